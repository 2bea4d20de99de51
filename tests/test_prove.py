"""Every mismatch between a fault, a check or a correct stack and its declaration is red, by name, in every format."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from rich.console import Console

from harness import PROJECT
from harness.commands import cli
from harness.contract.errors import Blame, StackError, UsageError
from harness.contract.faults import DRIVEN, NOTHING, Fault
from harness.contract.topology import topology
from harness.judging import pace
from harness.machine import targets
from harness.machine.progress import silent
from harness.machine.targets import registry
from harness.proving import prove
from harness.proving.kill_matrix import Baseline, FaultProof, KillMatrix, Lap, Mark, Outcome, judge_fault, prove_target
from harness.proving.prove import Request, likely_first, plan, plans
from harness.records.verdict import Cause
from harness.running import catalogue
from harness.running.session import Options, Seat
from reports import kill_figures, kill_matrix, kill_matrix_terminal
from reports.readme import block
from tests import kill_matrices
from tests.kill_matrices import FAULTS, READS, Script, planned, target, verdict
from tests.test_cli import parity
from tests.test_reports import HOSTILE, Page

# Of these two only A names the check "ordering".
A, B = sorted(name for name in catalogue.declared() if name.startswith("ordering."))[1:3]
CONTROL = [verdict(A, "ordering"), verdict(A, "tokens:late"), verdict(B, "tokens"), verdict(B, "routing")]
SWAPPED = FAULTS[0]  # caught by ordering, corrupts what tokens reads


@pytest.fixture(autouse=True)
def _made_up_checks(monkeypatch):
    monkeypatch.setattr(catalogue, "facts_read", lambda: READS)


def under(*reds, fault: Fault = SWAPPED, control=CONTROL, fired: int = 3, **options) -> FaultProof:
    lap = Lap(fault=fault.id, verdicts=list(reds), driven=2, fired=fired, error=options.pop("error", ""))
    options = {"scenarios": [A, B], "filtered": False, "reads": READS} | options
    return judge_fault(fault, lap, Baseline(control), **options)


def marks(proof: FaultProof) -> dict[str, Mark]:
    return {catch.check: catch.mark for catch in proof.catches}


# --- one fault


def test_a_fault_is_killed_by_all_checks_that_exist_for_it_and_others_that_read_what_it_corrupts():
    proof = under(verdict(A, "ordering", "fail"), verdict(A, "tokens:late", "fail"), verdict(B, "tokens", "fail"))
    assert (proof.outcome, proof.problem, proof.seen) == (Outcome.KILLED, "", ["ordering", "tokens"])
    assert marks(proof) == {"ordering": Mark.CAUGHT, "tokens": Mark.ALSO}
    [ordering, tokens] = proof.catches
    assert (ordering.first, ordering.reason, ordering.blame, ordering.facts) == (A, "ordering is wrong", Blame.STACK, 3)
    assert len(ordering.evidence) == 2, "not more than is read"
    assert tokens.scenarios == 2
    assert [(cell.scenario, [red.check for red in cell.reds]) for cell in proof.cells] == [
        (A, ["ordering", "tokens"]),
        (B, ["tokens"]),
    ]
    assert proof.cells[0].reds[1].labels == ["tokens:late"]


@pytest.mark.parametrize(
    ("reds", "outcome", "says"),
    [
        ([], Outcome.SURVIVED, "no check turned red; not red: ordering"),
        ([verdict(B, "tokens", "fail")], Outcome.MISSED, "not red: ordering"),
        (
            [verdict(A, "ordering", "fail"), verdict(B, "tokens", "fail"), verdict(B, "routing", "fail")],
            Outcome.OVERREACH,
            "red, and reads nothing that it corrupts: routing",
        ),
        (
            [verdict(B, "tokens", "fail"), verdict(B, "routing", "fail")],
            Outcome.MISSED,
            "not red: ordering; red, and reads nothing that it corrupts: routing",
        ),
        (
            [verdict(A, "ordering", "untestable", "too few rows"), verdict(B, "tokens", "fail")],
            Outcome.MISSED,
            "not red: ordering",
        ),
        (
            [
                verdict(A, "ordering", "fail"),
                verdict(B, "tokens", "fail"),
                verdict(B, "routing", "untestable", "check routing raised KeyError", cause=Cause.RAISED),
            ],
            Outcome.OVERREACH,
            "broke, and a check may not raise: routing",
        ),
    ],
)
def test_every_other_end_is_red_and_names_the_difference(reds, outcome, says):
    proof = under(*reds)
    assert (proof.outcome, proof.problem) == (outcome, says)


def test_a_consequence_may_be_red_and_need_not_be():
    assert under(verdict(A, "ordering", "fail")).outcome == Outcome.KILLED
    reds = [verdict(A, "ordering", "fail"), verdict(B, "tokens", "fail")]
    assert under(*reds).also == ["tokens"]
    exact = msgspec.structs.replace(SWAPPED, corrupts=NOTHING)
    assert under(*reds, fault=exact).outcome == Outcome.OVERREACH


def test_a_check_that_could_not_judge_is_neither_catch_nor_alarm():
    reds = [verdict(A, "ordering", "fail"), verdict(B, "tokens", "fail"), verdict(B, "routing", "untestable", "blind")]
    proof = under(*reds)
    assert proof.outcome == Outcome.KILLED
    assert marks(proof)["routing"] == Mark.UNTESTABLE
    assert "routing" not in proof.seen


def test_blind_instruments_are_caught_by_saying_so():
    fault = Fault(name="tap_blind", breaks="the tap sees nothing", caught_by=frozenset({"instruments"}))
    blind = verdict(A, "instruments", "untestable", "the tap did not see the canary", blame=Blame.HARNESS)
    control = [*CONTROL, verdict(A, "instruments")]
    rest = verdict(A, "ordering", "untestable", "the tap did not see the canary")
    assert under(blind, rest, fault=fault, control=control).outcome == Outcome.KILLED
    assert under(blind, verdict(A, "ordering", "fail"), verdict(B, "tokens", "fail")).outcome == Outcome.OVERREACH


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fired": 0}, "it never took effect, so nothing is known"),
        (
            {"error": "StackError: no fault is called that"},
            "it could not be driven: StackError: no fault is called that",
        ),
    ],
)
def test_a_fault_that_took_no_effect_proves_nothing_whatever_turned_red(options, says):
    proof = under(verdict(A, "ordering", "fail"), verdict(B, "tokens", "fail"), **options)
    assert (proof.outcome, proof.problem) == (Outcome.UNFIRED, says)


def test_a_named_check_that_no_driven_scenario_judges_is_told_from_one_that_stayed_green():
    assert under(verdict(B, "tokens", "fail"), scenarios=[B]).problem == "no driven scenario judges ordering"
    assert under(verdict(B, "tokens", "fail"), scenarios=[A, B]).problem == "not red: ordering"


def test_a_scenario_that_the_fault_ended_is_one_red_and_not_one_a_check():
    fault = Fault(name="hang", breaks="a call never returns", caught_by=frozenset({DRIVEN}))
    ended: dict[str, Any] = {"cause": Cause.NOT_DRIVEN}
    hung = [
        verdict(A, check, "fail", "could not be driven: CallTimedOut", **ended) for check in ("ordering", "tokens:late")
    ]
    proof = under(*hung, fault=fault)
    assert (proof.outcome, proof.seen) == (Outcome.KILLED, [DRIVEN])
    assert under(*hung).problem == f"not red: ordering; red, and reads nothing that it corrupts: {DRIVEN}"
    ours = [msgspec.structs.replace(v, status="untestable", blame=Blame.HARNESS) for v in hung]
    assert under(*ours, fault=fault).outcome == Outcome.SURVIVED, "the harness's own error is no catch"


def test_what_is_red_without_the_fault_for_the_same_reason_is_not_its_doing():
    known = [*CONTROL, verdict(B, "echo", "fail", "top_k is lost", known="router-drops-top-k")]
    reds = [verdict(A, "ordering", "fail"), verdict(B, "tokens", "fail")]
    assert under(*reds, verdict(B, "echo", "fail", "top_k is lost"), control=known).outcome == Outcome.KILLED
    assert under(*reds, verdict(B, "echo", "fail", "seed is lost"), control=known).outcome == Outcome.OVERREACH
    assert under(*reds, verdict(A, "echo", "fail", "top_k is lost"), control=known).outcome == Outcome.OVERREACH


def test_where_scenarios_were_left_out_a_catch_elsewhere_is_not_missed_but_an_alarm_stays_one():
    both = msgspec.structs.replace(SWAPPED, caught_by=frozenset({"ordering", "sampling"}))
    assert under(verdict(A, "ordering", "fail"), fault=both, filtered=True).outcome == Outcome.KILLED
    assert under(verdict(A, "ordering", "fail"), fault=both).outcome == Outcome.MISSED
    assert under(verdict(B, "tokens", "fail"), filtered=True).outcome == Outcome.MISSED, "nothing that exists for it"
    assert under(filtered=True).outcome == Outcome.SURVIVED
    alarm = (verdict(A, "ordering", "fail"), verdict(B, "routing", "fail"))
    assert under(*alarm, filtered=True).outcome == Outcome.OVERREACH


def test_a_fault_that_was_not_driven_to_its_end_is_incomplete():
    proof = judge_fault(SWAPPED, None, Baseline(CONTROL), reads=READS, scenarios=[A, B], filtered=False)
    assert (proof.outcome, proof.problem) == (Outcome.INCOMPLETE, "it was not driven to its end")


# --- one stack


REDS = {
    "swapped/one_server": [verdict(A, "ordering", "fail"), verdict(B, "tokens", "fail")],
    "swapped/always": [verdict(A, "ordering", "fail")],
    "moves": [verdict(B, "routing", "fail")],
}
LAPS = {
    None: Lap(fault=None, verdicts=CONTROL, driven=2),
    **{name: Lap(fault=name, verdicts=reds, driven=2, fired=1) for name, reds in REDS.items()},
}


def matrix(laps=LAPS, *, filters=(), outcome="completed", faults=FAULTS, **options) -> KillMatrix:
    options = {"whole": True, "filtered": False, "scenarios": [A, B], "plan": {f.id: [A, B] for f in faults}} | options
    options["reads"] = READS
    proof = prove_target(
        "toy", faults, laps, commands={f.id: f"parity prove --fault {f.id}" for f in faults}, **options
    )
    return KillMatrix(
        run_id="r", created_at="2026-11-21T18:00:00+00:00", command="parity prove", start="fork", engine="cpu",
        proofs=[proof], outcome=outcome, filters=list(filters),
    )  # fmt: skip


def test_a_check_that_is_in_no_killed_faults_caught_by_is_red():
    made = matrix()
    assert [(c.check, c.killed_by, c.red) for c in made.checks] == [
        ("ordering", ["toy swapped/one_server", "toy swapped/always"], False),
        ("routing", ["toy moves"], False),
        ("tokens", [], True),
    ], "that tokens turned red as a consequence does not show that it catches what it is for"
    assert made.problems == ["no fault kills tokens, which is for: what tokens:late is for"]
    assert made.exit_status == 1


def green() -> KillMatrix:
    faults = (*FAULTS, Fault(name="edited", breaks="a token is edited", caught_by=frozenset({"tokens"})))
    edited = Lap(fault="edited", verdicts=[verdict(B, "tokens", "fail")], driven=2, fired=1)
    return matrix(LAPS | {"edited": edited}, faults=faults)


def test_it_is_green_only_if_everything_is_as_said():
    made = green()
    assert (made.problems, made.exit_status) == ([], 0)
    figures = made.figures
    assert (figures.faults_killed, figures.faults, figures.checks_killed, figures.checks) == (4, 4, 3, 3)
    assert (figures.scenarios, figures.drives, figures.control_green) == (2, 8, True)


@pytest.mark.parametrize("options", [{"filters": ["--fault swapped*"]}, {"whole": False}])
def test_of_a_part_it_is_not_asked_that_a_fault_kills_each_check(options):
    made = matrix(**options)
    assert (made.exit_status, made.figures.checks_killed, made.figures.checks) == (0, 2, 3)


def test_a_red_correct_stack_is_red():
    red = [*CONTROL, verdict(A, "numbers", "untestable", "nothing was seen")]
    made = matrix(LAPS | {None: Lap(fault=None, verdicts=red, driven=2)}, whole=False)
    assert made.problems[0] == f"toy: the correct stack is red: numbers in {A}: nothing was seen"
    assert not made.figures.control_green
    explained = [*CONTROL, verdict(A, "numbers", "untestable", "nothing was seen", known="entry")]
    made = matrix(LAPS | {None: Lap(fault=None, verdicts=explained, driven=2)}, whole=False)
    assert (made.exit_status, made.proofs[0].control.known) == (0, ["entry"])


@pytest.mark.parametrize(
    ("laps", "says"),
    [
        ({}, "toy: nothing was judged on the correct stack"),
        (LAPS | {None: Lap(fault=None, verdicts=[], driven=0)}, "toy: nothing was judged on the correct stack"),
        (
            LAPS | {None: Lap(fault=None, verdicts=CONTROL, driven=2, error="StackDied: gone")},
            "toy: the correct stack could not be driven to its end: StackDied: gone",
        ),
        (
            LAPS | {None: Lap(fault=None, verdicts=[verdict(A, "ordering", "missing")], driven=0)},
            "toy: nothing was judged on the correct stack",
        ),
    ],
)
def test_without_a_whole_control_nothing_is_proved(laps, says):
    made = matrix(laps, whole=False)
    assert made.problems[0] == says
    assert made.exit_status == 1


def test_a_run_that_was_stopped_or_drove_nothing_is_red():
    assert matrix(outcome="interrupted", whole=False).problems == ["the run is incomplete: interrupted"]
    assert "no fault was driven" in matrix({None: LAPS[None]}, faults=(), whole=False).problems[0]
    nothing = msgspec.structs.replace(green(), proofs=[])
    assert nothing.exit_status == 1
    missing = {name: lap for name, lap in LAPS.items() if name != "moves"}
    assert [p for p in matrix(missing).problems if "moves" in p] == [
        "toy: moves incomplete: it was not driven to its end"
    ]
    assert not matrix(missing).proofs[0].complete


# --- driving


def says(fault: str | None, scenario: str):
    control = [v for v in CONTROL if v.scenario == scenario]
    reds = {v.check: v for v in REDS.get(fault or "", []) if v.scenario == scenario}
    return [reds.get(v.check, v) for v in control]


def run(
    script: Script, tmp_path: Path, *, inline: bool = True, brief: Iterable[str] = (), **request
) -> tuple[prove.Run, list[str]]:
    lines: list[str] = []
    made = prove.prove(
        Request(run_dir=tmp_path / "run", jobs=1, **request),
        [planned([A, B], inline=inline, brief=brief)],
        silent,
        lambda *news: lines.append(prove.told(*news)),
        script.begin,
    )
    return made, [re.sub(r" \([\d.]+ s\)$", "", line) for line in lines]


@pytest.mark.parametrize("inline", [True, False])
def test_the_control_is_driven_first_and_each_fault_after_it(tmp_path, inline):
    script = Script(says)
    made, lines = run(script, tmp_path, inline=inline)
    assert lines == [
        "toy: correct stack: green",
        "toy: swapped/one_server: killed",
        "toy: swapped/always: killed",
        "toy: moves: killed",
    ]
    seat = "toy@disaggregated"
    drives = [("drive", seat, A), ("drive", seat, B)]
    assert script.calls[:4] == [("inject", seat, "none"), *drives, ("inject", seat, "none")]
    assert script.calls[4:8] == [("inject", seat, "swapped/one_server"), *drives, ("inject", seat, "none")]
    assert script.closed == ["completed"] * (4 if inline else 1), "a fresh stack a fault, where that costs nothing"
    assert made.matrix.problems == ["no fault kills tokens, which is for: what tokens:late is for"]
    assert made.folder == tmp_path / "run"
    assert made.matrix.proofs[0].faults[0].fired == 1


def test_a_job_that_is_cancelled_is_heard_of():
    """A pool's worker dies by what is no Exception, and nobody would answer for its job."""

    def begin(*_: Any) -> prove.Driver:
        raise asyncio.CancelledError

    job = prove.Job(options=Options(baseline="miniature", candidate="miniature", engine="cpu"), seats=(), fault=None)
    with pytest.raises(RuntimeError, match="cancelled"):
        prove.drive_job(job, begin)


