"""The miniature's staleness manager: it lets only as many rollouts begin as training can use before they are too stale."""

from __future__ import annotations

import asyncio

from harness.contract.messages import StalenessRequest


class StalenessManager:
    """SkyRL documentation, Fully Async Training: all rollouts begun so far fit into the steps up to `max_staleness_steps` after the
    current one."""

    def __init__(self) -> None:
        self.fired = 0
        self.begin(StalenessRequest(max_concurrent=1, mini_batch_size=1, max_staleness_steps=0))

    def begin(self, limits: StalenessRequest) -> None:
        """Start at global step 1 with these limits."""
        self.limits = limits
        self.global_step = 1
        self.accepted = self.running = 0
        self._change = asyncio.Condition()

    def room(self) -> int:
        """Number of rollouts that may begin now."""
        ahead = (self.global_step + self.limits.max_staleness_steps) * self.limits.mini_batch_size
        return min(ahead - self.accepted - self.running, self.limits.max_concurrent - self.running)

    async def acquire(self) -> None:
        async with self._change:
            await self._change.wait_for(lambda: self.room() > 0)
            self.running += 1

    async def accept(self) -> None:
        async with self._change:
            self.running -= 1
            self.accepted += 1
            self._change.notify_all()

    async def trained(self, global_step: int) -> None:
        async with self._change:
            self.global_step = global_step
            self._change.notify_all()
