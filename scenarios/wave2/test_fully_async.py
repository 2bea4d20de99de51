"""Fully asynchronous training: engines make rollouts while the trainer uses others, and syncs change the weights under them."""

from __future__ import annotations

import asyncio
from collections import deque

from fixtures.prompts import Prompts
from harness.checks.capacity import CAPACITY
from harness.checks.continuation import CONTINUATION
from harness.checks.control_plane import FAN_OUT
from harness.checks.history import explained, waited
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.capability import Capability
from harness.contract.messages import PauseMode
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import GREEDY

MINI_BATCH = 4
STALENESS = 1
WORKERS = 6
"""Rollouts at once. SkyRL asks for MINI_BATCH <= WORKERS <= MINI_BATCH * (STALENESS + 1); here two more workers ask."""
STEPS = 4
NEEDS = {Capability.WEIGHT_SYNC, Capability.STALENESS_MANAGER}


class FullyAsync:
    """SkyRL's FullyAsyncRayPPOTrainer in small: workers that generate, and a trainer that syncs version k after step k."""

    def __init__(self, stack: Stack, prompts: Prompts, mode: PauseMode) -> None:
        self._stack, self._mode = stack, mode
        self._data = deque(enumerate(prompts.unique(STEPS * MINI_BATCH)))
        self._buffer: asyncio.Queue[str] = asyncio.Queue()
        self._begun = 0
        self._progress = asyncio.Condition()

    async def run(self) -> None:
        await self._stack.start_staleness_manager(
            max_concurrent=WORKERS, mini_batch_size=MINI_BATCH, max_staleness_steps=STALENESS
        )
        async with asyncio.TaskGroup() as tasks:
            for _ in range(WORKERS + 2):
                tasks.create_task(self._work())
            await self._train()

    async def _work(self) -> None:
        """One rollout after the other, each once there is room for it (_run_generate_for_a_group_loop)."""
        while self._data:
            number, prompt = self._data.popleft()
            rollout = f"rollout-{number}"
            await self._stack.acquire_slot(rollout)
            async with self._progress:
                self._begun += 1
                self._progress.notify_all()
            await self._stack.generate([prompt], label=rollout, max_tokens=40 + 8 * (number % 16), **GREEDY)
            self._buffer.put_nowait(rollout)
            await self._stack.accept_rollout(rollout)

    async def _train(self) -> None:
        """Steps of a trainer that is slower than the workers: each lasts until there is no room for further rollouts."""
        for step in range(1, STEPS + 1):
            mini_batch = [await self._buffer.get() for _ in range(MINI_BATCH)]
            room = min(STEPS, STALENESS + step) * MINI_BATCH
            async with self._progress:
                await self._progress.wait_for(lambda room=room: self._begun >= room)  # type: ignore[misc]
            await self._stack.pause(self._mode)
            await self._stack.sync_weights(step)
            if self._mode == "abort":
                await self._stack.reset_prefix_cache()
            await self._stack.digests()
            await self._stack.resume()
            await self._stack.trained(mini_batch, global_step=step + 1)


@scenario(
    task=5,
    promise="rollouts that a sync interrupts go on under the new version, and none is begun before training has room for it",
    needs={*NEEDS, Capability.PAUSE_ABORT, Capability.RETRY_ABORTED, Capability.RESET_PREFIX_CACHE},
    checks=[CAPACITY, CONTINUATION, explained(waited), EVERY_PARAMETER, ALL_COMPLETE],
    deadline_s=120.0,
)
async def test_rollouts_are_interrupted_for_each_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: pause (abort) → weight sync → resume → retry; SkyRL documentation, Fully Async Training."""
    await FullyAsync(stack, prompts, "abort").run()


@scenario(
    task=5,
    promise="rollouts that a sync freezes are whole, and none is begun before training has room for it",
    needs={*NEEDS, Capability.PAUSE_KEEP},
    checks=[CAPACITY, explained(waited), EVERY_PARAMETER, FAN_OUT, ALL_COMPLETE],
    deadline_s=120.0,
)
async def test_rollouts_are_frozen_for_each_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, Fully Async Training; SkyRL 0.2.0, FullyAsyncRayPPOTrainer.train: "pause generation, sync weights,
    resume". The old version makes a frozen rollout's tokens before a sync; later tokens read old keys and values."""
    await FullyAsync(stack, prompts, "keep").run()
