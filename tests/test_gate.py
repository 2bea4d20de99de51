"""The gate opens only if nothing stands against the step under its profile, and names every objection."""

from __future__ import annotations

import msgspec
import pytest

from harness import PROJECT
from harness.contract.errors import UsageError
from harness.judging.census import CENSUS
from harness.judging.gate import decide
from harness.judging.ledger import Ledger
from harness.machine.targets import Step, step
from harness.records.recording import CallError
from harness.records.verdict import Cause, Change, Concession, Gate, How, Judgement, LedgerProblem, OpenCause, Verdict
from harness.suite.plan import Bullet, Plan, Task
from harness.suite.profiles import default_for, load, named
from tests import recordings

LEGACY, HTTP = "skyrl-0.2.0:legacy", "skyrl-0.2.0:http"


def promise(place: str, text: str, scenarios: list[str]) -> Bullet:
    return Bullet(id=place, slug=text, level="must", source="s", since="0.1.0", text=text, scenarios=scenarios)


PLAN = Plan(
    task=[
        Task(number=0, wave=1, title="contract", bullet=[promise("0.1", "order", ["order.test_rows"])]),
        Task(number=1, wave=1, title="colocated", bullet=[promise("1.1", "sync", ["sync.test_all@colocated"])]),
    ]
)
RUN = recordings.info(baseline=LEGACY, candidate=HTTP, engine="cuda")


def verdict(scenario: str, topology: str = "disaggregated", **fields) -> Verdict:
    return recordings.verdict(scenario=scenario, topology=topology, **({"target": HTTP} | fields))


def both(scenario: str, topology: str = "disaggregated") -> list[Verdict]:
    return [
        verdict(scenario, topology, target=LEGACY),
        verdict(scenario, topology),
        verdict(scenario, topology, baseline=LEGACY, status="parity"),
    ]


GREEN = both("order.test_rows") + both("sync.test_all", "colocated")


def asked(
    verdicts, *, profile="removal", plan=PLAN, ledger=None, problems=(), causes=(), concessions=(), **run
) -> Gate:
    judgement = Judgement(
        run=msgspec.structs.replace(RUN, **run),
        verdicts=verdicts,
        ledger_problems=list(problems),
        open_causes=list(causes),
        concessions=list(concessions),
    )
    gate = decide(judgement, plan, ledger or Ledger(), named(profile))
    assert gate.may_replace is (not gate.reasons)
    return gate


def reasons(verdicts, **fields) -> list[str]:
    return asked(verdicts, **fields).reasons


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


def test_differences_that_the_contract_leaves_open_do_not_stand_against_it():
    assert reasons([*GREEN, verdict("order.test_rows", check="d", baseline=LEGACY, status="open")]) == []


def entry(**fields) -> Ledger:
    return Ledger(entries=(recordings.entry(check="d", targets=[HTTP], **fields),))


def known(status: str, **fields) -> Verdict:
    return verdict("order.test_rows", check="d", status=status, reason="r", known="e", **fields)


@pytest.mark.parametrize("status", ["regression", "missing", "untestable"])
def test_a_known_regression_still_stands(status):
    verdicts = [*GREEN, known(status, baseline=LEGACY)]
    assert "known divergence e still stands (1 verdict): d: r" in reasons(verdicts, ledger=entry())
    assert reasons(verdicts, ledger=entry(blocks=False)) == []


def test_a_known_fault_of_the_baseline_alone_or_of_both_does_not_stand():
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
    gate = asked([*GREEN, *extra], plan=plan)
    assert gate.reasons == (["task 0: no bullet has all of its evidence (wave 1)"] if closed else [])
    assert gate.left_out == ([] if closed else ["0.1 without order.test_extra"])


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


# --- profiles


def own(target: str, *reasons: str, **fields) -> Verdict:
    about = {"reason": "; ".join(reasons), "reasons": list(reasons) if len(reasons) > 1 else [], "status": "fail"}
    return verdict("order.test_rows", check="d", target=target, **(about | fields))


def compared(status: str, reason: str = "r", **fields) -> Verdict:
    return verdict("order.test_rows", check="d", baseline=LEGACY, status=status, reason=reason, **fields)


def shared(ours: tuple[str, ...], theirs: tuple[str, ...], **fields) -> list[Verdict]:
    """A check that fails on both stacks."""
    return [*GREEN, own(LEGACY, *ours), own(HTTP, *theirs, **fields), compared("both-wrong")]


def extra(*lacking: str, **fields) -> tuple[Plan, list[Verdict]]:
    """A plan with one more bullet, and verdicts about its scenario: missing on these stacks, not driven on the others."""
    task = msgspec.structs.replace(PLAN.task[0], bullet=[*PLAN.task[0].bullet, promise("0.2", "t", ["more.test_it"])])
    missing = [verdict("more.test_it", target=one, status="missing", **fields) for one in lacking]
    return Plan(task=[task, PLAN.task[1]]), [*GREEN, *missing]


