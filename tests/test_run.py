"""A run's folder belongs to one run, and its recordings are judged offline, independent of the order of driving."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from harness.checks.base import Check, passed
from harness.contract.capability import Capability
from harness.contract.errors import Blame, RecordingError, UsageError
from harness.contract.topology import Topology, topology
from harness.records.book import Book
from harness.records.recorder import Recorder
from harness.records.recording import Call, CallError, Event, ScenarioEnd
from harness.records.verdict import Conformance, Judgement, Parity
from harness.running import run as running
from harness.running.run import RunFolder, compare_recordings, judge_run
from reports.view import held_entries
from tests import recordings, traces

TODAY = datetime.date(2026, 1, 1)
NAMES = ["module.test_a", "module.test_b"]
OLD, NEW = "stack:old", "stack:new"
ENTRY = """
[[divergence]]
id = "one"
scenario = "module.*"
check = "conservation"
targets = ["{target}"]
reason = '{reason}'
cap = {cap}
owner = "nobody"
expires = 2026-12-31
source = "client.py:1: what was"
"""


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """Replaces the project's scenarios by those of these tests. Returns a function that changes them."""
    found = {name: recordings.declared(name) for name in NAMES}
    monkeypatch.setattr(running, "declared", lambda: found)
    return found


@pytest.fixture
def judged(tmp_path: Path, ledger: Path):
    """Judge a run of both stacks whose candidate was damaged by `change`."""

    def judge(change=None, **info) -> Judgement:
        recordings.run_folder(tmp_path / "run", NAMES, change=change, **info)
        return judge_run(tmp_path / "run", ledger=ledger, today=TODAY)

    return judge


def statuses(judgement: Judgement, *, scenario: str = NAMES[0], target: str = NEW, pair: bool = True) -> dict[str, str]:
    return {
        v.check: v.status
        for v in judgement.verdicts
        if (v.scenario, v.target, v.baseline is not None) == (scenario, target, pair)
    }


def other_token(event: Event) -> Event:
    """In every scenario's own calls, the candidate answers with another token than its engine made."""
    if not isinstance(event, Call) or event.phase == "clean_room":
        return event
    result = msgspec.json.decode(msgspec.json.encode(event.result))
    result["response_ids"][0][0] += 1
    return msgspec.structs.replace(event, result=result)


# --- the folder -----------------------------------------------------------------------------------------------------


def test_a_run_makes_its_own_folder_and_says_where_everything_lies(tmp_path: Path):
    with RunFolder.create(root=tmp_path) as folder, RunFolder.create(root=tmp_path) as other:
        assert folder.path.parent == other.path.parent == tmp_path / ".parity" / "runs"
        assert folder.path != other.path
        assert folder.recording("skyrl-0.2.0:http", Topology()) == (
            folder.path / "recordings" / "skyrl-0.2.0_http@disaggregated.jsonl"
        )
        assert folder.logs("a:b", Topology()) == folder.path / "logs" / "a_b@disaggregated"
        folder.write_info(recordings.info(outcome="running"))
        folder.write_info(recordings.info())
        assert folder.info() == recordings.info()
        assert not list(folder.path.glob(".run-*"))


def test_two_runs_in_one_folder_are_refused_while_the_first_lives_and_after_it(tmp_path: Path):
    command = "import sys; from pathlib import Path; from harness.running.run import RunFolder; RunFolder.create(Path(sys.argv[1]))"
    with RunFolder.create(tmp_path / "run") as folder:
        second = subprocess.run(
            [sys.executable, "-c", command, str(folder.path)], capture_output=True, text=True, check=False, timeout=60
        )
        assert second.returncode != 0
        assert f"another run (pid {os.getpid()}) is using {folder.path}" in second.stderr
        folder.write_info(recordings.info())
    with pytest.raises(UsageError, match="holds a run already"):
        RunFolder.create(folder.path)


def test_a_folder_of_a_run_that_was_killed_is_not_written_to_again(tmp_path: Path):
    with RunFolder.create(tmp_path / "run") as folder:
        Recorder(folder.recording(OLD, Topology())).open(traces.header()).close()
    with pytest.raises(UsageError, match="holds a run already"):
        RunFolder.create(folder.path)


def test_a_folder_without_a_run_is_not_judged(tmp_path: Path):
    with pytest.raises(UsageError, match="is not the folder of a run"):
        judge_run(tmp_path)
    (tmp_path / "run.json").write_text('{"run_id":')
    with pytest.raises(RecordingError, match="does not say what was run"):
        judge_run(tmp_path)


