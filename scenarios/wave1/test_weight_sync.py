"""Policy versions through the stack's own weight sync: they reach every parameter of every server, and the answers follow."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.control_plane import FAN_OUT
from harness.checks.history import EXPLAINED, answered, cached, explained
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.staleness import FORCED_EFFECT, SAME_VERSION_SAME_OUTPUT
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.contract.messages import Layout
from harness.driving.stack import Stack
from harness.suite.scenario import by_deltas, scenario, under_delays
from scenarios.pauses import interrupted
from scenarios.requests import ANSWER, EVERYWHERE, SPREAD, long, sessions, sync_and_answer

SYNC = {Capability.WEIGHT_SYNC}


@scenario(
    task=2,
    promise="a weight sync brings every parameter to every server, and the answers follow",
    needs=SYNC,
    checks=[EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED, FORCED_EFFECT, ALL_COMPLETE],
    topologies=EVERYWHERE,
)
async def test_sync_reaches_every_parameter_of_every_server(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014: "Weight sync via NCCL/CUDA_IPC broadcast completes" (1), "still works" (2), "works" (3)."""
    batch = prompts.unique(SPREAD)
    await stack.generate(batch, **ANSWER)
    await stack.digests()
    await sync_and_answer(stack, batch, (1, 1))


@scenario(
    task=2,
    promise="going to another version and back gives the same parameters and the same answers",
    needs=SYNC,
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, FORCED_EFFECT, EXPLAINED],
)
async def test_there_and_back_again(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 2: weight sync. Its result must depend on the sent weights, not on the earlier ones."""
    await sync_and_answer(stack, prompts.unique(SPREAD), (1, 1), (2, 1), (1, 1), (2, 1), (1, 1))


@scenario(
    task=2,
    promise="syncing the version that is there changes nothing",
    needs=SYNC,
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, EXPLAINED],
)
async def test_syncing_the_same_version_changes_nothing(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 2: weight sync; a trainer that resumes syncs what the engines hold already."""
    await sync_and_answer(stack, prompts.unique(SPREAD), *[(3, 1)] * 3)


@scenario(
    task=2,
    promise="many syncs in a row end at the last version",
    needs=SYNC,
    checks=[EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED, ALL_COMPLETE],
    deadline_s=120.0,
)
async def test_many_syncs_in_a_row(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 2: weight sync, in every training step. This finds faults that begin with the second sync."""
    for version in range(1, 9):
        await stack.sync_weights(version)
        await stack.digests()
        await stack.generate(prompts.unique(2), max_tokens=8, temperature=0.0)


@scenario(
    task=2,
    promise="several syncs without an answer or a look in between end at the last version",
    needs=SYNC,
    checks=[EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED, ALL_COMPLETE],
)
async def test_syncs_back_to_back(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 2: weight sync. No slow call in between may hide a race between two syncs."""
    for version in (1, 2, 3, 4, 5):
        await stack.sync_weights(version)
    await stack.digests()
    await stack.generate(prompts.unique(SPREAD), **ANSWER)


@scenario(
    task=2,
    promise="a sync in chunks equals the whole",
    needs=SYNC,
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, EXPLAINED],
    topologies=EVERYWHERE,
)
async def test_a_sync_in_chunks_equals_the_whole(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, RemoteInferenceClient.update_weights_chunk: "Can be called multiple times" in one weight update."""
    await sync_and_answer(stack, prompts.unique(SPREAD), (1, 1), (2, 4), (1, 4), (2, 1))


@scenario(
    task=2,
    promise="a sync of some parameters brings these, and leaves all others as they are",
    needs=SYNC,
    checks=[EVERY_PARAMETER],
)
async def test_a_sync_of_some_parameters(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL API reference, InferenceEngineInterface.update_named_weights: a request names its parameters. A trainer that freezes
    layers sends the others only. Engines hold several parameters of a checkpoint in one (vLLM, packed_modules_mapping): a part of
    them comes."""
    await stack.sync_weights(1)
    await stack.sync_weights(1, sparse=True)
    await stack.digests()


@scenario(
    task=1,
    promise="a sync of shards that the trainer gathers equals the whole",
    needs={*SYNC, Capability.TRAINER},
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, EXPLAINED],
    deadline_s=300.0,
)
async def test_a_sync_of_gathered_shards_equals_the_whole(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 1: FSDP2. SkyRL 0.2.0, FSDPWeightExtractor: shards are gathered parameter by parameter."""
    batch = prompts.unique(SPREAD)
    held: tuple[tuple[int, Layout], ...] = ((1, "single"), (0, "single"), (1, "fsdp2"))
    for version, layout in held:
        await stack.sync_weights(version, layout=layout)
        await stack.digests()
        await stack.generate(batch, **ANSWER)


@scenario(
    task=1,
    promise="after a sync and a cache reset no answer reads the old policy's keys and values",
    needs={*SYNC, Capability.RESET_PREFIX_CACHE},
    checks=[explained(cached, answered), FAN_OUT],
)
async def test_prefix_cache_is_fresh_after_a_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, reset_prefix_cache; the trainers call it with every sync. Prompts fill more than one block,
    and each is answered twice before the sync, so that its blocks are cached."""
    batch = prompts.long(SPREAD)
    for version in (1, 2):
        await stack.generate(batch, session_ids=sessions(SPREAD), **ANSWER)
        await stack.generate(batch, session_ids=sessions(SPREAD), **ANSWER)
        await stack.reset_prefix_cache()
        await stack.sync_weights(version)
    await stack.generate(batch, session_ids=sessions(SPREAD), **ANSWER)


@scenario(
    task=13,
    promise="a sync while requests are frozen loses none of them",
    needs={*SYNC, Capability.PAUSE_KEEP},
    checks=[EVERY_PARAMETER, FAN_OUT, EXPLAINED, ALL_COMPLETE],
    topologies=["disaggregated", "remote"],
)
async def test_sync_while_requests_are_frozen(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Weight sync during pause succeeds", "Resume continues generation"; task 13 for keep mode.

    Frozen requests continue with the new policy on old keys and values; this scenario leaves their tokens open."""
    batch = prompts.unique(8)
    async with interrupted(stack, "keep", stack.generate(batch, **long(stack)), requests=len(batch)):
        await stack.sync_weights(1)
        await stack.digests()
    await stack.generate(prompts.unique(SPREAD), **ANSWER)


test_sync_reaches_every_parameter_of_every_server_under_delays = under_delays(
    test_sync_reaches_every_parameter_of_every_server
)
test_there_and_back_again_by_deltas = by_deltas(test_there_and_back_again)
test_syncing_the_same_version_changes_nothing_by_deltas = by_deltas(test_syncing_the_same_version_changes_nothing)
test_many_syncs_in_a_row_by_deltas = by_deltas(test_many_syncs_in_a_row)
test_a_sync_in_chunks_equals_the_whole_by_deltas = by_deltas(test_a_sync_in_chunks_equals_the_whole)
test_a_sync_of_some_parameters_by_deltas = by_deltas(test_a_sync_of_some_parameters)
test_prefix_cache_is_fresh_after_a_sync_by_deltas = by_deltas(test_prefix_cache_is_fresh_after_a_sync)
test_sync_while_requests_are_frozen_by_deltas = by_deltas(test_sync_while_requests_are_frozen)