def cause(name: str) -> OpenCause:
    return OpenCause(pair=f"{LEGACY}~{HTTP}", cause=name, verdicts=1, places=1, scenarios=["order.test_rows"])


def concession(*stacks: str) -> Concession:
    about = {"kind": "check", "place": "p", "name": "n", "what": "w", "why": "y", "hides": "h"}
    return Concession(id="c", stacks=list(stacks), **about)


def census(*changes: Change) -> list[Verdict]:
    return [*GREEN, verdict("order.test_rows", check=CENSUS, baseline=LEGACY, status="open", changes=list(changes))]


GONE = Change(name="generate", how=How.GONE, do="call sample()", source="a.py:1: it is gone")
SAID = "row 3 swapped"
NAMES = ("removal", "upgrade", "patch")


@pytest.mark.parametrize("profile", NAMES)
def test_everything_green_opens_the_gate_under_every_profile(profile):
    gate = asked(census(), profile=profile)
    assert gate.question == f"May {HTTP} replace {LEGACY}? (profile {profile})"
    assert gate.may_replace
    assert not gate.aside
    assert LEGACY in gate.means


def test_the_default_pair_asks_whether_legacy_may_be_removed():
    assert "skyrl-0.2.0:legacy may be removed" in asked(GREEN).means


@pytest.mark.parametrize("profile", NAMES)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"start": "fork"}, "started by fork"),
        ({"problems": [LedgerProblem(entry="old", problem="expired", next_step="renew")]}, "ledger entry old: expired"),
        ({"verdicts": [compared("regression")]}, "regression: d"),
        ({"verdicts": [own(HTTP, SAID)]}, f"fail: d on {HTTP} in order.test_rows: {SAID}"),
        ({"verdicts": [own(HTTP, SAID, status="untestable")]}, f"untestable: d on {HTTP} in order.test_rows: {SAID}"),
        ({"verdicts": [compared("missing")]}, "missing: d"),
        ({"verdicts": [compared("untestable")]}, "untestable: d"),
        ({"verdicts": [compared("both-wrong")]}, "both-wrong: d"),
        ({"verdicts": [verdict("capabilities.sleep", check="e", target=LEGACY, status="untestable")]}, "untestable: e"),
        ({"verdicts": [known("regression", baseline=LEGACY)], "ledger": entry()}, "known divergence e still stands"),
        ({"causes": [cause("unexplained")]}, "no cause explains an open difference"),
        ({"concessions": [concession(HTTP)]}, "1 of 1 concessions can hide a difference and are made to one"),
        ({"plan": extra()[0]}, "task 0: no evidence for 0.2"),
    ],
)  # fmt: skip
def test_what_stands_under_every_profile(profile, fields, says):
    given = fields | {"verdicts": [*census(), *fields.get("verdicts", ())]}
    (reason,) = reasons(given.pop("verdicts"), profile=profile, **given)
    assert reason.startswith(says)


RULES = {
    "baseline_faults": [
        ({"verdicts": shared((SAID,), (SAID,))}, f"both-wrong: d in order.test_rows: {SAID}"),
        ({"verdicts": [*GREEN, own(LEGACY, SAID)]}, f"fail: d on {LEGACY} in order.test_rows: {SAID}"),
    ],
    "whole_plan": [(dict(zip(("plan", "verdicts"), extra(LEGACY), strict=True)), "task 0: no evidence for 0.2")],
    "unnamed_differences": [({"causes": [cause("text")]}, "no entry for text: 1 verdict of")],
    "client_changes": [
        ({"verdicts": census(GONE)}, "a caller has to change 1 (gone): generate"),
        ({"verdicts": GREEN}, "the clients were not compared"),
    ],
    "shared_concessions": [
        ({"concessions": [concession("*")]}, "1 of 1 concessions can hide a difference and are made to both stacks"),
        ({"concessions": [concession(HTTP, LEGACY)]}, "1 of 1 concessions can hide a difference and are made to both"),
    ],
}
"""Each rule of a profile, with what it is about."""
STANDS = {
    "removal": {"baseline_faults", "whole_plan", "unnamed_differences", "shared_concessions"},
    "upgrade": set(),
    "patch": {"unnamed_differences", "client_changes"},
}


@pytest.mark.parametrize("profile", NAMES)
@pytest.mark.parametrize(("rule", "fields", "says"), [(r, *case) for r, cases in RULES.items() for case in cases])
def test_each_rule_of_a_profile_stands_or_is_shown(profile, rule, fields, says):
    given = {"verdicts": GREEN} | fields
    compared = [] if rule == "client_changes" else census()[len(GREEN) :]
    gate = asked([*given.pop("verdicts"), *compared], profile=profile, **given)
    assert any(reason.startswith(says) for reason in gate.reasons) == (rule in STANDS[profile])
    assert gate.may_replace is (rule not in STANDS[profile])
    if rule not in STANDS[profile]:
        assert any(one.startswith(says) for one in gate.aside) or gate.left_out == ["0.2 without more.test_it"]


