"""One-step off-policy training: the generator is one batch ahead of the trainer, and weights move between two generations."""

from __future__ import annotations

import asyncio

from fixtures.prompts import Prompts
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.schedule import ACKNOWLEDGED, OVERLAP, STAGES, VERSIONS
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.training import Rollouts, roll_out, train

STEPS = 4


@scenario(
    task=4,
    promise="generation N+1 overlaps training N, syncs lie between generations, and each rollout is one step old",
    needs={Capability.WEIGHT_SYNC, Capability.TRAINER, Capability.RESET_PREFIX_CACHE},
    checks=[OVERLAP, STAGES, ACKNOWLEDGED, VERSIONS, EVERY_PARAMETER, ALL_COMPLETE],
    deadline_s=240.0,
)
async def test_one_step_off_policy(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 4, and SkyRL's example of asynchronous training: a queue of one batch between generator and trainer, and
    two events, generation_ack and sync_finished, around each sync."""
    batch = prompts.unique(4)
    ready: asyncio.Queue[Rollouts] = asyncio.Queue(maxsize=1)
    generation_ack, sync_finished = asyncio.Event(), asyncio.Event()

    async def generate() -> None:
        for step in range(STEPS):
            await ready.put(await roll_out(stack, batch, step=step))
            if step > 0:
                stack.mark("generation_ack", step=step - 1)
                generation_ack.set()
                await sync_finished.wait()
                sync_finished.clear()

    async def learn() -> None:
        version = 0
        for step in range(STEPS):
            rollouts = await ready.get()
            version = (await train(stack, rollouts, base=version, step=step)).version
            if step < STEPS - 1:
                await generation_ack.wait()
            await stack.sync_weights(version, chunks=2, label=f"sync {step}")
            await stack.reset_prefix_cache(label=f"reset {step}")
            await stack.digests(label=f"digests {step}")
            stack.mark("sync_finished", step=step)
            generation_ack.clear()
            sync_finished.set()

    async with asyncio.TaskGroup() as stages:
        stages.create_task(generate())
        stages.create_task(learn())