def test_a_brief_fault_meets_the_scenarios_of_its_checks_first():
    here, there = (Seat(target="toy", topology=topology(name)) for name in ("disaggregated", "colocated"))
    assert likely_first([(there, (B,)), (here, (B, A))], {"ordering"}) == [(here, [A, B]), (there, [B])]
    assert likely_first([(there, (B,)), (here, (B, A))], ()) == [(there, [B]), (here, [B, A])]


def test_a_brief_fault_ends_with_its_last_catch_and_the_reports_say_so(tmp_path):
    script = Script(says)
    briefly = ["swapped/always", "moves"]
    made, lines = run(script, tmp_path, brief=briefly)
    assert [line for line in lines if not line.endswith("killed")] == ["toy: correct stack: green"]
    assert made.matrix.problems == run(Script(says), tmp_path / "again")[0].matrix.problems, (
        "every check needs its fault"
    )
    drives = {fault.id: (fault.driven, fault.brief) for fault in made.matrix.proofs[0].faults}
    assert drives == {"swapped/one_server": (2, False), "swapped/always": (1, True), "moves": (2, True)}
    said = "2 faults ended with the last catch: false alarms in the rest of the suite went unseen."
    assert said in in_terminal(made.matrix)
    assert said in Page(kill_matrix.write_all(made.matrix, tmp_path)["kill_matrix.html"].read_text()).text
    assert made.matrix.partial


