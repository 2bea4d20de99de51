"""The gate opens only without any obstacle to removing legacy, and names every obstacle."""

from __future__ import annotations

import datetime

import msgspec
import pytest

from harness.judging.gate import decide
from harness.judging.ledger import Entry, Ledger
from harness.records.recording import CallError
from harness.records.verdict import Judgement, LedgerProblem, RunInfo, Verdict
from harness.suite.plan import Bullet, Plan, Task

LEGACY, HTTP = "skyrl-0.2.0:legacy", "skyrl-0.2.0:http"


def promise(place: str, text: str, scenarios: list[str]) -> Bullet:
    return Bullet(id=place, slug=text, level="must", source="s", since="0.1.0", text=text, scenarios=scenarios)


PLAN = Plan(
    task=[
        Task(number=0, wave=1, title="contract", bullet=[promise("0.1", "order", ["order.test_rows"])]),
        Task(
            number=1,
            wave=1,
            title="colocated",
            bullet=[promise("1.1", "sync", ["sync.test_all@colocated"])],
        ),
    ]
)
RUN = RunInfo(
    run_id="r",
    created_at="2026-05-01T00:00:00Z",
    command="parity run",
    baseline=LEGACY,
    candidate=HTTP,
    start="ray",
    engine="cuda",
)


def verdict(scenario: str, topology: str = "disaggregated", **fields) -> Verdict:
    defaults = {"wave": 1, "task": 0, "promise": "p", "check": "c", "target": HTTP, "status": "pass", "facts": 1}
    return Verdict(scenario=scenario, topology=topology, **(defaults | fields))


def both(scenario: str, topology: str = "disaggregated") -> list[Verdict]:
    return [
        verdict(scenario, topology, target=LEGACY),
        verdict(scenario, topology),
        verdict(scenario, topology, baseline=LEGACY, status="parity"),
    ]


GREEN = both("order.test_rows") + both("sync.test_all", "colocated")


def reasons(verdicts, *, plan=PLAN, ledger=None, problems=(), **run) -> list[str]:
    judgement = Judgement(run=msgspec.structs.replace(RUN, **run), verdicts=verdicts, ledger_problems=list(problems))
    gate = decide(judgement, plan, ledger or Ledger())
    assert gate.may_remove_legacy is (not gate.reasons)
    return gate.reasons


def test_everything_green_on_the_real_stacks_opens_the_gate():
    assert reasons(GREEN) == []


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"start": "fork"}, "started by fork"),
        ({"outcome": "stopped by Ctrl-C"}, "stopped by Ctrl-C"),
        (
            {"not_started": {"skyrl-0.2.0:http@remote": CallError(kind="StartFailed", message="port in use")}},
            "port in use",
        ),
        ({"baseline": None}, "no comparison"),
        ({"candidate": None}, "no comparison"),
    ],
)
def test_a_run_that_proves_less_keeps_it_closed(run, says):
    assert any(says in reason for reason in reasons(GREEN, **run))


def test_nothing_judged_keeps_it_closed():
    found = reasons([])
    assert found[0] == "nothing was judged"
    assert "task 0–1: no bullet has all of its evidence (wave 1)" in found


@pytest.mark.parametrize("status", ["fail", "untestable"])
def test_one_red_stack_verdict_keeps_it_closed(status):
    assert reasons([*GREEN, verdict("order.test_rows", check="d", status=status, reason="row 3 swapped")]) == [
        f"{status}: d on {HTTP} in order.test_rows: row 3 swapped"
    ]


@pytest.mark.parametrize("status", ["regression", "both-wrong", "missing", "untestable"])
def test_one_red_comparison_keeps_it_closed(status):
    assert len(reasons([*GREEN, verdict("order.test_rows", check="d", baseline=LEGACY, status=status)])) == 1


def test_differences_that_the_contract_leaves_open_do_not_stand_against_it():
    assert reasons([*GREEN, verdict("order.test_rows", check="d", baseline=LEGACY, status="open")]) == []


def test_a_problem_with_the_ledger_keeps_it_closed():
    problem = LedgerProblem(entry="old", problem="expired", next_step="renew")
    assert reasons(GREEN, problems=[problem]) == ["ledger entry old: expired"]


def entry(**fields) -> Ledger:
    defaults = {
        "id": "e", "scenario": "*", "check": "d", "targets": [HTTP], "reason": "r", "cap": 9,
        "owner": "o", "expires": datetime.date(2030, 1, 1), "source": "a.py:1: so it is",
    }  # fmt: skip
    return Ledger(entries=(Entry(**(defaults | fields)),))


