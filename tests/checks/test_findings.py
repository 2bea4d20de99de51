"""Several things that are wrong become one finding that tells each of them."""

from __future__ import annotations

from harness.checks.base import concluded, failed, passed, together, untestable
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.tokens import greedy
from harness.contract.errors import Blame
from harness.records.recording import CallError
from tests.checks.scene import Scene


def test_every_reason_is_told_alone_and_has_its_evidence():
    wrong = [("b", {"call": 1, "row": 0}), ("a", {"call": 2}), ("b", {"call": 3}), ("c", {}), ("d", {})]
    found = concluded(9, wrong)
    assert (found.status, found.facts, found.reason, found.reasons) == ("fail", 9, "a; b; c; d", ["a", "b", "c", "d"])
    assert {item["why"] for item in found.evidence} == {"a", "b", "c", "d"}
    assert set(found.concerns) == {(1, 0), (2, None), (3, None)}


def test_one_reason_is_the_whole_finding():
    found = concluded(2, [("a", {"call": 1}), ("a", {"call": 2})])
    assert (found.reason, found.reasons, len(found.evidence)) == ("a", [], 2)
    assert concluded(2, []) == passed(2)


def test_what_fails_outweighs_what_is_untestable_and_that_what_passed():
    fails, untold, good = failed(1, "a", [{}]), untestable("u"), passed(3)
    assert together([good, untold, fails]).reason == "a"
    assert together([good, untold]).reason == "u"
    assert together([good]).status == "pass"


def test_a_failed_call_does_not_hide_a_wrong_row_of_another_call():
    scene = Scene()
    first, second = scene.generate([[1, 2, 3]], label="a"), scene.generate([[4, 5, 6], [7, 8, 9]], label="b")
    scene.change(first, result=None, error=CallError(kind="Broken", message="m", blame=Blame.STACK))
    alone = scene.judge(greedy("a", "b"))
    assert (alone.reason, alone.reasons) == ("generate() failed with Broken: m", [])
    assert second.result is not None
    good = second.result["response_ids"]
    scene.change(second, result={**second.result, "response_ids": [good[1], good[0]]})
    both = scene.judge(greedy("a", "b"))
    assert both.reasons == [
        "generate() failed with Broken: m",
        "greedy output parts from the reference's at its first token",
    ]
    assert both.concerns == [(first.id, None), (second.id, 0), (second.id, 1)]


def test_an_empty_row_does_not_hide_its_neighbours():
    scene = Scene()
    call = scene.generate([[1, 2, 3], [4, 5, 6]])
    assert call.result is not None
    answers = call.result["response_ids"]
    scene.change(call, result={**call.result, "response_ids": [[], answers[0]]})
    assert scene.judge(greedy()).reasons == [
        "generate() returned a result without tokens",
        "greedy output parts from the reference's at its first token",
    ]


def test_a_refused_call_does_not_hide_a_row_that_was_cut_short():
    scene = Scene()
    first, second = scene.generate([[1, 2, 3]]), scene.generate([[4, 5, 6]])
    assert second.result is not None
    scene.change(first, result=None, error=CallError(kind="Broken", message="m", blame=Blame.STACK))
    scene.change(second, result={**second.result, "stop_reasons": ["abort"]})
    assert scene.judge(ALL_COMPLETE).reasons == [
        "a request did not come to its end",
        "generate() failed with Broken: m",
    ]
