"""What a stack says of its own weights: the client counts its syncs, and every server reports a label."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.errors import answered_or_named
from harness.checks.failed_sync import FAILED_SYNC
from harness.checks.history import answered, cached, explained
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.staleness import FORCED_EFFECT
from harness.checks.tokens import greedy
from harness.checks.weight_labels import SALTS_OF_WEIGHTS, SYNCS_COUNTED, WEIGHT_LABELS
from harness.checks.weights import EVERY_PARAMETER, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.contract.messages import GymRequest
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import ANSWER, sessions

COUNTED = {Capability.WEIGHT_SYNC, Capability.SYNC_COUNT}
LABELLED = {Capability.WEIGHT_SYNC, Capability.WEIGHT_LABELS}


@scenario(
    task=14,
    promise="the client's count moves by one with each completed sync, a repeated one too, and a copy of the client keeps it",
    needs={*COUNTED, Capability.PICKLE_CLIENT},
    checks=[SYNCS_COUNTED, ALL_COMPLETE],
)
async def test_the_client_counts_its_syncs(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - every scenario has both
    """SkyRL 0.3.0, RemoteInferenceClient.weight_version: "Number of weight syncs to the engines so far"."""
    await stack.sync_count()
    for version in (1, 1, 2):
        await stack.sync_weights(version)
        await stack.sync_count()
        await stack.pickle_client()
        await stack.sync_count()


@scenario(
    task=14, promise="a sync that fails is not counted", needs=COUNTED, checks=[SYNCS_COUNTED, FAILED_SYNC], spoils=True
)
async def test_a_failed_sync_is_not_counted(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - every scenario has both
    """SkyRL 0.3.0, increment_weight_version: "Called once per completed weight sync to the engines"."""
    await stack.sync_weights(1)
    await stack.sync_count()
    await stack.attempt(stack.sync_weights(2, chunks=5, fail_after_chunks=1))
    await stack.sync_count()
    await stack.attempt(stack.prepare_weight_sync())
    await stack.attempt(stack.sync_weights(2))
    await stack.sync_count()


@scenario(
    task=14,
    promise="every server reports the label of its last sync and holds the parameters that this label names",
    needs=LABELLED,
    checks=[WEIGHT_LABELS, EVERY_PARAMETER, UNIFORM_SERVERS, ALL_COMPLETE],
)
async def test_servers_report_the_label_of_their_weights(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001
    """vLLM 0.30, finish_weight_update: "Finish the weight update and set its version if provided"; /weight_info."""
    for label, version, chunks in (("first", 1, 1), ("second", 2, 4), ("second again", 2, 1), ("back", 1, 2)):
        await stack.sync_weights(version, chunks=chunks, weight_label=label)
        await stack.weight_labels()
        await stack.digests()


@scenario(
    task=14,
    promise="after a sync without a label no server reports the label of the weights before",
    needs=LABELLED,
    checks=[WEIGHT_LABELS],
)
async def test_a_sync_without_a_label(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001
    """vLLM 0.30, get_weight_version: "Return the latest committed weight version"."""
    await stack.sync_weights(1, weight_label="labelled")
    await stack.weight_labels()
    await stack.sync_weights(2)
    await stack.weight_labels()


@scenario(
    task=14,
    promise="a sync that fails moves no label, and the next one gives every server its own",
    needs=LABELLED,
    checks=[WEIGHT_LABELS, FAILED_SYNC, EVERY_PARAMETER, UNIFORM_SERVERS],
    deadline_s=90.0,
    spoils=True,
)
async def test_a_failed_sync_moves_no_label(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001
    """vLLM 0.30, get_weight_version: "Return the latest committed weight version"."""
    await stack.sync_weights(1, weight_label="whole")
    await stack.weight_labels()
    for after in (1, 3):
        await stack.attempt(stack.sync_weights(2, chunks=5, fail_after_chunks=after, weight_label="broken off"))
        await stack.attempt(stack.weight_labels())
        await stack.attempt(stack.prepare_weight_sync())
        await stack.attempt(stack.sync_weights(1, weight_label=f"mended {after}"))
        await stack.attempt(stack.weight_labels())
        await stack.attempt(stack.digests())


@scenario(
    task=14,
    promise="under a salt of its own for each policy version no answer reads keys and values of earlier weights, without a reset",
    needs={Capability.WEIGHT_SYNC, Capability.CACHE_SALT},
    checks=[explained(cached, answered), FORCED_EFFECT, greedy(), ALL_COMPLETE],
)
async def test_a_salt_for_each_policy_version(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.3.0, GeneratorConfig.use_cache_salt: "cache blocks are only shared across trajectories that started with the same
    policy weight version". Prompts fill a block and are answered twice, so the cache holds them before a sync."""
    batch = prompts.long(4)
    for version, salt in enumerate(("policy-0", "policy-1", "policy-2")):
        if version:
            await stack.sync_weights(version)
        for _ in range(2):
            await stack.generate(batch, session_ids=sessions(4), cache_salt=salt, **ANSWER)


@scenario(
    task=14,
    promise="trajectories after a sync get another salt than those before, whichever copy of the client their generator holds",
    needs={Capability.WEIGHT_SYNC, Capability.CACHE_SALT, Capability.GYM_GENERATOR, Capability.PICKLE_CLIENT},
    checks=[SALTS_OF_WEIGHTS, ALL_COMPLETE],
)
async def test_a_copy_of_the_client_salts_with_the_engines_version(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.3.0, GeneratorConfig.use_cache_salt; RemoteInferenceClient: "Serializable: Can be pickled and passed between
    processes". A trainer syncs with one copy of the client, and generators elsewhere hold another."""
    await stack.pickle_client()
    for version in (0, 1):
        if version:
            await stack.sync_weights(version)
        for earlier in (False, True):
            await stack.gym_generate(
                GymRequest(
                    prompts=prompts.conversations(2),
                    env_extras=[{}] * 2,
                    sampling_params={"max_tokens": 4, "temperature": 0.0},
                    earlier_client=earlier,
                )
            )


SALTS = ("policy@1", "organization/model", "back\\slash", "long" * 40, "a b")
"""Salts that name a policy in ways that occur to a caller."""


@scenario(
    task=14,
    promise="a salt is any text, or is refused by name",
    needs={Capability.CACHE_SALT},
    checks=[answered_or_named("salt", "cache_salt"), greedy("after")],
)
async def test_salts_of_any_text(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Automatic Prefix Caching, cache isolation: "cache_salt", a text of the caller's."""
    for salt in SALTS:
        await stack.attempt(stack.generate(prompts.unique(2), cache_salt=salt, label="salt", **ANSWER))
    await stack.generate(prompts.unique(8), label="after", **ANSWER)
