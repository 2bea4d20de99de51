"""pause(abort) in the middle of generation, where the stack goes on by itself after resume()."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import EOS, MAX_MODEL_LEN, Prompts
from harness.capability import Capability
from harness.checks.continuation import CONTINUATION
from harness.checks.control_plane import FAN_OUT
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import are_numbers, of_reference
from harness.checks.pausing import FROZEN, HELD, PAUSED, SAME_AS_UNINTERRUPTED, UNINTERRUPTED
from harness.checks.staleness import CURRENT_POLICY, WHOLE_VERSION
from harness.checks.stopping import ends_as_asked
from harness.checks.text import text_of_tokens
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER
from harness.scenario import scenario
from harness.stack import Stack
from scenarios.pauses import pause_in_flight

LONG: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
"""Long enough (about a second) to be interrupted twice."""
SHORT: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
NEEDS = {Capability.PAUSE_KEEP, Capability.PAUSE_ABORT, Capability.RETRY_ABORTED}


async def with_and_without(stack: Stack, batch: list[list[int]], *, interruptions: int = 1, **params: Any) -> None:
    """The batch alone, then again with so many interruptions."""
    await stack.generate(batch, label=UNINTERRUPTED, **params)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stack.generate(batch, label=PAUSED, **params))
        for _ in range(interruptions):
            async with pause_in_flight(stack, "abort", requests=len(batch)):
                pass


@scenario(
    task=5,
    promise="a greedy batch that pause(abort) interrupts ends as if nothing had happened",
    needs=NEEDS,
    checks=[FAN_OUT, CONTINUATION, SAME_AS_UNINTERRUPTED, FROZEN, text_of_tokens(), ALL_COMPLETE],
)
async def test_an_interrupted_batch_ends_as_if_nothing_had_happened(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Partial responses accumulated correctly", "Retry-on-abort works (re-feed accumulated
    tokens)"."""
    await with_and_without(stack, prompts.unique(8), **LONG)


@scenario(
    task=5,
    promise="a batch that is interrupted again while it goes on ends as if nothing had happened",
    needs=NEEDS,
    checks=[FAN_OUT, CONTINUATION, SAME_AS_UNINTERRUPTED, FROZEN, ALL_COMPLETE],
)
async def test_a_batch_may_be_interrupted_twice(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Resume continues generation": after each pause, with what all attempts have made."""
    await with_and_without(stack, prompts.unique(8), interruptions=2, **LONG)


@scenario(
    task=5,
    promise="pausing twice before one resume() interrupts once",
    needs=NEEDS,
    checks=[FAN_OUT, CONTINUATION, SAME_AS_UNINTERRUPTED, FROZEN, HELD, ALL_COMPLETE],
)
async def test_pausing_twice_interrupts_once(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause and /resume: a state, not a count."""
    batch = prompts.unique(4)
    await stack.generate(batch, label=UNINTERRUPTED, **LONG)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stack.generate(batch, label=PAUSED, **LONG))
        async with pause_in_flight(stack, "abort", requests=len(batch)):
            await stack.pause("abort")
            tasks.create_task(stack.generate(prompts.unique(2), **SHORT))


@scenario(
    task=5,
    promise="log-probabilities of an interrupted answer are those of its tokens, one each, over all parts",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, of_reference(), are_numbers()],
)
async def test_logprobs_of_an_interrupted_batch(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineOutput.response_logprobs; the trainer's loss is over the whole response."""
    await with_and_without(stack, prompts.unique(6), logprobs=0, **LONG)


@scenario(
    task=5,
    promise="min_tokens and stop tokens hold over all parts of an interrupted answer",
    needs=NEEDS,
    checks=[
        CONTINUATION,
        SAME_AS_UNINTERRUPTED,
        ends_as_asked(eos=EOS, max_model_len=MAX_MODEL_LEN, causes=["stop token"]),
    ],
)
async def test_min_tokens_of_an_interrupted_batch(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.min_tokens: counted from the response's start, of which a retry has a part."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200, "min_tokens": 96}
    await with_and_without(stack, prompts.unique(8), stop_token_ids=list(range(100, 300)), **params)


@scenario(
    task=5,
    promise="requests that come while others are interrupted wait for resume(), and both are answered",
    needs=NEEDS,
    checks=[FAN_OUT, CONTINUATION, SAME_AS_UNINTERRUPTED, HELD, FROZEN, greedy("late"), ALL_COMPLETE],
)
async def test_requests_that_come_during_an_interruption(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, InferenceEngineClient.pause_generation: new requests are blocked until resume."""
    batch, late = prompts.unique(4), prompts.unique(4)
    await stack.generate(batch, label=UNINTERRUPTED, **LONG)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stack.generate(batch, label=PAUSED, **LONG))
        async with pause_in_flight(stack, "abort", requests=len(batch)):
            tasks.create_task(stack.generate(late, label="late", **SHORT))


@scenario(
    task=5,
    promise="a weight sync between interruption and retry: what was made stays, the rest is made by the new policy",
    needs={*NEEDS, Capability.WEIGHT_SYNC, Capability.PAUSE_CLEAR_CACHE},
    checks=[CONTINUATION, EVERY_PARAMETER, WHOLE_VERSION, CURRENT_POLICY, FAN_OUT, ALL_COMPLETE],
)
async def test_a_sync_between_interruption_and_retry(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Weight sync during pause succeeds", "Resume continues generation"."""
    batch = prompts.unique(8)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stack.generate(batch, **LONG))
        async with pause_in_flight(stack, "abort", requests=len(batch), clear_cache=True):
            await stack.sync_weights(1, chunks=4)
            await stack.digests()
    await stack.generate(prompts.unique(4), **SHORT)
