"""Routing: partitions of requests by server, and the probability that a fair choice looks unfair."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.routing import (
    ALPHA,
    SAME_SESSION,
    SESSIONLESS_SPREAD,
    SESSIONS_SPREAD,
    STICKY,
    false_alarm_rate,
    power,
    shares,
)
from tests import traces
from tests.checks.scene import SERVERS, Scene, home, without_observations

SESSIONS = [f"session-{n}" for n in range(40)]


def prompts(count: int, first: int = 3) -> list[list[int]]:
    return [[first + n // 50, 3 + n % 50, first % 60] for n in range(count)]


@pytest.fixture
def scene() -> Scene:
    """Forty sessions of two turns each, and forty requests without a session."""
    scene = Scene()
    scene.generate(prompts(40, 3), sessions=SESSIONS, length=1)
    scene.generate(prompts(40, 9), sessions=SESSIONS[::-1], length=1)
    scene.generate(prompts(40, 20), length=1)
    return scene


@pytest.mark.parametrize("check", [STICKY, SESSIONS_SPREAD, SESSIONLESS_SPREAD])
def test_right_routing_passes_and_a_blind_tap_judges_nothing(scene, check):
    assert scene.judge(check).status == "pass"
    assert without_observations(scene).judge(check).status == "untestable"


def test_turns_that_chance_could_have_kept_together_and_a_single_server_judge_nothing(scene):
    found = scene.judge(STICKY)
    assert (found.numbers["choices"], found.numbers["unnoticed"]) == (40, 2**-40)
    few = Scene()
    for _ in range(10):
        few.generate([[5, 6]], sessions=["s"])
    assert few.judge(STICKY).status == "untestable"
    few.generate([[5, 6]], sessions=["s"])
    assert few.judge(STICKY).status == "pass"
    assert few.judge(STICKY, servers=SERVERS[:1]).reason == "there is one server: no session can leave it"


@pytest.mark.parametrize(
    ("session", "words"),
    [
        (0, "the integer 0"),
        (7, "an integer"),
        (-1, "a negative integer"),
        (2**53 + 1, "a large integer"),
        ("0", "a text of digits"),
        ("", "the empty string"),
        ("Gespräch", "a text beyond ASCII"),
        ("turn one", "a text with spaces"),
        ("x" * 300, "a long text"),
        ("trial", "a plain text"),
    ],
)
def test_a_session_that_moves_on_its_second_turn_is_blamed_by_family(session, words):
    scene = Scene()
    scene.generate([[5, 6]], sessions=[session])
    scene.generate([[5, 7]], sessions=[session], route=lambda _, s: next(x for x in SERVERS if x != home(s)))
    found = scene.judge(STICKY)
    assert (found.status, found.reason) == ("fail", f"a session moved between servers: its id is {words}")


def test_equal_answers_to_equal_prompts_of_two_sessions_do_not_tell_whose_they_are():
    scene = Scene()
    for turn in range(12):
        scene.generate([[5, 6, turn]], sessions=["a"], route=lambda *_: SERVERS[0])
    scene.generate([[5, 6], [5, 6]], sessions=["a", "b"], route=lambda row, _: SERVERS[1 - row])
    assert scene.judge(STICKY).status == "pass"


def test_an_integer_and_its_text():
    scene = Scene()
    for number in range(10):
        scene.generate([[5, 6], [5, 7]], sessions=[number, str(number)])
        assert scene.judge(SAME_SESSION).status == ("pass" if number == 9 else "untestable"), "2^-10 by chance"
    assert scene.judge(STICKY).status == "untestable"  # one turn each
    scene.generate([[6, 6], [6, 7]], sessions=[8, "8"], route=lambda row, _: SERVERS[row])
    assert scene.judge(SAME_SESSION).status == "fail"


def test_all_sessions_on_one_server():
    scene = Scene()
    scene.generate(prompts(40), sessions=SESSIONS, length=1, route=lambda *_: "server-0")
    assert scene.judge(SESSIONS_SPREAD).reason == "sessions of generate() leave a server without any"


@pytest.mark.parametrize(
    ("batch", "kind"), [(prompts(40), "requests"), ([[5, 6]] * 40, "identical requests")], ids=["distinct", "identical"]
)
def test_all_sessionless_traffic_on_one_server(batch, kind):
    scene = Scene()
    scene.generate(batch, length=1, route=lambda *_: "server-1")
    found = scene.judge(SESSIONLESS_SPREAD)
    assert (found.status, found.reason) == ("fail", f"{kind} without a session leave a server without any")
    assert found.numbers["false_alarm_rate"] == 2**-39 + ALPHA


def test_too_few_requests_say_nothing():
    scene = Scene()
    scene.generate(prompts(8), length=1, route=lambda *_: "server-1")
    assert scene.judge(SESSIONLESS_SPREAD).status == "untestable"
    assert false_alarm_rate(32, 2) == 2**-31
    assert false_alarm_rate(1, 2) == 1.0


def test_each_prompts_requests_are_spread_even_if_all_together_are():
    """A hash of the body spreads many prompts over both servers, but sends all samples of a prompt to one."""
    scene = Scene()
    for number in range(2):
        scene.generate([[5, number]] * 40, length=1, route=lambda *_, at=number: SERVERS[at])
    assert scene.judge(SESSIONLESS_SPREAD).reason == "identical requests without a session leave a server without any"
    scene = Scene()
    for number in range(2):
        scene.generate([[5, number]] * 40, length=1)
    assert scene.judge(SESSIONLESS_SPREAD).status == "pass"


@pytest.mark.parametrize(("tinker", "status"), [("policy", "pass"), (None, "untestable")])
def test_samples_through_tinker_are_requests_of_their_own(tinker, status):
    """The samples of one call of the client's sample() count as one request."""
    scene = Scene()
    answers = [[number] for number in range(40)]
    started = scene.pass_time()
    for number, answer in enumerate(answers):
        scene.seen += traces.executed([5, 6], answer, server=SERVERS[number % 2], from_ns=scene.pass_time(), params={})
    about = {"started_ns": started, "ended_ns": scene.pass_time()}
    call = traces.sample([5, 6], answers, **about)
    scene.calls.append(msgspec.structs.replace(call, request=call.request | {"tinker": tinker}))
    assert scene.judge(SESSIONLESS_SPREAD).status == status


@pytest.mark.parametrize(("busy", "status"), [(128, "pass"), (160, "pass"), (230, "fail")])
def test_a_server_that_gets_most_of_many_requests(busy, status):
    """Of 256 requests an uneven but right hash may give one server 160; nine of ten are too many."""
    scene = Scene()
    scene.generate(prompts(256), length=1, route=lambda row, _: SERVERS[row >= busy])
    found = scene.judge(SESSIONLESS_SPREAD)
    assert found.status == status
    if status == "fail":
        assert found.reason == "requests without a session are spread in uneven shares"


def test_the_bounds_of_shares_follow_from_the_stated_skew_and_rate():
    fewest, most = shares(256, 2)
    assert (fewest + most, most / 256) == (256, pytest.approx(0.77, abs=0.01))
    assert power(256, 2) > 0.999 > power(64, 2)
    assert shares(256, 4)[0] > 0
