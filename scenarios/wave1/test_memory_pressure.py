"""Engines whose KV cache is too small for the requests that they run: some lose their place, and are computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import are_numbers, of_reference
from harness.checks.pausing import PAUSED, UNINTERRUPTED, WAITED
from harness.checks.preemption import PREEMPTED, SAME_AS_WITH_ROOM
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.pauses import pause_in_flight
from scenarios.requests import GREEDY

STARVED = ("starved",)
CROWD = 32
"""Requests that find room at once while they are short, and none when they grow."""
FEW = 3
"""Requests for which even one server has room."""
PREEMPTING = 820
"""Tokens in flight of an engine that has begun to preempt: seven requests have filled a block each."""
GROWN = 200
"""Tokens of an answer that fills two blocks of an engine's cache."""


@scenario(
    task=0,
    promise="where the KV cache is full, tokens and their log-probabilities are the model's all the same",
    checks=[PREEMPTED, greedy(), of_reference(), are_numbers(), ALL_COMPLETE],
    topologies=STARVED,
    deadline_s=120,
)
async def test_answers_that_outgrow_the_cache(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Optimization and Tuning, Preemption: "preempted requests are recomputed when sufficient KV cache space
    becomes available again". Long rollouts meet it every day."""
    await stack.generate(prompts.unique(CROWD), max_tokens=GROWN, logprobs=0, **GREEDY)


@variants(
    {
        "test_draws_that_outgrow_the_cache": {"asked": lambda _: {"temperature": 1.0, "seed": 9}},
        "test_penalties_of_what_outgrows_the_cache": {
            "asked": lambda _: {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.5}
        },
        "test_lengths_of_what_outgrows_the_cache": {
            "asked": lambda stack: {
                "temperature": 0.0,
                "min_tokens": 150,
                "stop_token_ids": stack.vocabulary.scattered(range(100, 300)),
                "ignore_eos": False,
            }
        },
    },
    task=0,
    promise="a request that loses its place in the KV cache gets the answer that it gets where there is room",
    checks=[PREEMPTED, SAME_AS_WITH_ROOM, ALL_COMPLETE],
    topologies=STARVED,
    deadline_s=120,
)
async def outgrows_the_cache(stack: Stack, prompts: Prompts, *, asked: Callable[[Stack], dict[str, Any]]) -> None:
    """vLLM documentation, Optimization and Tuning, Preemption; SamplingParams: seed, penalties, min_tokens. The same prompts a few at
    a time, and all at once."""
    batch = prompts.unique(CROWD)
    params = {"max_tokens": GROWN, "ignore_eos": True, **asked(stack)}
    for first in range(0, CROWD, FEW):
        await stack.generate(batch[first : first + FEW], label=UNINTERRUPTED, **params)
    await stack.generate(batch, label=PAUSED, **params)


@scenario(
    task=13,
    promise="pause(wait) lets requests finish that have lost their place in the KV cache",
    needs={Capability.PAUSE_KEEP, Capability.PAUSE_WAIT},
    checks=[PREEMPTED, WAITED, ALL_COMPLETE],
    topologies=STARVED,
    deadline_s=120,
)
async def test_a_wait_for_what_outgrew_the_cache(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: "wait": wait for in-flight requests to complete. The pause comes when all have grown."""
    batch = prompts.unique(CROWD)
    async with asyncio.TaskGroup() as callers:
        callers.create_task(stack.generate(batch, max_tokens=GROWN, **GREEDY))
        await stack.until_generating(requests=FEW, tokens=PREEMPTING * stack.topology.engines)
        async with pause_in_flight(stack, "wait", requests=1):
            pass
