"""Sleeping engines hand their accelerators to the trainer and take them back: the colocated cycle."""

from __future__ import annotations

import asyncio

from fixtures.prompts import Prompts
from harness.checks.control_plane import FAN_OUT
from harness.checks.history import EXPLAINED
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.memory import AWAKE_AGAIN, BY_TAGS, RELEASED
from harness.checks.sleeping import CUT_BY_SLEEP, STILL
from harness.checks.staleness import FORCED_EFFECT, SAME_VERSION_SAME_OUTPUT
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS
from harness.contract.capability import Capability
from harness.contract.clock import monotonic
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.moments import QUEUED
from scenarios.pauses import HOLD
from scenarios.requests import ANSWER, GREEDY, SPREAD

COLOCATED = ("colocated",)


@scenario(
    task=1,
    promise="sleep, train, wake the weights, sync, wake the cache: the answers are the new policy's",
    needs={Capability.SLEEP, Capability.WAKE_UP_TAGS, Capability.WEIGHT_SYNC},
    checks=[FAN_OUT, EVERY_PARAMETER, EXPLAINED, FORCED_EFFECT, ALL_COMPLETE],
    topologies=COLOCATED,
)
async def test_the_colocated_training_step(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 1: "Sleep before training step, wake before generation"; the trainer wakes "weights" before the
    broadcast and "kv_cache" after it."""
    batch = prompts.unique(SPREAD)
    await stack.generate(batch, **ANSWER)
    for version in (1, 2):
        await stack.sleep(level=2)
        await stack.wake_up(tags=["weights"])
        await stack.sync_weights(version)
        await stack.wake_up(tags=["kv_cache"])
        await stack.digests()
        await stack.generate(batch, **ANSWER)


@scenario(
    task=1,
    promise="engines that slept and were synced to the same version answer as before, long prompts too",
    needs={Capability.SLEEP, Capability.WEIGHT_SYNC},
    checks=[FAN_OUT, EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, EXPLAINED],
    topologies=COLOCATED,
)
async def test_sleep_and_a_sync_of_the_same_version(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Sleep Mode: level 2 discards weights and cache; a sync brings the weights back."""
    batch = prompts.long(2) + prompts.unique(SPREAD)
    await stack.digests()
    await stack.generate(batch, **ANSWER)
    await stack.sleep(level=2)
    await stack.wake_up()
    await stack.sync_weights(0)
    await stack.digests()
    await stack.generate(batch, **ANSWER)


@scenario(
    task=1,
    promise="engines that slept (level 1) answer as before",
    needs={Capability.SLEEP},
    checks=[FAN_OUT, EVERY_PARAMETER, SAME_VERSION_SAME_OUTPUT, EXPLAINED, ALL_COMPLETE],
    topologies=COLOCATED,
)
async def test_sleep_and_wake_change_no_answer(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Sleep Mode: level 1 offloads the weights and brings them back; the cache is discarded."""
    batch = prompts.long(2) + prompts.unique(SPREAD)
    await stack.generate(batch, **ANSWER)
    for _ in range(2):
        await stack.sleep(level=1)
        await stack.wake_up()
        await stack.digests()
        await stack.generate(batch, **ANSWER)


@scenario(
    task=1,
    promise="sleep(tags) puts only what its tags name to sleep, and engines that wake answer as before",
    needs={Capability.SLEEP, Capability.SLEEP_TAGS},
    checks=[FAN_OUT, EVERY_PARAMETER, SAME_VERSION_SAME_OUTPUT, EXPLAINED, ALL_COMPLETE],
    topologies=COLOCATED,
)
async def test_sleep_of_a_part(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, RemoteInferenceClient.sleep: "Optional list of tags to sleep specific resources"."""
    batch = prompts.unique(SPREAD)
    await stack.generate(batch, **ANSWER)
    for tag in ("kv_cache", "weights"):
        await stack.sleep(level=1, tags=[tag])
        await stack.wake_up()
        await stack.digests()
        await stack.generate(batch, **ANSWER)


@scenario(
    task=1,
    promise="sleep gives the device's memory back, and each tag takes back its own",
    needs={Capability.SLEEP, Capability.WAKE_UP_TAGS, Capability.WEIGHT_SYNC, Capability.DEVICE_MEMORY},
    checks=[RELEASED, BY_TAGS, AWAKE_AGAIN, EVERY_PARAMETER, EXPLAINED, FORCED_EFFECT, ALL_COMPLETE],
    topologies=COLOCATED,
    deadline_s=120.0,
)
async def test_sleep_gives_memory_back(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Sleep Mode: level 1 offloads weights and discards the cache, level 2 discards both; SkyRL #1014, task 1:
    the trainer wakes "weights" before the sync and "kv_cache" after it.

    A sync and an answer come before the first reading, so that it includes the buffers of trainer and engines."""
    batch = prompts.unique(SPREAD)
    await stack.sync_weights(1)
    await stack.generate(batch, **ANSWER)
    await stack.device_memory(label="awake")
    for version in (2, 3):
        await stack.sleep(level=1)
        await stack.device_memory(label="asleep, level 1")
        await stack.wake_up()
        await stack.generate(batch, **ANSWER)
        await stack.device_memory(label="awake")
        await stack.sleep(level=2)
        await stack.device_memory(label="asleep, level 2")
        await stack.wake_up(tags=["weights"])
        await stack.device_memory(label="weights awake")
        await stack.sync_weights(version)
        await stack.wake_up(tags=["kv_cache"])
        await stack.digests()
        await stack.generate(batch, **ANSWER)
        await stack.device_memory(label="awake")


@scenario(
    task=1,
    promise="requests in flight when the engines sleep are cut short and say so, or fail by name; afterwards engines answer as before",
    needs={Capability.SLEEP},
    checks=[CUT_BY_SLEEP, greedy("after")],
    topologies=COLOCATED,
    deadline_s=120.0,
)
async def test_sleep_with_requests_in_flight(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, AsyncVLLMInferenceEngine.sleep: "Aborting all unfinished requests"; vLLM documentation, /sleep: mode "abort".

    More requests than the engines run at once, and answers of nearly the whole context: the later ones have no token yet."""
    asked = {**GREEDY, "logprobs": 0, "max_tokens": stack.max_model_len - 64}
    async with asyncio.TaskGroup() as callers:
        first, later = prompts.unique(QUEUED - SPREAD), prompts.unique(SPREAD)
        callers.create_task(stack.attempt(stack.generate(first, label="in flight", **asked)))
        await stack.until_generating(requests=len(first), tokens=len(first))
        callers.create_task(stack.attempt(stack.generate(later, label="queued", **asked)))
        await stack.until_generating(requests=QUEUED)
        await stack.sleep(1)
        await stack.wake_up()
    await stack.generate(prompts.unique(SPREAD), label="after", **ANSWER)


@scenario(
    task=1,
    promise="requests that come while anything sleeps wait until all is awake",
    needs={Capability.SLEEP, Capability.WAKE_UP_TAGS, Capability.WEIGHT_SYNC},
    checks=[STILL, EXPLAINED, EVERY_PARAMETER, FAN_OUT, ALL_COMPLETE],
    topologies=COLOCATED,
    deadline_s=120.0,
)
async def test_requests_that_come_before_all_is_awake(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Sleep Mode: "weights" are woken before a weight update, "kv_cache" after it; vLLM #44483: "Resume
    scheduling only once the executor is fully resident"."""
    began = monotonic()
    await stack.generate(prompts.unique(SPREAD), **ANSWER)
    took = monotonic() - began
    async with asyncio.TaskGroup() as callers:
        await stack.sleep(level=2)
        callers.create_task(stack.generate(prompts.unique(SPREAD), label="asleep", **ANSWER))
        await asyncio.sleep(HOLD * took)
        await stack.wake_up(tags=["weights"])
        callers.create_task(stack.generate(prompts.unique(SPREAD), label="weights awake", **ANSWER))
        await asyncio.sleep(HOLD * took)
        await stack.sync_weights(1)
        await stack.digests()
        await stack.wake_up(tags=["kv_cache"])
