"""Rollouts that a staleness manager lets begin, in time or too early, and their use in training."""

from __future__ import annotations

import pytest

from harness.checks.capacity import CAPACITY, LOST, NEVER_FULL, NO_MANAGER, TOO_EARLY, TOO_MANY, TWICE
from tests.checks.scene import Scene

LIMITS = {"max_concurrent": 3, "mini_batch_size": 2, "max_staleness_steps": 1}


class Loop(Scene):
    """Four rollouts for two steps; `extra` further rollouts begin before the first step is done."""

    def __init__(self, *, extra: int = 0, waits: bool = True, used: list[str] | None = None, limits=LIMITS) -> None:
        super().__init__()
        self.call("start_staleness_manager", limits)
        names = [f"rollout-{n}" for n in range(6 if waits else 4)]
        for name in names[: 4 + extra]:
            self.slot(name)
            self.call("accept_rollout", {"rollout": name})
        asked = self.pass_time()
        self.trained(2, used or names[:2])
        for name in names[4 + extra :]:
            self.slot(name, asked)
            self.call("accept_rollout", {"rollout": name})
        self.trained(3, names[2:4])
        self.trained(4, names[4:])

    def slot(self, name: str, asked_ns: int | None = None) -> None:
        slot = self.call("acquire_slot", {"rollout": name})
        if asked_ns is not None:
            self.change(slot, started_ns=asked_ns)

    def trained(self, step: int, used: list[str]) -> None:
        self.call("trained", {"global_step": step, "consumed": used})


def test_rollouts_in_time_pass_and_their_age_is_shown():
    found = Loop().judge(CAPACITY)
    assert (found.status, found.numbers["oldest_steps"], found.numbers["older_than_meant"]) == ("pass", 1, 0)
    assert found.numbers["waited"] == 2


def test_a_rollout_that_training_has_no_room_for():
    assert Loop(extra=1).judge(CAPACITY).reason == TOO_EARLY


def test_more_rollouts_at_once_than_workers():
    scene = Scene()
    scene.call("start_staleness_manager", {**LIMITS, "max_concurrent": 1})
    for name in ("a", "b"):
        scene.call("acquire_slot", {"rollout": name})
    assert scene.judge(CAPACITY).reason == TOO_MANY


@pytest.mark.parametrize(
    ("used", "why"),
    [(["rollout-0"], LOST), (["rollout-0", "rollout-1", "rollout-2"], TWICE), (["rollout-0", "other"], LOST)],
)
def test_a_rollout_that_is_lost_or_used_twice(used, why):
    assert why in Loop(used=used).judge(CAPACITY).reason


def test_what_was_not_put_to_the_test():
    assert Loop(waits=False).judge(CAPACITY).reason == NEVER_FULL
    assert Scene().judge(CAPACITY).reason == NO_MANAGER
