"""Answers under adapters and without: each made by what it asked for."""

from __future__ import annotations

import pytest

from harness.checks.adapters import ADAPTER_EFFECT, ADAPTER_ISOLATED, FRESH_ADAPTER_CACHE
from harness.checks.staleness import (
    CURRENT_POLICY,
    FORCED_EFFECT,
    FRESH_CACHE,
    NO_GREEDY,
    SAME_VERSION_SAME_OUTPUT,
)
from tests.checks.scene import Scene

SHORT = [[10, 11], [20, 21]]
FOUR = [*SHORT, [30, 31], [40, 41]]
LONG = [[3 + n % 50 for n in range(130)]]


def served(prompts=SHORT) -> Scene:
    """The base model, version 1 under a name, then version 2 under the same: what comes then is left to the test."""
    scene = Scene()
    scene.generate(prompts)
    scene.load("policy", 1)
    scene.generate(prompts, adapter="policy")
    scene.load("policy", 2)
    return scene


def under(scene: Scene, adapter: int | None, prompts=SHORT) -> list[list[int]]:
    """What the model answers under a version of the adapter."""
    return [scene.reference.greedy(p, 6, adapter=adapter) for p in prompts]


def test_right_answers_pass():
    scene = served(LONG)
    scene.generate(LONG, adapter="policy")
    scene.generate(LONG)
    for check in (ADAPTER_EFFECT, ADAPTER_ISOLATED, FRESH_ADAPTER_CACHE):
        assert scene.judge(check).status == "pass"


def test_an_adapter_that_is_ignored():
    scene = Scene()
    scene.load("policy", 1)
    scene.generate(FOUR)
    scene.generate(FOUR, adapter="policy", tokens=under(scene, None, FOUR))
    assert scene.judge(ADAPTER_EFFECT).reason == "an adapter does not change the answers"
    assert scene.judge(ADAPTER_ISOLATED).status == "pass"


def test_a_version_that_was_not_loaded():
    scene = served(FOUR)
    scene.generate(FOUR, adapter="policy", tokens=under(scene, 1, FOUR))
    assert scene.judge(ADAPTER_EFFECT).reason == "another version does not change the answers"


def test_a_few_prompts_may_be_answered_alike():
    scene = Scene()
    scene.load("policy", 1)
    scene.generate(FOUR[:3])
    scene.generate(FOUR[:3], adapter="policy", tokens=under(scene, None, FOUR[:3]))
    assert scene.judge(ADAPTER_EFFECT).status == "untestable"
    scene = served()
    scene.generate(SHORT, adapter="policy", tokens=under(scene, 1))
    assert scene.judge(ADAPTER_EFFECT).status == "pass", (
        "the first version moved them; of the second too few say anything"
    )


def test_one_prompt_that_moves_shows_the_effect():
    scene = served()
    scene.generate(SHORT, adapter="policy", tokens=[under(scene, 1)[0], under(scene, 2)[1]])
    assert scene.judge(ADAPTER_EFFECT).status == "pass"


def test_an_adapter_that_leaks_into_the_base():
    scene = served()
    scene.generate(SHORT, tokens=[under(scene, None)[0], under(scene, 2)[1]])
    found = scene.judge(ADAPTER_ISOLATED)
    assert found.reason == "an answer without an adapter was made under one"
    assert (found.evidence[0]["row"], found.evidence[0]["follows"]) == (1, [{"version": 0, "adapter": 2}])
    scene = served()
    scene.generate(SHORT, tokens=[[1, 2, 3, 4, 5, 6]] * 2)
    assert scene.judge(ADAPTER_ISOLATED).reason == "an answer without an adapter is not the base model's"


def test_answers_beside_an_adapter_are_counted():
    scene = served()
    base = scene.generate(SHORT)
    beside = scene.generate(SHORT, adapter="policy")
    scene.change(beside, started_ns=base.started_ns + 1)
    assert scene.judge(ADAPTER_ISOLATED).numbers["beside an adapter"] == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda scene: under(scene, 1, LONG), "an answer was made under another adapter than it asked for"),
        (lambda scene: under(scene, None, LONG), "an answer was made under another adapter than it asked for"),
        (
            lambda scene: [[*under(scene, 2, LONG)[0][:3], 1, 2, 3]],
            "an answer mixes adapters: its prefix cache is another one's",
        ),
    ],
    ids=["replaced", "base", "mixed"],
)
def test_a_cache_of_another_adapter(answer, reason):
    scene = served(LONG)
    scene.generate(LONG, adapter="policy", tokens=answer(scene))
    assert scene.judge(FRESH_ADAPTER_CACHE).reason == reason


def test_nothing_to_judge_is_untestable():
    scene = Scene()
    assert scene.judge(ADAPTER_EFFECT).status == "untestable"
    scene.generate(SHORT)
    for check in (ADAPTER_EFFECT, ADAPTER_ISOLATED, FRESH_ADAPTER_CACHE):
        assert scene.judge(check).status == "untestable"
    scene = served()  # short prompts: no cache block
    scene.generate(SHORT, adapter="policy")
    assert scene.judge(FRESH_ADAPTER_CACHE).status == "untestable"
    assert scene.judge(ADAPTER_ISOLATED).status == "untestable", "no base answer since the adapter came"


def test_an_answer_while_its_adapter_is_replaced_is_not_judged():
    scene = Scene()
    scene.load("policy", 1)
    scene.generate(SHORT)
    answer = scene.generate(SHORT, adapter="policy", tokens=[[1, 2, 3, 4, 5, 6]] * 2)
    load = scene.load("policy", 2)
    scene.change(load, started_ns=answer.started_ns + 1)
    assert scene.judge(ADAPTER_EFFECT).status == "untestable"


def test_checks_of_policy_versions_keep_adapters_apart():
    scene = served(LONG)
    scene.generate(LONG, adapter="policy")
    scene.generate(LONG)
    assert scene.judge(CURRENT_POLICY).status == "pass"
    assert scene.judge(SAME_VERSION_SAME_OUTPUT).status == "pass"
    assert scene.judge(FORCED_EFFECT).status == "untestable", "one policy version, whatever the adapter"
    assert scene.judge(FRESH_CACHE).status == "untestable"
    scene.sync(1)
    scene.generate(LONG, adapter="policy")
    scene.generate(LONG)
    for check in (CURRENT_POLICY, SAME_VERSION_SAME_OUTPUT, FORCED_EFFECT, FRESH_CACHE):
        assert scene.judge(check).status == "pass"


def test_greedy_answers_are_asked_of_the_adapter_that_was_loaded():
    scene = served()
    scene.calls = [c for c in scene.calls if c.method != "generate"]
    assert scene.judge(CURRENT_POLICY).reason == NO_GREEDY
