"""Broken hops: what a caller got, and how often engines ran the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness.checks.base import Finding
from harness.checks.hops import AFTER, BROKEN, BROKEN_CONTROL, BROKEN_HOPS
from harness.contract.messages import BROKEN_HOP_SAYS
from harness.records.recording import CallError
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene
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


@pytest.mark.parametrize(
    ("fault", "failed", "runs", "says"),
    [
        ({"connection": "whole", "form": "slow"}, None, 1, None),
        ({"connection": "whole", "form": "slow"}, None, 2, "was computed again although its answer came"),
        (
            {"connection": "whole", "form": "chunked"},
            error("PayloadError", "400, no length"),
            1,
            "its answer was whole",
        ),
        ({"connection": "hanging"}, None, 1, None),
        ({"connection": "hanging"}, error("TimeoutError", "no answer in 3 s"), 0, None),
        ({"connection": "hanging"}, None, 2, "was computed again after it had hung"),
    ],
)
def test_whole_answers_and_hanging_requests(fault, failed, runs, says):
    found = met(fault, failed, runs=runs).judge(BROKEN_HOPS)
    assert (found.status == "pass") is (says is None)
    assert (says or "") in found.reason


def controlled(
    failed: CallError | None, *, reach: Sequence[str] = SERVERS, later: CallError | None = None, struck: int = 1
) -> Finding:
    """A pause that met a broken hop at one server, and one after it."""
    scene = Scene()
    fault = {"hop": "server", "call": "pause", "status": 503}
    for breaks, why, servers in ((fault, failed, reach), (None, later, SERVERS)):
        scene.call("break_hop", {"fault": breaks}, {"struck": struck})
        scene.control("pause", servers, error=why, mode="keep", clear_cache=False)
    return scene.judge(BROKEN_CONTROL)


SAYS = f"503: {BROKEN_HOP_SAYS}"


@pytest.mark.parametrize(
    ("failed", "reach", "says"),
    [
        (error("HopBroken", f"{SAYS} at server-0"), SERVERS[1:], None),
        (error("ClientError", f"{SAYS}, url='http://127.0.0.1:8001/pause'"), SERVERS[1:], None),
        (error("HopBroken", SAYS), (), None),
        (error("HopBroken", SAYS), SERVERS, None),
        (error("HopBroken", SAYS), SERVERS[1:], "does not say at which"),
        (error("ValueError", "no"), SERVERS, "another cause than its own"),
        (None, SERVERS[1:], "succeeded and did not reach every server"),
        (None, SERVERS, None),
    ],
)
def test_a_control_call_that_fails_at_one_server_says_so_and_where(failed, reach, says):
    found = controlled(failed, reach=reach)
    assert (found.status == "pass") is (says is None)
    assert (says or "") in found.reason


def test_the_control_call_after_it_works():
    found = controlled(error("HopBroken", f"{SAYS} at server-0"), later=error("HopBroken", SAYS))
    assert "pause() failed after pause had met a broken hop" in found.reason


def test_a_control_fault_without_effect_is_not_judged():
    assert controlled(None, struck=0).status == "untestable"
    assert Scene().judge(BROKEN_CONTROL).status == "untestable"


def test_a_request_that_fails_after_the_hop_is_whole_again():
    found = met({}, NAMED, runs=0, later=error("ServerError", "no", status=503)).judge(BROKEN_HOPS)
    assert "after the hop was whole again" in (found.reason or "")


def test_a_fault_without_effect_is_not_judged():
    assert met({}, None, runs=1, struck=0).judge(BROKEN_HOPS).status == "untestable"
    assert Scene().judge(BROKEN_HOPS).status == "untestable"
