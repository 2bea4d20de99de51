"""The verdict table, cell by cell, and cases that must never count as parity."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks.base import Check, Evidence, failed, passed
from harness.checks.liveness import EVERY_CALL_ENDS
from harness.checks.request_fields import AFTER_AN_ERROR
from harness.contract.errors import Blame
from harness.contract.topology import Topology
from harness.judging.causes import Why
from harness.judging.facets import deterministic
from harness.judging.noise import noise_floors
from harness.judging.parity import Absent, Judged, Missing, compare
from harness.records.recording import ENUMERATED, Call, CallError, Mark, Observation, ScenarioTrace
from harness.records.reference import NoiseRequest, Score, ScoreRequest
from harness.records.verdict import Concern, Conformance, NoiseFloor, Parity, Verdict
from tests import recordings, traces

BOOK = traces.FakeReference()
GREEDY = {"temperature": 0.0, "max_tokens": 4, "logprobs": 1}
SCENARIO = recordings.declared(checks=(Check(name="order", fault="f", source="s", judge=lambda e: passed(1)),))
WITH_ERRORS = recordings.declared(
    checks=(Check(name="errors.named:bad", fault="f", source="s", errors_of="bad", judge=lambda e: passed(1)),)
)
NOISE = [NoiseFloor(check="outputs.logprobs", unit="nats", floor=1e-6, bound=1e-5, weakest_fault=1e-3, facts=9)]


def verdict(status: str, *, check: str = "order", **more: Any) -> Verdict:
    return recordings.verdict(scenario=SCENARIO.name, status=status, check=check, **more)


def side(trace: ScenarioTrace, status: str = "pass", **about: Any) -> Judged:
    return Judged(evidence=Evidence(trace, BOOK), verdicts=[verdict(status, **about)])


def both(
    left: list[Call], right: list[Call], *, twin: list[Call] | None = None, noise=NOISE, scenario=SCENARIO, **about: Any
) -> dict[str, Verdict]:
    """Compare two conforming sides; check or facet → verdict."""
    found = compare(
        scenario,
        side(traces.trace(*left, target="stack:old"), check=scenario.checks[0].name, **about),
        side(traces.trace(*right, target="stack:new"), check=scenario.checks[0].name, **about),
        None if twin is None else traces.trace(*twin, take=2, target="stack:old"),
        noise,
    )
    assert all((v.baseline, v.target) == ("stack:old", "stack:new") for v in found)
    assert len({v.id for v in found}) == len(found)
    return {v.check: v for v in found}


def answer(
    tokens: list[int] | None = None,
    *,
    logprobs: list[float] | None = None,
    params: dict[str, Any] | None = None,
    **about: Any,
) -> Call:
    """One greedy call with one row."""
    tokens = [11, 12, 13] if tokens is None else tokens
    logprobs = [-1.0 - token / 7 for token in tokens] if logprobs is None else logprobs
    return traces.generate(
        [[5, 6, 7]], [tokens], logprobs=[logprobs], params=GREEDY if params is None else params, **about
    )


# --- per check ------------------------------------------------------------------------------------------------------

OLD, NEW = traces.trace(answer(), target="stack:old"), traces.trace(answer(), target="stack:new")


SIDES = {
    "pass": lambda trace: side(trace, "pass"),
    "fail": lambda trace: side(trace, "fail", reason="lost a row", blame=Blame.STACK),
    "untestable": lambda trace: side(trace, "untestable", reason="the tap is blind", blame=Blame.ENVIRONMENT),
    "missing": lambda trace: Missing(
        target=trace.header.target, topology="disaggregated", reason="does not declare sleep"
    ),
    "absent": lambda trace: Absent(
        target=trace.header.target, topology="disaggregated", reason="did not start", blame=Blame.ENVIRONMENT
    ),
}
TABLE: dict[tuple[str, str], Parity | None] = {
    ("pass", "pass"): Parity.PARITY,
    ("pass", "fail"): Parity.REGRESSION,
    ("pass", "untestable"): Parity.UNTESTABLE,
    ("pass", "missing"): Parity.MISSING,
    ("pass", "absent"): Parity.UNTESTABLE,
    ("fail", "pass"): Parity.BASELINE_DEFECT,
    ("fail", "fail"): Parity.BOTH_WRONG,
    ("fail", "untestable"): Parity.UNTESTABLE,
    ("fail", "missing"): Parity.MISSING,
    ("fail", "absent"): Parity.UNTESTABLE,
    ("untestable", "pass"): Parity.UNTESTABLE,
    ("untestable", "fail"): Parity.UNTESTABLE,
    ("untestable", "untestable"): Parity.UNTESTABLE,
    ("untestable", "missing"): Parity.MISSING,
    ("untestable", "absent"): Parity.UNTESTABLE,
    ("missing", "pass"): Parity.ADDED,
    ("missing", "fail"): Parity.ADDED,
    ("missing", "untestable"): Parity.ADDED,
    ("missing", "missing"): None,
    ("missing", "absent"): Parity.UNTESTABLE,
    ("absent", "pass"): Parity.UNTESTABLE,
    ("absent", "fail"): Parity.UNTESTABLE,
    ("absent", "untestable"): Parity.UNTESTABLE,
    ("absent", "missing"): Parity.UNTESTABLE,
    ("absent", "absent"): Parity.UNTESTABLE,
}
"""Status of one check on the baseline (left) and on the candidate → the comparison. None: each has its own verdict."""
NOT_RED = {Parity.PARITY, Parity.BASELINE_DEFECT, Parity.ADDED}


def test_the_verdict_table_has_every_cell():
    assert set(TABLE) == set(itertools.product(SIDES, SIDES))
    assert set(SIDES) == set(Conformance) | {"absent"}
    differing = {Parity.OPEN}  # of outputs, where both conform
    assert set(TABLE.values()) - {None} == set(Parity) - differing


@pytest.mark.parametrize(("baseline", "candidate"), sorted(TABLE))
def test_every_cell_of_the_verdict_table(baseline: str, candidate: str):
    expected = TABLE[baseline, candidate]
    found = compare(SCENARIO, SIDES[baseline](OLD), SIDES[candidate](NEW), None, NOISE)
    if expected is None:
        assert found == []
        return
    first, *facets = found
    assert (first.check, first.status, first.target) == ("order", expected, "stack:new")
    assert (first.baseline, first.red) == ("stack:old", expected not in NOT_RED)
    assert bool(facets) == (expected == Parity.PARITY), "outputs are compared only where both conform"
    assert bool(first.blame) == bool(first.next_step) == (expected not in (Parity.PARITY, Parity.ADDED))
    assert bool(first.reason) == (expected != Parity.PARITY)


def test_the_reason_is_that_of_the_side_that_is_wrong():
    wrong = {"reason": "lost a row", "blame": Blame.STACK, "evidence": [{"row": 1}]}
    [regression, *_] = compare(SCENARIO, side(OLD), side(NEW, "fail", **wrong), None, NOISE)
    [defect, *_] = compare(SCENARIO, side(OLD, "fail", **wrong), side(NEW), None, NOISE)
    [alike, *_] = compare(SCENARIO, side(OLD, "fail", **wrong), side(NEW, "fail", **wrong), None, NOISE)
    assert (regression.reason, defect.reason, alike.reason) == ("lost a row", "lost a row", "both: lost a row")
    assert regression.evidence == [{"side": "candidate", "row": 1}]
    assert [e["side"] for e in alike.evidence] == ["baseline", "candidate"]


def test_one_that_was_not_recorded_is_untestable_with_its_blame():
    gone = Absent(target="stack:new", topology="disaggregated", reason="did not start: OOM", blame=Blame.ENVIRONMENT)
    for pair, role in (((side(OLD), gone), "candidate"), ((gone, side(NEW)), "baseline")):
        [found] = compare(SCENARIO, *pair, None, NOISE)
        assert (found.status, found.blame, found.red) == (Parity.UNTESTABLE, Blame.ENVIRONMENT, True)
        assert found.reason == f"{role}: did not start: OOM"


def test_a_check_that_judged_one_side_only_is_untestable_unless_the_other_was_never_driven():
    left = Judged(evidence=Evidence(OLD, BOOK), verdicts=[verdict("pass"), verdict("pass", check="echo")])
    found = {v.check: v for v in compare(SCENARIO, left, side(NEW), None, NOISE)}
    assert (found["echo"].status, found["echo"].blame) == (Parity.UNTESTABLE, Blame.HARNESS)
    refuses = traces.trace(traces.generate([[1]], error=traces.error()), target="stack:new")
    assert [v.check for v in compare(SCENARIO, left, side(refuses), None, NOISE) if v.check == "echo"] == []
    dead = traces.trace(target="stack:new", outcome="failed", end_error=traces.error())
    found = {v.check: v for v in compare(SCENARIO, left, side(dead, "fail"), None, NOISE)}
    assert {name: v.status for name, v in found.items()} == {"order": Parity.REGRESSION}


@pytest.mark.parametrize(
    ("status", "on_the_baseline", "found"),
    [
        ("pass", False, None),
        ("fail", False, Parity.REGRESSION),
        ("fail", True, Parity.BASELINE_DEFECT),
        ("untestable", False, Parity.UNTESTABLE),
    ],
)
def test_a_promise_that_holds_in_silence_is_kept_by_the_silent_side(status, on_the_baseline, found):
    def pair(silent: ScenarioTrace) -> list[Verdict]:
        judged = Judged(evidence=Evidence(NEW, BOOK), verdicts=[verdict("pass"), verdict(status, check="refusals")])
        sides = (judged, side(silent)) if on_the_baseline else (side(silent), judged)
        return [v for v in compare(SCENARIO, *sides, None, NOISE) if v.check == "refusals"]

    assert [v.status for v in pair(OLD)] == ([] if found is None else [found])
    assert pair(traces.trace(target="stack:old", outcome="failed", end_error=traces.error())) == []


def test_a_side_that_failed_has_told_why_a_check_found_nothing_on_it():
    left = Judged(evidence=Evidence(OLD, BOOK), verdicts=[verdict("pass"), verdict("pass", check="echo")])
    found = compare(SCENARIO, left, side(NEW, "fail", reason="refused"), None, NOISE)
    assert {v.check: v.status for v in found} == {"order": Parity.REGRESSION}


# --- beside a failed check --------------------------------------------------------------------------------------------


def beside(wrong: list[Concern], right: list[list[int]], label: str | None = None) -> dict[str, Verdict]:
    """Two rows, `right` on the candidate, which fails a check that found this wrong; facet → verdict."""
    asked = {"params": GREEDY | {"logprobs": None}, "label": label}
    old = traces.trace(traces.generate([[5, 6], [7, 8]], [[11, 12], [13, 14]], **asked), target="stack:old")
    new = traces.trace(traces.generate([[5, 6], [7, 8]], right, **asked), target="stack:new")
    concerns = [(new.calls[0].id if call == "it" else call, row) for call, row in wrong]
    fails = [verdict("fail", reason="wrong", blame=Blame.STACK, concerns=concerns)]
    failing = Judged(evidence=Evidence(new, BOOK), verdicts=fails, own=fails)
    return {v.check: v for v in compare(SCENARIO, side(old), failing, None, NOISE) if v.check == "outputs.tokens"}


@pytest.mark.parametrize(
    ("wrong", "right", "differ"),
    [
        ([("it", 0)], [[1, 2], [13, 14]], False),
        ([("it", 0)], [[1, 2], [13, 9]], True),
        ([("it", 1)], [[1, 2], [13, 14]], True),
        ([("it", None)], [[1, 2], [13, 9]], False),
        ([("asked", None)], [[1, 2], [13, 9]], False),
        ([("other", None)], [[1, 2], [13, 9]], True),
        ([], [[1, 2], [13, 14]], True),
        ([], [[11, 12], [13, 14]], False),
    ],
)
def test_what_a_failed_check_did_not_find_wrong_is_compared_all_the_same(wrong, right, differ):
    found = beside(wrong, right, label="asked")
    assert {name: v.status for name, v in found.items()} == ({"outputs.tokens": Parity.OPEN} if differ else {})
    for one in found.values():
        assert one.reason == "outputs.tokens differ in generate (the candidate fails order)"
        assert not one.red


@pytest.mark.parametrize(("wrong", "shown"), [("bad", False), ("other", True)])
def test_an_error_of_one_side_is_told_beside_a_failed_check_unless_it_is_what_failed(wrong, shown):
    old = traces.trace(traces.generate([[1]], [[2]], params=GREEDY, label="bad"), target="stack:old")
    new = traces.trace(*failing(), target="stack:new")
    about = {"check": "errors.named:bad"}
    fails = [verdict("fail", reason="wrong", blame=Blame.STACK, concerns=[(wrong, None)], **about)]
    broken = Judged(evidence=Evidence(new, BOOK), verdicts=fails, own=fails)
    found = {v.check: v for v in compare(WITH_ERRORS, side(old, **about), broken, None, NOISE)}
    assert ("outputs.errors" in found) == shown
    if shown:
        assert found["outputs.errors"].status == Parity.OPEN


def test_a_failed_check_says_all_that_is_wrong_and_shows_three():
    found = failed(9, "wrong", [{"call": call, "row": row} for call in (1, 2) for row in range(3)] + [{"server": "a"}])
    assert found.concerns == [(call, row) for call in (1, 2) for row in range(3)]
    assert len(found.evidence) == 3


# --- calls ----------------------------------------------------------------------------------------------------------


def test_a_call_without_a_partner_is_untestable_never_dropped():
    for left, right, role in (([answer(), answer()], [answer()], "baseline"), ([], [answer()], "candidate")):
        found = both(left, right)["calls.paired"]
        assert (found.status, found.blame, found.red) == (Parity.UNTESTABLE, Blame.HARNESS, True)
        assert found.reason == f"calls without a partner on the other side: generate ({role})"


def test_what_only_the_stack_with_an_error_is_asked_needs_no_partner():
    assert "calls.paired" not in both([answer()], [answer(), answer(label=AFTER_AN_ERROR)])
    assert both([answer()], [answer(), answer(label="after")])["calls.paired"].red


@pytest.mark.parametrize(("asked", "status"), [((3, 2), Parity.OPEN), ((3, 3), Parity.UNTESTABLE)])
@pytest.mark.parametrize("conforms", [True, False])
def test_what_only_one_stack_has_is_named_where_a_scenario_asks_for_all(asked, status, conforms):
    def enumerating(name: str, calls: list[Call], cases: int, verdict: str) -> Judged:
        mark = Mark(name=ENUMERATED, step=0, at_ns=traces.tick(), numbers={"driven": cases, "left_out": 0})
        return side(traces.trace(*calls, target=name, marks=[mark]), verdict, check=SCENARIO.checks[0].name)

    more = traces.generate([[9, 9]], [[1]], params=GREEDY)
    sides = [
        enumerating("stack:old", [answer(), more], asked[0], "pass" if conforms else "fail"),
        enumerating("stack:new", [answer()], asked[1], "pass"),
    ]
    found = {v.check: v for v in compare(SCENARIO, *sides, None, NOISE)}
    if not conforms and status is Parity.UNTESTABLE:
        assert "calls.paired" not in found
        return
    assert found["calls.paired"].status is status
    assert found["calls.paired"].causes == ({Why.ASKED_OF_ONE: 1} if status is Parity.OPEN else {})


@pytest.mark.parametrize(("alike", "status"), [(1, Parity.OPEN), (0, Parity.UNTESTABLE)])
@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_an_enumeration_whose_cases_were_asked_otherwise_compares_nothing(verdict, alike, status):
    def enumerating(name: str, calls: list[Call]) -> Judged:
        mark = Mark(name=ENUMERATED, step=0, at_ns=traces.tick(), numbers={"driven": len(calls), "left_out": 0})
        return side(traces.trace(*calls, target=name, marks=[mark]), verdict, check=SCENARIO.checks[0].name)

    def asked(prompts: dict[str, int]) -> list[Call]:
        return [traces.generate([[n, n]], [[1]], params=GREEDY, label=case) for case, n in prompts.items()]

    sides = [
        enumerating("stack:old", asked({"a: null": 5, **({"b: null": 7} if alike else {})})),
        enumerating("stack:new", asked({"new: null": 5, "a: null": 6, **({"b: null": 7} if alike else {})})),
    ]
    found = {v.check: v for v in compare(SCENARIO, *sides, None, NOISE)}["calls.paired"]
    assert found.status is status
    assert ("1 of the same cases were asked with other requests" in found.reason) is (status is Parity.UNTESTABLE)


def test_concurrent_calls_are_paired_by_what_they_asked_not_by_when_they_ended():
    calls = [traces.generate([[n]], [[n]], params=GREEDY, started_ns=100, ended_ns=200 + n) for n in range(1, 5)]
    found = both(calls, calls[::-1])
    assert found["outputs.tokens"].status == Parity.PARITY
    assert found["outputs.tokens"].facts == 4


def test_a_label_keeps_equal_requests_apart():
    old = [answer(label="before"), answer([21], label="after")]
    new = [answer([21], label="after"), answer(label="before")]
    assert both(old, new)["outputs.tokens"].status == Parity.PARITY


def test_the_clean_room_and_looking_at_a_stack_are_not_compared():
    extra = [traces.call("in_flight", {}, {"requests": 1}), answer([1], phase="clean_room")]
    assert "calls.paired" not in both([*extra, answer()], [answer()])


# --- outputs --------------------------------------------------------------------------------------------------------


def test_a_difference_is_open_with_both_sides_and_the_shortest_prompt():
    prompts = [[1] * 30, [2] * 3, [3] * 10, [4] * 20, [5] * 2]
    old = traces.generate(prompts, [[7, 8]] * 5, params=GREEDY)
    new = traces.generate(prompts, [[7, 9], [7, 9], [7, 9], [7, 9], [7, 8]], params=GREEDY)
    found = both([old], [new])["outputs.tokens"]
    assert (found.status, found.red, found.facts) == (Parity.OPEN, False, 5)
    assert found.reason == "outputs.tokens differ in generate"
    assert found.numbers["differing"] == 4
    assert [e["input"] for e in found.evidence] == [[2] * 3, [3] * 10, [4] * 20]
    assert (found.evidence[0]["baseline"], found.evidence[0]["candidate"]) == ([7, 8], [7, 9])


def test_a_difference_no_larger_than_the_twins_is_noise_and_an_earlier_one_is_not():
    old, twin = answer([1, 2, 3, 4]), answer([1, 2, 9, 9])
    within = both([old], [answer([1, 2, 8, 8])], twin=[twin])["outputs.tokens"]
    assert (within.status, within.numbers["within_twin_noise"]) == (Parity.PARITY, 1)
    assert "twin" in within.reason
    assert both([old], [answer([1, 7, 3, 4])], twin=[twin])["outputs.tokens"].status == Parity.OPEN
    assert both([old], [answer([1, 2, 8, 8])], twin=[old])["outputs.tokens"].status == Parity.OPEN


def test_sampled_output_without_a_seed_is_not_compared_and_seeded_is():
    unseeded = {"temperature": 1.0}
    found = both([answer([1], params=unseeded)], [answer([2], params=unseeded)])
    assert not any(name.startswith("outputs.") for name in found)
    seeded = {"temperature": 1.0, "seed": 3}
    assert both([answer([1], params=seeded)], [answer([2], params=seeded)])["outputs.tokens"].status == Parity.OPEN
    assert not deterministic(answer(params={})), "vLLM samples where no temperature is given"


@pytest.mark.parametrize(
    ("left", "right", "status"),
    [
        ({"dtype": "float32"}, {"dtype": "float32"}, Parity.UNTESTABLE),
        ({}, {}, Parity.OPEN),
        ({"batch_invariant": True}, {}, Parity.OPEN),
        ({}, {"batch_invariant": True}, Parity.OPEN),
        ({"batch_invariant": True}, {"batch_invariant": True}, Parity.UNTESTABLE),
        ({"batch_invariant": True, "cuda_graphs": True}, {"batch_invariant": True}, Parity.OPEN),
    ],
    ids=[
        "float32",
        "bfloat16",
        "the baseline alone",
        "the candidate alone",
        "both batch-invariant",
        "graphs and eager",
    ],
)
def test_numbers_that_differ_need_a_measured_noise_where_both_stacks_are_exact(left, right, status):
    def made(target: str, off: float, dtype: str = "bfloat16", **about: bool) -> Judged:
        model = {"name": "tiny", "sha256": "0", "dtype": dtype}
        return side(traces.trace(answer(logprobs=[-1 - off, -2, -3]), target=target, model=model, **about))

    found = compare(SCENARIO, made("stack:old", 0, **left), made("stack:new", 0.01, **right), None, [])
    assert {v.check: v.status for v in found}["outputs.logprobs"] == status


def scored(tokens: list[int], behind: float) -> None:
    """Give the reference a score for these tokens, in which the last one is `behind` nats below the most probable one."""
    asked = ScoreRequest(version=0, prompt=[5, 6, 7], tokens=tokens)
    gaps = (*[0.0] * (len(tokens) - 1), behind)
    BOOK.set(
        asked, Score(logprobs=[-1.0] * len(tokens), ranks=[0] * len(tokens), margins=[1.0] * len(tokens), behind=gaps)
    )


@pytest.mark.parametrize(
    ("behind", "status", "after"),
    [(0.5, Parity.PARITY, 1.0), (1.5, Parity.OPEN, None)],
    ids=["a near tie", "the model prefers one of them by far"],
)
def test_what_comes_after_a_token_at_which_rounding_decides_is_no_difference(behind, status, after):
    scored([11, 12], 0.0)
    scored([11, 13], behind * traces.NOISE.near)
    found = both([answer([11, 12])], [answer([11, 13])])["outputs.tokens"]
    assert (found.status, found.numbers.get("after_a_near_tie")) == (status, after)


@pytest.mark.parametrize(
    ("behind", "later", "status"),
    [(0.5, 1, Parity.PARITY), (1.5, 1, Parity.UNTESTABLE), (0.5, 2, Parity.UNTESTABLE)],
    ids=["after a near tie", "after another difference", "one side asks more"],
)
def test_a_turn_that_follows_an_answer_that_parted_needs_no_partner(behind, later, status):
    scored([11, 12], 0.0)
    scored([11, 13], behind * traces.NOISE.near)
    sides = [
        [answer([11, last]), *(traces.generate([[5, 6, 7, 11, last]], [[1]], params=GREEDY) for _ in range(turns))]
        for last, turns in ((12, 1), (13, later))
    ]
    found = both(*sides)["calls.paired"]
    assert (found.status, found.numbers.get("after_a_near_tie")) == (status, 2.0 if status == Parity.PARITY else None)


def test_an_answer_that_ends_early_is_a_difference_whatever_the_tokens():
    scored([11, 12], 0.0)
    scored([11], 0.0)
    assert both([answer([11, 12])], [answer([11])])["outputs.tokens"].status == Parity.OPEN


@pytest.mark.parametrize(
    ("at", "dtype", "status"),
    [(30, "bfloat16", Parity.PARITY), (1, "bfloat16", Parity.OPEN), (30, "float32", Parity.OPEN)],
    ids=["late in one of many rows", "at once in all", "float32 has no such reason"],
)
def test_seeded_rows_may_part_as_seldom_as_noise_changes_a_draw(at, dtype, status):
    model = {"name": "tiny", "sha256": "0" * 64, "dtype": dtype}
    rows = [[row] * 40 for row in range(12)]
    others = [[*row[:at], 50, *row[at + 1 :]] if at == 1 or row[0] == 3 else row for row in rows]
    params = {"temperature": 1.0, "seed": 3}
    calls = [traces.generate([[n] for n in range(12)], given, params=params) for given in (rows, others)]
    book = traces.FakeReference()
    book.set(NoiseRequest(), msgspec.structs.replace(traces.NOISE, rms=1e-3))
    recorded = [traces.trace(call, target=name, model=model) for call, name in zip(calls, ("old", "new"), strict=True)]
    sides = [Judged(evidence=Evidence(trace, book), verdicts=[verdict("pass")]) for trace in recorded]
    assert {v.check: v.status for v in compare(SCENARIO, *sides, None, NOISE)}["outputs.tokens"] == status


@pytest.mark.parametrize(
    ("left", "right", "status"),
    [
        ({}, {"batch_invariant": True}, Parity.PARITY),
        ({"batch_invariant": True}, {"batch_invariant": True, "cuda_graphs": True}, Parity.PARITY),
        ({"batch_invariant": True}, {"batch_invariant": True}, Parity.OPEN),
    ],
    ids=["the candidate alone", "graphs and eager", "both"],
)
def test_batch_invariant_stacks_part_at_no_near_tie(left, right, status):
    scored([11, 12], 0.0)
    scored([11, 13], 0.5 * traces.NOISE.near)
    sides = [
        side(traces.trace(answer(tokens), target=target, **about))
        for tokens, target, about in (([11, 12], "stack:old", left), ([11, 13], "stack:new", right))
    ]
    assert {v.check: v.status for v in compare(SCENARIO, *sides, None, NOISE)}["outputs.tokens"] == status


def test_openai_bodies_are_compared_without_what_is_each_calls_own():
    request = {"model": traces.MODEL, "prompt": "x", "temperature": 0}
    choice = {"index": 0, "text": "a", "logprobs": {"token_logprobs": [-1.0]}}
    old = {"id": "1", "created": 1, "model": "m", "choices": [choice], "usage": {"total_tokens": 3}}
    new = copy.deepcopy(old) | {"id": "2", "created": 9, "model": "/elsewhere"}
    new["choices"][0]["logprobs"]["token_logprobs"][0] += 5e-6
    ours = [traces.openai("completion", request, old)]
    assert both(ours, [traces.openai("completion", request, new)])["outputs.bodies"].status == Parity.PARITY
    new["usage"]["total_tokens"] = 4
    new["choices"][0]["logprobs"]["token_logprobs"][0] += 5e-4
    found = both(ours, [traces.openai("completion", request, new)])["outputs.bodies"]
    assert found.status == Parity.OPEN
    assert found.reason == (
        "outputs.bodies differ in completion choices[].logprobs.token_logprobs[], completion usage.total_tokens"
    )


@pytest.mark.parametrize(("apart", "status"), [(0.9, Parity.PARITY), (1.1, Parity.OPEN)])
def test_without_a_twin_bodies_may_differ_by_what_rounding_moves(apart, status):
    def asked(target: str, logprob: float) -> Judged:
        choice = {"index": 0, "text": "a", "logprobs": {"token_logprobs": [logprob]}}
        call = traces.openai(
            "completion", {"model": traces.MODEL, "prompt": "x", "temperature": 0}, {"choices": [choice]}
        )
        return side(traces.trace(call, target=target))

    sides = (asked("stack:old", -1.0), asked("stack:new", -1.0 - apart * traces.NOISE.near))
    found = {v.check: v for v in compare(SCENARIO, *sides, None, [])}["outputs.bodies"]
    assert found.status is status
    assert found.causes == ({} if status is Parity.PARITY else {"unexplained": 1})


def test_one_model_at_two_places_is_one_request():
    def ask(model: str) -> list[Call]:
        return [traces.openai("completion", {"model": model, "prompt": "x", "temperature": 0}, {"choices": []})]

    left = side(traces.trace(*ask("/a/tiny"), target="o", model={"name": "tiny", "sha256": "0", "dtype": "float32"}))
    right = side(traces.trace(*ask("/b/tiny"), target="n", model={"name": "tiny", "sha256": "0", "dtype": "float32"}))
    assert "calls.paired" not in {v.check for v in compare(SCENARIO, left, right, None, NOISE)}


def test_routing_is_compared_as_a_partition_not_by_the_servers_names():
    def routed(places: list[str]) -> Judged:
        prompts = [[n, n] for n in range(len(places))]
        names = [f"s{n}" for n in range(len(places))]
        started = traces.tick()
        seen = [o for p, at in zip(prompts, places, strict=True) for o in traces.executed(p, [9], server=at)]
        call = traces.generate(prompts, [[9]] * len(places), session_ids=names, params=GREEDY, started_ns=started)
        return side(traces.trace(call, observations=seen, target=f"stack:{places[0]}"))

    def status(old: list[str], new: list[str]) -> str:
        return {v.check: v.status for v in compare(SCENARIO, routed(old), routed(new), None, [])}["routing.partition"]

    assert status(["a", "b", "a"], ["y", "x", "y"]) == Parity.PARITY
    assert status(["a", "b", "a"], ["y", "x", "x"]) == Parity.OPEN
    assert status(["a", "b", "a"], ["y", "y", "y"]) == Parity.OPEN


def test_sessions_that_one_side_alone_was_asked_for_are_no_difference_of_routing():
    def asked(sessions: dict[str, str]) -> Judged:
        prompts = {name: [n, n] for n, name in enumerate("abc")}
        started = traces.tick()
        seen = [o for name, at in sessions.items() for o in traces.executed(prompts[name], [9], server=at)]
        calls = [
            traces.generate([prompts[name]], [[9]], session_ids=[name], params=GREEDY, started_ns=started)
            for name in sessions
        ]
        return side(traces.trace(*calls, observations=seen, target=f"stack:{len(sessions)}"))

    def status(old: dict[str, str], new: dict[str, str]) -> str:
        return {v.check: v.status for v in compare(SCENARIO, asked(old), asked(new), None, [])}["routing.partition"]

    whole = {"a": "one", "b": "one", "c": "one"}
    assert status(whole, {"b": "x", "c": "x"}) == status({"b": "x", "c": "x"}, whole) == Parity.PARITY
    assert status(whole, {"b": "x", "c": "y"}) == Parity.OPEN


def test_sessions_of_a_call_that_one_side_refuses_are_no_difference_of_routing():
    def asked(**about: Any) -> list[Call | Observation]:
        started = traces.tick()
        seen = [] if "error" in about else traces.executed([1, 1], [9], server="a")
        answers = None if "error" in about else [[9]]
        return [
            *seen,
            traces.generate([[1, 1]], answers, session_ids=["s"], params=GREEDY, started_ns=started, **about),
        ]

    def one(target: str, parts: list[Call | Observation]) -> Judged:
        calls = [part for part in parts if isinstance(part, Call)]
        seen = [part for part in parts if isinstance(part, Observation)]
        return side(traces.trace(*calls, observations=seen, target=target))

    def facets(old: list[Call | Observation], new: list[Call | Observation]) -> set[str]:
        return {v.check for v in compare(SCENARIO, one("o", old), one("n", new), None, [])}

    assert "routing.partition" not in facets(asked(error=traces.error()), asked())
    assert "routing.partition" in facets(asked(), asked())


def test_digests_are_compared_by_what_servers_hold_not_by_their_names():
    def digests(**servers: str) -> list[Call]:
        return [traces.call("digests", {}, {"servers": {name: [{"w": value}] for name, value in servers.items()}})]

    assert both(digests(a="1", b="2"), digests(x="2", y="1"))["weights.digests"].status == Parity.PARITY
    assert both(digests(a="1", b="2"), digests(x="1", y="1"))["weights.digests"].status == Parity.OPEN


def test_true_is_not_one():
    old, new = (traces.call("world_size", {}, {"world_size": value}) for value in (1, True))
    assert both([old], [new])["outputs.state"].status == Parity.OPEN


# --- errors ---------------------------------------------------------------------------------------------------------


def failing(kind: str = "ValueError", status: int | None = None) -> list[Call]:
    return [traces.generate([[1]], error=traces.error(kind, status=status), params=GREEDY, label="bad")]


def test_equal_errors_earn_parity_only_where_a_check_judged_their_cause():
    alike = both(failing(), failing())["outputs.errors"]
    assert (alike.status, alike.red) == (Parity.BOTH_WRONG, True)
    assert both(failing(), failing(), scenario=WITH_ERRORS)["outputs.errors"].status == Parity.PARITY


def test_an_error_of_another_call_than_the_one_that_was_to_fail_earns_nothing():
    other = [*failing(), traces.generate([[2]], error=traces.error(), params=GREEDY, label="good")]
    assert both(other, other, scenario=WITH_ERRORS)["outputs.errors"].status == Parity.BOTH_WRONG


def test_where_a_server_dies_every_error_is_judged():
    dying = recordings.declared(checks=(msgspec.structs.replace(EVERY_CALL_ENDS, judge=lambda e: passed(1)),))
    assert both(failing("EngineDeadError"), failing(), scenario=dying)["outputs.errors"].status == Parity.OPEN


def test_a_call_that_the_scenario_gave_up_is_no_error_of_either_stack():
    given_up = [traces.generate([[1]], error=CallError(kind="Cancelled", message="", blame="harness"), params=GREEDY)]
    assert "outputs.errors" not in both(given_up, given_up)
    assert both(given_up, [traces.generate([[1]], [[2]], params=GREEDY)])["outputs.errors"].red


def test_errors_that_differ_are_open_where_judged_and_red_where_not():
    body = {"error": {"type": "BadRequestError", "code": 400}}
    returned = [traces.openai("completion", {"prompt": 1}, body, label="bad")]
    raised = [
        traces.openai(
            "completion", {"prompt": 1}, None, error=traces.error(body["error"]["type"], status=400), label="bad"
        )
    ]
    found = both(returned, raised, scenario=WITH_ERRORS)["outputs.errors"]
    assert found.status == Parity.OPEN
    assert found.reason == (
        "errors differ (baseline / candidate): returned BadRequestError 400 / raised BadRequestError 400"
    )
    blaming = {"error": {**body["error"], "param": "max_tokens"}}
    by_name = [traces.openai("completion", {"prompt": 1}, blaming, label="bad")]
    assert both(returned, by_name, scenario=WITH_ERRORS)["outputs.errors"].reason.endswith(
        "BadRequestError 400 of max_tokens"
    )
    assert both(returned, raised)["outputs.errors"].status == Parity.BOTH_WRONG
    fine = [traces.generate([[1]], [[2]], params=GREEDY, label="bad")]
    assert both(fine, failing())["outputs.errors"].red
    one_sided = both(fine, failing(), scenario=WITH_ERRORS)["outputs.errors"]
    assert (one_sided.status, one_sided.causes) == (Parity.OPEN, {"request-refused-by-one": 1})


# --- log-probabilities ----------------------------------------------------------------------------------------------


def shifted(by: float) -> Call:
    return answer(logprobs=[-1.0 - token / 7 + by for token in (11, 12, 13)])


@pytest.mark.parametrize(("by", "expected"), [(0.0, Parity.PARITY), (5e-6, Parity.PARITY), (2e-5, Parity.OPEN)])
def test_log_probabilities_are_judged_by_the_runs_bound_with_both_margins_shown(by, expected):
    found = both([answer()], [shifted(by)])["outputs.logprobs"]
    assert (found.status, found.facts) == (expected, 3)
    assert (found.numbers["noise_floor"], found.numbers["bound"], found.numbers["weakest_fault"]) == (1e-6, 1e-5, 1e-3)
    assert found.numbers["max_abs_difference"] == pytest.approx(by, abs=1e-12)


def test_without_a_useful_bound_only_equality_is_parity():
    useless = [msgspec.structs.replace(NOISE[0], bound=2e-3)]
    for noise in ([], useless):
        assert both([answer()], [shifted(0.0)], noise=noise)["outputs.logprobs"].status == Parity.PARITY
        found = both([answer()], [shifted(1e-7)], noise=noise)["outputs.logprobs"]
        assert (found.status, found.blame, found.red) == (Parity.UNTESTABLE, Blame.HARNESS, True)


def test_log_probabilities_that_are_not_there_are_never_skipped():
    assert both([answer()], [answer(logprobs=[-2.0])])["outputs.logprobs"].status != Parity.PARITY
    assert both([answer()], [answer([63], logprobs=[-1.0])])["outputs.logprobs"].status == Parity.UNTESTABLE
    none = traces.generate([[5, 6, 7]], [[11, 12, 13]], params=GREEDY)
    assert both([answer()], [none])["outputs.logprobs"].status == Parity.OPEN
    partly = both([answer([11, 12, 13])], [answer([11, 12, 63])])
    assert (partly["outputs.logprobs"].status, partly["outputs.logprobs"].facts) == (Parity.PARITY, 2)
    assert partly["outputs.tokens"].status == Parity.OPEN


def test_the_bound_comes_from_the_baseline_and_its_twin():
    [found] = noise_floors([(traces.trace(answer()), traces.trace(shifted(3e-6), take=2))])
    assert found.floor == pytest.approx(3e-6)
    assert found.bound == pytest.approx(3e-5)
    assert found.weakest_fault == min(found.faults.values()) == 1e-3
    assert set(found.faults) == {
        "each off by 1e-3",
        "temperature 1.01, not renormalized",
        "shifted by one position",
        "kept in bfloat16",
    }
    [quiet] = noise_floors([(traces.trace(answer()), traces.trace(answer(), take=2))])
    assert quiet.floor == 0
    assert quiet.bound == 64 * 2.0**-23 * (1 + 13 / 7), "64 roundings at the scale of the largest log-probability"
    assert noise_floors([]) == []


@pytest.mark.parametrize(("by", "expected"), [(0.0, Parity.PARITY), (0.05, Parity.OPEN)])
def test_quantized_engines_are_compared_and_left_open_where_they_differ(by, expected):
    about = {"topology": Topology(quantization="int8")}
    old, new = (
        traces.trace(answer(), target="stack:old", **about),
        traces.trace(shifted(by), target="stack:new", **about),
    )
    found = {v.check: v for v in compare(SCENARIO, side(old), side(new), None, [])}["outputs.logprobs"]
    assert (found.status, found.red) == (expected, False)


def test_the_noise_of_quantized_engines_hides_nothing_of_others():
    about = {"topology": Topology(quantization="fp8")}
    parted = (traces.trace(answer(), **about), traces.trace(shifted(0.05), take=2, **about))
    [found] = noise_floors([parted, (traces.trace(answer()), traces.trace(answer(), take=2))])
    assert found.floor == 0
    assert noise_floors([parted]) == []


# --- properties -----------------------------------------------------------------------------------------------------

tokens_of = st.lists(st.integers(3, 60), min_size=1, max_size=6)


@st.composite
def greedy_calls(draw: st.DrawFn) -> list[Call]:
    """Calls of distinct prompts, greedy or seeded, with text, log-probabilities and stop reasons."""
    calls = []
    for number in range(draw(st.integers(1, 3))):
        rows = draw(st.lists(tokens_of, min_size=1, max_size=3))
        params = draw(st.sampled_from([GREEDY, {"temperature": 0.7, "seed": 4, "logprobs": 1}]))
        calls.append(
            traces.generate(
                [[number, row, 9] for row in range(len(rows))],
                rows,
                logprobs=[[-draw(st.floats(0.01, 8.0)) for _ in row] for row in rows],
                stop_reasons=[draw(st.sampled_from(["stop", "length"])) for _ in rows],
                params=params,
            )
        )
    return calls


@given(greedy_calls())
@settings(max_examples=60)
def test_a_trace_beside_itself_is_parity(calls):
    found = both(calls, calls, twin=calls)
    assert {v.status for v in found.values()} == {Parity.PARITY}
    assert {"outputs.tokens", "outputs.text", "outputs.stop_reasons", "outputs.logprobs"} <= set(found)


MUTATIONS = {
    "token": "outputs.tokens",
    "shorter": "outputs.tokens",
    "text": "outputs.text",
    "stop": "outputs.stop_reasons",
    "logprob": "outputs.logprobs",
    "no logprob": "outputs.logprobs",
    "row": "outputs.tokens",
    "error": "outputs.errors",
}


@given(greedy_calls(), st.data(), st.sampled_from(sorted(MUTATIONS)))
@settings(max_examples=150)
def test_no_single_mutation_of_a_deterministic_call_is_parity(calls, data, mutation):
    at = data.draw(st.integers(0, len(calls) - 1))
    result = copy.deepcopy(calls[at].result)
    row = data.draw(st.integers(0, len(result["response_ids"]) - 1))
    place = data.draw(st.integers(0, len(result["response_ids"][row]) - 1))
    changes: dict[str, Any] = {"result": result}
    match mutation:
        case "token":
            result["response_ids"][row][place] += 1
        case "shorter":
            result["response_ids"][row].pop()
            result["response_logprobs"][row].pop()
        case "text":
            result["responses"][row] += "!"
        case "stop":
            result["stop_reasons"][row] = "abort"
        case "logprob":
            result["response_logprobs"][row][place] += data.draw(st.sampled_from([-1, 1])) * 1.2e-5
        case "no logprob":
            result["response_logprobs"][row][place] = None
        case "row":
            for values in filter(None, result.values()):
                values.pop(row)
        case "error":
            changes = {"result": None, "error": traces.error()}
    mutated = [*calls[:at], msgspec.structs.replace(calls[at], **changes), *calls[at + 1 :]]
    found = both(calls, mutated, twin=calls)
    assert found[MUTATIONS[mutation]].status != Parity.PARITY
    assert found["order"].status == Parity.PARITY
    assert Conformance.PASS not in {v.status for v in found.values()}


# --- training runs --------------------------------------------------------------------------------------------------


def of_curve(*rewards: float, **about: Any) -> ScenarioTrace:
    marks = [
        Mark(name="evaluation", step=step, at_ns=traces.tick(), numbers={"reward": reward})
        for step, reward in enumerate(rewards)
    ]
    return traces.trace(answer(), marks=marks, **about)


@pytest.mark.parametrize(
    ("rewards", "status"), [((0.2, 0.6, 0.9), Parity.PARITY), ((0.2, 0.3, 0.4), Parity.REGRESSION)]
)
def test_training_runs_are_compared_by_their_evaluation(rewards, status):
    baseline, candidate = of_curve(0.2, 0.6, 0.9, target="stack:old"), of_curve(*rewards, target="stack:new")
    found = {v.check: v for v in compare(SCENARIO, side(baseline), side(candidate), None, NOISE)}
    assert found["outputs.evaluation"].status == status
    assert found["outputs.evaluation"].red == (status == Parity.REGRESSION)
