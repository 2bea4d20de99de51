"""Weight syncs by the engine's own weight transfer, and syncs after one that failed in the middle."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.control_plane import HEALTHY, PAUSE_STATES
from harness.checks.errors import answered_or_named, names_error
from harness.checks.failed_sync import FAILED_SYNC
from harness.checks.history import EXPLAINED
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import extremes
from harness.checks.staleness import FORCED_EFFECT, SAME_VERSION_SAME_OUTPUT
from harness.checks.tokens import greedy
from harness.checks.transfer import NATIVE_TRANSFER, NO_EXTENSION
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.contract.messages import UNKNOWN, Unfit
from harness.driving.stack import Stack
from harness.suite.scenario import by_deltas, scenario, variants
from scenarios.pauses import interrupted
from scenarios.requests import ANSWER, SPREAD, long, sync_and_answer

SYNC = {Capability.WEIGHT_SYNC}
NATIVE = {*SYNC, Capability.NATIVE_WEIGHT_SYNC}
UNKNOWN_NAME = [names_error("unfit", UNKNOWN), FAILED_SYNC, HEALTHY, EVERY_PARAMETER, EXPLAINED]


@scenario(
    task=14,
    promise="the engine's own weight transfer carries a sync, whole or in chunks",
    needs=NATIVE,
    checks=[NATIVE_TRANSFER, EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED, FORCED_EFFECT, ALL_COMPLETE],
    topologies=["disaggregated", "remote"],
)
async def test_the_engines_own_transfer_carries_a_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 14: "Native weight sync"; vLLM documentation, Weight Transfer: /update_weights."""
    batch = prompts.unique(SPREAD)
    await stack.generate(batch, **ANSWER)
    await sync_and_answer(stack, batch, (1, 1), (2, 4))


