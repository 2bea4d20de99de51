"""Ways in that hold requests back, engines that take too many, and queues that forget that a caller has gone."""

from __future__ import annotations

import asyncio
from typing import Any

from backends.miniature.client import Client
from backends.miniature.engine import Engine, Request
from backends.miniature.faults.registry import seeded
from harness.contract.messages import ENGINE_PLACES

FEW = 4


@seeded("few_at_a_time", "completion", caught_by=["who_waits", "pace"])
class FewCompletions(Client):
    """The client sends the prompts of OpenAI bodies four at a time, whatever is free."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "few"}

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        self.few = getattr(self, "few", None) or asyncio.Semaphore(FEW)
        self.fired += self.few.locked()
        async with self.few:
            return await super()._answered(body, prompts, kind)


@seeded("few_at_a_time", "more_than_places", caught_by=["who_waits"])
class MoreThanPlaces(Engine):
    """An engine runs all that it has."""

    def step(self) -> None:
        self.places = 2**20
        self.fired += len(self.running) > ENGINE_PLACES
        super().step()


@seeded("cancellation", "runs_from_the_queue", caught_by=["cancellation"])
class RunsFromTheQueue(Engine):
    """An engine forgets a request whose caller has gone only while it runs: one that waits is computed later."""

    def drop(self, request: Request) -> None:
        if request in self.waiting or request in self.held:
            self.fired += 1
            return
        super().drop(request)
