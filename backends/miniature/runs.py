"""The miniature's fully asynchronous trainer: workers make rollouts ahead of it, and it pauses the engines for each sync."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Literal, NamedTuple

from backends.miniature.client import Client
from backends.miniature.generator import Generator
from backends.miniature.staleness import StalenessManager
from harness.contract.messages import (
    GymRequest,
    RolloutGroup,
    StalenessRequest,
    TrainerRunRequest,
    TrainerWants,
    TrajectoryId,
)


class Checkpoint(NamedTuple):
    """The last finished step, and the prompts that its epoch has trained on."""

    step: int
    used: frozenset[str]


class Run:
    """SkyRL documentation, Fully Async Training. Each method is a step that a fault may break."""

    def __init__(self) -> None:
        self.fired = 0
        self.generator: Generator
        self.client: Client
        self.request: TrainerRunRequest
        self._task: asyncio.Task[None] | None = None
        self.checkpoint = Checkpoint(0, frozenset())

    def begin(self, request: TrainerRunRequest, client: Client, generator: Generator) -> None:
        self.request, self.client, self.generator = request, client, generator
        self._wants: asyncio.Queue[TrainerWants] = asyncio.Queue()
        self._go: asyncio.Queue[bool] = asyncio.Queue()
        self.evaluated: list[int] = []
        self._task = asyncio.create_task(self._run())

    async def wants(self, within_s: float) -> TrainerWants:
        try:
            return await asyncio.wait_for(self._wants.get(), within_s)
        except TimeoutError:
            return TrainerWants(what="unknown")

    def goes_on(self, *, fails: bool) -> None:
        self._go.put_nowait(fails)

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def ask(
        self, what: Literal["weights", "training"], step: int, groups: list[RolloutGroup] | None = None
    ) -> None:
        self._tell(what=what, step=step, groups=groups or [])
        if await self._go.get():
            raise RuntimeError(f"the {what} could not be done")

    async def _run(self) -> None:
        ended = None
        try:
            await self.train()
        except Exception as e:  # noqa: BLE001 - whatever ends the run is told to the caller
            ended = f"{type(e).__name__}: {e}"
        self._tell(what="nothing", ended=ended)

    def _tell(self, **what: Any) -> None:
        self._wants.put_nowait(TrainerWants(**what, evaluated=list(self.evaluated)))

    async def train(self) -> None:
        asked = self.request
        steps = len(asked.prompts) // asked.mini_batch_size
        self.step, self.used = (self.checkpoint.step, set(self.checkpoint.used)) if asked.resumes else (0, set())
        await self.ask("weights", self.step)
        if asked.evaluates:
            await self.evaluate()
        while self.step < steps * asked.epochs:
            if self.step % steps == 0:
                self.used = self.of_the_next_epoch()
            await self.train_until(steps * (self.step // steps + 1))

    async def train_until(self, last: int) -> None:
        """One epoch, or the rest of it."""
        asked = self.request
        self.step += 1
        self._staleness = StalenessManager()
        limits = {"mini_batch_size": asked.mini_batch_size, "max_staleness_steps": asked.max_staleness_steps}
        self._staleness.begin(StalenessRequest(max_concurrent=asked.workers, **limits))
        self._data = deque(number for number in range(len(asked.prompts)) if str(number) not in self.used)
        self._buffer: asyncio.Queue[RolloutGroup] = asyncio.Queue()
        workers = [asyncio.create_task(self.work()) for _ in range(asked.workers)]
        try:
            while True:
                groups = [await self.taken(workers) for _ in range(asked.mini_batch_size)]
                await self.ask("training", self.step, groups)
                self.used |= {group.uid for group in groups}
                await self.sync()
                if asked.evaluates:
                    await self.evaluate()
                if asked.saves or asked.resumes:
                    self.checkpoint = Checkpoint(self.step, frozenset(self.used))
                if self.step == last:
                    break
                self.step += 1
                await self._staleness.trained(self.step)
        finally:
            for worker in workers:
                worker.cancel()

    def of_the_next_epoch(self) -> set[str]:
        """The prompts of which an epoch that begins has made use."""
        return set()

    async def evaluate(self) -> None:
        """Answers to the first prompt, logged under the present step."""
        await self.generator.generate(self.rollouts(0))
        self.evaluated.append(self.step)

    async def sync(self) -> None:
        """New weights for engines that are paused."""
        await self.client.everywhere("pause_generation", mode="keep", clear_cache=False)
        try:
            await self.ask("weights", self.step)
        except RuntimeError:
            await self.gives_up()
            raise
        await self.client.everywhere("resume_generation")

    async def gives_up(self) -> None:
        """After a sync that failed: rollouts of others go on."""
        await self.client.everywhere("resume_generation")

    async def taken(self, workers: list[asyncio.Task[None]]) -> RolloutGroup:
        """The next finished group. Raises the error of a worker that failed."""
        waits = asyncio.create_task(self._buffer.get())
        while not waits.done():
            self.failed(workers)
            await asyncio.wait([waits, *(w for w in workers if not w.done())], return_when=asyncio.FIRST_COMPLETED)
        return waits.result()

    def failed(self, workers: list[asyncio.Task[None]]) -> None:
        """Raise the error of a worker that failed."""
        for worker in workers:
            if worker.done():
                worker.result()

    async def work(self) -> None:
        """One group after the other, each once there is room for it."""
        while self._data:
            number = self._data.popleft()
            await self._staleness.acquire()
            begun_at = self.step
            output = await self.generator.generate(self.rollouts(number))
            await self._buffer.put(RolloutGroup(uid=str(number), begun_at=begun_at, responses=output.response_ids))
            await self._staleness.accept()

    def rollouts(self, number: int) -> GymRequest:
        asked = self.request
        return GymRequest(
            prompts=[asked.prompts[number]] * asked.samples,
            env_extras=[asked.env_extras[number]] * asked.samples,
            sampling_params={"max_tokens": asked.max_tokens, "temperature": 0.0},
            trajectory_ids=[TrajectoryId(instance_id=str(number), repetition_id=n) for n in range(asked.samples)],
            max_turns=asked.max_turns,
        )
