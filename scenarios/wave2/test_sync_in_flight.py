"""Weight syncs in chunks between requests that do not wait for them: no answer shows half a sync."""

from __future__ import annotations

import asyncio

from fixtures.prompts import Prompts
from harness.checks.control_plane import FAN_OUT
from harness.checks.history import EXPLAINED, explained, waited
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.pausing import HELD
from harness.checks.weights import EVERY_PARAMETER, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, under_delays
from scenarios.pauses import interrupted, pause_idle, pause_in_flight
from scenarios.requests import ANSWER, long

NEEDS = {Capability.WEIGHT_SYNC, Capability.PAUSE_KEEP}


@scenario(
    task=5,
    promise="requests that wait for a sync in chunks are answered by the whole new version",
    needs=NEEDS,
    checks=[explained(waited), EVERY_PARAMETER, UNIFORM_SERVERS, HELD, FAN_OUT, ALL_COMPLETE],
)
async def test_requests_that_wait_for_a_sync_meet_the_whole_version(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Weight sync during pause succeeds"; SkyRL 0.2.0, RemoteInferenceClient.update_weights_chunk."""
    for version in (1, 2):
        async with asyncio.TaskGroup() as tasks, pause_idle(stack, "keep", prompts.one()):
            tasks.create_task(stack.generate(prompts.unique(8), **ANSWER))
            await stack.sync_weights(version, chunks=4)
            await stack.digests()


@scenario(
    task=5,
    promise="between syncs in chunks, with requests in flight, each new answer is the newest version's",
    needs=NEEDS,
    checks=[EXPLAINED, EVERY_PARAMETER, FAN_OUT, ALL_COMPLETE],
    deadline_s=90.0,
)
async def test_syncs_in_chunks_between_answers(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: weights move while requests are in flight. New requests follow each sync at once, beside
    requests that continue."""
    for version, chunks in ((1, 3), (2, 5), (3, 3)):
        batch = prompts.unique(4)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stack.generate(batch, **long(stack)))
            async with pause_in_flight(stack, "keep", requests=len(batch)):
                await stack.sync_weights(version, chunks=chunks)
            await stack.generate(prompts.unique(8), **ANSWER)
        await stack.digests()


@scenario(
    task=5,
    promise="frozen requests whose cache is reset after a sync go on as the new version alone would",
    needs={*NEEDS, Capability.RESET_PREFIX_CACHE, Capability.RESET_RUNNING_REQUESTS},
    checks=[explained(waited), EVERY_PARAMETER, FAN_OUT, ALL_COMPLETE],
)
async def test_frozen_requests_are_read_anew_after_a_sync(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /reset_prefix_cache: reset_running_requests preempts running requests, so that their keys and values are
    computed again; SkyRL #904, reset_prefix_cache(). Tokens made before the sync stay as they are."""
    batch = prompts.unique(6)
    async with interrupted(stack, "keep", stack.generate(batch, **long(stack)), requests=len(batch)):
        await stack.sync_weights(1)
        await stack.reset_prefix_cache(reset_running_requests=True)
        await stack.digests()


test_requests_that_wait_for_a_sync_meet_the_whole_version_under_delays = under_delays(
    test_requests_that_wait_for_a_sync_meet_the_whole_version
)
test_syncs_in_chunks_between_answers_under_delays = under_delays(test_syncs_in_chunks_between_answers)
