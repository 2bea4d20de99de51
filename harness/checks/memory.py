"""Sleep releases device memory, and wake_up takes it back: judged from the devices' reports, not from the stack's.

Every bound is a share of the engines' own sleep pool, so it fits any model and any cache size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from harness.checks.base import Check, Evidence, Finding, concluded, passed, request, untestable
from harness.contract.messages import DeviceMemoryResult, WakeUpRequest
from harness.records.recording import Call
from harness.records.verdict import Margin

BOUND = 0.05
"""Share of the pool by which a reading may be off. On an H100, two engines of vLLM 0.23 with 1 GiB of cache each gave back 2052 MiB
and took back the same 2052 MiB. The bound leaves room for other users of a device, such as the trainer's buffers."""
LEAK = 0.02
"""Share of the pool that the weakest seeded leak keeps with each sleep."""
TAGS = frozenset({"weights", "kv_cache"})
UNIT = "share of the sleep pool"

NOT_READ = "device memory was not read awake, then asleep, then in the state that this check is for"
NO_DEVICE = "a server reports no device memory"
NO_POOL = "the workers on a device have no pool of memory that sleep could release"
HELD = "asleep engines hold memory that sleep has to release"
OTHER_TAG = "waking by tags takes back memory of other tags"
NOT_TAKEN = "waking does not take the memory back"
GROWS = "memory in use grows with the number of sleeps"


class Device(msgspec.Struct, frozen=True):
    """One device at one reading, in bytes: memory in use by all processes, and the pools of all its workers, by tag."""

    in_use: int
    pool: dict[str, int]

    @property
    def size(self) -> int:
        """Bytes of all tags."""
        return sum(self.pool.values())


class Reading(msgspec.Struct, frozen=True):
    """One device_memory() call. `awake`: tags that the calls before it left awake. `sleeps`: sleep() calls before it."""

    call: Call
    awake: frozenset[str]
    sleeps: int
    devices: dict[str, Device]


class Cycle(msgspec.Struct, frozen=True):
    """One device around one sleep: at the scenario's first reading awake, at the last one before the sleep, asleep, and now.
    `reading` is the one asleep or a later one before the next sleep."""

    device: str
    reading: Reading
    first: Device
    before: Device
    asleep: Device
    now: Device

    @property
    def given(self) -> int:
        """Bytes that the sleep gave back, or that an earlier sleep gave back and waking did not take."""
        return max(self.first.in_use, self.before.in_use) - self.asleep.in_use

    @property
    def taken(self) -> int:
        """Bytes that waking took since the sleep."""
        return self.now.in_use - self.asleep.in_use

    @property
    def woken(self) -> int:
        """Bytes of the tags that are awake."""
        return sum(size for tag, size in self.before.pool.items() if tag in self.reading.awake)

    def share(self, size: float) -> float:
        """These bytes as a share of the pool."""
        return size / self.before.size

    @property
    def lacking(self) -> float:
        """Share of the pool that waking had to take and did not. Waking cannot take bytes that the sleep kept."""
        return self.share(min(self.woken, self.given) - self.taken)

    @property
    def cache(self) -> float:
        """Share of the pool that is KV cache."""
        return self.share(self.before.pool.get("kv_cache", 0))

    @property
    def shown(self) -> dict[str, object]:
        return {
            "call": self.reading.call.id,
            "device": self.device,
            "awake": sorted(self.reading.awake),
            "pool": self.before.pool,
            "in use": {
                "at first": self.first.in_use,
                "before the sleep": self.before.in_use,
                "asleep": self.asleep.in_use,
                "now": self.now.in_use,
            },
        }


def _devices(call: Call, servers: Iterable[str]) -> dict[str, Device] | None:
    """Each device once, however many workers share it. None if a server does not report its devices."""
    reported = msgspec.convert(call.result, DeviceMemoryResult).servers
    found: dict[str, Device] = {}
    for server in servers:
        workers = reported.get(server) or []
        if not workers or any(worker.device is None for worker in workers):
            return None
        for worker in workers:
            known = found.get(str(worker.device), Device(0, {}))
            pool = {tag: known.pool.get(tag, 0) + worker.pool.get(tag, 0) for tag in known.pool | worker.pool}
            found[str(worker.device)] = Device(max(known.in_use, worker.total - worker.free), pool)
    return found


def _readings(evidence: Evidence) -> Iterator[tuple[Call, frozenset[str], int]]:
    """Each reading with the tags that are awake and the number of sleeps before it."""
    awake, sleeps = TAGS, 0
    for call in evidence.calls():
        if call.error is not None:
            continue
        match call.method:
            case "sleep":
                awake, sleeps = frozenset(), sleeps + 1
            case "wake_up":
                tags = request(call, WakeUpRequest).tags
                awake |= TAGS if tags is None else frozenset(tags)
            case "device_memory":
                yield call, awake, sleeps
            case _:
                pass