def test_a_brief_fault_that_a_check_misses_is_driven_in_the_whole_suite(tmp_path):
    both = (msgspec.structs.replace(FAULTS[1], caught_by=frozenset({"ordering", "routing"})),)
    plans_ = [planned([A, B], both, brief=["swapped/always"])]
    made = prove.prove(Request(run_dir=tmp_path / "run", jobs=1), plans_, silent, lambda *_: None, Script(says).begin)
    assert [(f.outcome, f.driven) for f in made.matrix.proofs[0].faults] == [(Outcome.MISSED, 2)]


def test_of_three_parts_each_fault_is_driven_whole_in_one():
    brief = [plan(Request(whole=(part, 3)), target()).brief for part in (1, 2, 3)]
    assert [len(one) for one in brief] == [2, 2, 2]
    assert frozenset.intersection(*brief) == frozenset()
    assert plan(Request(), target()).brief == frozenset()
    assert plan(Request(whole=(2, 3)), target(faults=f"{__name__}:BY_PACE")).brief == frozenset()


BY_PACE = (Fault(name="slow", breaks="…", caught_by=frozenset({pace.CHECK})),)
"""Its pace is measured over all scenarios."""


def test_a_fault_is_driven_in_its_own_scenarios_only(tmp_path):
    narrow = Fault(name="moves", breaks="…", caught_by=frozenset({"routing"}), scenarios=frozenset({B}))
    script = Script(says)
    [found] = [
        lap for lap in prove.started_laps(planned([A, B], [narrow], inline=False), script) if lap.fault is not None
    ]
    assert [call for call in script.calls if call[0] == "drive"][2:] == [("drive", "toy@disaggregated", B)]
    assert found.driven == 1