@scenario(task=14, promise="no class of the stack's own is in the workers", needs=NATIVE, checks=[NO_EXTENSION])
async def test_no_worker_is_extended(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - every scenario has both
    """SkyRL #1014, task 14: "no worker extension"; vLLM documentation, worker_extension_cls. Not with external servers, since the
    user who starts them chooses their command line."""
    await stack.sync_weights(1)
    await stack.workers()


@scenario(
    task=14,
    promise="a sync that fails in the middle leaves nothing behind that the next one would not put right",
    needs=SYNC,
    checks=[
        FAILED_SYNC,
        EVERY_PARAMETER,
        UNIFORM_SERVERS,
        EXPLAINED,
        SAME_VERSION_SAME_PARAMETERS,
        SAME_VERSION_SAME_OUTPUT,
    ],
    topologies=["disaggregated", "colocated"],
    deadline_s=120.0,
    spoils=True,
)
async def test_a_failed_sync_does_not_poison_the_next(stack: Stack, prompts: Prompts) -> None:
    """architecture, idempotent sync: "a failed sync followed by a good one is a good one"; SkyRL 0.2.0,
    NewInferenceWorkerWrap: start, chunks, finish. The trainer fails at another place each time and rejoins; the next sync
    sends another version than the failed one."""
    batch = prompts.unique(SPREAD)

    async def sync_and_answer() -> None:
        synced = await stack.attempt(stack.sync_weights(1, chunks=5))
        await stack.attempt(stack.digests())
        if synced is not None:  # nobody asks engines for answers whose weights were not put right
            await stack.attempt(stack.generate(batch, **ANSWER))

    for after in (1, 2, 3, 0):
        await stack.attempt(stack.sync_weights(2, chunks=5, fail_after_chunks=after))
        await stack.attempt(stack.prepare_weight_sync())
        await sync_and_answer()
    await sync_and_answer()


@scenario(
    task=14,
    promise="after a sync that failed, engines go on answering, until the next sync puts their weights right",
    needs={*SYNC, Capability.HEALTH},
    checks=[FAILED_SYNC, HEALTHY, EVERY_PARAMETER],
    topologies=["disaggregated"],
    deadline_s=90.0,
    spoils=True,
)
async def test_answers_after_a_failed_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 14; SkyRL documentation, Fully Async Training: rollouts go on while the trainer has trouble. Which weights
    make these answers is left open; that they come, and that the next sync is a good one, is not."""
    batch = prompts.unique(SPREAD)
    await stack.attempt(stack.sync_weights(2, chunks=5, fail_after_chunks=2))
    await stack.attempt(stack.generate(batch, max_tokens=2))
    await stack.attempt(stack.health())
    await stack.attempt(stack.prepare_weight_sync())
    await stack.attempt(stack.sync_weights(1))
    await stack.attempt(stack.digests())
    await stack.attempt(stack.generate(batch, **ANSWER))


@variants(
    {
        "test_a_parameter_of_another_name": {"unfit": "name", "checks": UNKNOWN_NAME},
        "test_a_parameter_of_another_name_by_deltas": {
            "unfit": "name",
            "checks": UNKNOWN_NAME,
            "needs": {*SYNC, Capability.HEALTH, Capability.DELTA_SYNC},
            "topologies": ["deltas"],
        },
        "test_a_parameter_of_another_shape": {
            "unfit": "shape",
            "checks": [names_error("unfit", "shape", "size"), FAILED_SYNC, HEALTHY, EVERY_PARAMETER],
        },
    },
    task=14,
    promise="a sync of a parameter that the model does not have is a named error, and the next sync is a good one",
    needs={*SYNC, Capability.HEALTH},
    topologies=["disaggregated"],
    deadline_s=150.0,
    spoils=True,
)
async def unfit_parameter(stack: Stack, prompts: Prompts, *, unfit: Unfit) -> None:
    """vLLM documentation, Weight Transfer: the trainer names each parameter with its shape; PyTorch documentation,
    Module.load_state_dict: unexpected keys and other shapes are errors. Who trains a model with another head meets it."""
    await stack.attempt(stack.sync_weights(2, unfit=unfit, label="unfit"))
    await stack.attempt(stack.health())
    await stack.attempt(stack.prepare_weight_sync())
    await stack.attempt(stack.sync_weights(1))
    await stack.attempt(stack.digests())
    await stack.attempt(stack.generate(prompts.unique(SPREAD), **ANSWER))


@scenario(
    task=14,
    promise="engines whose policy has diverged to NaN answer or say so, and the next sync is a good one",
    needs={*SYNC, Capability.HEALTH},
    checks=[answered_or_named("diverged", "nan", "finite", "float"), HEALTHY, EVERY_PARAMETER, greedy("after")],
    topologies=["disaggregated", "moe"],
    spoils=True,
)
async def test_a_policy_of_no_numbers(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 14; RFC 8259, 6: JSON has no NaN. A training that diverges sends such weights, and returns to a checkpoint.

    It spoils the stack: keys and values of NaN stay in an engine's memory."""
    batch = prompts.unique(SPREAD)
    await stack.sync_weights(2, unfit="numbers")
    await stack.attempt(stack.generate(batch, label="diverged", **ANSWER))
    await stack.attempt(stack.generate(batch, label="diverged", temperature=1.0, max_tokens=4, logprobs=0))
    await stack.health()
    await stack.sync_weights(1)
    await stack.digests()
    await stack.attempt(stack.generate(prompts.unique(SPREAD), label="after", logprobs=0, **ANSWER))


@scenario(
    task=14,
    promise="a policy that is about to diverge shows its log-probabilities, however small",
    needs=SYNC,
    checks=[extremes("diverging"), greedy("after")],
    topologies=["disaggregated"],
    spoils=True,
)
async def test_a_policy_that_diverges(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineOutput.response_logprobs; vLLM documentation, SamplingParams.logprobs. Their size is what a
    user sees of such a training. Few tokens are allowed, so that the chosen ones are very unlikely."""
    await stack.sync_weights(2, unfit="size")
    few: dict[str, Any] = {"allowed_token_ids": stack.vocabulary.plain[:6], "ignore_eos": True, "temperature": 0.0}
    asked = stack.generate(prompts.unique(SPREAD), label="diverging", max_tokens=6, logprobs=0, **few)
    await stack.attempt(asked)
    await stack.sync_weights(1)
    await stack.generate(prompts.unique(SPREAD), label="after", **ANSWER)


@scenario(
    task=14,
    promise="a sync that fails while requests are frozen leaves every server healthy, paused, and able to go on",
    needs={*SYNC, Capability.PAUSE_KEEP, Capability.IS_PAUSED, Capability.HEALTH},
    checks=[FAILED_SYNC, PAUSE_STATES, HEALTHY, EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED],
    deadline_s=90.0,
    spoils=True,
)
async def test_a_failed_sync_leaves_the_pause_as_it_is(stack: Stack, prompts: Prompts) -> None:
    """architecture, uniform fleet: "after a control call that failed …, all servers are in the same state"; SkyRL #899, /is_paused
    and /health."""
    batch = prompts.unique(4)
    async with interrupted(stack, "keep", stack.generate(batch, **long(stack)), requests=len(batch)):
        await stack.attempt(stack.sync_weights(2, chunks=3, fail_after_chunks=1))
        await stack.is_paused()
        await stack.health()
        await stack.attempt(stack.prepare_weight_sync())
        await stack.attempt(stack.sync_weights(1))
        await stack.is_paused()
        await stack.attempt(stack.digests())
    await stack.is_paused()
    await stack.health()
    await stack.generate(prompts.unique(SPREAD), **ANSWER)


test_a_failed_sync_does_not_poison_the_next_by_deltas = by_deltas(test_a_failed_sync_does_not_poison_the_next)
test_answers_after_a_failed_sync_by_deltas = by_deltas(test_answers_after_a_failed_sync)
test_a_failed_sync_leaves_the_pause_as_it_is_by_deltas = by_deltas(test_a_failed_sync_leaves_the_pause_as_it_is)
