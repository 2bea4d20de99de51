"""Runs of a fully asynchronous trainer that hang, sync under running engines, or use rollouts twice."""

from __future__ import annotations

import asyncio

from backends.miniature.faults.registry import seeded
from backends.miniature.runs import Checkpoint, Run
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


@seeded("trainer_run", "resumes_from_scratch", caught_by=["trainer_resumes"])
class ResumesFromScratch(Run):
    """A resumed run does not read its checkpoint."""

    async def train(self) -> None:
        if self.request.resumes:
            self.fired += 1
            self.checkpoint = Checkpoint(0, frozenset())
        await super().train()


@seeded("trainer_run", "trains_again_after_a_resume", caught_by=["trainer_resumes"])
class TrainsAgainAfterAResume(Run):
    """A checkpoint lacks the prompts that its epoch has trained on."""

    async def train(self) -> None:
        if self.request.resumes:
            self.fired += 1
            self.checkpoint = self.checkpoint._replace(used=frozenset())
        await super().train()


@seeded("trainer_run", "an_epoch_is_over_for_ever", caught_by=["trainer_resumes"])
class AnEpochIsOverForEver(Run):
    """A run that is resumed after an epoch takes the next one's prompts for used: its workers make no rollout."""

    def of_the_next_epoch(self) -> set[str]:
        if not self.request.resumes or not self.used:
            return super().of_the_next_epoch()
        self.fired += 1
        return self.used


@seeded("trainer_run", "evaluates_a_step_late", caught_by=["trainer_evaluations"])
class EvaluatesAStepLate(Run):
    """An evaluation's metrics are logged with those of the next step, the last ones never."""

    _kept: bool = False

    async def evaluate(self) -> None:
        await super().evaluate()
        if self.step:
            self.fired += 1
            del self.evaluated[-1]
            self.evaluated += [self.step] * self._kept
            self._kept = True
