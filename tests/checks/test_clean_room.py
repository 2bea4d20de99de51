"""What a scenario begins with: the checkpoint's weights on every server, or nothing that follows says anything."""

from __future__ import annotations

import pytest

from harness.checks.clean_room import CLEAN_ROOM, UNCLEAN
from harness.contract.topology import Topology
from tests.checks.scene import SERVERS, WEIGHTS, Scene

LEFT_BEHIND = {"weight": "00000001:2x2:float32"}


def test_every_server_holds_the_checkpoint():
    found = Scene().judge(CLEAN_ROOM)
    assert (found.status, found.facts) == ("pass", 2)


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
