"""Results come back in the order of their prompts, each to its own caller."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.ordering import in_order
from harness.checks.request_cap import CAP
from harness.checks.stopping import ends_as_asked
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.contract.messages import REQUEST_CAP
from harness.driving.stack import Stack
from harness.records.argument_forms import USED_AGAIN
from harness.suite.scenario import scenario, under_delays
from scenarios.moments import until_all_are_there

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


@scenario(
    task=0,
    promise="all callers of one client together have no more requests in flight than its cap; the others wait and lose nothing",
    needs={
        Capability.REQUEST_CAP,
        Capability.PAUSE_KEEP,
        Capability.SAMPLE,
        Capability.COMPLETION,
        Capability.CHAT_COMPLETION,
    },
    checks=[CAP, ALL_COMPLETE],
)
async def test_callers_share_one_cap(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE: "at most this many tasks per engine are in-flight at once; the rest queue
    locally"; RemoteInferenceClient: all callers share the cap. While engines are frozen, no request makes room."""
    cap = REQUEST_CAP * len(stack.servers)
    short: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    model = {"model": stack.model_name, "return_token_ids": True, **short}
    calls: list[Coroutine[Any, Any, Any]] = [stack.generate(prompts.unique(cap * 5 // 8), **short) for _ in range(2)]
    calls += [stack.sample(prompt, 1, max_tokens=2, temperature=0) for prompt in prompts.unique(4)]
    bodies = [{"prompt": prompt, **model} for prompt in prompts.unique(4)]
    bodies += [{"messages": messages, **model} for messages in prompts.conversations(4)]
    calls += [stack.completion(b) if "prompt" in b else stack.chat_completion(b) for b in bodies]
    async with asyncio.TaskGroup() as callers:
        await stack.pause("keep")
        for call in calls:
            callers.create_task(call)
        frozen_or_not = f"{cap} requests that are held, or an answer"  # an answer: the engines are not frozen
        await stack.until(lambda seen: seen.requests >= cap or stack.pending < len(calls), frozen_or_not)
        if stack.pending == len(calls):
            await until_all_are_there(stack, 2 * cap, len(calls))
        await stack.resume()


@scenario(
    task=0,
    promise="a call is what it was when it was made: what its caller then does with the arguments changes none of its rows",
    needs={Capability.PAUSE_KEEP},
    checks=[ALL_COMPLETE, ends_as_asked(causes=["length"])],
)
async def test_arguments_are_used_again(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface.generate: the arguments are a request, which a caller may keep and change for the
    next one. The engines are frozen while the caller changes max_tokens, so that rows of a batch that is larger than a client's cap
    still wait in the client."""
    cap = REQUEST_CAP * len(stack.servers)
    short: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    calls = [stack.generate(prompts.unique(rows), **short) for rows in (*[1] * 8, cap * 9 // 8)]
    async with asyncio.TaskGroup() as callers:
        await stack.pause("keep")
        for call in calls:
            callers.create_task(call)
        frozen_or_not = f"{cap} requests that are held, or an answer"  # an answer: the engines are not frozen
        await stack.until(lambda seen: seen.requests >= cap or stack.pending < len(calls), frozen_or_not)
        await stack.form(USED_AGAIN)
        await stack.resume()


test_results_keep_the_order_of_prompts_under_delays = under_delays(test_results_keep_the_order_of_prompts)
test_concurrent_callers_do_not_mix_results_under_delays = under_delays(test_concurrent_callers_do_not_mix_results)
