"""Fields of requests: what took effect, was refused by name, was dropped, changed, or broke the stack."""

from __future__ import annotations

import pytest

from harness.checks.request_fields import AS_IT_IS, FIELD_PAIRS, REQUEST_FIELDS
from harness.records.verdict import Effect
from tests.checks.scene import Scene
from tests.traces import error

PLAIN = {"max_tokens": 4, "temperature": 1.0}


def asked(*cases) -> Scene:
    """A plain request, and each case: (label, given, at the engine or an error)."""
    scene = Scene()
    for label, given, became in ((AS_IT_IS, {}, {}), *cases):
        scene.case(label, PLAIN | given, PLAIN | became if isinstance(became, dict) else became)
    return scene


@pytest.mark.parametrize(
    ("given", "became", "effect"),
    [
        ({"top_k": 5}, {"top_k": 5}, Effect.TOOK_EFFECT),
        ({"top_k": 0}, {}, Effect.AS_USUAL),
        ({"top_k": None}, {}, Effect.AS_USUAL),
        ({"top_k": 5}, {}, Effect.DROPPED),
        ({"top_k": 5}, {"top_k": 7}, Effect.CHANGED),
        ({"top_k": 5}, {"top_k": 5, "min_p": 0.5}, Effect.TOOK_EFFECT),
        ({"top_k": -7}, error("ValueError", "top_k must be at least -1"), Effect.REFUSED),
        ({"top_k": -7}, error("ValueError", "bad value"), Effect.REFUSED_NAMELESS),
        ({"top_k": -7}, error("ServerError", "top_k", status=500), Effect.BROKE),
        ({"top_k": -7}, error("Exception", "top_k"), Effect.BROKE),
        ({"top_k": -7}, error("ValueError", ""), Effect.BROKE),
        ({"top_k": -7}, error("CallTimedOut", "top_k"), Effect.BROKE),
    ],
)
def test_what_became_of_a_field(given, became, effect):
    scene = asked(("top_k: some value", given, became))
    found = scene.judge(REQUEST_FIELDS)
    assert [one.effect for one in found.effects] == [effect]
    assert (found.status == "fail") == (effect in (Effect.REFUSED_NAMELESS, Effect.BROKE))


def test_after_a_request_without_an_answer_nothing_is_told_of_others():
    gave_up = error("Cancelled", "the scenario gave up waiting")
    found = asked(("seed: one", {"seed": 1}, gave_up), ("top_k: one", {"top_k": 1}, gave_up)).judge(REQUEST_FIELDS)
    assert [one.effect for one in found.effects] == [Effect.BROKE, Effect.UNTOLD]
    assert found.reason == "generate() answers no more after a value that its engine does not bear"


def test_nothing_is_told_if_the_plain_request_failed():
    scene = asked(("seed: one", {"seed": 1}, {"seed": 1}))
    scene.change(scene.calls[-2], result=None, error=error())
    assert scene.judge(REQUEST_FIELDS).status == "untestable"


def test_nothing_is_told_if_no_engine_was_seen_to_run_the_plain_request():
    assert asked(("seed: one", {"seed": 1}, {"seed": 1})).judge(REQUEST_FIELDS).status == "pass"
    blind = asked()
    blind.seen = [seen for seen in blind.seen if seen.data.get("prompt_token_ids") != [10, 11, 12]]
    assert blind.judge(REQUEST_FIELDS).status == "untestable"


ALONE = (("top_k: five", {"top_k": 5}, {"top_k": 5}), ("min_p: a half", {"min_p": 0.5}, {"min_p": 0.5}))
TOGETHER = {"top_k": 5, "min_p": 0.5}


@pytest.mark.parametrize(
    ("became", "effect", "reason"),
    [
        (TOGETHER, Effect.TOOK_EFFECT, ""),
        (error("ValueError", "min_p needs another top_k"), Effect.REFUSED, ""),
        (
            error("ValueError", "bad"),
            Effect.REFUSED_NAMELESS,
            "generate() refuses top_k and min_p without naming either, though it takes each alone: ValueError: bad",
        ),
        (
            error("ServerError", "min_p", status=500),
            Effect.BROKE,
            "generate() breaks at top_k and min_p, though it takes each alone: ServerError 500: min_p",
        ),
        ({"top_k": 5}, Effect.DROPPED, "generate() drops one of top_k and min_p"),
        ({"top_k": 5, "min_p": 0.25}, Effect.CHANGED, "generate() changes one of top_k and min_p"),
    ],
)
def test_two_fields_that_work_alone_work_together(became, effect, reason):
    found = asked(*ALONE, ("top_k + min_p: five + a half", TOGETHER, became)).judge(FIELD_PAIRS)
    assert found.effects[-1].effect == effect
    assert found.reason.startswith(reason)
    assert (found.status == "fail") == bool(reason)


@pytest.mark.parametrize("alone", [error("ServerError", "min_p", status=500), {}])
def test_what_is_wrong_with_a_field_alone_is_not_the_pairs(alone):
    cases = (ALONE[0], ("min_p: a half", {"min_p": 0.5}, alone), ("top_k + min_p: five + a half", TOGETHER, alone))
    assert asked(*cases).judge(FIELD_PAIRS).status == "pass"


def test_a_pair_without_its_fields_alone_is_not_blamed():
    lone = asked(("top_k + min_p: five + a half", TOGETHER, error("ValueError", "bad")))
    assert lone.judge(FIELD_PAIRS).status == "pass"
    assert asked(*ALONE).judge(FIELD_PAIRS).status == "untestable"
