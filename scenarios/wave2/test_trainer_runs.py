"""The stack's own trainers: the loop of the fully asynchronous one begins rollouts, pauses the engines and asks for weights; the
workers of all send them."""

from __future__ import annotations

import math
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.history import answered, cached, explained
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.staleness import FORCED_EFFECT
from harness.checks.tokens import greedy
from harness.checks.trainer_runs import FAILS, SYNC_FAILS, TRAINER_EVALUATIONS, TRAINER_RESUMES, TRAINER_RUN
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.capability import Capability
from harness.contract.messages import TrainerRunRequest, Training
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import ANSWER, SPREAD, sessions, until_settled

MINI_BATCH = 2
STEPS = 4
EXTRAS: list[dict[str, Any]] = [{"turns": 1 + row % 4} for row in range(MINI_BATCH * STEPS)]
NEEDS = {Capability.TRAINER_RUNS, Capability.GYM_GENERATOR, Capability.WEIGHT_SYNC}
BY_DELTAS: dict[str, Any] = {"needs": {Capability.WEIGHT_SYNC, Capability.DELTA_SYNC}, "topologies": ["deltas"]}
PATIENCE_S = 20.0
"""A trainer that asks for nothing for that long waits for nothing that will come, on an engine of the tiny model's speed."""


async def run(
    stack: Stack,
    prompts: Prompts,
    extras: list[dict[str, Any]],
    label: str | None = None,
    until_step: float = math.inf,
    **given: Any,
) -> None:
    """A run to its end, or until it asks for this step: policy version k after step k."""
    asked = TrainerRunRequest(
        prompts=prompts.conversations(len(extras)),
        env_extras=extras,
        mini_batch_size=MINI_BATCH,
        workers=2 * MINI_BATCH,
        max_staleness_steps=STEPS - 1,
        max_tokens=24,
        max_turns=4,
        **given,
    )
    within_s, version = PATIENCE_S * (4 if stack.slow else 1), 0
    await stack.start_trainer_run(asked)
    try:
        while (wants := await stack.trainer_wants(within_s, label)).what in ("weights", "training"):
            if wants.step >= until_step:
                break
            version += wants.what == "weights"
            fails = wants.what == "weights" and version > 1 and label == SYNC_FAILS
            if wants.what == "weights" and not fails:
                await stack.sync_weights(version)
                await stack.digests()
            await stack.trainer_goes_on(fails=fails)
    finally:  # also after a sync that failed: the trainer would go on beside the next scenario
        await stack.end_trainer_run()


@scenario(
    task=5,
    promise="the trainer's own loop pauses engines for each sync, resumes them, and trains on each rollout once",
    needs=NEEDS,
    checks=[TRAINER_RUN, explained(), EVERY_PARAMETER],
    deadline_s=180.0,
)
async def test_a_fully_asynchronous_run(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, Fully Async Training. Rollouts have one to four turns, so that a sync always meets some of them."""
    await run(stack, prompts, EXTRAS)


@scenario(
    task=5,
    promise="a rollout that fails ends the trainer's run by an error: it does not wait for it for ever",
    needs=NEEDS,
    checks=[TRAINER_RUN],
    deadline_s=180.0,
)
async def test_a_rollout_that_fails(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1691: a worker's error was swallowed, and the trainer waited with all accelerators idle. Here each environment fails."""
    await run(stack, prompts, [{"turns": "many"}] * MINI_BATCH * STEPS, FAILS)


@scenario(
    task=5,
    promise="a sync that fails ends the trainer's run by an error, and leaves no engine paused",
    needs=NEEDS,
    checks=[TRAINER_RUN],
    deadline_s=180.0,
)
async def test_a_sync_that_fails_within_a_run(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, Fully Async Training: pause, sync and resume. Rollouts of others, an evaluation for instance, would wait
    for a resume() that nobody calls. The second sync fails; in the end the scenario resumes the engines itself, and waits for those
    requests of the ended run that the pause had held back: they would reach an engine within the next scenario."""
    await run(stack, prompts, EXTRAS, SYNC_FAILS)
    await stack.resume()
    await until_settled(stack)


@scenario(
    task=5,
    promise="evaluations are logged under the step after which the policy was evaluated, and none is lost",
    needs=NEEDS,
    checks=[TRAINER_EVALUATIONS],
    deadline_s=180.0,
)
async def test_a_run_that_evaluates(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1929: evaluations of the fully asynchronous trainer were logged a step late, and the last one never."""
    await run(stack, prompts, EXTRAS, evaluates=True)


@variants(
    {
        "test_a_run_that_is_resumed_within_an_epoch": {"epochs": 1, "until_step": 3},
        "test_a_run_that_is_resumed_after_an_epoch": {"epochs": 2, "until_step": STEPS + 1},
        "test_a_run_that_is_resumed_after_its_end": {"epochs": 1, "until_step": math.inf},
    },
    task=5,
    promise="a resumed run goes on at the step after the checkpoint, and trains on each prompt once in an epoch",
    needs=NEEDS,
    checks=[TRAINER_RESUMES],
    deadline_s=180.0,
)
async def a_run_that_is_resumed(stack: Stack, prompts: Prompts, *, epochs: int, until_step: float) -> None:
    """SkyRL documentation, Checkpointing and Resumption; SkyRL #799, #1802: a run that was resumed from the last checkpoint of an
    epoch never ended. A run that came to its end is resumed with one more epoch."""
    await run(stack, prompts, EXTRAS, epochs=epochs, until_step=until_step, saves=True)
    await until_settled(stack)
    await run(stack, prompts, EXTRAS, epochs=epochs + math.isinf(until_step), resumes=True)


@variants(
    {
        "test_the_cache_after_a_synchronous_sync": {"training": "synchronous"},
        "test_the_cache_after_an_asynchronous_sync": {"training": "asynchronous"},
        "test_the_cache_after_a_synchronous_sync_by_deltas": {"training": "synchronous", **BY_DELTAS},
        "test_the_cache_after_an_asynchronous_sync_by_deltas": {"training": "asynchronous", **BY_DELTAS},
    },
    task=5,
    promise="after a sync by the trainer's own worker no answer reads keys and values of earlier weights",
    needs={Capability.WEIGHT_SYNC},
    checks=[explained(cached, answered), FORCED_EFFECT, greedy(), ALL_COMPLETE],
)
async def the_cache_after_a_sync(stack: Stack, prompts: Prompts, *, training: Training) -> None:
    """SkyRL API reference, reset_prefix_cache: SkyRL's worker calls it with each sync (broadcast_to_inference_engines). Prompts
    fill a block and are answered twice, so the cache holds them before a sync. None has a salt, as a user's own has none."""
    batch = prompts.long(SPREAD)
    for version in range(3):
        if version:
            await stack.sync_weights(version, training=training)
        for _ in range(2):
            await stack.generate(batch, session_ids=sessions(SPREAD), **ANSWER)
