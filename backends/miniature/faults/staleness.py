"""Staleness managers that let rollouts begin that will be too stale, and caches that outlive their weights."""

from __future__ import annotations

from backends.miniature.engine import Engine
from backends.miniature.faults.registry import ONE, RECOMPUTED, seeded
from backends.miniature.staleness import StalenessManager
from harness.contract.faults import Fact
from harness.contract.messages import PauseMode


@seeded("staleness_exceeded", "one_slot_too_many", caught_by=["staleness.capacity"])
class OneSlotTooMany(StalenessManager):
    """One rollout too many may begin."""

    def room(self) -> int:
        right = super().room()
        busy = self.running >= self.limits.max_concurrent
        self.fired += right == 0 and not busy
        return right if busy else right + 1


@seeded("staleness_exceeded", "accepted_forgotten", caught_by=["staleness.capacity"])
class AcceptedForgotten(StalenessManager):
    """Accepted rollouts no longer count, used or not."""

    async def accept(self) -> None:
        await super().accept()
        self.fired += 1
        self.accepted -= 1


@seeded("staleness_exceeded", "workers", caught_by=["staleness.capacity"])
class WorkersUnlimited(StalenessManager):
    """The number of concurrent rollouts has no limit."""

    def room(self) -> int:
        ahead = (self.global_step + self.limits.max_staleness_steps) * self.limits.mini_batch_size
        self.fired += super().room() <= 0 < ahead - self.accepted - self.running
        return ahead - self.accepted - self.running


@seeded("cache_outlives_weights", "running_requests", caught_by=["weight_history"], changes=RECOMPUTED)
class RunningRequestsKeepTheirCache(Engine):
    """reset_prefix_cache(reset_running_requests=True) keeps the cache of running requests."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.fired += reset_running_requests and bool(self.running)
        await super().reset_prefix_cache(reset_running_requests=False)


@seeded("cache_outlives_weights", "cleared_freeze", caught_by=["weight_history"], corrupts=Fact.POLICY)
class ClearedFreezeKeepsItsCache(Engine):
    """pause(keep, clear_cache=True) keeps the cache of frozen requests and the prefix cache."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        self.fired += clear_cache and mode == "keep" and bool(self.running)
        await super().pause_generation(mode=mode, clear_cache=clear_cache and mode != "keep")


@seeded("freeze_loses_cache", "every_server", caught_by=["weight_history"])
class FrozenAreReadAnew(Engine):
    """Requests that are frozen during a sync are prefilled again, though they should keep their cache."""

    _resumed_at = 0

    async def resume_generation(self) -> None:
        if self.frozen and self.syncs != self._resumed_at:
            self.fired += bool(self.running)
            self._resumed_at = self.syncs
            self.read_anew()
        await super().resume_generation()

    def read_anew(self) -> None:
        self.recompute()


@seeded("freeze_loses_cache", "one_server", caught_by=["weight_history"])
class FrozenOfOneAreReadAnew(FrozenAreReadAnew):
    """At one server, requests that are frozen during a sync are prefilled again, though they should keep their cache."""

    def read_anew(self) -> None:
        if self.name == ONE:
            super().read_anew()


@seeded("frozen_keep_old_weights", "every_server", caught_by=["weight_history"])
class FrozenKeepOldWeights(Engine):
    """Requests that are frozen during a sync go on with the old weights."""

    def feed(self) -> None:
        """Feed each request into the network that it began with. One that is prefilled again begins again."""
        began = [request for request in self.running if request.node is not None]
        ours = self.running
        for request in began:
            assert request.node is not None
            old = request.node.network
            self.fired += old is not self.network(request.adapter)
            request.node = old.feed(request.node, request.tokens[-1])
            old.look([request.node])
        self.running = [request for request in ours if request not in began]
        super().feed()
        self.running = ours
