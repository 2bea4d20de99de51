"""Staleness managers that let rollouts begin which will be too old, and caches that outlive their weights."""

from __future__ import annotations

from backends.miniature.engine import Engine
from backends.miniature.faults.registry import seeded
from backends.miniature.staleness import StalenessManager


@seeded("staleness_exceeded", "one_slot_too_many", caught_by=["staleness.capacity"])
class OneSlotTooMany(StalenessManager):
    """One rollout more than there is room for may begin."""

    def room(self) -> int:
        right = super().room()
        busy = self.running >= self.limits.max_concurrent
        self.fired += right == 0 and not busy
        return right if busy else right + 1


@seeded("staleness_exceeded", "accepted_forgotten", caught_by=["staleness.capacity"])
class AcceptedForgotten(StalenessManager):
    """Rollouts that came back do not count any more, used or not."""

    async def accept(self) -> None:
        await super().accept()
        self.fired += 1
        self.accepted -= 1


@seeded("staleness_exceeded", "workers", caught_by=["staleness.capacity"])
class WorkersUnlimited(StalenessManager):
    """The number of rollouts at once has no limit."""

    def room(self) -> int:
        ahead = (self.global_step + self.limits.max_staleness_steps) * self.limits.mini_batch_size
        self.fired += super().room() <= 0 < ahead - self.accepted - self.running
        return ahead - self.accepted - self.running


@seeded("cache_outlives_weights", "running_requests", caught_by=["whole_version"])
class RunningRequestsKeepTheirCache(Engine):
    """reset_prefix_cache(reset_running_requests=True) leaves what running requests have computed."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.fired += reset_running_requests and bool(self.running)
        await super().reset_prefix_cache(reset_running_requests=False)
