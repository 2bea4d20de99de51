"""Syncs while requests are frozen, with and without their cache: which weights and which cache made each later token."""

from __future__ import annotations

import asyncio

from fixtures.prompts import Prompts
from harness.checks.control_plane import FAN_OUT
from harness.checks.history import answered, cached, explained, frozen, waited
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.pausing import FROZEN, SAME_AS_UNINTERRUPTED
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, under_delays
from scenarios.pauses import interrupted, with_and_without
from scenarios.requests import ANSWER, SPREAD, long, sessions

KEEP = {Capability.PAUSE_KEEP}
SYNC = {*KEEP, Capability.WEIGHT_SYNC}
CLEAR = {*KEEP, Capability.PAUSE_CLEAR_CACHE}


@scenario(
    task=13,
    promise="requests that were frozen through a sync go on with the new weights, on the cache that they had",
    needs=SYNC,
    checks=[explained(frozen, waited), EVERY_PARAMETER, FROZEN, ALL_COMPLETE],
)
async def test_frozen_requests_keep_their_cache_through_a_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, RemoteInferenceClient.pause: "They resume where they left off on /resume. KV cache is preserved." A request
    that comes in the meantime reads its prompt with the new weights."""
    batch = prompts.unique(SPREAD)
    async with interrupted(stack, "keep", stack.generate(batch, **long(stack)), requests=len(batch)) as tasks:
        tasks.create_task(stack.generate(prompts.unique(2), **ANSWER))
        await stack.sync_weights(1)
        await stack.digests()


@scenario(
    task=13,
    promise="each of several syncs within one answer changes the weights, and none of what had been read before",
    needs=SYNC,
    checks=[explained(frozen), EVERY_PARAMETER, ALL_COMPLETE],
    deadline_s=90.0,
)
async def test_several_syncs_within_one_answer(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 13: no abort, so an answer may live through many syncs (SkyRL documentation, Fully Async Training)."""
    batch = prompts.unique(4)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stack.generate(batch, **{**long(stack), "max_tokens": 320}))
        for version in (1, 2, 3):
            await stack.until_generating(requests=len(batch), tokens=60 * version * len(batch))
            await stack.pause("keep")
            await stack.sync_weights(version)
            await stack.resume()
    await stack.digests()


@scenario(
    task=13,
    promise="requests that were frozen with a cleared cache go on as the new version alone would",
    needs={*SYNC, *CLEAR},
    checks=[explained(waited), EVERY_PARAMETER, FROZEN, FAN_OUT, ALL_COMPLETE],
)
async def test_a_cleared_cache_is_read_anew_after_a_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, RemoteInferenceClient.pause: "clear_cache: Whether to clear the KV cache on pause."; vLLM 0.19,
    AsyncLLM.pause_generation: "Whether to clear KV cache and prefix cache after draining". Earlier tokens stay as they are."""
    batch = prompts.unique(SPREAD)
    async with interrupted(stack, "keep", stack.generate(batch, **long(stack)), requests=len(batch), clear_cache=True):
        await stack.sync_weights(1)
        await stack.digests()


@scenario(
    task=13,
    promise="a pause(keep) that clears the cache and brings no new weights changes no answer",
    needs=CLEAR,
    checks=[SAME_AS_UNINTERRUPTED, FROZEN, FAN_OUT, ALL_COMPLETE],
)
async def test_a_cleared_cache_changes_no_answer(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, RemoteInferenceClient.pause: a request resumes where it left off, whether its keys and values are kept or
    computed again."""
    async with with_and_without(stack, "keep", prompts.unique(SPREAD), clear_cache=True, **long(stack)):
        pass


@scenario(
    task=13,
    promise="after a freeze that cleared the cache, no new request reads what frozen ones had left in it",
    needs={*SYNC, *CLEAR},
    checks=[explained(cached, answered), FAN_OUT, ALL_COMPLETE],
)
async def test_new_requests_after_a_cleared_freeze(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, RemoteInferenceClient.pause(clear_cache); vLLM documentation, Automatic Prefix Caching. Prompts fill more than a
    block; they are sent again after the frozen requests have ended."""
    batch, named = prompts.long(SPREAD), sessions(SPREAD)
    for _ in range(2):
        await stack.generate(batch, session_ids=named, **ANSWER)
    frozen = stack.generate(batch, session_ids=named, **{**long(stack), "max_tokens": 120})
    async with interrupted(stack, "keep", frozen, requests=len(batch), clear_cache=True):
        await stack.sync_weights(1)
    await stack.generate(batch, session_ids=named, **ANSWER)


test_frozen_requests_keep_their_cache_through_a_sync_under_delays = under_delays(
    test_frozen_requests_keep_their_cache_through_a_sync
)
