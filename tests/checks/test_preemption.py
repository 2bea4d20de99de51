"""Requests that a step of their engine leaves out."""

import msgspec

from harness.checks.pausing import PAUSED, UNINTERRUPTED
from harness.checks.preemption import NONE_PREEMPTED, PREEMPTED, SAME_AS_WITH_ROOM
from tests.checks.scene import SERVERS, STEP, Scene

PROMPTS = [[10, 11], [20, 21], [30, 31], [40, 41]]
"""Two for each server, by turns."""
LENGTH = 12


class Squeezed(Scene):
    """Four prompts with room for all, then at once: the later two lose their place after five tokens, for ten steps."""

    def __init__(self, *, squeezed=SERVERS):
        super().__init__()
        self.generate(PROMPTS, length=LENGTH, label=UNINTERRUPTED)
        before = len(self.seen)
        self.again = self.generate(PROMPTS, length=LENGTH, label=PAUSED)
        arrived = [one for one in self.seen[before:] if one.kind == "request"]
        self.last = {one.data["request_id"] for one in arrived[2:] if one.server in squeezed}
        first = min(one.at_ns for one in self.seen[before:] if one.kind == "step")
        for at, one in enumerate(self.seen[before:], start=before):
            ids = {one.data["request_id"]} if "request_id" in one.data else set(one.data.get("tokens", ()))
            if one.kind != "request" and ids & self.last and one.at_ns > first + 4 * STEP:
                self.seen[at] = msgspec.structs.replace(one, at_ns=one.at_ns + 10 * STEP)
        self.pass_time(20)


def test_requests_that_lose_their_place_and_get_it_back():
    scene = Squeezed()
    found = scene.judge(PREEMPTED)
    assert (found.status, found.numbers["preempted"]) == ("pass", 2)
    assert scene.judge(SAME_AS_WITH_ROOM).status == "pass"


def test_a_server_with_room_for_all_shows_nothing():
    found = Squeezed(squeezed=SERVERS[:1]).judge(PREEMPTED)
    assert (found.status, found.reason) == ("untestable", NONE_PREEMPTED)
    found = Squeezed(squeezed=()).judge(SAME_AS_WITH_ROOM)
    assert (found.status, found.reason) == ("untestable", NONE_PREEMPTED)


def test_a_later_request_that_begins_first():
    scene = Squeezed()
    begun = next(one for one in scene.seen if one.kind == "step" and scene.last & set(one.data["tokens"]))
    late = scene.generate([[50, 51], [60, 61]], length=2)
    moved = {one.data.get("request_id") or next(iter(one.data["tokens"])) for one in scene.seen[-8:]}
    for at, one in enumerate(scene.seen):
        if (one.data.get("request_id") or next(iter(one.data.get("tokens", ())), None)) in moved:
            scene.seen[at] = msgspec.structs.replace(one, at_ns=begun.at_ns + 6 * STEP + at * STEP // 100)
    scene.change(late, started_ns=begun.at_ns)
    found = scene.judge(PREEMPTED)
    assert (found.status, found.reason) == ("fail", "a request that came later began while a preempted one waited")


def test_another_answer_after_the_loss():
    scene = Squeezed()
    rows = [list(row) for row in scene.again.result["response_ids"]]
    rows[3][7] += 1
    scene.change(scene.again, result=scene.again.result | {"response_ids": rows})
    assert scene.judge(SAME_AS_WITH_ROOM).status == "fail"