# --- judging --------------------------------------------------------------------------------------------------------


def test_two_correct_stacks_are_green_and_in_parity_though_driven_in_different_order(judged):
    judgement = judged()
    for name in NAMES:
        assert set(statuses(judgement, scenario=name, target=OLD, pair=False).values()) == {"pass"}
        assert set(statuses(judgement, scenario=name, pair=False).values()) == {"pass"}
        assert set(statuses(judgement, scenario=name).values()) == {Parity.PARITY}
    assert {"outputs.tokens", "outputs.logprobs", "routing.partition", "conservation"} <= set(statuses(judgement))
    assert judgement.exit_status == 0
    assert len({v.id for v in judgement.verdicts}) == len(judgement.verdicts)
    assert [h["target"] for h in judgement.run.headers] == [NEW, OLD]
    assert judgement.noise[0].floor == 0
    assert not judgement.gate.may_replace, "two scenarios are no evidence for the whole plan"


def test_a_candidate_that_alters_tokens_is_a_regression(judged):
    judgement = judged(other_token)
    assert statuses(judgement, target=OLD, pair=False)["conservation"] == "pass"
    assert statuses(judgement, pair=False)["conservation"] == "fail"
    assert statuses(judgement)["conservation"] == Parity.REGRESSION
    assert judgement.exit_status == 1


def test_outputs_that_differ_while_both_conform_are_open(judged):
    def other_logprob(event: Event) -> Event:
        if not isinstance(event, Call) or event.phase == "clean_room":
            return event
        result = msgspec.json.decode(msgspec.json.encode(event.result))
        result["response_logprobs"][0][0] -= 1e-3
        return msgspec.structs.replace(event, result=result)

    judgement = judged(other_logprob)
    assert statuses(judgement)["outputs.logprobs"] == Parity.OPEN
    assert judgement.exit_status == 0


def test_a_judgement_says_how_long_each_scenario_was_driven_on_each_stack(judged):
    def slow(event: Event) -> Event:
        late = isinstance(event, ScenarioEnd) and event.scenario == NAMES[1]
        return msgspec.structs.replace(event, at_ns=event.at_ns + 5 * 10**9) if late else event

    took = {(drive.scenario, drive.target, drive.takes): round(drive.seconds, 1) for drive in judged(slow).drives}
    a, b = NAMES
    assert took == {(a, OLD, 2): 0.0, (b, OLD, 2): 0.0, (a, NEW, 1): 0.0, (b, NEW, 1): 5.0}


def test_a_stack_that_died_in_a_scenario_fails_it_and_what_came_after_is_untestable(tmp_path, ledger):
    def dies(event: Event) -> Event:
        error = CallError(kind="StackDied", message="engine 1", blame="stack")
        return (
            msgspec.structs.replace(event, outcome="failed", error=error) if isinstance(event, ScenarioEnd) else event
        )

    with RunFolder.create(tmp_path / "run") as folder:
        recordings.write(folder.recording(OLD, Topology()), OLD, NAMES, takes=2)
        recordings.write(folder.recording(NEW, Topology()), NEW, NAMES[:1], change=dies)
        folder.write_info(recordings.info())
    judgement = judge_run(folder.path, ledger=ledger, today=TODAY)
    assert statuses(judgement, pair=False) == {"sticky_sessions": "fail", "all_complete": "fail"}
    assert statuses(judgement)["all_complete"] == Parity.REGRESSION
    after = [v for v in judgement.verdicts if v.scenario == NAMES[1] and v.target == NEW]
    assert {v.status for v in after} == {"untestable"}
    assert {v.blame for v in after} == {Blame.STACK}
    assert any(v.reason.startswith("was not driven after an earlier scenario ended: StackDied: ") for v in after)


def test_a_stack_that_did_not_start_is_untestable_with_its_blame(tmp_path, ledger):
    error = CallError(kind="StartFailed", message="no memory", blame="environment")
    with RunFolder.create(tmp_path / "run") as folder:
        recordings.write(folder.recording(OLD, Topology()), OLD, NAMES)
        folder.write_info(recordings.info(not_started={f"{NEW}@disaggregated": error}))
    judgement = judge_run(folder.path, ledger=ledger, today=TODAY)
    gone = [v for v in judgement.verdicts if v.target == NEW]
    assert {(v.status, v.blame) for v in gone} == {("untestable", Blame.ENVIRONMENT)}
    assert {v.reason for v in gone} == {
        "did not start: StartFailed: no memory",
        "candidate: did not start: StartFailed: no memory",
    }
    assert judgement.exit_status == 1


