"""A baseline that was recorded earlier gives the verdicts of one that was driven, and is refused by name where it does not fit."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.contract.errors import HarnessError, RecordingError, UsageError
from harness.contract.topology import Topology, topology
from harness.machine.progress import silent
from harness.machine.targets import known
from harness.records.excerpt import take_over
from harness.records.recording import CallError, traces
from harness.records.run_folder import RunFolder, references_in
from harness.records.verdict import Judgement, RunInfo
from harness.running import catalogue
from harness.running.run import judge_run
from harness.running.session import Options, Seat, Session
from tests import recordings

TODAY = datetime.date(2026, 1, 1)
PLACE = topology("disaggregated")


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Scenarios of several kinds: with a twin and without, with a trainer, and one that the baseline does not offer."""
    found = catalogue.declared()
    kinds = {
        "ordering": lambda s: s.name.startswith("ordering."),
        "census": lambda s: s.name.startswith("census."),
        "sync": lambda s: s.name.startswith("weight_sync.") and "disaggregated" in s.topologies,
        "logprobs": lambda s: s.name == "tokens.test_greedy_tokens_and_logprobs_are_the_models",
        "pause": lambda s: s.name.startswith("control_plane.") and "disaggregated" in s.topologies,
        "dead": lambda s: s.spoils and "disaggregated" in s.topologies,
        "retry": lambda s: "retry_aborted" in s.needs and "disaggregated" in s.topologies,
    }
    return [next(s.name for s in found.values() if wanted(s)) for wanted in kinds.values()]


def drive(folder: Path, names: list[str], *, place: Topology = PLACE, **options) -> Path:
    """A run of these scenarios, as the plugin makes one: the candidate, the baseline, then comparisons."""
    given = {"baseline": "miniature", "candidate": "miniature:retry", "engine": "cpu"} | options
    session = Session(Options(run_dir=folder, **given), silent, selected={place: names})
    for target in reversed(session.options.targets):
        for name in names:
            session.drive(catalogue.declared()[name], Seat(target=target, topology=place), catalogue.body(name))
    if session.options.compares:
        for name in names:
            session.compare(catalogue.declared()[name], place)
    session.close()
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> Path:
    """A run of the miniature alone, with its twin."""
    return drive(tmp_path_factory.mktemp("runs") / "base", names, stacks=["miniature"], twin=True)


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    """The same run, to be damaged."""
    return shutil.copytree(base, tmp_path / "base")


def verdicts(judgement: Judgement) -> set[tuple]:
    return {(v.id, v.status, v.reason, v.facts, v.takes) for v in judgement.verdicts}


def test_a_recorded_baseline_gives_the_verdicts_of_one_that_is_driven(copy, names, tmp_path):
    live = judge_run(drive(tmp_path / "live", names, twin=True), today=TODAY)
    run = drive(tmp_path / "run", names, recorded=copy)
    shutil.rmtree(copy)
    told = judge_run(run, today=TODAY)
    assert {v.target for v in live.verdicts} == {"miniature", "miniature:retry"}
    assert verdicts(told) == verdicts(live)
    assert [floor.check for floor in told.noise] == [floor.check for floor in live.noise]
    assert "outputs.logprobs" in {floor.check for floor in told.noise}, "the noise floor comes from the recorded twin"
    assert told.gate == live.gate
    assert told.run.recorded == str(copy)
    assert told.run.declared == live.run.declared
    assert (run / "logs" / "miniature@disaggregated").is_dir() == (
        tmp_path / "live" / "logs" / "miniature@disaggregated"
    ).is_dir()


def test_only_what_the_new_run_selects_is_taken_over(base, names, tmp_path):
    run = drive(tmp_path / "run", names[:1], recorded=base)
    taken = [trace.scenario for trace in traces(run / "recordings" / "miniature@disaggregated.jsonl")]
    assert taken == [names[0]] * 2
    assert {v.scenario for v in judge_run(run, today=TODAY).verdicts} == {names[0]}


def test_a_candidate_of_the_same_name_is_told_apart_from_its_baseline(base, names, tmp_path):
    name = "miniature in base"
    run = drive(tmp_path / "run", names, recorded=base, baseline=name, candidate="miniature")
    judgement = judge_run(run, today=TODAY)
    assert (judgement.run.baseline, judgement.run.candidate) == (name, "miniature")
    assert {v.status for v in judgement.verdicts if v.baseline == name} == {"parity"}
    assert judgement.gate.profile == "patch"
    assert (run / "recordings" / f"{name}@disaggregated.jsonl").is_file()


