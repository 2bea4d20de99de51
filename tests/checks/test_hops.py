"""Broken hops: what a caller got, and how often engines ran the request."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.hops import AFTER, BROKEN, BROKEN_HOPS
from harness.contract.messages import BROKEN_HOP_SAYS
from harness.records.recording import CallError
from tests import traces
from tests.checks.scene import STEP, Scene
from tests.traces import error

PARAMS = {"max_tokens": 4, "temperature": 0.0}
NAMED = error("ServerError", BROKEN_HOP_SAYS, status=500)


def met(
    fault: dict[str, Any], failed: CallError | None, *, runs: int, struck: int = 1, later: CallError | None = None
) -> Scene:
    """A request that met the fault, and a plain one after it."""
    scene = Scene()
    whole = {"hop": "server", "moment": "before", "status": 500, "body": "vllm", "connection": "kept", **fault}
    for label, why, times, breaks in ((BROKEN, failed, runs, whole), (AFTER, later, 1, None)):
        scene.call("break_hop", {"fault": breaks}, {"struck": struck})
        prompt = [10, 11, 12 + len(scene.calls)]
        answer = scene.reference.greedy(prompt, 4)
        started = scene.pass_time()
        for _ in range(times):
            scene.seen += traces.executed(prompt, answer, params=PARAMS, from_ns=scene.pass_time(), step_ns=STEP)
            scene.pass_time(7)
        about: dict[str, Any] = {"started_ns": started, "ended_ns": scene.pass_time(), "label": label}
        if why is None:
            scene.calls.append(traces.generate([prompt], [answer], params=PARAMS, **about))
        else:
            scene.calls.append(traces.generate([prompt], None, params=PARAMS, error=why, **about))
    return scene


@pytest.mark.parametrize(
    ("fault", "failed", "runs"),
    [
        ({}, NAMED, 0),
        ({}, None, 1),
        ({"status": 422}, error("ClientError", "422", status=422), 0),
        ({"status": 429}, None, 1),
        ({"moment": "after"}, NAMED, 1),
        ({"connection": "reset"}, error("ConnectionResetError", "reset by peer"), 0),
    ],
)
def test_a_named_error_and_one_run_pass(fault, failed, runs):
    assert met(fault, failed, runs=runs).judge(BROKEN_HOPS).status == "pass"


@pytest.mark.parametrize(
    ("fault", "failed", "runs", "says"),
    [
        ({}, error("CallTimedOut", "late"), 0, "did not end in time"),
        ({}, None, 0, "succeeded although no engine ran it"),
        ({"moment": "after"}, None, 2, "was computed again"),
        ({"connection": "torn", "moment": "after"}, None, 2, "was computed again"),
        ({"status": 422}, None, 1, "was sent again although it was refused"),
        ({}, error("Exception", BROKEN_HOP_SAYS), 0, "without a named cause"),
        ({"status": 503}, error("ServerError", "no"), 0, "another cause than its own"),
    ],
)
def test_what_goes_wrong_is_named(fault, failed, runs, says):
    found = met(fault, failed, runs=runs).judge(BROKEN_HOPS)
    assert found.status == "fail"
    assert says in (found.reason or "")


def test_a_request_that_fails_after_the_hop_is_whole_again():
    found = met({}, NAMED, runs=0, later=error("ServerError", "no", status=503)).judge(BROKEN_HOPS)
    assert "after the hop was whole again" in (found.reason or "")


def test_a_fault_without_effect_is_not_judged():
    assert met({}, None, runs=1, struck=0).judge(BROKEN_HOPS).status == "untestable"
    assert Scene().judge(BROKEN_HOPS).status == "untestable"