def test_what_the_candidate_cannot_do_is_missing(tmp_path, ledger, declared):
    declared[NAMES[1]] = recordings.declared(NAMES[1], needs=frozenset({Capability.SLEEP}))
    with RunFolder.create(tmp_path / "run") as folder:
        recordings.write(folder.recording(OLD, Topology()), OLD, NAMES)
        few = recordings.header(NEW, capabilities=[Capability.HEALTH])
        with Recorder(folder.recording(NEW, Topology())).open(few) as recorder:
            for event in recordings.events(NAMES[0]):
                recorder.add(event)
        folder.write_info(recordings.info())
    judgement = judge_run(folder.path, ledger=ledger, today=TODAY)
    assert set(statuses(judgement, scenario=NAMES[1], pair=False).values()) == {Conformance.MISSING}
    assert set(statuses(judgement, scenario=NAMES[1]).values()) == {Parity.MISSING}
    assert judgement.exit_status == 1


def test_only_a_whole_wave_says_what_was_never_driven_or_exercised(tmp_path, ledger, declared):
    declared["module.test_c"] = recordings.declared("module.test_c")
    recordings.run_folder(tmp_path / "part", NAMES)
    recordings.run_folder(tmp_path / "whole", NAMES, whole_waves=[1])
    part = judge_run(tmp_path / "part", ledger=ledger, today=TODAY)
    whole = judge_run(tmp_path / "whole", ledger=ledger, today=TODAY)
    assert part.exit_status == 0
    new = {v.scenario: v.status for v in whole.verdicts if v.scenario not in NAMES}
    assert new["module.test_c"] == "untestable"
    assert new["capabilities.sleep"] == "untestable"
    assert whole.exit_status == 1


@pytest.mark.parametrize(
    ("driven", "stale"), [(NAMES, True), (NAMES[:1], False)], ids=["all that it covers", "a part of it"]
)
def test_an_entry_with_a_pattern_is_stale_only_where_all_that_it_covers_was_driven(tmp_path, ledger, driven, stale):
    ledger.write_text(ENTRY.format(target=NEW, reason="what was", cap=1))
    recordings.run_folder(tmp_path / "run", driven)
    problems = judge_run(tmp_path / "run", ledger=ledger, today=TODAY).ledger_problems
    assert [p.entry for p in problems] == ["one"] * stale


@pytest.mark.parametrize(("version", "holds"), [("0.2.0", True), ("0.2.1.dev0", False)])
def test_the_entries_of_a_release_hold_for_an_own_stack_of_that_version(tmp_path, ledger, version, holds):
    found = recordings.run_folder(tmp_path / "found", NAMES, change=other_token)
    red = judge_run(found.path, ledger=ledger, today=TODAY)
    (reason,) = {v.reason for v in red.verdicts if v.check == "conservation" and v.red and v.baseline is None}
    ledger.write_text(ENTRY.format(target="skyrl-0.2.0:http", reason=re.escape(reason), cap=2))
    with RunFolder.create(tmp_path / "run") as folder:
        about = {"about": {"packages": {"skyrl": version}}}
        recordings.write(folder.recording("local:http", Topology()), "local:http", NAMES, change=other_token, **about)
        recordings.book(folder.reference)
        folder.write_info(recordings.info(baseline=None, candidate=None))
    judgement = judge_run(folder.path, ledger=ledger, today=TODAY)
    own = [v for v in judgement.verdicts if v.check == "conservation"]
    assert [v.known for v in own] == ["one"] * 2 if holds else [None] * 2
    assert judgement.released == {"local:http": "skyrl-0.2.0:http" if holds else None}
    assert judgement.ledger_problems == []
    (said,) = held_entries(judgement)
    assert ("about skyrl-0.2.0:http hold for local:http" in said) is holds


def test_a_scenario_that_is_not_declared_any_more_is_untestable(judged, declared):
    del declared[NAMES[1]]
    judgement = judged()
    assert statuses(judgement, scenario=NAMES[1], pair=False) == {"scenario.declared": "untestable"}
    assert judgement.exit_status == 1