@pytest.mark.parametrize("inline", [True, False])
def test_a_fault_that_the_stack_does_not_know_is_unfired_and_the_rest_goes_on(tmp_path, inline):
    made, lines = run(Script(says, refuses={"swapped/always": StackError("no such fault")}), tmp_path, inline=inline)
    assert lines[2:] == [
        "toy: swapped/always: unfired: it could not be driven: StackError: no such fault",
        "toy: moves: killed",
    ]
    assert made.error is None


@pytest.mark.parametrize("inline", [True, False])
def test_ctrl_c_keeps_what_is_there_and_is_red(tmp_path, inline):
    def stops(fault: str | None, scenario: str):
        if fault == "swapped/always" and scenario == B:
            raise KeyboardInterrupt
        return says(fault, scenario)

    script = Script(stops)
    made, lines = run(script, tmp_path, inline=inline)
    assert lines == ["toy: correct stack: green", "toy: swapped/one_server: killed"]
    assert [f.outcome for f in made.matrix.proofs[0].faults] == [Outcome.KILLED, Outcome.INCOMPLETE, Outcome.INCOMPLETE]
    assert made.matrix.problems[0] == "the run is incomplete: interrupted"
    assert script.closed[-1] == ("completed" if inline else "interrupted")


def test_a_named_error_ends_the_run_after_what_is_there_was_judged(tmp_path):
    def broken(fault: str | None, scenario: str):
        if fault == "moves":
            raise UsageError("the disk is full", next_step="free some")
        return says(fault, scenario)

    made, _ = run(Script(broken), tmp_path, inline=False)
    assert isinstance(made.error, UsageError)
    assert made.matrix.outcome == "UsageError: the disk is full"
    assert [f.outcome for f in made.matrix.proofs[0].faults][:2] == [Outcome.KILLED] * 2


