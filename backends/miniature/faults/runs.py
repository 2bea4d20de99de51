"""Runs of a fully asynchronous trainer that hang, sync under running engines, or use rollouts twice."""

from __future__ import annotations

import asyncio

from backends.miniature.faults.registry import seeded
from backends.miniature.runs import Run
from harness.contract.messages import RolloutGroup


@seeded("trainer_run", "waits_for_a_failed_worker", caught_by=["trainer_run"])
class WaitsForAFailedWorker(Run):
    """The error of a rollout ends its worker, and nobody looks at it: the trainer waits for the rollout."""

    def failed(self, workers: list[asyncio.Task[None]]) -> None:
        self.fired += any(worker.done() and worker.exception() is not None for worker in workers)


@seeded("trainer_run", "without_a_pause", caught_by=["trainer_run"])
class SyncsWithoutAPause(Run):
    """Weights change while engines generate."""

    async def sync(self) -> None:
        self.fired += 1
        await self.ask("weights", self.step)


@seeded("trainer_run", "left_paused", caught_by=["trainer_run"])
class LeftPaused(Run):
    """A sync fails, and nobody resumes the engines that it paused."""

    async def gives_up(self) -> None:
        self.fired += 1


@seeded("trainer_run", "one_rollout_twice", caught_by=["trainer_run"])
class OneRolloutTwice(Run):
    """A step trains on a rollout of the step before."""

    _before: RolloutGroup | None = None

    async def taken(self, workers: list[asyncio.Task[None]]) -> RolloutGroup:
        group = await super().taken(workers)
        if self._before is not None and self.step > 1:
            self.fired += 1
            return self._before
        self._before = group
        return group
