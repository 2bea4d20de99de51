"""Answers and the policy version that made them."""

from __future__ import annotations

import pytest

from harness.checks.staleness import FORCED_EFFECT, NOTHING_BETWEEN, SAME_VERSION_SAME_OUTPUT
from tests.checks.scene import Scene

SHORT = [[10, 11], [20, 21]]


def test_a_sync_moves_the_answers():
    for version, status in ((1, "pass"), (0, "fail")):
        scene = Scene()
        scene.generate(SHORT)
        scene.sync(1)
        scene.generate(SHORT, version=version)
        assert scene.judge(FORCED_EFFECT).status == status


@pytest.mark.parametrize("syncs", [(0,), (1, 0)], ids=["same version", "there and back"])
def test_the_same_version_answers_the_same(syncs):
    scene = Scene()
    scene.generate(SHORT)
    for version in syncs:
        scene.sync(version)
    scene.generate(SHORT)
    assert scene.judge(SAME_VERSION_SAME_OUTPUT).status == "pass"
    before = scene.calls[-1].result["response_ids"]
    scene.change(scene.calls[-1], result={**scene.calls[-1].result, "response_ids": [before[0], before[1][::-1]]})
    found = scene.judge(SAME_VERSION_SAME_OUTPUT)
    assert found.reason == "a policy version answers otherwise the second time"
    scene.generate(SHORT, tokens=[[1, 2, 3, 4, 5, 6]] * 2)
    assert [row for _, row in scene.judge(SAME_VERSION_SAME_OUTPUT).concerns] == [0, 1, 1]


def test_two_answers_with_nothing_between_them_show_nothing():
    scene = Scene()
    scene.generate(SHORT)
    scene.generate(SHORT)
    assert scene.judge(SAME_VERSION_SAME_OUTPUT).reason == NOTHING_BETWEEN


def test_nothing_to_compare_is_untestable():
    scene = Scene()
    for check in (SAME_VERSION_SAME_OUTPUT, FORCED_EFFECT):
        assert scene.judge(check).status == "untestable"
    scene.generate(SHORT)
    for check in (SAME_VERSION_SAME_OUTPUT, FORCED_EFFECT):
        assert scene.judge(check).status == "untestable"


def test_how_far_an_aborted_answer_had_come_is_chance():
    scene = Scene()
    scene.generate(SHORT)
    scene.sync(0)
    scene.generate(SHORT)
    half = [row[:3] for row in scene.calls[-1].result["response_ids"]]
    cut = {**scene.calls[-1].result, "response_ids": half, "stop_reasons": ["abort"] * 2}
    scene.change(scene.calls[-1], result=cut)
    assert scene.judge(SAME_VERSION_SAME_OUTPUT).status == "untestable"
