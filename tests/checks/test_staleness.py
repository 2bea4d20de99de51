"""Answers and the policy version that made them."""

from __future__ import annotations

import pytest

from harness.checks.staleness import FORCED_EFFECT, NOTHING_BETWEEN, SAME_VERSION_SAME_OUTPUT
from harness.records.reference import Noise, NoiseRequest, Score, ScoreRequest
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


@pytest.mark.parametrize(
    ("dtype", "behind", "status"),
    [("bfloat16", 0.3, "pass"), ("bfloat16", 0.5, "fail"), ("float32", 0.3, "fail")],
    ids=["a near tie", "further than the noise", "float32 repeats itself"],
)
def test_rounding_may_part_two_answers_of_a_version(dtype, behind, status):
    scene = Scene()
    scene.reference.set(NoiseRequest(), Noise(numbers=5120, largest=0.2, rms=0.05, weights=0.3))
    before = scene.generate(SHORT).result["response_ids"]
    scene.sync(0)
    scene.generate(SHORT, tokens=[before[0], [*before[1][:5], 63]])
    score = Score(logprobs=[-1.0] * 6, ranks=[0] * 5 + [1], margins=[3.0] * 6, behind=(0.0,) * 5 + (behind,))
    scene.reference.set(ScoreRequest(version=0, prompt=SHORT[1], tokens=[*before[1][:5], 63]), score)
    about = {"model": {"name": "tiny", "sha256": "0" * 64, "dtype": dtype}}
    assert scene.judge(SAME_VERSION_SAME_OUTPUT, **about).status == status
    assert scene.judge(SAME_VERSION_SAME_OUTPUT, **about, batch_invariant=True).status == "fail"


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
