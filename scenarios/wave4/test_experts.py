"""Which experts each token was routed to, for a trainer that replays the routing."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.capability import Capability
from harness.checks.continuation import CONTINUATION
from harness.checks.experts import routed_experts
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.pausing import PAUSED, SAME_AS_UNINTERRUPTED, UNINTERRUPTED
from harness.checks.staleness import CURRENT_POLICY
from harness.checks.tokens import greedy
from harness.contract import PauseMode
from harness.scenario import scenario
from harness.stack import Stack
from scenarios.pauses import pause_in_flight

ANSWER: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 120, "temperature": 0.0, "ignore_eos": True}
NEEDS = {Capability.ROUTED_EXPERTS}


@scenario(
    task=10,
    promise="each answer comes with the experts of each token that was fed to the model",
    needs=NEEDS,
    checks=[routed_experts(), greedy("greedy"), ALL_COMPLETE],
)
async def test_experts_of_every_token(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices: per token, layer and expert."""
    await stack.generate(prompts.ragged(16), label="greedy", **ANSWER)
    await stack.generate(prompts.ragged(16), label="sampled", temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


@scenario(
    task=10,
    promise="after a weight sync the experts are those that the new policy routes to",
    needs={*NEEDS, Capability.WEIGHT_SYNC},
    checks=[routed_experts(), CURRENT_POLICY, ALL_COMPLETE],
)
async def test_experts_after_a_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 10: weight sync with experts. The router's weights move with all others."""
    batch = prompts.unique(6)
    await stack.generate(batch, **ANSWER)
    for version, chunks in ((1, 1), (2, 4)):
        await stack.sync_weights(version, chunks=chunks)
        await stack.generate(batch, **ANSWER)


async def _paused(stack: Stack, prompts: Prompts, mode: PauseMode) -> None:
    batch = prompts.unique(6)
    await stack.generate(batch, label=UNINTERRUPTED, **LONG)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stack.generate(batch, label=PAUSED, **LONG))
        async with pause_in_flight(stack, mode, requests=len(batch)):
            pass


@scenario(
    task=10,
    promise="a pause(keep) in the middle loses no token's experts",
    needs={*NEEDS, Capability.PAUSE_KEEP},
    checks=[routed_experts(), SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
)
async def test_experts_of_frozen_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices and pause_generation."""
    await _paused(stack, prompts, "keep")


@scenario(
    task=10,
    promise="an answer that was interrupted and continued has the experts of all its parts",
    needs={*NEEDS, Capability.PAUSE_KEEP, Capability.PAUSE_ABORT, Capability.RETRY_ABORTED},
    checks=[routed_experts(), CONTINUATION, SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
)
async def test_experts_of_interrupted_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices; SkyRL #1014, task 5: partial responses accumulate."""
    await _paused(stack, prompts, "abort")