def test_a_run_with_a_recorded_baseline_is_a_baseline_itself(base, names, tmp_path):
    first = drive(tmp_path / "first", names, recorded=base)
    second = drive(tmp_path / "second", names, recorded=first)
    assert verdicts(judge_run(second, today=TODAY)) == verdicts(judge_run(first, today=TODAY))


# --- what is refused


def header(run: Path, **changes) -> None:
    """Change the header of the miniature's recording."""
    file = run / "recordings" / "miniature@disaggregated.jsonl"
    first, _, rest = file.read_bytes().partition(b"\n")
    fields = msgspec.json.decode(first)
    for name, value in changes.items():
        fields[name] = fields[name] | value if isinstance(value, dict) else value
    file.write_bytes(msgspec.json.encode(fields) + b"\n" + rest)


def about(run: Path, change: Callable[[RunInfo], dict]) -> None:
    """Change what run.json says."""
    info = RunFolder(run).info()
    RunFolder(run).write_info(msgspec.structs.replace(info, **change(info)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"sha256": "f" * 64}}, "the model of disaggregated differs: sha256 .* in this run, sha256 fff"),
        ({"model": {"dtype": "bfloat16"}}, "the model of disaggregated differs: dtype float32 in this run, dtype bfloat16"),
        ({"seed": 7}, "the model of disaggregated differs: seed 0 in this run, seed 7"),
        ({"engine": "cuda"}, "the engine differs: cpu in this run, cuda"),
        ({"start": "fork"}, "the start differs: inline in this run, fork"),
        ({"harness_version": "0.0.1"}, r"the harness version differs: 0\.1\.0 in this run, 0\.0\.1"),
        ({"topology": {"engines": 4}}, "the shape of disaggregated differs"),
        ({"cuda_graphs": True}, "how the engines of disaggregated compute differs: CUDA graphs False in this run"),
        ({"batch_invariant": True}, "how the engines of disaggregated compute differs: batch-invariant False"),
    ],
)  # fmt: skip
def test_a_recording_of_another_set_up_is_refused_by_what_differs(copy, names, tmp_path, changes, says):
    header(copy, **changes)
    refused(tmp_path, copy, names, UsageError, says)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda run: header(run, format=1), (RecordingError, "has format 1, this harness reads 2")),
        (lambda run: about(run, lambda _: {"contract": {}}), (UsageError, "does not say by which scenarios")),
        (lambda run: changed(run, "wave1.test_ordering"), (UsageError, "changed since .* was recorded: wave1.test_ordering")),
        (lambda run: changed(run, "the methods of the contract"), (UsageError, "was recorded: the methods of the contract")),
        (lambda run: changed(run, "what scenarios share"), (UsageError, "was recorded: what scenarios share")),
        (lambda run: about(run, lambda _: {"outcome": "running"}), (RecordingError, "is still running, or was killed")),
        (lambda run: about(run, lambda _: {"outcome": "interrupted"}), (RecordingError, "ended early: interrupted")),
        (lambda run: about(run, lambda _: {"not_started": {"miniature@disaggregated": CallError(kind="E", message="no memory")}}),
         (UsageError, "miniature did not start in disaggregated in .*: E: no memory")),
        (lambda run: (run / "run.json").unlink(), (UsageError, "is not the folder of a run")),
        (lambda run: (run / "recordings" / "miniature@disaggregated.jsonl").unlink(), (UsageError, "holds recordings of nothing")),
        (lambda run: half(run / "recordings" / "miniature@disaggregated.jsonl"), (RecordingError, "cut off")),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_a_baseline_is_refused(copy, names, tmp_path, damage, fault):
    damage(copy)
    refused(tmp_path, copy, names, *fault)


def changed(run: Path, part: str) -> None:
    about(run, lambda info: {"contract": info.contract | {part: "0"}})


