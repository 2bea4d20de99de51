"""Engines over several workers (TP > 1): each holds its shards, and together they are the model."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.control_plane import WORLD_SIZE
from harness.checks.history import EXPLAINED, cached, explained
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import of_reference
from harness.checks.staleness import FORCED_EFFECT, SAME_VERSION_SAME_OUTPUT
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import ANSWER, SPREAD, sessions, sync_and_answer

SHARDED = ("tp2", "tp2x2")
SYNC = {Capability.WEIGHT_SYNC}


@scenario(
    task=8,
    promise="world_size() is servers × TP",
    needs={Capability.WORLD_SIZE},
    checks=[WORLD_SIZE, ALL_COMPLETE],
    topologies=SHARDED,
)
async def test_world_size_counts_shards(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - every scenario has both
    """SkyRL #1014, task 8: "get_world_size() returns correct value (num_servers * TP)"."""
    await stack.world_size()


@scenario(
    task=8,
    promise="tokens and log-probabilities are those of the model in one piece",
    checks=[greedy(), of_reference(), ALL_COMPLETE],
    topologies=SHARDED,
)
async def test_sharded_engines_answer_like_the_whole_model(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 8; vLLM documentation, Parallelism and Scaling: tensor parallelism changes results only by rounding."""
    await stack.generate(prompts.ragged(12), logprobs=0, **ANSWER)


@scenario(
    task=8,
    promise="a weight sync brings every worker its shard of every parameter, and the answers follow",
    needs=SYNC,
    checks=[EVERY_PARAMETER, EXPLAINED, FORCED_EFFECT, ALL_COMPLETE],
    topologies=SHARDED,
)
async def test_sync_reaches_every_shard(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 8: "Weight sync with sharded weights"."""
    batch = prompts.unique(SPREAD)
    await stack.generate(batch, **ANSWER)
    await stack.digests()
    await sync_and_answer(stack, batch, (1, 1), (2, 3))


@scenario(
    task=8,
    promise="going to another version and back gives every worker the same shards, and the same answers",
    needs=SYNC,
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, EXPLAINED],
    topologies=SHARDED,
)
async def test_shards_go_there_and_back_again(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 8: "Weight sync with sharded weights": its result depends only on the sent weights."""
    await sync_and_answer(stack, prompts.unique(SPREAD), (1, 1), (2, 1), (1, 1), (1, 1))


@scenario(
    task=8,
    promise="after a sync and a reset no worker answers from the cache of the version before",
    needs=SYNC | {Capability.RESET_PREFIX_CACHE},
    checks=[explained(cached), EVERY_PARAMETER, ALL_COMPLETE],
    topologies=SHARDED,
)
async def test_no_shard_answers_from_an_old_cache(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 8; SkyRL API reference, InferenceEngineInterface.reset_prefix_cache."""
    batch = prompts.long(2)
    for version in (1, 2):
        await stack.generate(batch, session_ids=sessions(2), **ANSWER)
        await stack.generate(batch, session_ids=sessions(2), **ANSWER)
        await stack.reset_prefix_cache()
        await stack.sync_weights(version)
        await stack.digests()
    await stack.generate(batch, session_ids=sessions(2), **ANSWER)