def test_worker_processes_bring_back_what_one_process_finds(tmp_path):
    """Uses the real miniature. The worker finds that it does not know the fault, and reports it."""
    unknown = Fault(name="nobody_knows_it", breaks="…", caught_by=frozenset({"ordering"}))
    topology = catalogue.declared()[A].driven_in(2, ["disaggregated"])[0]
    seats = ((prove.Seat(target="miniature", topology=topology), (A,)),)
    request = Request(run_dir=tmp_path)
    control, fault = (
        prove.Job(options=prove.options(request, "miniature", tmp_path / str(n)), fault=fault, seats=seats)
        for n, fault in enumerate((None, unknown))
    )
    laps = {lap.fault: lap for lap in prove.inline_laps(control, [fault], 2)}
    assert {v.status for v in laps[None].verdicts} == {"pass"}
    assert "nobody_knows_it" in laps["nobody_knows_it"].error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_is_driven_only_where_the_correct_stack_calls_what_it_changes(tmp_path, workers):
    """Uses the real miniature. Only one scenario asks its router for control routes; all of them generate, without top_k."""
    exposure = next(name for name in catalogue.declared() if name.startswith("exposure."))
    topology = catalogue.declared()[A].driven_in(2, ["disaggregated"])[0]
    seats = ((prove.Seat(target="miniature", topology=topology), (A, exposure)),)
    seeded = targets.known("miniature").seeded()
    driven = {
        "control_plane_exposed/one_route": 1,
        "results_swapped/in_a_batch": 2,
        "rewards_shifted": 0,
        "turn_logprobs_late": 0,
        "parameter_ignored/max_tokens": 2,
        "parameter_ignored/top_k": 0,
    }
    faults = [seeded[id_] for id_ in driven]
    watch = frozenset(function for fault in faults for function in fault.changes)
    control, *jobs = (
        prove.Job(options=prove.options(Request(), "miniature", tmp_path / str(n)), fault=fault, seats=seats)
        for n, fault in enumerate((None, *faults))
    )
    control = msgspec.structs.replace(control, watch=watch)
    laps = {lap.fault: lap for lap in prove.inline_laps(control, jobs, workers)}
    assert laps[None].driven == 2
    assert {fault.id: laps[fault.id].driven for fault in faults} == driven
    assert {v.scenario for v in laps["control_plane_exposed/one_route"].verdicts} == {exposure}
    assert laps["rewards_shifted"].fired == 0