def test_red_in_one_of_many_takes_is_red_and_counted(tmp_path, ledger):
    with RunFolder.create(tmp_path / "run") as folder:
        recordings.write(folder.recording(OLD, Topology()), OLD, NAMES, takes=4)
        recordings.write(folder.recording(NEW, Topology()), NEW, NAMES, takes=4, change=other_token)
        folder.write_info(recordings.info())
    judgement = judge_run(folder.path, ledger=ledger, today=TODAY)
    assert statuses(judgement, pair=False)["conservation"] == "fail"
    [found] = [v for v in judgement.verdicts if v.id == f"{NAMES[0]}@disaggregated::conservation[{OLD}~{NEW}]"]
    assert found.status == Parity.REGRESSION
    assert found.evidence[-1] == {"takes": "regression in 1 of 4 takes"}


def test_the_twin_is_judged_like_any_take(tmp_path, ledger):
    with RunFolder.create(tmp_path / "run") as folder:
        recordings.write(folder.recording(OLD, Topology()), OLD, NAMES, takes=2, change=other_token)
        recordings.write(folder.recording(NEW, Topology()), NEW, NAMES)
        folder.write_info(recordings.info())
    judgement = judge_run(folder.path, ledger=ledger, today=TODAY)
    assert statuses(judgement, target=OLD, pair=False)["conservation"] == "fail"
    assert statuses(judgement)["conservation"] == Parity.BASELINE_DEFECT


def test_a_cut_off_recording_or_book_is_refused(tmp_path, ledger):
    folder = recordings.run_folder(tmp_path / "run", NAMES)
    for path in (*folder.recorded(), folder.reference):
        whole = path.read_bytes()
        path.write_bytes(whole[:-3])
        with pytest.raises(RecordingError, match=path.name):
            judge_run(folder.path, ledger=ledger, today=TODAY)
        path.write_bytes(whole)
    assert judge_run(folder.path, ledger=ledger, today=TODAY).exit_status == 0


def test_answers_of_another_model_are_refused(tmp_path, ledger):
    folder = recordings.run_folder(tmp_path / "run", NAMES)
    folder.reference.unlink()
    Book.create(folder.reference, "another").close()
    with pytest.raises(UsageError, match="answers for another model"):
        judge_run(folder.path, ledger=ledger, today=TODAY)


def test_topologies_of_one_run_may_have_models_of_their_own_and_a_book_for_each(tmp_path, ledger, declared):
    declared[NAMES[0]] = recordings.declared(NAMES[0], topologies=("disaggregated", "moe"))
    folder = recordings.run_folder(tmp_path / "run", NAMES)
    moe = topology("moe")
    about = {"topology": moe, "model": {"name": "moe", "sha256": "another", "dtype": "float32"}}
    for target in (OLD, NEW):
        recordings.write(folder.recording(target, moe), target, NAMES[:1], about=about)
    recordings.book(folder.reference_of(moe.model), "another")
    judgement = judge_run(folder.path, ledger=ledger, today=TODAY)
    assert {(v.topology, v.status) for v in judgement.verdicts if v.baseline and v.scenario == NAMES[0]} == {
        ("disaggregated", "parity"),
        ("moe", "parity"),
    }
    folder.reference_of(moe.model).unlink()
    with pytest.raises(UsageError, match="answers for another model"):
        judge_run(folder.path, ledger=ledger, today=TODAY)


def test_stacks_with_different_models_in_one_topology_are_refused(tmp_path, ledger):
    folder = recordings.run_folder(tmp_path / "run", NAMES)
    folder.reference.unlink()
    about = {"model": {"name": "other", "sha256": "another", "dtype": "float32"}}
    folder.recording(NEW, Topology()).unlink()
    recordings.write(folder.recording(NEW, Topology()), NEW, NAMES, about=about)
    with pytest.raises(UsageError, match="2 different models"):
        judge_run(folder.path, ledger=ledger, today=TODAY)


def test_the_reference_answers_of_the_run_are_used(tmp_path, ledger, declared):
    from harness.records.reference import NextRequest

    ask = Check(
        name="oracle",
        fault="f",
        source="s",
        judge=lambda e: passed(len(e.reference.next(NextRequest(version=0, prompt=[1])).logprobs)),
    )
    declared[NAMES[0]] = recordings.declared(NAMES[0], checks=(ask,))
    folder = recordings.run_folder(tmp_path / "run", NAMES)
    assert statuses(judge_run(folder.path, ledger=ledger, today=TODAY), pair=False)["oracle"] == "untestable"
    folder.reference.unlink()
    with Book.create(folder.reference, recordings.MODEL) as book:
        book.add(NextRequest(version=0, prompt=[1]), traces.FakeReference().next(NextRequest(version=0, prompt=[1])))
    assert statuses(judge_run(folder.path, ledger=ledger, today=TODAY), pair=False)["oracle"] == "pass"


