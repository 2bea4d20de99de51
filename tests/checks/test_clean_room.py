"""What a scenario begins with: the checkpoint's weights on every server, or nothing that follows says anything."""

from __future__ import annotations

import pytest

from harness.checks.clean_room import CLEAN_ROOM, UNCLEAN
from harness.contract.topology import Topology
from tests.checks.scene import SERVERS, WEIGHTS, Scene

LEFT_BEHIND = {"weight": "00000001:2x2:float32"}


def test_every_server_holds_the_checkpoint():
    found = Scene().judge(CLEAN_ROOM)
    assert (found.status, found.facts) == ("pass", 3), "a digest of each server, and the resume"


@pytest.mark.parametrize(
    "held",
    [
        dict.fromkeys(SERVERS, LEFT_BEHIND),
        {SERVERS[0]: WEIGHTS, SERVERS[1]: LEFT_BEHIND},
        {SERVERS[0]: WEIGHTS, SERVERS[1]: {}},
        {SERVERS[0]: WEIGHTS},
    ],
    ids=["left behind", "on one server", "nothing", "no server"],
)
def test_other_weights_are_red_and_say_where(held):
    scene = Scene()
    scene.begin_on(held)
    found = scene.judge(CLEAN_ROOM)
    assert (found.status, found.reason, found.blame) == ("fail", UNCLEAN, "stack")
    assert found.evidence


def test_a_moment_that_was_missed_is_judged_by_its_last_clean_room():
    scene = Scene()
    scene.begin_on(dict.fromkeys(SERVERS, LEFT_BEHIND))
    scene.begin_on(dict.fromkeys(SERVERS, WEIGHTS))
    assert scene.judge(CLEAN_ROOM).status == "pass"


def test_what_was_not_read_is_untestable_and_a_pipeline_is_not_known():
    scene = Scene()
    scene.calls = [call for call in scene.calls if call.method != "digests"]
    assert scene.judge(CLEAN_ROOM).status == "untestable"
    assert Scene().judge(CLEAN_ROOM, topology=Topology(pipeline_parallel=2)) is None


@pytest.mark.parametrize("method", ["resume", "wake_up", "reset_prefix_cache"])
def test_a_clean_room_that_misses_a_server_is_red(method):
    scene = Scene()
    scene.control(method, phase="clean_room")
    assert scene.judge(CLEAN_ROOM).status == "pass"
    scene.control(method, SERVERS[:1], phase="clean_room")
    found = scene.judge(CLEAN_ROOM)
    assert found.reason == f"{method}() of the clean room did not reach every server"
    assert found.evidence[0]["servers"] == [SERVERS[1]]


def test_a_reset_of_the_clean_room_that_reaches_nobody_is_red_and_a_resume_may_stay_in_the_client():
    for method, status in (("resume", "pass"), ("reset_prefix_cache", "fail")):
        scene = Scene()
        scene.control(method, (), phase="clean_room")
        assert scene.judge(CLEAN_ROOM).status == status


def test_other_weights_do_not_hide_a_server_that_was_not_reached():
    scene = Scene()
    scene.begin_on(dict.fromkeys(SERVERS, LEFT_BEHIND))
    scene.control("reset_prefix_cache", SERVERS[:1], phase="clean_room")
    assert len(scene.judge(CLEAN_ROOM).reasons) == 2