def _cycles(readings: Iterable[Reading]) -> Iterator[Cycle]:
    """Every reading that follows one awake and one asleep, device by device."""
    first: Reading | None = None
    before: Reading | None = None
    asleep: Reading | None = None
    awake: Reading | None = None
    for reading in readings:
        if not reading.awake:
            asleep, before = reading, awake
        if first and before and asleep and asleep.sleeps == reading.sleeps:
            for name, now in reading.devices.items():
                yield Cycle(name, reading, first.devices[name], before.devices[name], asleep.devices[name], now)
        if reading.awake == TAGS:
            first, awake = first or reading, reading


def _judge(
    evidence: Evidence,
    state: Callable[[frozenset[str]], bool],
    shares: Callable[[Cycle], dict[str, float]],
    faults: Callable[[Cycle], dict[str, float]],
) -> Finding:
    """Judge every cycle whose awake tags `state` accepts. `shares`: reason → wrong share of the pool. `faults`: seeded fault → the
    share that it would make wrong."""
    readings = []
    unread: list[Finding] = []
    for call, awake, sleeps in _readings(evidence):
        devices = _devices(call, evidence.header.servers)
        if devices is not None and all(device.size for device in devices.values()):
            readings.append(Reading(call, awake, sleeps, devices))
        else:
            why = NO_DEVICE if devices is None else NO_POOL
            unread.append(untestable(why, evidence=[{"call": call.id, "result": call.result}]))
    cycles = [cycle for cycle in _cycles(readings) if state(cycle.reading.awake)]
    measured = [(share, reason, cycle) for cycle in cycles for reason, share in shares(cycle).items()]
    wrong = [(reason, cycle.shown) for share, reason, cycle in measured if share > BOUND]
    if wrong:
        return concluded(len(cycles), wrong)
    if unread or not cycles:
        return next(iter(unread), untestable(NOT_READ))
    margin = Margin(
        unit=UNIT,
        measured=max(0.0, *(share for share, _, _ in measured)),
        bound=BOUND,
        faults=_hardest_to_see(cycles, faults),
    )
    return passed(
        len(cycles),
        margin=margin,
        pool_bytes=min(cycle.before.size for cycle in cycles),
        given_bytes=min(cycle.given for cycle in cycles),
        taken_bytes=min(cycle.taken for cycle in cycles),
        sleeps=max(cycle.reading.sleeps for cycle in cycles),
        devices=len({cycle.device for cycle in cycles}),
    )


def _hardest_to_see(cycles: list[Cycle], faults: Callable[[Cycle], dict[str, float]]) -> dict[str, float]:
    """Fault → its share on the device that shows it least, in the cycle that shows it most there."""
    seeded: dict[str, dict[str, float]] = {}
    for cycle in cycles:
        for fault, share in faults(cycle).items():
            by_device = seeded.setdefault(fault, {})
            by_device[cycle.device] = max(share, by_device.get(cycle.device, 0.0))
    return {fault: min(by_device.values()) for fault, by_device in seeded.items()}


def _judge_released(evidence: Evidence) -> Finding:
    return _judge(
        evidence,
        lambda awake: not awake,
        lambda cycle: {HELD: cycle.share(cycle.before.size - cycle.given)},
        lambda cycle: {"nothing is released": 1.0, "the cache is not released": cycle.cache},
    )


RELEASED = Check(
    name="memory.released",
    fault="sleep() is accepted and the engines keep their memory, or a part of it",
    next_step="compare the memory of each worker before and after sleep(): what stays is held by a process that "
    "was not asked, or by a reference",
    source='vLLM documentation, Sleep Mode: "release most GPU memory used by a model, including model weights and KV cache"; '
    "SkyRL #1014, task 1",
    judge=_judge_released,
)


def _judge_by_tags(evidence: Evidence) -> Finding:
    return _judge(
        evidence,
        lambda awake: bool(awake) and awake != TAGS,
        lambda cycle: {OTHER_TAG: cycle.share(cycle.taken - cycle.woken), NOT_TAKEN: cycle.lacking},
        lambda cycle: {"the cache comes with the weights": cycle.cache},
    )


BY_TAGS = Check(
    name="memory.by_tags",
    fault="waking the weights for a sync takes the cache back as well, and the trainer runs out of memory",
    next_step="compare what each tag of wake_up() gave back, worker by worker, in the evidence",
    source="vLLM documentation, Sleep Mode, wake_up(tags); SkyRL #1014, task 1",
    judge=_judge_by_tags,
)


def _judge_awake_again(evidence: Evidence) -> Finding:
    return _judge(
        evidence,
        lambda awake: awake == TAGS,
        lambda cycle: {NOT_TAKEN: cycle.lacking, GROWS: cycle.share(cycle.now.in_use - cycle.first.in_use)},
        lambda cycle: {"the cache is not taken back": cycle.cache, "each sleep leaks": LEAK * cycle.reading.sleeps},
    )


AWAKE_AGAIN = Check(
    name="memory.awake_again",
    fault="wake_up() is accepted and takes nothing back, or each sleep leaks memory until the device is full",
    next_step="look at the last wake_up(): which tags and which servers it reached",
    source="vLLM documentation, Sleep Mode; SkyRL #1014, task 1",
    judge=_judge_awake_again,
)