# --- comparing ------------------------------------------------------------------------------------------------------


def test_two_folders_or_two_files_are_compared(tmp_path, ledger):
    monday = recordings.run_folder(tmp_path / "monday", NAMES)
    tuesday = recordings.run_folder(tmp_path / "tuesday", NAMES, change=other_token)
    folders = compare_recordings(monday.path, tuesday.path, ledger=ledger, today=TODAY)
    assert (folders.run.baseline, folders.run.candidate) == (OLD, NEW)
    assert statuses(folders)["conservation"] == Parity.REGRESSION
    files = [folder.recording(NEW, Topology()) for folder in (monday, tuesday)]
    same = compare_recordings(*files, ledger=ledger, today=TODAY)
    assert (same.run.baseline, same.run.candidate) == (NEW, f"{NEW} in run")
    assert statuses(same, target=f"{NEW} in run")["conservation"] == Parity.REGRESSION
    assert statuses(same, pair=False)["conservation"] == "pass"


def test_a_scenario_in_one_of_two_recordings_is_untestable(tmp_path, ledger):
    recordings.write(tmp_path / "a.jsonl", OLD, NAMES)
    recordings.write(tmp_path / "b.jsonl", NEW, NAMES[:1])
    judgement = compare_recordings(tmp_path / "a.jsonl", tmp_path / "b.jsonl", ledger=ledger, today=TODAY)
    assert set(statuses(judgement, scenario=NAMES[1]).values()) == {Parity.UNTESTABLE}
    assert judgement.exit_status == 1


def test_what_a_stack_offers_nowhere_is_missing_where_it_has_no_recording(tmp_path, ledger, declared):
    name, remote = "module.test_c", topology("remote")
    declared[name] = recordings.declared(name, needs=frozenset({Capability.SLEEP}))
    recordings.write(tmp_path / "old.jsonl", OLD, NAMES, about={"capabilities": [Capability.HEALTH]})
    new = recordings.run_folder(tmp_path / "new", NAMES)
    recordings.write(new.recording(NEW, remote), NEW, [name], about={"topology": remote})
    compared = compare_recordings(tmp_path / "old.jsonl", new.path, ledger=ledger, today=TODAY)
    assert set(statuses(compared, scenario=name, target=OLD, pair=False).values()) == {Conformance.MISSING}


def test_one_topology_of_two_shapes_is_refused(tmp_path, ledger):
    folder = recordings.run_folder(tmp_path / "run", NAMES)
    four = topology("disaggregated", 4)
    folder.recording(NEW, four).unlink()
    recordings.write(folder.recording(NEW, four), NEW, NAMES, about={"topology": four})
    with pytest.raises(UsageError, match="2 and 4 engines"):
        judge_run(folder.path, ledger=ledger, today=TODAY)


def test_recordings_that_have_nothing_in_common_are_refused(tmp_path, ledger):
    recordings.write(tmp_path / "a.jsonl", OLD, NAMES)
    for name, changes in (
        ("topology", {"topology": Topology(engines=4)}),
        ("dtype", {"model": {"sha256": "1", "dtype": "float16"}}),
        ("models", {"model": {"sha256": "1", "dtype": "float32"}}),
    ):
        Recorder(tmp_path / f"{name}.jsonl").open(recordings.header(NEW, **changes)).close()
        with pytest.raises(UsageError, match=name):
            compare_recordings(tmp_path / "a.jsonl", tmp_path / f"{name}.jsonl", ledger=ledger, today=TODAY)
    described = msgspec.structs.replace(Topology(), about="the same in other words")
    recordings.write(tmp_path / "b.jsonl", NEW, NAMES, about={"topology": described})
    assert compare_recordings(tmp_path / "a.jsonl", tmp_path / "b.jsonl", ledger=ledger, today=TODAY).verdicts
    with pytest.raises(RecordingError, match="cannot read"):
        compare_recordings(tmp_path / "a.jsonl", tmp_path / "none.jsonl", ledger=ledger, today=TODAY)
