"""Requests that sleep() met: cut short and marked, whole, or failed by name. Those that came later: run when all is awake."""

import pytest

from harness.checks.sleeping import CUT_BY_SLEEP, NONE_CAME, ONE_LEFT_OUT, STILL, TOO_SHORT
from harness.contract.errors import CANCELLED
from tests.checks.scene import Scene
from tests.traces import error


def met(reason, tokens, failure=None) -> Scene:
    """A request for six tokens during which the engines sleep."""
    scene = Scene()
    asked = scene.generate([[10, 11]], tokens=[tokens])
    slept = scene.control("sleep", level=1)
    scene.change(slept, started_ns=asked.started_ns + 1)
    result = None if failure else asked.result | {"stop_reasons": [reason]}
    scene.change(asked, result=result, error=failure)
    return scene


@pytest.mark.parametrize(
    ("reason", "tokens", "status"),
    [
        ("abort", [5, 6], "pass"),
        ("abort", [], "pass"),
        ("length", [5, 6, 7, 8, 9, 10], "pass"),
        ("length", [5, 6], "fail"),
        ("stop", [5, 6], "pass"),
        (None, [5, 6], "fail"),
    ],
)
def test_what_came_back(reason, tokens, status):
    assert met(reason, tokens).judge(CUT_BY_SLEEP).status == status


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (error("EngineDeadError", "asleep"), "pass"),
        (error("RuntimeError", ""), "fail"),
        (error("ServerError", "no", status=500), "fail"),
        (error(CANCELLED, "the scenario gave up waiting"), "fail"),
    ],
)
def test_how_it_failed(failure, status):
    assert met("abort", [5], failure).judge(CUT_BY_SLEEP).status == status


def test_without_requests_in_flight_nothing_is_known():
    scene = Scene()
    scene.generate([[10, 11]])
    scene.control("sleep", level=1)
    assert scene.judge(CUT_BY_SLEEP).status == "untestable"


def slept(*stages, runs_in=None, prompts=([20, 21], [30, 31]), steps=20) -> Scene:
    """Sleep, then one wake_up() for each of `stages`, `steps` engine steps apart. Requests come after sleep(), and run at the end, or
    after the call whose number is `runs_in`."""
    scene = Scene()
    scene.generate([[10, 11], [12, 13]])
    scene.control("sleep", level=2)
    came = scene.now + 1
    for number, tags in enumerate((*stages, None)):
        if prompts and (number == runs_in or (tags is None and runs_in is None)):
            scene.change(scene.generate(prompts), started_ns=came)
        if tags is not None:
            scene.pass_time(steps)
            scene.control("wake_up", tags=list(tags))
    return scene


TWO_STEPS = (("weights",), ("kv_cache",))


@pytest.mark.parametrize("stages", [TWO_STEPS, ((),)])
def test_what_comes_while_engines_sleep_waits_until_all_is_awake(stages):
    assert slept(*stages).judge(STILL).status == "pass"


@pytest.mark.parametrize(("runs_in", "state"), [(0, "it slept"), (1, "only weights were awake")])
def test_an_engine_that_runs_before_all_is_awake(runs_in, state):
    finding = slept(*TWO_STEPS, runs_in=runs_in).judge(STILL)
    assert finding.status == "fail"
    assert state in finding.reason


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        (slept(*TWO_STEPS, prompts=()), NONE_CAME),
        (slept(*TWO_STEPS, prompts=([20, 21],)), ONE_LEFT_OUT),
        (slept(*TWO_STEPS, steps=1), TOO_SHORT),
    ],
)
def test_without_a_request_on_every_server_for_some_steps_nothing_is_known(scene, reason):
    finding = scene.judge(STILL)
    assert (finding.status, finding.reason) == ("untestable", reason)
