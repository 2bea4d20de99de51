"""Arguments in other forms: as usual, refused by name, or something else; and the caller's own objects."""

from __future__ import annotations

import pytest

from harness.checks.call_forms import CALL_FORMS, KEPT_ARGUMENTS
from harness.records.argument_forms import AS_IT_IS
from harness.records.recording import Call, Raw
from harness.records.verdict import Effect
from tests.checks.scene import Scene
from tests.traces import error

PLAIN = {"max_tokens": 4, "temperature": 0.0}
TUPLE = "input_batch.prompt_token_ids: tuple"
SUBCLASS = "input_batch: of a subclass"
POSITION = "all arguments: by position"


def noted(formed=None, changed=()) -> list[Raw]:
    return [Raw(method="generate", arguments=["input_batch"], forms={"": "dict"}, formed=formed, changed=list(changed))]


def asked(*cases, changed=()) -> Scene:
    """The usual call, and each case: (label, at the engine or an error, server)."""
    scene = Scene()
    for label, became, server in ((AS_IT_IS, {}, "server-0"), *cases):
        call = scene.case(label, PLAIN, PLAIN | became if isinstance(became, dict) else became, server)
        scene.change(call, raw=noted(changed=changed) if label == AS_IT_IS else noted(formed=label))
    return scene


def usual(scene: Scene) -> Call:
    return next(call for call in scene.calls if call.label == AS_IT_IS)


@pytest.mark.parametrize(
    ("label", "became", "server", "effect"),
    [
        (TUPLE, {}, "server-0", Effect.AS_USUAL),
        (TUPLE, {}, "server-1", Effect.CHANGED),
        (TUPLE, {"top_k": 7}, "server-0", Effect.CHANGED),
        (TUPLE, error("TypeError", "a list is needed"), "", Effect.REFUSED),
        (SUBCLASS, error("TypeError", "a dict is needed"), "", Effect.REFUSED_NAMELESS),
        (TUPLE, error("TypeError", ""), "", Effect.BROKE),
        (TUPLE, error("ServerError", "no", status=500), "", Effect.BROKE),
        (TUPLE, error("CallTimedOut", "late"), "", Effect.BROKE),
    ],
)
def test_what_became_of_a_form(label, became, server, effect):
    found = asked((label, became, server)).judge(CALL_FORMS)
    assert [one.effect for one in found.effects] == [effect]
    assert (found.status == "pass") == (effect in (Effect.AS_USUAL, Effect.REFUSED))


def test_of_forms_that_were_never_answered_the_first_is_named():
    gave_up = error("Cancelled", "the scenario gave up waiting")
    labels = ("input_batch.prompt_token_ids[]: tuple", TUPLE, SUBCLASS)
    scene = asked(*((label, gave_up, "") for label in labels))
    for call in scene.calls[1:]:
        scene.change(call, raw=[])
    found = scene.judge(CALL_FORMS)
    assert [one.effect for one in found.effects] == [Effect.BROKE, Effect.UNTOLD, Effect.UNTOLD]
    assert found.reason == "generate() answers no more after input_batch.prompt_token_ids[] given tuple"


def test_a_form_that_no_argument_got_is_not_judged():
    scene = asked((TUPLE, {}, "server-0"))
    scene.change(scene.calls[-1], raw=noted())
    assert scene.judge(CALL_FORMS).status == "untestable"


def test_nothing_is_told_if_the_usual_call_failed():
    scene = asked((TUPLE, {}, "server-0"))
    scene.change(usual(scene), result=None, error=error())
    assert scene.judge(CALL_FORMS).status == "untestable"


def test_a_caller_finds_its_objects_as_they_were():
    assert asked().judge(KEPT_ARGUMENTS).status == "pass"
    found = asked(changed=["input_batch"]).judge(KEPT_ARGUMENTS)
    assert (found.status, found.reason) == ("fail", "generate() changes its caller's input_batch")
    blind = asked()
    blind.change(usual(blind), raw=None)
    assert blind.judge(KEPT_ARGUMENTS).status == "untestable"


@pytest.mark.parametrize(("tags", "effect"), [(["weights"], Effect.AS_USUAL), (None, Effect.CHANGED)])
def test_a_control_call_is_judged_by_its_arguments_at_the_engines(tags, effect):
    scene = Scene()
    for label, seen in ((AS_IT_IS, ["weights"]), (POSITION, tags)):
        call = scene.control("wake_up", tags=["weights"], arguments={"tags": seen})
        scene.change(call, label=label, raw=noted(formed=None if label == AS_IT_IS else label))
    assert [one.effect for one in scene.judge(CALL_FORMS).effects] == [effect]
