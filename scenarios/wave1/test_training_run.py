"""A small training run: rollouts from the stack, a training step, a sync, an evaluation, several times over."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.history import EXPLAINED
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.training import GAP, RISES
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.training import PROMPTS, evaluate, roll_out, train

STEPS = 10
"""Of 12 draws of rollouts each raised the reward by 0.4 or more in ten steps; in six steps one of ten stays below `RISE`."""


@scenario(
    task=1,
    promise="training on the stack's rollouts raises the evaluation reward, each step in agreement with the trainer",
    needs={Capability.WEIGHT_SYNC, Capability.TRAINER, Capability.RESET_PREFIX_CACHE},
    checks=[RISES, GAP, EXPLAINED, EVERY_PARAMETER, ALL_COMPLETE],
    deadline_s=240.0,
)
async def test_a_small_training_run_learns(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 1: "Evaluation accuracy is at least that of the legacy path"; SkyRL's RayPPOTrainer: generate, train, sync.

    On-policy: the version that a step trains makes the step's rollouts."""
    version, batch, held_out = 0, prompts.unique(PROMPTS), prompts.unique(16)
    await evaluate(stack, held_out, step=0)
    for step in range(STEPS):
        rollouts = await roll_out(stack, batch, step=step)
        trained = await train(stack, rollouts, base=version, step=step)
        version = trained.version
        await stack.sync_weights(version, chunks=2, label=f"sync {step}")
        await stack.digests(label=f"digests {step}")
        await stack.reset_prefix_cache(label=f"reset {step}")
        await evaluate(stack, held_out, step=step + 1)
