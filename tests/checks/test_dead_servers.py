"""Servers that die, health() afterwards, and calls in flight."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.conservation import CONSERVATION
from harness.checks.control_plane import HEALTH_FOLLOWS_SERVERS, HEALTHY
from harness.checks.liveness import EVERY_CALL_ENDS
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene

MUTE = "generate() failed with an error that does not say that a server is gone"


def asked(one_dead=True, all_dead=False, error=None) -> Scene:
    """health() with both servers alive, with one dead, and twice with both dead. The test chooses the last answer."""
    scene = Scene()
    scene.call("health", {}, {"healthy": True})
    scene.call("kill_server", {"server": SERVERS[0]}, {})
    scene.call("health", {}, {"healthy": one_dead})
    scene.call("kill_server", {"server": SERVERS[1]}, {})
    scene.call("health", {}, {"healthy": True})  # it may need a moment
    scene.call("health", {}, {"healthy": all_dead})
    if error is not None:
        scene.change(scene.calls[-1], result=None, error=error)
    return scene


def test_health_follows_the_servers():
    for scene in (asked(), asked(error=traces.error("ConnectError", "no server left"))):
        assert scene.judge(HEALTH_FOLLOWS_SERVERS).status == "pass"
        assert scene.judge(HEALTHY).status == "pass"


@pytest.mark.parametrize(
    ("answers", "reason", "healthy"),
    [
        ({"all_dead": True}, "health() is true though every server is dead", "pass"),
        ({"one_dead": False}, "health() is not true while a server works", "fail"),
    ],
)
def test_health_that_does_not_follow(answers, reason, healthy):
    scene = asked(**answers)
    assert scene.judge(HEALTH_FOLLOWS_SERVERS).reason == reason
    assert scene.judge(HEALTHY).status == healthy


def test_health_that_was_not_asked_in_both_states_is_untestable():
    scene = asked()
    scene.calls = scene.calls[:-2]
    assert scene.judge(HEALTH_FOLLOWS_SERVERS).status == "untestable"
    scene.calls = [c for c in asked().calls if c.method != "kill_server"]
    assert scene.judge(HEALTH_FOLLOWS_SERVERS).status == "untestable"


class Killed(Scene):
    """Two requests in flight, one per server, when server-0 is killed: the first fails by name, the other ends well."""

    def __init__(self):
        super().__init__()
        begun = self.pass_time()
        answer = self.reference.greedy([20, 21], 6)
        self.dying = traces.executed([10, 11], [1, 2], server=SERVERS[0], reason=None, from_ns=begun + 1, step_ns=STEP)
        self.seen += self.dying
        self.seen += traces.executed([20, 21], answer, server=SERVERS[1], from_ns=begun + 1, step_ns=STEP)
        self.now += 3 * STEP
        self.kill = self.call("kill_server", {"server": SERVERS[0]}, {})
        self.now += 6 * STEP
        error = traces.error("EngineDead", "server-0 died", status=503)
        self.failed = traces.generate([[10, 11]], error=error, started_ns=begun, ended_ns=self.kill.ended_ns + 1)
        self.whole = traces.generate([[20, 21]], [answer], started_ns=begun, ended_ns=self.pass_time())
        self.calls += [self.failed, self.whole]


def test_an_error_that_does_not_tell_of_a_dead_server_is_red():
    for kind, message, status, red in (
        ("JSONDecodeError", "Expecting value: line 1 column 1 (char 0)", None, True),
        ("ClientResponseError", "Bad Gateway", 502, False),
        ("ServerDisconnectedError", "Server disconnected", None, False),
    ):
        scene = Killed()
        scene.change(scene.failed, error=traces.error(kind, message, status=status))
        reason = f"{MUTE}: {kind}: Expecting value: line … column … (char …)" if red else ""
        assert scene.judge(EVERY_CALL_ENDS).reason == reason


def test_calls_that_end_well_or_by_name_pass():
    found = Killed().judge(EVERY_CALL_ENDS)
    assert (found.status, found.numbers["errors"]) == ("pass", 1)
    assert Killed().judge(CONSERVATION).status == "pass"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"error": traces.error("CallTimedOut", "late")}, "generate() did not end"),
        ({"error": traces.error("Cancelled", "gave up")}, "generate() did not end"),
        ({"error": traces.error("StackDied", "gone")}, "generate() ended only because the whole stack was given up"),
        ({"error": traces.error("EngineDead", " ")}, "generate() failed with an error that has no name or no message"),
        ({"error": traces.error("Exception", "oh")}, "generate() failed with an error that has no name or no message"),
        (
            {"error": None, "result": {"response_ids": [[]], "responses": [""], "stop_reasons": ["stop"]}},
            "a request that was cut short came back as a success",
        ),
        (
            {"error": None, "result": {"response_ids": [[1, 2]], "responses": [""], "stop_reasons": ["abort"]}},
            "a request that was cut short came back as a success",
        ),
        (
            {"error": None, "result": {"response_ids": [], "responses": [], "stop_reasons": []}},
            "a request is neither answered nor reported as failed",
        ),
    ],
)
def test_calls_that_do_not_end_as_they_should(changes, reason):
    scene = Killed()
    scene.change(scene.failed, **changes)
    assert scene.judge(EVERY_CALL_ENDS).reason == reason


def test_a_request_that_another_server_takes_over_was_not_run_twice():
    scene = Killed()
    answer = scene.reference.greedy([10, 11], 6)
    scene.seen += traces.executed([10, 11], answer, server=SERVERS[1], from_ns=scene.kill.ended_ns, step_ns=1)
    ended = scene.kill.ended_ns + 10
    scene.change(scene.failed, error=None, ended_ns=ended, result=traces.generate([[10, 11]], [answer]).result)
    assert scene.judge(CONSERVATION).status == "pass"
    assert scene.judge(EVERY_CALL_ENDS).status == "pass"
    twice = [msgspec.structs.replace(o, server=SERVERS[1]) for o in scene.dying]
    scene.seen += [o for o in twice if o.kind == "request"]
    assert scene.judge(CONSERVATION).status == "fail", "a server that lives has no excuse"


def test_a_death_that_nobody_waited_through_says_nothing():
    scene = Scene()
    scene.generate([[10, 11]])
    scene.call("kill_server", {"server": SERVERS[0]}, {})
    assert scene.judge(EVERY_CALL_ENDS).status == "untestable"


def test_what_a_pause_cut_short_is_no_empty_success():
    aborted = {"response_ids": [[1, 2]], "responses": [""], "stop_reasons": ["abort"]}
    scene = Killed()
    scene.change(scene.failed, error=None, result=aborted)
    pause = traces.call(
        "pause", {"mode": "abort"}, started_ns=scene.failed.started_ns + 1, ended_ns=scene.kill.ended_ns
    )
    scene.calls.append(pause)
    assert scene.judge(EVERY_CALL_ENDS).status == "pass"
    scene.change(pause, request={"mode": "keep"})
    assert scene.judge(EVERY_CALL_ENDS).reason == "a request that was cut short came back as a success"