# --- what the command line selects


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prove, "resolve", target)
    monkeypatch.setattr(prove, "known", target)


def test_every_scenario_is_driven_once_and_patterns_select_faults(toy):
    [whole] = plans(Request(stacks=("toy",)))
    assert whole.whole
    assert sorted(whole.scenarios) == sorted(name for name, one in catalogue.declared().items() if not one.bulk)
    assert [f.id for f in whole.faults] == ["swapped/one_server", "swapped/always", "moves"]
    by_name, by_id = (plan(Request(faults=(glob,)), target()) for glob in ("swapped", "*/always"))
    assert [f.id for f in by_name.faults] == ["swapped/one_server", "swapped/always"]
    assert [f.id for f in by_id.faults] == ["swapped/always"]
    assert not by_id.whole


def test_what_needs_a_gpu_is_refused_on_a_cpu():
    for asked in ({"cuda_graphs": True}, {"batch_invariant": True}):
        with pytest.raises(UsageError, match="needs a GPU"):
            prove.plans(Request(stacks=("miniature",), **asked))
    [plan] = prove.plans(
        Request(stacks=("skyrl-0.2.0:http",), faults=("usage_wrong",), engine="cuda", cuda_graphs=True)
    )
    [fault] = plan.faults
    assert prove.command(plan, fault, Request(engine="cuda", cuda_graphs=True)).endswith("--engine cuda --cuda-graphs")


def test_scenarios_are_selected_as_pytest_does(toy):
    some = plan(Request(expression="ordering and not messages"), target()).scenarios
    assert some
    assert all("ordering" in name for name in some)


@pytest.mark.parametrize("expression", ["routing and", "1 + 1", "'routing'", "nothing_like_this"])
def test_an_expression_that_selects_nothing_is_refused_by_name(expression):
    with pytest.raises(UsageError, match=re.escape(f"-k {expression}")):
        plan(Request(expression=expression), target())


def test_a_scenario_that_the_target_is_not_able_to_is_not_driven():
    unable = msgspec.structs.replace(target(), capabilities=frozenset())
    made = plan(Request(), unable)
    assert made.unable
    assert not set(made.unable) & set(made.scenarios)
    assert all(not catalogue.declared()[name].needs for name in made.scenarios)


NARROW = (Fault(name="moves", breaks="…", caught_by=frozenset({"routing"}), scenarios=frozenset({A})),)
LOST = (Fault(name="moves", breaks="…", caught_by=frozenset({"routing"}), scenarios=frozenset({"gone.test_gone"})),)


def test_a_stack_whose_faults_name_scenarios_is_driven_in_those_only():
    made = plan(Request(), target(faults=f"{__name__}:NARROW"))
    assert (made.scenarios, made.whole) == ((A,), False)


