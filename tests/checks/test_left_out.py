"""Parameters that requests leave out have a documented default, and always the same one."""

from __future__ import annotations

import pytest

from harness.checks.left_out import LEFT_OUT
from tests import traces
from tests.checks.scene import STEP, Scene


def asked(*calls: tuple[dict, dict]) -> Scene:
    """A call of generate() per pair of what was given and what the engine had."""
    scene = Scene()
    for number, (given, at_engine) in enumerate(calls):
        prompt = [10, 11, 12 + number]
        answer = scene.reference.greedy(prompt, 4)
        started = scene.pass_time()
        scene.seen += traces.executed(prompt, answer, params=at_engine, from_ns=scene.pass_time(), step_ns=STEP)
        scene.pass_time(7)
        times = {"started_ns": started, "ended_ns": scene.now}
        scene.calls.append(traces.generate([prompt], [answer], params=given, **times))
    return scene


@pytest.mark.parametrize(
    "at_engine", [{"temperature": 0.7}, {"temperature": 1.0}, {}], ids=["the checkpoint's", "vLLM's", "not shown"]
)
def test_a_documented_default(at_engine):
    assert asked(({}, at_engine), ({"temperature": None}, at_engine)).judge(LEFT_OUT).status == "pass"


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"temperature": 0.5}, "generate() without temperature gets neither the checkpoint's nor the engine's"),
        (
            {"temperature": 1.0},
            "generate() without temperature gets the checkpoint's at times, and at times the engine's",
        ),
    ],
)
def test_another_default(second, reason):
    found = asked(({}, {"temperature": 0.7}), ({}, second)).judge(LEFT_OUT)
    assert (found.status, found.reason) == ("fail", reason)


def test_a_parameter_that_is_named():
    assert asked(({"temperature": 0.2}, {"temperature": 0.2})).judge(LEFT_OUT).status == "untestable"
