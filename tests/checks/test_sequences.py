"""Sequences: what each call met is read from the times of the recording, and calls that the contract allows work."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.control_plane import FAN_OUT
from harness.checks.pausing import GRACE_NS
from harness.checks.sequences import AS_THE_STATE_SAYS
from harness.records.recording import CallError
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene

PROMPTS = [[10, 11], [20, 21]]


def paused_twice():
    scene = Scene()
    for method, request in (
        ("resume", {}),
        ("pause", {"mode": "keep"}),
        ("pause", {"mode": "keep"}),
        ("wake_up", {"tags": None}),
    ):
        scene.call(method, request)
    return scene


def resumed(scene, *, later=100):
    scene.pass_time(later)
    scene.call("resume", {})
    scene.generate(PROMPTS)
    return scene


def visits(scene):
    return {(one.step, one.state, one.requests) for one in scene.judge(AS_THE_STATE_SAYS).visits}


def test_each_call_is_seen_in_its_state():
    scene = resumed(paused_twice())
    assert scene.judge(AS_THE_STATE_SAYS).status == "pass"
    assert visits(scene) == {
        ("resume", "running", "no request"),
        ("pause keep", "running", "no request"),
        ("pause keep", "paused (keep)", "no request"),
        ("wake_up", "paused (keep)", "no request"),
        ("resume", "paused (keep)", "no request"),
        ("generate", "running", "no request"),
    }


def test_a_request_that_a_pause_meets_is_frozen_and_one_that_comes_later_is_queued():
    scene = Scene()
    met = scene.generate(PROMPTS)
    scene.call("pause", {"mode": "keep"})
    late = scene.generate([[30, 31]])
    scene.call("health")
    end = scene.call("resume", {}).ended_ns
    for call in (met, late):
        scene.change(call, ended_ns=end + GRACE_NS)
    assert {("generate", "paused (keep)", "frozen"), ("health", "paused (keep)", "frozen and queued")} < visits(scene)


def test_a_caller_that_gives_up_is_seen_where_it_does():
    scene = Scene()
    call = scene.generate(PROMPTS)
    scene.call("pause", {"mode": "keep"})
    gone = CallError(kind="Cancelled", message="the scenario gave up waiting", blame="harness")
    scene.change(call, ended_ns=scene.pass_time(), error=gone, result=None)
    scene.call("resume", {})
    assert ("cancel", "paused (keep)", "frozen") in visits(scene)
    assert scene.judge(AS_THE_STATE_SAYS).status == "pass"


def test_a_call_that_fails_where_the_contract_allows_it_is_red():
    scene = resumed(paused_twice())
    refused = CallError(kind="RuntimeError", message="not asleep", blame="stack")
    scene.change(scene.calls[-3], error=refused, result=None)
    found = scene.judge(AS_THE_STATE_SAYS)
    assert found.reason == "wake_up failed while paused (keep)"


def test_tokens_of_a_pause_that_another_call_ended_are_red():
    scene = paused_twice()
    scene.pass_time(50)
    scene.seen.append(traces.observation("step", "server-0", scene.now, tokens={"r": [1]}))
    found = resumed(scene).judge(AS_THE_STATE_SAYS)
    assert found.reason == "an engine made tokens during pause(keep), and wake_up came before"


def test_only_pause_abort_cuts_a_request_short():
    scene = Scene()
    call = scene.generate(PROMPTS)
    assert call.result is not None
    cut = scene.change(call, result={**call.result, "stop_reasons": ["abort", "length"]})
    assert scene.judge(AS_THE_STATE_SAYS).reason == "a request was cut short"
    aborting = traces.call("pause", {"mode": "abort"}, started_ns=cut.started_ns + 1, ended_ns=cut.ended_ns - 1)
    scene.calls.insert(scene.calls.index(cut) + 1, aborting)
    assert scene.judge(AS_THE_STATE_SAYS).status == "pass"


def test_without_a_step_nothing_is_judged():
    scene = Scene()
    scene.calls = [msgspec.structs.replace(call, phase="clean_room") for call in scene.calls]
    assert scene.judge(AS_THE_STATE_SAYS).status == "untestable"


def given_up(**ended):
    scene = Scene()
    call = scene.call("sync_weights", {"version": 3, "chunks": 3, "fail_after_chunks": 1})
    scene.change(call, **ended)
    scene.call("health")
    scene.sync(1)
    scene.generate(PROMPTS)
    return scene


def failed(kind):
    return {"error": CallError(kind=kind, message="it failed", blame="stack"), "result": None}


def test_a_sync_that_the_trainer_gave_up_fails_as_planned():
    assert given_up(**failed("TrainerFailed")).judge(AS_THE_STATE_SAYS).status == "pass"
    assert ("health", "weights torn", "no request") in visits(given_up(**failed("TrainerFailed")))
    for ended, said in (({}, "reported as done"), (failed("ServerDied"), "sync_weights given up failed while running")):
        finding = given_up(**ended).judge(AS_THE_STATE_SAYS)
        assert finding.status == "fail"
        assert said in finding.reason


def beside_a_dead_server(met=(None, None), control=None, reached=SERVERS[1:], later=None):
    """Two requests, at server-0 and server-1, when server-0 dies; then a pause and a request. `met`, `control`, `later`: their
    errors, or None. `reached`: the servers that took the pause."""
    scene = Scene()
    calls = [scene.generate([prompt], route=lambda *_, n=n: SERVERS[n]) for n, prompt in enumerate(PROMPTS)]
    begun = calls[1].started_ns + 1
    kill = traces.call("kill_server", {"server": SERVERS[0]}, {}, started_ns=begun, ended_ns=begun + 1)
    scene.calls.insert(scene.calls.index(calls[1]) + 1, kill)
    met_dead = scene.change(calls[0], ended_ns=kill.ended_ns + 1)
    for call, error in zip((met_dead, calls[1]), met, strict=True):
        if error is not None:
            scene.change(call, error=error, result=None)
    scene.control("pause", reached, mode="keep", error=control)
    scene.pass_time(2 * GRACE_NS / STEP)
    scene.call("health", {}, {"healthy": True})
    scene.control("resume", SERVERS[1:])
    last = scene.generate([[30, 31]], route=lambda *_: SERVERS[1])
    if later is not None:
        scene.change(last, error=later, result=None)
    return scene


GONE = traces.error("ClientConnectorError", "cannot connect to host")
MUTE = traces.error("JSONDecodeError", "Expecting value")


@pytest.mark.parametrize("told", [{}, {"met": (GONE, None)}, {"control": GONE}, {"met": (GONE, None), "control": GONE}])
def test_what_a_dead_server_fails_may_say_so(told):
    scene = beside_a_dead_server(**told)
    assert scene.judge(AS_THE_STATE_SAYS).status == "pass"
    assert ("pause keep", "one server dead", "no request") in visits(scene)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"met": (MUTE, None)}, "generate failed while running by an error that does not say that a server is gone"),
        ({"met": (None, GONE)}, "generate failed while running, though no server that it ran on died"),
        (
            {"control": MUTE},
            "pause keep failed while one server dead by an error that does not say that a server is gone",
        ),
        ({"later": GONE}, "generate failed while one server dead, though another server lives"),
    ],
)
def test_a_death_excuses_nothing_else(told, why):
    assert beside_a_dead_server(**told).judge(AS_THE_STATE_SAYS).reason == why


def test_health_is_true_beside_a_dead_server():
    scene = beside_a_dead_server()
    asked = next(call for call in scene.calls if call.method == "health")
    scene.change(asked, result={"healthy": False})
    assert scene.judge(AS_THE_STATE_SAYS).reason == "health() is not true while paused (keep), one server dead"


@pytest.mark.parametrize("error", [None, GONE])
def test_a_control_call_reaches_the_living_server(error):
    assert beside_a_dead_server(control=error).judge(FAN_OUT).status == "pass"
    finding = beside_a_dead_server(control=error, reached=SERVERS[:1]).judge(FAN_OUT)
    assert finding.reason == "pause() did not reach the living server"


def test_a_pause_that_failed_at_a_dead_server_holds_the_living_one():
    scene = beside_a_dead_server(control=GONE)
    resume = next(call for call in scene.calls if call.method == "resume" and call.phase == "scenario")
    scene.seen.append(traces.observation("step", SERVERS[1], resume.started_ns - 1, tokens={"r": [1]}))
    finding = scene.judge(AS_THE_STATE_SAYS)
    assert "an engine made tokens during pause(keep), and nothing came before" in finding.reason
