"""A heavy session and a light one, on a server each."""

from __future__ import annotations

import pytest

from harness.checks.starvation import HEAVY, LIGHT, NO_LIGHT, NOT_STARVED, OVER, STARVED
from tests.checks.scene import SERVERS, STEP, Scene, without_observations


def scene(*, asked: int, begun: int, at: str = SERVERS[1]) -> Scene:
    """Forty heavy rows of 20 steps; a light one is asked for and begun that many steps after them."""
    made = Scene()
    began_ns = made.now
    made.generate([[5, 6 + n] for n in range(40)], length=20, label=HEAVY, route=lambda *_: SERVERS[0])
    made.now = began_ns + (begun - 2) * STEP
    light = made.generate([[7, 7]], length=1, label=LIGHT, route=lambda *_: at)
    made.change(light, started_ns=began_ns + asked * STEP)
    return made


@pytest.mark.parametrize(("begun", "status", "reason"), [(10, "pass", ""), (40, "fail", STARVED)])
def test_a_light_request_that_waits_until_the_heavy_load_has_ended(begun, status, reason):
    found = scene(asked=5, begun=begun).judge(NOT_STARVED)
    assert (found.status, found.reason or "") == (status, reason)


def test_a_light_request_on_the_heavy_server_or_after_the_load_judges_nothing():
    assert scene(asked=5, begun=10, at=SERVERS[0]).judge(NOT_STARVED).reason == NO_LIGHT
    assert scene(asked=39, begun=40).judge(NOT_STARVED).reason == OVER
    assert without_observations(scene(asked=5, begun=10)).judge(NOT_STARVED).status == "untestable"
