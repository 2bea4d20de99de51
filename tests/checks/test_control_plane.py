"""Control calls: the servers that they reached, how often, and the state that the stack reports."""

from __future__ import annotations

import pytest

from harness.checks.control_plane import (
    FAN_OUT,
    GOOD,
    HEALTH_OF_THE_ADDRESS,
    HEALTHY,
    NO_SLEEP,
    PAUSE_STATES,
    WORLD_SIZE,
)
from harness.checks.liveness import ALL_COMPLETE
from harness.contract.topology import Topology
from tests import traces
from tests.checks.scene import SERVERS, Scene, without_observations


def test_a_call_that_reaches_every_server_once():
    scene = Scene()
    for method in ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache"):
        scene.control(method)
    found = scene.judge(FAN_OUT)
    assert (found.status, found.facts) == ("pass", 10)
    assert without_observations(scene).judge(FAN_OUT).status == "untestable"


def test_a_pause_that_reaches_only_some_servers():
    scene = Scene()
    scene.control("pause")
    scene.control("pause", SERVERS[:1])
    found = scene.judge(FAN_OUT)
    assert (found.status, found.reason) == ("fail", "pause() did not reach every server")
    assert found.evidence[0]["times by server"] == {"server-0": 1, "server-1": 0}


def test_a_call_that_reaches_a_server_twice():
    scene = Scene()
    scene.control("resume", [*SERVERS, SERVERS[0]])
    assert scene.judge(FAN_OUT).reason == "resume() reached a server more than once"


def test_a_server_whose_tap_is_silent_is_not_a_fault_of_the_stack():
    scene = Scene()
    scene.control("pause", SERVERS[:1])
    scene.seen = [s for s in scene.seen if s.server == "server-0"]
    scene.seen += traces.executed([60, 61], [5], from_ns=0)
    assert scene.judge(FAN_OUT).status == "untestable"
    assert scene.judge(NO_SLEEP).status == "untestable"


def test_no_control_call_is_untestable():
    assert Scene().judge(FAN_OUT).status == "untestable"


@pytest.mark.parametrize(
    ("check", "method", "right", "wrong"),
    [
        (HEALTHY, "health", {"healthy": True}, {"healthy": False}),
        (WORLD_SIZE, "world_size", {"world_size": 8}, {"world_size": 2}),
    ],
)
def test_what_the_stack_says_of_itself(check, method, right, wrong):
    scene, topology = Scene(), Topology(engines=2, tensor_parallel=4)
    assert scene.judge(check, topology=topology).status == "untestable"
    scene.call(method, {}, right)
    assert scene.judge(check, topology=topology).status == "pass"
    scene.call(method, {}, wrong)
    assert scene.judge(check, topology=topology).status == "fail"


@pytest.mark.parametrize(
    ("status", "healthy", "verdict"),
    [(200, True, "pass"), (503, False, "pass"), (500, True, "pass"), (503, True, "fail")],
)
def test_an_address_that_refuses_requests_and_its_health(status, healthy, verdict):
    scene = Scene()
    scene.call("health", {}, {"healthy": True})
    assert scene.judge(HEALTH_OF_THE_ADDRESS).status == "untestable"
    asked = scene.call(
        "http", {"path": "/v1/completions", "method": "POST"}, {"status": status, "headers": {}, "body": ""}
    )
    scene.change(asked, label=GOOD)
    scene.call("health", {}, {"healthy": healthy})
    assert scene.judge(HEALTH_OF_THE_ADDRESS).status == verdict


def states(*answers: dict[str, bool]) -> Scene:
    scene = Scene()
    scene.call("is_paused", {}, {"servers": answers[0]})
    scene.control("pause")
    scene.call("is_paused", {}, {"servers": answers[1]})
    scene.control("resume")
    scene.call("is_paused", {}, {"servers": answers[2]})
    return scene


def test_is_paused_follows_every_server():
    on, off = dict.fromkeys(SERVERS, True), dict.fromkeys(SERVERS, False)
    assert states(off, on, off).judge(PAUSE_STATES).status == "pass"
    assert states(off, {"server-0": True}, off).judge(PAUSE_STATES).reason == "is_paused() does not name every server"
    assert states(off, {**on, "server-1": False}, off).judge(PAUSE_STATES).reason.endswith("after pause()")
    assert states(off, on, on).judge(PAUSE_STATES).reason.endswith("after resume()")
    found = states(on, {"server-0": True}, on).judge(PAUSE_STATES)
    assert (len(found.reasons), len(found.concerns)) == (2, 3)
    assert states(off, on, off).judge(PAUSE_STATES).numbers == {"asked_paused": 1, "asked_running": 2}
    scene = Scene()
    scene.call("is_paused", {}, {"servers": off})
    assert scene.judge(PAUSE_STATES).status == "untestable"


def test_a_sleep_where_none_is_needed():
    scene = Scene()
    scene.control("wake_up", phase="clean_room")
    scene.generate([[5, 6]])
    assert scene.judge(NO_SLEEP).reason == "no weights were synced"
    scene.sync(1)
    found = scene.judge(NO_SLEEP)
    assert (found.status, found.numbers) == ("pass", {"syncs": 1})
    scene.control("sleep", level=1)
    assert scene.judge(NO_SLEEP).status == "fail"
    assert without_observations(scene).judge(NO_SLEEP).status == "untestable"


def test_calls_that_fail_or_end_early_are_incomplete():
    scene = Scene()
    assert scene.judge(ALL_COMPLETE).status == "untestable"
    scene.generate([[5, 6]])
    assert scene.judge(ALL_COMPLETE).status == "pass"
    cut = scene.change(scene.calls[-1], result={**scene.calls[-1].result, "stop_reasons": ["abort"]})
    assert scene.judge(ALL_COMPLETE).reason == "a request did not come to its end"
    scene.calls.remove(cut)
    refused = traces.openai("completion", {"prompt": "a"}, {"error": {"message": "no"}})
    scene.calls.append(refused)
    assert scene.judge(ALL_COMPLETE).reason == "completion() was answered with a nameless error: no"
    scene.calls.remove(refused)
    scene.control("pause", error=traces.error("CallTimedOut"))
    assert scene.judge(ALL_COMPLETE).reason == "pause() failed with CallTimedOut: not like this"