SMALL = (NARROW[0], msgspec.structs.replace(NARROW[0], variant="a_hair", exact=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_a_fault_that_16_bits_hide_is_driven_in_float32_and_named_otherwise(dtype):
    real = target(inline=False, faults=f"{__name__}:SMALL")
    made = plan(Request(engine="cpu", dtype=dtype), real)
    driven, hidden = (("moves", "moves/a_hair"), ()) if dtype == "float32" else (("moves",), ("moves/a_hair",))
    assert (tuple(fault.id for fault in made.faults), made.hidden) == (driven, hidden)
    proof = msgspec.structs.replace(matrix().proofs[0], dtype=dtype, hidden=list(made.hidden))
    said = in_terminal(msgspec.structs.replace(matrix(), proofs=[proof]))
    assert any("moves/a_hair" in line for line in said) == bool(hidden)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stack", "minature"], "did you mean miniature"),
        (["--stack", "reference"], "no faults are seeded for 'reference'"),
        (["--stack", "toy", "--fault", "no_such*"], "--fault no_such* matches no fault of toy"),
        (["--stack", "toy", "--fault", "moves", "--fault", "no_such*"], "--fault no_such* matches no fault of toy"),
        (["--stack", "toy", "-k", "no_such_scenario"], "selects no scenario"),
        (["--stack", "toy", "-k", "a and"], "-k a and: "),
        (["--stack", "toy", "--fault", "moves", "--readme"], "the README shows runs of all faults only"),
        (["--stack", "toy", "--whole", "4/3"], "--whole 4/3 is no part of a whole"),
        (["--stack", "toy", "--whole", "third"], "--whole third is no part of a whole"),
        (["--stack", "skyrl-0.2.0:http", "--whole", "1/3"], "each fault of skyrl-0.2.0:http names its few scenarios"),
        (["--stack", "lost"], "name scenarios that do not exist: gone.test_gone"),
        (["--stack", "narrow", "-k", "routing"], "nothing is left to drive"),
    ],
)
def test_what_cannot_be_driven_is_a_named_error(arguments, said, monkeypatch, capsys):
    def find(name: str, python: object = None):
        made = {
            "toy": target(),
            "lost": target(faults=f"{__name__}:LOST"),
            "narrow": target(faults=f"{__name__}:NARROW"),
        }.get(name)
        return made or known(name)

    from harness.machine.targets import known

    for module in ("harness.proving.prove.resolve", "harness.proving.prove.known", "harness.machine.targets.known"):
        monkeypatch.setattr(module, find)
    assert parity(monkeypatch, "prove", *arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "  next: " in shown


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toy):
    """`parity prove` with a scripted session instead of the real one."""
    monkeypatch.setattr("harness.machine.targets.known", target)
    monkeypatch.setattr(cli, "PROJECT", tmp_path)
    given: dict[str, prove.Run] = {}

    made = run(Script(says), tmp_path)[0]

    def scripted(request: Request, planned_, progress, tell):
        given["run"] = msgspec.structs.replace(made, matrix=given.get("matrix", made.matrix))
        return msgspec.structs.replace(given["run"], error=given.get("error"))

    monkeypatch.setattr(prove, "prove", scripted)
    return given


def test_the_command_writes_both_reports_and_ends_with_the_figures(driven, monkeypatch, tmp_path, capsys):
    assert parity(monkeypatch, "prove", "--stack", "toy") == 1
    assert {"kill_matrix.json", "kill_matrix.html"} <= {p.name for p in (tmp_path / "run").iterdir()}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "red: killed 3 of 3 faults; 2 of 3 checks are killed by a fault; control green"


def test_the_command_is_green_and_renews_the_readme(driven, monkeypatch, tmp_path):
    (tmp_path / "README.md").write_text(f"before\n{BLOCK}after\n")
    driven["matrix"] = green()
    assert parity(monkeypatch, "prove", "--stack", "toy", "--readme") == 0
    text = (tmp_path / "README.md").read_text()
    assert "| `toy` | – | 4 of 4 | 4 | 3 of 3 | 2 | 8 | green |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_a_named_error_of_the_run_ends_the_command_with_2_and_the_reports_are_there(driven, monkeypatch, tmp_path):
    driven["error"] = UsageError("the disk is full", next_step="free some")
    assert parity(monkeypatch, "prove", "--stack", "toy") == 2
    assert (tmp_path / "run" / "kill_matrix.html").is_file()


# --- reports


def in_terminal(made: KillMatrix) -> list[str]:
    out = io.StringIO()
    kill_matrix_terminal.show(made, Console(file=out, width=200, no_color=True))
    return out.getvalue().splitlines()


def test_kill_matrix_json_validates(tmp_path):
    made = kill_matrices.big()
    paths = kill_matrix.write_all(made, tmp_path)
    found = json.loads(paths["kill_matrix.json"].read_text())
    jsonschema.Draft202012Validator(kill_matrix.SCHEMA.made()).validate(found)
    assert (found["exit_status"], found["figures"]["faults"]) == (1, 70)


def test_a_large_matrix_has_every_outcome_in_every_format(tmp_path):
    made = kill_matrices.big()
    assert {f.outcome for f in made.proofs[0].faults} == set(Outcome)
    text = kill_matrix.write_all(made, tmp_path)["kill_matrix.html"].read_text()
    page = Page(text)
    for outcome in Outcome:
        assert f'<span class="s {outcome}">' in text
    for mark in Mark:
        assert f'<td class="{mark}"' in text
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "link", "form"})
    assert all(fault.command in page.text for fault in made.proofs[0].faults)
    lines = in_terminal(made)
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "red: " + kill_matrix_terminal.closing(made)
    assert len(text) < 3_000_000


