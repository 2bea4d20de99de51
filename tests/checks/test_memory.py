"""Device memory around sleep: green on the reports of a correct stack's devices, red under each fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.checks.memory import (
    AWAKE_AGAIN,
    BY_TAGS,
    GROWS,
    HELD,
    NO_DEVICE,
    NO_POOL,
    NOT_READ,
    NOT_TAKEN,
    OTHER_TAG,
    RELEASED,
)
from tests import traces
from tests.checks.scene import SERVERS, Scene

POOL = {"weights": 2, "kv_cache": 1024}
"""Memory of each server (MiB)."""
OTHERS = 2304
"""Memory of other processes (MiB)."""
TOTAL = 81920
CHECKS = (RELEASED, BY_TAGS, AWAKE_AGAIN)

Held = Callable[[str, frozenset[str], int], float]
"""(server, awake tags, sleeps so far) → the server's memory on its device (MiB)."""


def right(_server: str, awake: frozenset[str], _sleeps: int) -> float:
    return sum(size for tag, size in POOL.items() if tag in awake)


class Devices(Scene):
    """Every server on one device, or each on its own."""

    def __init__(self, held: Held = right, *, shared: bool = True, pool: dict[str, int] = POOL) -> None:
        super().__init__()
        self.held, self.shared, self.pool = held, shared, pool
        self.awake = frozenset(POOL)
        self.sleeps = 0

    def sleep(self, level: int = 1) -> None:
        self.awake, self.sleeps = frozenset(), self.sleeps + 1
        self.control("sleep", level=level)

    def wake(self, *tags: str) -> None:
        self.awake |= frozenset(tags or POOL)
        self.control("wake_up", tags=[*tags] or None)

    def read(self) -> None:
        held = {server: self.held(server, self.awake, self.sleeps) for server in SERVERS}
        servers = {}
        for server in SERVERS:
            free = TOTAL - OTHERS - (sum(held.values()) if self.shared else held[server])
            about: dict[str, Any] = {"device": "GPU-0" if self.shared else f"GPU of {server}", "pool": self.pool}
            servers[server] = [{"rank": 0, "total": TOTAL, "free": int(free), **about}]
        self.call("device_memory", {}, {"servers": servers})


def cycles(held: Held = right, **about: Any) -> Devices:
    """Two cycles of sleep level 1, and one of level 2 that wakes tag by tag."""
    scene = Devices(held, **about)
    scene.read()
    for _ in range(2):
        scene.sleep(1)
        scene.read()
        scene.wake()
        scene.read()
        scene.sleep(2)
        scene.read()
        scene.wake("weights")
        scene.read()
        scene.wake("kv_cache")
        scene.read()
    return scene


@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_is_given_and_taken(shared):
    scene, devices = cycles(shared=shared), 1 if shared else 2
    for check, readings in ((RELEASED, 4), (BY_TAGS, 2), (AWAKE_AGAIN, 4)):
        found = scene.judge(check)
        assert (found.status, found.facts) == ("pass", readings * devices), found.reason
        assert found.margin.measured == 0
        assert found.margin.bound < min(found.margin.faults.values())


def one_holds(server, awake, sleeps):
    return sum(POOL.values()) if server == SERVERS[1] else right(server, awake, sleeps)


def leaks(server, awake, sleeps):
    return right(server, awake, sleeps) + 0.02 * sum(POOL.values()) * sleeps


FAULTS = [
    ("holds everything", lambda *_: sum(POOL.values()), {RELEASED.name: HELD}),
    ("one server holds", one_holds, {RELEASED.name: HELD}),
    ("holds the cache", lambda s, awake, n: right(s, awake | {"kv_cache"}, n), {RELEASED.name: HELD}),
    ("tags ignored", lambda s, awake, n: right(s, frozenset(POOL) if awake else awake, n), {BY_TAGS.name: OTHER_TAG}),
    ("takes nothing", lambda s, awake, n: 0 if n else right(s, awake, n), {AWAKE_AGAIN.name: NOT_TAKEN}),
    ("leaks a fiftieth", leaks, {AWAKE_AGAIN.name: GROWS}),
]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("held", "reasons"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_each_fault_turns_its_own_check_red(held, reasons, shared):
    scene = cycles(held, shared=shared)
    found = {check.name: scene.judge(check) for check in CHECKS}
    assert {name: finding.reason for name, finding in found.items() if finding.status == "fail"} == reasons
    assert all(finding.status != "untestable" for finding in found.values())


def test_weights_that_are_a_share_of_the_pool_have_to_come_back_too():
    pool = {"weights": 512, "kv_cache": 512}

    def in_time(_server: str, awake: frozenset[str], _sleeps: int) -> float:
        return 512 * len(awake)

    def late(_server: str, awake: frozenset[str], _sleeps: int) -> float:
        return 1024 if awake == pool.keys() else 0

    assert cycles(in_time, pool=pool).judge(BY_TAGS).status == "pass"
    assert cycles(late, pool=pool).judge(BY_TAGS).reason == NOT_TAKEN


def test_what_else_comes_and_goes_on_the_device_is_no_fault_of_sleep():
    """Buffers that the first sleep frees for good, and a trainer's that stay below the bound."""
    buffers = cycles(lambda s, awake, n: right(s, awake, n) + (0 if n else 300))
    trainers = cycles(lambda s, awake, n: right(s, awake, n) + (40 if n else 0))
    for scene in (buffers, trainers):
        assert {check.name: scene.judge(check).status for check in CHECKS} == {c.name: "pass" for c in CHECKS}


def test_a_call_that_failed_changes_no_state():
    scene = cycles()
    scene.control("sleep", error=traces.error("CallFailed"), level=1)
    scene.read()
    assert scene.judge(RELEASED).status == "pass"
    assert scene.judge(AWAKE_AGAIN).facts == 5


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_what_cannot_be_read_is_not_judged(check):
    assert Scene().judge(check).reason == NOT_READ
    assert cycles(pool={}).judge(check).reason == NO_POOL
    never_asleep = Devices()
    never_asleep.read()
    never_asleep.read()
    assert never_asleep.judge(check).reason == NOT_READ
    on_cpu = cycles()
    on_cpu.call("device_memory", {}, {"servers": {server: [{"rank": 0}] for server in SERVERS}})
    assert on_cpu.judge(check).reason == NO_DEVICE
    one_silent = cycles()
    one_silent.call("device_memory", {}, {"servers": {SERVERS[0]: [{"rank": 0, "device": "GPU-0", "pool": POOL}]}})
    assert one_silent.judge(check).reason == NO_DEVICE
