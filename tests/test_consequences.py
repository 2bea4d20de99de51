"""Causes before consequences: which red verdict explains which others, and how reports show it."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from harness.checks.base import Check
from harness.contract.errors import Blame
from harness.contract.faults import NOTHING, ROWS, Fact
from harness.judging.consequences import with_causes
from harness.judging.gate import decide
from harness.judging.ledger import Ledger
from harness.judging.parity import compare
from harness.records.differing import around_the_difference, names_of_sides, parting
from harness.records.verdict import Cause, Judgement
from harness.running import catalogue
from harness.suite.profiles import named
from reports.html import _sides
from reports.render import write_all
from reports.terminal import show
from reports.view import divergences
from tests import synthetic, traces
from tests.miniature import bench
from tests.synthetic import HTTP, verdict
from tests.test_parity import NEW, NOISE, OLD, SCENARIO, side

CALL = traces.generate([[1, 2], [3, 4]], [[5], [6]], label="mixed")
ORDER = {"reads": Fact.ANSWERS, "falsifies": ROWS}
TOKENS = {"reads": Fact.ANSWERS | Fact.POLICY}
WEIGHTS = {"reads": Fact.POLICY, "falsifies": Fact.POLICY | Fact.ADAPTERS}


def red(name: str, *concerns, reason: str = "", status: str = "fail", cause=None, **facts: Fact):
    check = Check(name=name, fault="f", source="s", judge=lambda _: None, **facts)
    found = verdict("ordering", "one", name, HTTP, status=status, reason=reason or name, cause=cause)
    return check, msgspec.structs.replace(found, concerns=list(concerns))


def explained(*judged) -> dict[str, str]:
    return {v.check: v.because for v in with_causes(judged, [CALL]) if v.because}


def test_a_consequence_reads_what_the_cause_falsifies_about_the_same_rows():
    order = red("order", (CALL.id, 0), (CALL.id, 1), **ORDER)
    assert explained(red("tokens", (CALL.id, 1), **TOKENS), order) == {"tokens": "order"}
    assert explained(red("tokens", ("mixed", 1), **TOKENS), order) == {"tokens": "order"}, (
        "a label stands for its calls"
    )
    assert explained(red("tokens", (CALL.id, 7), **TOKENS), order) == {}, "another row"
    assert explained(red("tokens", **TOKENS), order) == {}, "about no row that is known"
    assert explained(red("pauses", (CALL.id, 1), reads=Fact.PAUSES), order) == {}, "it reads nothing that is false"
    assert explained(red("tokens", (CALL.id, 1), status="pass", **TOKENS), order) == {}


def test_a_fact_of_the_whole_stack_needs_no_common_row():
    weights = red("weights", **WEIGHTS)
    assert explained(red("tokens", (CALL.id, 1), **TOKENS), weights) == {"tokens": "weights"}
    unjudged = red("weights", **WEIGHTS, status="untestable")
    assert explained(red("tokens", (CALL.id, 1), **TOKENS), unjudged) == {}, "what was not judged falsifies nothing"
    room = red("clean_room", reads=Fact.POLICY, falsifies=~NOTHING)
    rows = red("order", (CALL.id, 1), **ORDER)
    assert explained(rows, weights, room) == {"order": "clean_room", "weights": "clean_room"}


def test_one_reason_has_one_cause_and_an_explained_verdict_explains_nothing():
    ended = [
        red(n, reason="could not be driven", cause=Cause.NOT_DRIVEN, **f) for n, f in [("a", TOKENS), ("b", ORDER)]
    ]
    assert explained(*ended) == {"b": "a"}
    order, kept = red("order", (CALL.id, 0), **ORDER), red("kept", (CALL.id, 0), **TOKENS, falsifies=Fact.TEXT)
    text = red("text", (CALL.id, 0), reads=Fact.TEXT | Fact.POLICY | Fact.PAUSES)
    assert explained(text, kept, order) == {"kept": "order", "text": "order"}


@pytest.mark.parametrize(
    ("fault", "scenario", "cause", "consequences"),
    [
        ("results_swapped/in_a_batch", "test_results_keep_the_order_of_prompts", "ordering", {"tokens.greedy", "conservation"}),
        ("results_swapped/between_servers", "test_messages_are_rendered_by_the_models_template", "ordering",
         {"tokens.greedy", "logprobs.reference", "conservation"}),
        ("instrument_blind", "test_health_is_true", "instruments", {"conservation", "echo"}),
        ("adapter_ignored/every_server", "test_another_version_under_the_same_name", "adapter_effect",
         {"tokens.greedy", "logprobs.reference"}),
        ("error_becomes_empty/generate", "test_an_adapter_that_was_unloaded", "errors.named:unloaded", {"conservation", "refusals"}),
    ],
)  # fmt: skip
def test_a_seeded_fault_has_its_check_as_the_cause(tmp_path, fault, scenario, cause, consequences):
    [name] = [n for n in catalogue.declared() if n.endswith("." + scenario)]
    with bench(tmp_path) as bench_:
        bench_.inject(fault)
        reds = [v for v in bench_.drive(name) if v.red]
        bench_.inject(None)
        assert not any(v.because for v in bench_.drive(name))
    assert {v.check: v.because for v in reds} == {cause: None} | dict.fromkeys(consequences, cause)
    first = next(v for v in reds if v.check == cause)
    assert first.blame != Blame.STACK or first.next_step != synthetic.STEP, "the advice is about this check"


def swapped() -> Judgement:
    """One misplaced result that explains two reds, a red of its own in two places, and a consequence in one of them alone."""
    base = synthetic.judgement()
    fields = {"status": "fail", "blame": Blame.STACK, "next_step": "look"}
    verdicts = [
        verdict("ordering", "one", "tokens.greedy", HTTP, reason="other tokens", because="order", **fields),
        verdict("ordering", "one", "kept", HTTP, reason="lost", because="order", **fields),
        verdict("ordering", "one", "order", HTTP, reason="swapped", **fields),
        *(verdict("ordering", name, "echo", HTTP, reason="dropped", **fields) for name in ("two", "three")),
        verdict("ordering", "two", "tokens.greedy", HTTP, reason="other tokens", **fields),
    ]
    return msgspec.structs.replace(base, verdicts=verdicts)


def test_what_explains_others_comes_first_and_hides_nothing(tmp_path):
    judgement = swapped()
    found = divergences(judgement)
    assert [(d.check, d.below, d.explains) for d in found] == [
        ("order", False, {"tokens.greedy": 1, "kept": 1}),
        ("kept", True, {}),
        ("tokens.greedy", True, {}),
        ("echo", False, {}),
        ("tokens.greedy", False, {}),
    ]
    assert sum(len(d.verdicts) for d in found) == 6 == sum(v.red for v in judgement.verdicts)
    files = {name: path.read_text() for name, path in write_all(judgement, tmp_path).items()}
    out = io.StringIO()
    show(judgement, Console(file=out, width=100, no_color=True))
    assert "Red: 3 causes, 2 consequences" in out.getvalue()
    assert "explains 2 more: tokens.greedy, kept" in out.getvalue()
    assert "again: parity run --wave 1 -k test_one" in out.getvalue()
    assert files["report.html"].count('class="card red below"') == 2
    assert files["report.html"].count("because of <code>order</code>") == 2
    assert "- because of order: **kept** fail: lost" in files["report.md"]
    assert files["junit.xml"].count("because of: order") == 2
    assert files["junit.xml"].count("<failure") >= 6


def test_the_gate_names_consequences_last():
    reasons = decide(swapped(), synthetic.plan(), Ledger(), named("removal")).reasons
    red = [r.split(" on ")[0] for r in reasons if r.startswith("fail")]
    assert red == ["fail: echo", "fail: tokens.greedy", "fail: order", "fail: kept"], (
        "tokens.greedy also stands by itself"
    )


def test_a_comparison_takes_cause_and_advice_from_the_side_that_is_wrong():
    right = msgspec.structs.replace(
        side(NEW, "fail", reason="lost").verdicts[0], because="order", next_step="look there"
    )
    candidate = msgspec.structs.replace(side(NEW, "fail"), verdicts=[right])
    [found, *_] = compare(SCENARIO, side(OLD, "pass"), candidate, None, NOISE)
    assert (found.status, found.because, found.next_step) == ("regression", "order", "look there")
    alone = msgspec.structs.replace(right, because=None)
    baseline = msgspec.structs.replace(side(OLD, "fail"), verdicts=[alone])
    [found, *_] = compare(SCENARIO, baseline, candidate, None, NOISE)
    assert (found.status, found.because) == ("both-wrong", None), "one side stands by itself"


def test_a_consequence_whose_cause_is_known_stands_by_itself():
    judgement = swapped()
    known = [msgspec.structs.replace(v, known="entry") if v.check == "order" else v for v in judgement.verdicts]
    found = divergences(msgspec.structs.replace(judgement, verdicts=known))
    assert [(d.check, d.red, d.below) for d in found if d.check in ("order", "kept")] == [
        ("kept", True, False),
        ("order", False, False),
    ]


def test_evidence_shows_where_two_sides_part():
    left = [*range(40), 7, *range(50, 60)]
    right = [*range(40), 8, *range(50, 58)]
    cut = parting(got=left, engine=right)
    assert (cut["first difference"], cut["lengths"]) == (40, {"got": 51, "engine": 49})
    assert (cut["got"][:5], cut["engine"][:5]) == ([36, 37, 38, 39, 7], [36, 37, 38, 39, 8])
    assert names_of_sides(cut) == ("got", "engine")
    assert _sides(cut)["note"] == "first difference at element 40; lengths 51 and 49"
    whole = {"call": 1, "baseline": "a" * 500 + "b", "candidate": "a" * 500 + "c"}
    shown = around_the_difference(whole)
    assert (shown["call"], shown["baseline"], shown["candidate"]) == (1, "a" * 16 + "b", "a" * 16 + "c")
    for other in (cut, {"expected": 1, "got": 2}, {"expected": [1], "got": None}, {"call": 1}):
        assert around_the_difference(other) == other
