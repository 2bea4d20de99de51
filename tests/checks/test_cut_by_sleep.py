"""Requests that sleep() met: cut short and marked, whole, or failed by name."""

import pytest

from harness.checks.cut_by_sleep import CUT_BY_SLEEP
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