def test_every_field_of_a_profile_is_a_rule_of_these_tests():
    said = {
        one.name: {field for field, value in msgspec.structs.asdict(one).items() if value is True} for one in load()
    }
    fields = {
        field for one in load() for field, value in msgspec.structs.asdict(one).items() if isinstance(value, bool)
    }
    assert fields == set(RULES)
    assert said == STANDS


def test_a_shared_fault_with_a_reason_that_only_the_candidate_gives_is_a_regression():
    gate = asked(shared((SAID,), (SAID, "row 4 lost")), profile="upgrade")
    assert gate.reasons == ["regression: d in order.test_rows: row 4 lost"]
    assert gate.aside[0] == f"fail: d on {LEGACY} in order.test_rows: {SAID}"


@pytest.mark.parametrize("blocks", [True, False])
def test_a_new_reason_that_is_known_stands_unless_its_entry_says_otherwise(blocks):
    new = shared((SAID,), (SAID, "row 4 lost"), explained={"row 4 lost": "e"})
    found = reasons(new, profile="upgrade", ledger=entry(blocks=blocks))
    assert found == (["known divergence e still stands (2 verdicts): d: row 4 lost"] if blocks else [])


def test_a_known_fault_of_both_is_counted():
    both_wrong = [known("fail", target=LEGACY), known("fail"), known("both-wrong", baseline=LEGACY)]
    gate = asked([*GREEN, *both_wrong], profile="upgrade", ledger=entry())
    assert gate.may_replace
    assert "known divergence e (3 verdicts): the baseline has it too" in gate.aside


@pytest.mark.parametrize("profile", NAMES)
def test_what_only_this_machine_cannot_show_is_a_promise_without_evidence(profile):
    plan, verdicts = extra(LEGACY, HTTP, cause=Cause.NOT_HERE)
    gate = asked([*census(), *verdicts[len(GREEN) :]], profile=profile, plan=plan)
    assert gate.reasons == ["task 0: no evidence for 0.2"]
    assert not gate.left_out


@pytest.mark.parametrize("profile", NAMES)
def test_what_the_baseline_offers_needs_evidence(profile):
    plan, verdicts = extra(HTTP)
    offered = verdict("more.test_it", target=LEGACY)
    lost = verdict("more.test_it", baseline=LEGACY, status="missing")
    gate = asked([*census(), *verdicts[len(GREEN) :], offered, lost], profile=profile, plan=plan)
    assert gate.reasons == ["missing: c in more.test_it", "task 0: no evidence for 0.2"]


@pytest.mark.parametrize(
    ("baseline", "candidate", "profile"),
    [
        ("skyrl-0.2.0:legacy", "skyrl-0.2.0:http", "removal"),
        ("skyrl-0.2.0:legacy", "skyrl-0.4.0:http", "removal"),
        ("miniature", "miniature:retry", "removal"),
        ("a recording of", "nothing known", "removal"),
        ("skyrl-0.2.0:http", "skyrl-0.3.0:http", "upgrade"),
        ("skyrl-0.1.0:legacy", "skyrl-0.2.0:legacy", "upgrade"),
        ("skyrl-0.2.0:http", "local:http", "upgrade"),
        ("skyrl-0.3.0:http", "local:http", "patch"),
        ("local:http", "local:http in run", "patch"),
        ("skyrl-0.3.0:http", "skyrl-0.3.0:http in run", "patch"),
        ("miniature", "miniature in run", "patch"),
    ],
)
def test_the_step_decides_the_profile_of_a_run_that_names_none(baseline, candidate, profile):
    packages = {name: {"skyrl": "0.3.0"} for name in ("local:http", "local:http in run")}
    assert default_for(step(baseline, candidate, packages)).name == profile


def test_a_local_stack_whose_version_nobody_recorded_is_another_release():
    assert step("skyrl-0.3.0:http", "local:http", {}) is Step.RELEASE
    assert step("local:http", "local:http in run", {}) is Step.RELEASE


def test_an_unknown_profile_is_refused_with_those_that_there_are():
    with pytest.raises(UsageError, match="there is no profile 'downgrade'") as caught:
        named("downgrade")
    assert "upgrade (the default for another release)" in caught.value.next_step


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda text: text.replace('"the same release"', '"another release"'),
            "has the profiles removal, upgrade, patch",
        ),
        (lambda text: text.replace('"patch"', '"upgrade"'), "has the profiles removal, upgrade, upgrade"),
        (lambda text: text.replace("client_changes = true", ""), "missing required field `client_changes`"),
        (lambda text: text + "more = true", "unknown field `more`"),
        (lambda text: text.replace('"the same release"', '"any"'), "Invalid enum value 'any'"),
    ],
)
def test_a_profile_without_one_of_its_rules_or_its_step_is_refused(tmp_path, change, says):
    path = tmp_path / "profiles.toml"
    path.write_text(change((PROJECT / "scenarios" / "profiles.toml").read_text()))
    with pytest.raises(UsageError, match=says):
        load(path)
