"""The stack's own fully asynchronous trainer, whose loop begins rollouts, pauses the engines and asks for weights."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.history import explained
from harness.checks.trainer_runs import FAILS, SYNC_FAILS, TRAINER_RUN
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.capability import Capability
from harness.contract.messages import TrainerRunRequest
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import until_settled

MINI_BATCH = 2
STEPS = 4
NEEDS = {Capability.TRAINER_RUNS, Capability.GYM_GENERATOR, Capability.WEIGHT_SYNC}
PATIENCE_S = 20.0
"""A trainer that asks for nothing for that long waits for nothing that will come, on an engine of the tiny model's speed."""


async def run(stack: Stack, prompts: Prompts, extras: list[dict[str, Any]], label: str | None = None) -> None:
    """A run to its end: policy version k after step k."""
    asked = TrainerRunRequest(
        prompts=prompts.conversations(len(extras)),
        env_extras=extras,
        mini_batch_size=MINI_BATCH,
        workers=2 * MINI_BATCH,
        max_staleness_steps=STEPS - 1,
        max_tokens=24,
        max_turns=4,
    )
    within_s, version = PATIENCE_S * (4 if stack.slow else 1), 0
    await stack.start_trainer_run(asked)
    try:
        while (wants := await stack.trainer_wants(within_s, label)).what in ("weights", "training"):
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
    await run(stack, prompts, [{"turns": 1 + row % 4} for row in range(MINI_BATCH * STEPS)])


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
    await run(stack, prompts, [{"turns": 1 + row % 4} for row in range(MINI_BATCH * STEPS)], SYNC_FAILS)
    await stack.resume()
    await until_settled(stack)