def test_a_green_matrix_says_yes_and_a_part_of_one_does_not(tmp_path):
    made = kill_matrices.big(green=True)
    assert (made.problems, made.exit_status) == ([], 0)
    assert ">Yes</div>" in kill_matrix.write_all(made, tmp_path)["kill_matrix.html"].read_text()
    assert in_terminal(made)[-1].startswith("green: killed 70 of 70 faults; 49 of 49 checks")
    part = msgspec.structs.replace(made, filters=["-k ordering"])
    assert ">In part</div>" in kill_matrix.write_all(part, tmp_path)["kill_matrix.html"].read_text()
    assert any("A part only (-k ordering)" in line for line in in_terminal(part))


def test_nothing_driven_is_red_in_every_format(tmp_path):
    nothing = msgspec.structs.replace(green(), proofs=[])
    text = kill_matrix.write_all(nothing, tmp_path)["kill_matrix.html"].read_text()
    assert ">No</div>" in text
    assert "nothing is proved" in text
    assert in_terminal(nothing)[-1] == (
        "red: killed 0 of 0 faults; 0 of 0 checks are killed by a fault; control red: nothing was driven"
    )


def test_what_a_stack_says_is_text_in_the_page_and_in_the_terminal(tmp_path):
    every = "".join(HOSTILE)
    faults = (Fault(name=every, variant=every, breaks=every, caught_by=frozenset({every})),)
    reds = [
        verdict(A, f"{every}", "fail", every, evidence=[{every: every, "expected": every, "actual": [float("nan")]}])
    ]
    laps = {
        None: Lap(fault=None, verdicts=[verdict(A, every, fault=every), verdict(B, every, "fail", every)], driven=2),
        faults[0].id: Lap(fault=faults[0].id, verdicts=reds, driven=2, fired=1),
    }
    made = msgspec.structs.replace(matrix(laps, faults=faults), outcome=every, command=every, filters=[every])
    paths = kill_matrix.write_all(made, tmp_path)
    text = paths["kill_matrix.html"].read_text()
    page = Page(text)
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "link", "form"})
    assert page.handlers == []
    assert all(link.startswith("#") for link in page.links)
    assert "<script>alert(1)</script>" in page.text
    for shown in (text, "\n".join(in_terminal(made))):
        assert not set(shown) & set("\u202e\u2066\u200b\x00\x1b\x07")
    jsonschema.Draft202012Validator(kill_matrix.SCHEMA.made()).validate(
        json.loads(paths["kill_matrix.json"].read_text())
    )


# --- the README


BLOCK = "<!-- kill matrix -->\n<!-- /kill matrix -->\n"
README = PROJECT / "README.md"


def test_the_figures_are_renewed_a_row_a_stack_and_of_whole_runs_only(tmp_path):
    text = f"a\n{BLOCK}b\n"
    once = kill_figures.renewed(text, green().proofs)
    other = [msgspec.structs.replace(p, target="other") for p in matrix().proofs]
    other.append(msgspec.structs.replace(other[0], dtype="bfloat16"))
    twice = kill_figures.renewed(once, other)
    assert list(kill_figures.rows_of(twice)) == [("toy", "–"), ("other", "–"), ("other", "bfloat16")]
    assert kill_figures.renewed(twice, other) == twice
    with pytest.raises(UsageError, match="there is no block"):
        kill_figures.renewed("a", [])
    for part in (matrix(filters=["-k x"]), matrix(outcome="interrupted")):
        with pytest.raises(UsageError, match="runs of all faults only"):
            kill_figures.renew(tmp_path / "README.md", part)


def test_the_figures_in_the_readme_are_of_a_green_run_of_todays_faults():
    text = README.read_text()
    rows = kill_figures.rows_of(text)
    assert block(text, kill_figures.NAME) == [*kill_figures.HEAD, *rows.values()], "written by `parity prove --readme`"
    assert {(name, "–") for name in prove.MINIATURES} <= set(rows), "run `parity prove --readme`"
    for (name, dtype), line in rows.items():
        found = kill_figures.ROW.fullmatch(line)
        assert found is not None
        seeded = [fault for fault in registry()[name].seeded().values() if dtype != "bfloat16" or not fault.exact]
        assert (int(found["killed"]), found["control"]) == (int(found["faults"]), "green"), line
        assert int(found["faults"]) == len(seeded), "run `parity prove --readme`"