def half(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def test_a_module_that_the_new_run_does_not_select_may_change(copy, names, tmp_path):
    changed(copy, next(name for name in catalogue.contract() if name.startswith("wave6.")))
    assert judge_run(drive(tmp_path / "run", names[:1], recorded=copy), today=TODAY).verdicts


def test_what_was_selected_and_not_recorded_is_refused(base, names, tmp_path):
    more = [name for name in catalogue.declared() if name.startswith("ordering.") and name not in names][:2]
    refused(
        tmp_path,
        base,
        [*names, *more],
        UsageError,
        f"has no recording of {more[0]} on miniature@disaggregated and 1 more",
    )
    refused(tmp_path, base, names[:1], UsageError, "has no recording of .*@colocated", place=topology("colocated"))


def test_a_recording_without_any_twin_is_refused_unless_none_is_wanted(names, tmp_path):
    alone = drive(tmp_path / "alone", names[:1], stacks=["miniature"])
    refused(tmp_path, alone, names[:1], UsageError, "has no twin of any selected scenario on miniature: no noise floor")
    [spoils] = [name for name in names if catalogue.declared()[name].once]
    drive(tmp_path / "spoils", [spoils], recorded=drive(tmp_path / "once", [spoils], stacks=["miniature"]))
    judgement = judge_run(drive(tmp_path / "run", names[:1], recorded=alone, twin=False), today=TODAY)
    assert not [floor for floor in judgement.noise if floor.check == "outputs.logprobs"]


def test_a_second_take_is_driven_only_where_chance_may_explain_a_difference(names, tmp_path):
    session = Session(
        Options(
            run_dir=tmp_path / "run", baseline="miniature:retry", candidate="miniature", engine="cpu", fault_taps=True
        ),
        silent,
        selected={PLACE: names},
    )
    for target, fault in (("miniature", "logprobs_off_by_constant/a_hair"), ("miniature:retry", None)):
        seat = Seat(target=target, topology=PLACE)
        session.inject(seat, None if fault is None else known(target).seeded()[fault])
        for name in names:
            session.drive(catalogue.declared()[name], seat, catalogue.body(name))
    session.close()
    takes: dict[str, list[int]] = {}
    for trace in traces(tmp_path / "run" / "recordings" / "miniature_retry@disaggregated.jsonl"):
        takes.setdefault(trace.scenario, []).append(trace.take)
    twice = [name for name, driven in takes.items() if driven == [1, 2]]
    assert "tokens.test_greedy_tokens_and_logprobs_are_the_models" in twice
    assert {tuple(driven) for name, driven in takes.items() if name not in twice} == {(1,)}
    assert not [name for name in twice if not name.startswith("tokens.")]


def refused(folder: Path, base: Path, names: list[str], error: type[HarnessError], says: str, **place) -> None:
    """The run is refused before anything is written."""
    with pytest.raises(error, match=says) as caught:
        drive(folder / "refused", names, recorded=base, **place)
    assert not (folder / "refused").exists()
    unread = ("format", "not the folder", "nothing", "cut off")
    assert ("parity run --stack miniature --twin" in caught.value.next_step) != any(said in says for said in unread)


def test_lines_are_taken_over_as_they_are(tmp_path):
    recordings.write(tmp_path / "all.jsonl", "stack:old", ["module.test_a", "module.test_b"], takes=2)
    take_over(tmp_path / "all.jsonl", tmp_path / "some.jsonl", {"module.test_b"}, "stack:new")
    before = [trace for trace in traces(tmp_path / "all.jsonl") if trace.scenario == "module.test_b"]
    after = list(traces(tmp_path / "some.jsonl"))
    assert [trace.header.target for trace in after] == ["stack:new"] * 2
    assert [(t.calls, t.observations, t.end) for t in after] == [(t.calls, t.observations, t.end) for t in before]


# --- where two stacks part


def test_the_reference_is_asked_about_rows_that_part_whatever_the_checks_ask(tmp_path):
    name = "routing.test_sessions_stick_over_turns_and_batches"
    scenario, body = catalogue.declared()[name], catalogue.body(name)
    options = Options(
        run_dir=tmp_path / "run", baseline="miniature:retry", candidate="miniature", engine="cpu", fault_taps=True
    )
    session = Session(options, silent, selected={PLACE: [name]})
    asked: list[int] = []
    for target in options.targets:
        seat = Seat(target=target, topology=PLACE)
        if target == options.candidate:
            session.inject(seat, known(target).seeded()["parameter_ignored/temperature"])
        session.drive(scenario, seat, body)
        asked.append(scores(tmp_path / "run"))
    session.compare(scenario, PLACE)
    session.close()
    assert asked == [0, 0], "the scenario's checks need no scores"
    assert scores(tmp_path / "run") > 0


def scores(run: Path) -> int:
    """Teacher-forced scores in the run's book."""
    [book] = references_in(run)
    return sum(b'"score:' in line for line in book.read_bytes().splitlines())
