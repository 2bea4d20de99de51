"""Sleep that keeps device memory or runs on, and waking that takes the wrong memory. Answers stay right."""

from __future__ import annotations

from backends.miniature.engine import TAGS, Engine
from backends.miniature.faults.registry import ONE, seeded
from backends.miniature.interface import Interface
from harness.contract.faults import Fact


class _Mapped(Engine):
    """Has the wrong tags on its device."""

    def mapped(self) -> frozenset[str]:
        right = super().mapped()
        wrong = self.wrongly_mapped(right)
        self.fired += wrong != right
        return wrong

    def wrongly_mapped(self, right: frozenset[str]) -> frozenset[str]:
        raise NotImplementedError


@seeded("sleep_keeps_memory", "every_server", caught_by=["memory.released"])
class SleepKeepsAll(_Mapped):
    """sleep() reports success and releases nothing."""

    def wrongly_mapped(self, right: frozenset[str]) -> frozenset[str]:
        return TAGS


@seeded("sleep_keeps_memory", "one_server", caught_by=["memory.released"])
class OneKeepsAll(_Mapped):
    """sleep() reports success, but one of the servers on a device releases nothing."""

    def wrongly_mapped(self, right: frozenset[str]) -> frozenset[str]:
        return TAGS if self.name == ONE else right


@seeded("sleep_keeps_memory", "cache", caught_by=["memory.released"])
class SleepKeepsCache(_Mapped):
    """sleep() releases the weights and keeps the KV cache."""

    def wrongly_mapped(self, right: frozenset[str]) -> frozenset[str]:
        return right | {"kv_cache"}


@seeded("wake_up_ignores_tags", caught_by=["memory.by_tags"])
class TagsIgnored(_Mapped):
    """Waking the weights also takes the memory of the KV cache."""

    def wrongly_mapped(self, right: frozenset[str]) -> frozenset[str]:
        return TAGS if right else right


@seeded("cut_by_sleep", "as_whole", caught_by=["cut_by_sleep"])
class CutAsWhole(Engine):
    """Requests that sleep() cuts short come back with the finish reason of whole answers."""

    async def sleep(self, *, level: int, tags: list[str] | None = None) -> None:
        for request in [*self.running, *self.waiting]:
            self.fired += 1
            request.reason = "length"
            self.finish(request)
        self.running, self.waiting = [], []
        await super().sleep(level=level, tags=tags)


class _RunsOn(Engine):
    """Runs requests while something sleeps."""

    def may_run(self) -> bool:
        goes_on = not super().may_run() and self.runs_on()
        self.fired += goes_on and bool(self.waiting)
        return goes_on or super().may_run()

    def runs_on(self) -> bool:
        raise NotImplementedError


@seeded("drops_tags_of_sleep", caught_by=["echo"])
class AllSleeps(Interface):
    """sleep(tags) puts everything to sleep, whatever the tags name."""

    async def sleep(self, level: int = 2, tags: list[str] | None = None) -> None:
        self.fired += tags is not None
        await super().sleep(level, None)


@seeded("runs_while_asleep", "in_part", caught_by=["still_while_asleep"], corrupts=Fact.ANSWERS)
class RunsWithoutCache(_RunsOn):
    """Waking the weights starts the scheduler again, though the KV cache still sleeps (vLLM #44395)."""

    def runs_on(self) -> bool:
        return self.asleep == {"kv_cache"}


@seeded("runs_while_asleep", "one_server", caught_by=["still_while_asleep"], corrupts=Fact.ANSWERS)
class OneRunsAsleep(_RunsOn):
    """One server runs what comes while it sleeps."""

    def runs_on(self) -> bool:
        return self.name == ONE and self.asleep == TAGS


@seeded("wake_up_takes_nothing", caught_by=["memory.awake_again"])
class NothingTakenBack(_Mapped):
    """wake_up() reports success, but takes no memory until the next sync."""

    _released = False

    async def sleep(self, *, level: int, tags: list[str] | None = None) -> None:
        self._released = True
        await super().sleep(level=level, tags=tags)

    async def finish_weight_update(self) -> None:
        self._released = False
        await super().finish_weight_update()

    def wrongly_mapped(self, right: frozenset[str]) -> frozenset[str]:
        return frozenset() if self._released else right


@seeded("sleep_leaks", "a_little", caught_by=["memory.awake_again"])
class SleepLeaks(Engine):
    """Each sleep leaves a fiftieth of the pool in use for good."""

    _sleeps = 0

    async def sleep(self, *, level: int, tags: list[str] | None = None) -> None:
        self._sleeps += 1
        await super().sleep(level=level, tags=tags)

    def in_use(self, rank: int) -> int:
        self.fired += self._sleeps > 0
        return super().in_use(rank) + self._sleeps * sum(self.pool(rank).values()) // 50