def known(status: str, **fields) -> Verdict:
    return verdict("order.test_rows", check="d", status=status, reason="r", known="e", **fields)


@pytest.mark.parametrize("status", ["regression", "missing", "untestable"])
def test_a_known_regression_still_stands_against_removal(status):
    verdicts = [*GREEN, known(status, baseline=LEGACY)]
    assert "known divergence e still stands (1 verdict): d: r" in reasons(verdicts, ledger=entry())
    assert reasons(verdicts, ledger=entry(blocks_removal=False)) == []


def test_a_known_fault_of_legacy_alone_or_of_both_does_not_stand_against_removal():
    alone = [known("fail", target=LEGACY), known("baseline-defect", baseline=LEGACY)]
    shared = [known("fail", target=LEGACY), known("fail"), known("both-wrong", baseline=LEGACY)]
    assert reasons([*GREEN, *alone], ledger=entry()) == []
    assert reasons([*GREEN, *shared], ledger=entry()) == []


def test_a_known_fault_of_the_candidate_that_was_not_compared_stands():
    assert reasons([*GREEN, known("fail")], ledger=entry()) != []


@pytest.mark.parametrize("dropped", range(6))
def test_each_missing_piece_of_evidence_keeps_it_closed(dropped):
    left = [v for position, v in enumerate(GREEN) if position != dropped]
    assert bool(reasons(left)) is (GREEN[dropped].target == HTTP)


def test_evidence_from_another_placement_does_not_count():
    moved = both("order.test_rows") + both("sync.test_all", "remote")
    assert reasons(moved) == ["task 1: no bullet has all of its evidence (wave 1)"]


@pytest.mark.parametrize(("lacking", "closed"), [((LEGACY, HTTP), False), ((HTTP,), True)])
def test_what_neither_stack_offers_needs_no_evidence(lacking, closed):
    first = msgspec.structs.replace(
        PLAN.task[0].bullet[0], scenarios=[*PLAN.task[0].bullet[0].scenarios, "order.test_extra"]
    )
    plan = Plan(task=[msgspec.structs.replace(PLAN.task[0], bullet=[first, *PLAN.task[0].bullet[1:]]), *PLAN.task[1:]])
    extra = [
        verdict("order.test_extra", target=one, status="missing" if one in lacking else "pass")
        for one in (LEGACY, HTTP)
    ]
    judgement = Judgement(run=RUN, verdicts=[*GREEN, *extra])
    gate = decide(judgement, plan, Ledger())
    assert gate.reasons == (["task 0: no bullet has all of its evidence (wave 1)"] if closed else [])
    assert gate.left_out == ([] if closed else ["0.1 without order.test_extra"])


def test_a_bullet_without_scenarios_has_no_evidence():
    task = msgspec.structs.replace(PLAN.task[0], bullet=[*PLAN.task[0].bullet, promise("0.2", "t", [])])
    assert reasons(GREEN, plan=Plan(task=[task, PLAN.task[1]])) == ["task 0: no evidence for 0.2"]


def test_what_needs_an_accelerator_is_not_shown_by_a_cpu_run():
    bullet = msgspec.structs.replace(PLAN.task[1].bullet[0], engine="cuda")
    plan = Plan(task=[PLAN.task[0], msgspec.structs.replace(PLAN.task[1], bullet=[bullet])])
    assert reasons(GREEN, plan=plan) == []
    assert reasons(GREEN, plan=plan, engine="cpu") == ["task 1: 1.1 can only be shown on CUDA; this run used cpu"]


def test_a_regression_is_named_once_with_its_cause():
    cause = verdict("order.test_rows", check="d", status="fail", reason="row 3 swapped")
    effect = verdict("order.test_rows", check="d", baseline=LEGACY, status="regression", reason="the candidate fails d")
    assert reasons([*GREEN, cause, effect]) == ["regression: d in order.test_rows: row 3 swapped"]


def test_reasons_come_worst_first_and_once():
    bad = [verdict(f"order.test_{n}", check="d", status="fail", reason="r") for n in "ab"]
    worse = verdict("order.test_c", check="d", baseline=LEGACY, status="regression", reason="r")
    found = reasons([*GREEN, *bad, worse], start="fork")
    assert found == [
        "regression: d in order.test_c: r",
        f"fail: d on {HTTP} in 2 scenarios (order.test_a, …): r",
        "started by fork: only a run with --start ray drives the stacks as SkyRL ships them",
    ]
