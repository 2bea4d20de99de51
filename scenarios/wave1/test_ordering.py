"""Results come back in the order of their prompts, each to its own caller."""

from __future__ import annotations

import asyncio

from fixtures.prompts import Prompts
from harness.checks.ordering import in_order
from harness.checks.stopping import ends_as_asked
from harness.checks.tokens import greedy
from harness.driving.stack import Stack
from harness.suite.scenario import scenario

STOPS = range(200, 260)
"""Enough stop tokens that rows of one batch end after a few tokens or after many."""


@scenario(
    task=0,
    promise="generate() returns results in the order of its prompts, however ragged",
    checks=[in_order(ragged=True), greedy(), ends_as_asked(causes=["stop token"])],
)
async def test_results_keep_the_order_of_prompts(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorInterface.generate: "Returns outputs in the same order as the input batch."
    Prompts of many lengths and rows that end early or late make the servers finish out of order."""
    await stack.generate(
        prompts.ragged(48), temperature=0, max_tokens=48, stop_token_ids=stack.vocabulary.scattered(STOPS)
    )


@scenario(
    task=0,
    promise="a batch of one, and one that does not divide evenly among the servers, lose nothing",
    checks=[in_order(), greedy()],
)
async def test_batches_of_any_size(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface.generate: one output for each prompt of the batch."""
    for size in (1, stack.topology.engines, stack.topology.engines + 1, 3 * stack.topology.engines + 1):
        await stack.generate(prompts.unique(size), temperature=0, max_tokens=12, ignore_eos=True)


@scenario(
    task=0,
    promise="concurrent callers of one client each get their own results",
    checks=[in_order(concurrent=True), greedy()],
)
async def test_concurrent_callers_do_not_mix_results(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, RemoteInferenceClient: many trajectories share one client. Twelve callers send four prompts each,
    with lengths that interleave."""
    async with asyncio.TaskGroup() as callers:
        for caller in range(12):
            batch = prompts.ragged(4, longest=40)
            callers.create_task(stack.generate(batch, temperature=0, max_tokens=8 + 2 * caller, ignore_eos=True))
