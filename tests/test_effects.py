"""What became of fields on two stacks: only what is right on both is compared, and what differs is set aside elsewhere."""

from __future__ import annotations

from harness.checks.base import Evidence
from harness.judging import effects
from harness.judging.causes import Why
from tests import traces
from tests.checks import test_call_forms as forms
from tests.checks.test_request_fields import asked
from tests.traces import error

REFUSED = error("ValueError", "top_k must be at least -1")


def evidence(became) -> Evidence:
    scene = asked(("top_k: five", {"top_k": 5}, became), ("min_p: a half", {"min_p": 0.5}, {"min_p": 0.5}))
    return Evidence(traces.trace(*scene.calls, observations=scene.seen), scene.reference)


def test_a_value_that_one_stack_refuses_is_one_difference_and_set_aside():
    left, right = evidence({"top_k": 5}), evidence(REFUSED)
    facet = effects.compare(left, right)[effects.EFFECTS]
    assert (facet.facts, [(d.place, d.why) for d in facet.differences]) == (2, [("top_k: five", (Why.VALUE_REFUSED,))])
    assert [len(side) for side in effects.apart(left, right)] == [1, 1]


def test_what_is_wrong_on_one_stack_is_set_aside_and_not_compared():
    left, right = evidence({"top_k": 5}), evidence({})
    assert effects.compare(left, right)[effects.EFFECTS].facts == 1
    assert [len(side) for side in effects.apart(left, right)] == [1, 1]


def test_equal_stacks_have_nothing_apart():
    assert effects.apart(evidence(REFUSED), evidence(REFUSED)) == (set(), set())


def test_two_values_of_one_name_are_not_the_same_case():
    """They were drawn from schemas that differ."""

    def drawn(value: int, became) -> Evidence:
        scene = asked(("top_k: drawn 1", {"top_k": value}, became))
        return Evidence(traces.trace(*scene.calls, observations=scene.seen), scene.reference)

    assert effects.compare(drawn(5, {"top_k": 5}), drawn(-7, REFUSED)) == {}
    assert effects.apart(drawn(5, {"top_k": 5}), drawn(-7, REFUSED)) == (set(), set())
    assert effects.compare(drawn(-7, {"top_k": -7}), drawn(-7, REFUSED))[effects.EFFECTS].differences


def test_two_fields_are_set_aside_with_the_one_that_differs_alone():
    """Both stacks take the pair; what follows from it differs as its field does."""

    def pair_of(became) -> Evidence:
        both = {"top_k": 5, "min_p": 0.5}
        scene = asked(
            ("top_k: five", {"top_k": 5}, became),
            ("min_p: a half", {"min_p": 0.5}, {"min_p": 0.5}),
            ("top_k + min_p: five + a half", both, both),
        )
        return Evidence(traces.trace(*scene.calls, observations=scene.seen), scene.reference)

    left, right = pair_of({"top_k": 5}), pair_of(REFUSED)
    assert [len(side) for side in effects.apart(left, right)] == [2, 2]
    assert effects.apart(left, left) == (set(), set())


def test_a_form_that_one_stack_refuses_is_a_difference():
    def of_form(became) -> Evidence:
        scene = forms.asked((forms.TUPLE, became, "server-0"))
        told = traces.call("form", {"form": forms.TUPLE}, {"forms": []}, started_ns=scene.now, ended_ns=scene.now + 1)
        return Evidence(traces.trace(*scene.calls, told, observations=scene.seen), scene.reference)

    left, right = of_form({}), of_form(error("TypeError", "a list is needed"))
    facet = effects.compare(left, right)[effects.EFFECTS]
    assert [(d.place, d.why) for d in facet.differences] == [(forms.TUPLE, (Why.FORM_REFUSED,))]
    assert [len(side) for side in effects.apart(left, right)] == [1, 1]
    assert effects.compare(left, left)[effects.EFFECTS].differences == []
