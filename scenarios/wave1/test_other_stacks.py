"""How a stack begins if it cannot, and how it ends: seen at another one, in a process of its own."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.other_stacks import FAILED_START, STACK_ENDS
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario

START_S = 120.0
"""Longest time for a start with a tiny model, which takes some seconds, or a minute with Ray."""
END_S = 20.0
"""Longest time until nothing is left. SkyRL gives its router five seconds to end, and Ray its workers ten."""
DEADLINE_S = 600


@scenario(
    task=0,
    promise="a stack that cannot start says in time which path or option is wrong, and leaves nothing",
    needs={Capability.OTHER_STACKS},
    checks=[FAILED_START],
    deadline_s=DEADLINE_S,
    bulk=True,
)
async def test_a_start_that_fails(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL, VLLMServerActor.start: "Start the vLLM server. Blocks until server is healthy". The model's path does not exist, its
    folder has no weights, as after a download that was broken off, or vLLM refuses an option."""
    for wrong in ("no model", "no weights"):
        await stack.other_stack(wrong=wrong, start_s=START_S, end_s=END_S)
    await stack.other_stack(wrong="option", then="exits", start_s=START_S, end_s=END_S)


@scenario(
    task=0,
    promise="a stack that is ended leaves no process, no address and no reservation, also if the process that owns it is killed",
    needs={Capability.OTHER_STACKS, Capability.STACK_ENDS},
    checks=[STACK_ENDS],
    deadline_s=DEADLINE_S,
    bulk=True,
)
async def test_an_end(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL, ServerActorPool.shutdown: "Shutdown all actors and kill them to release GPU memory"; VLLMRouter.shutdown: "Terminate the
    router process". A stack is ended by its own methods. Another one loses its process to SIGKILL, as by the kernel when memory is
    short: nobody can end the rest by hand on each machine."""
    await stack.other_stack(start_s=START_S, end_s=END_S)
    await stack.other_stack(then="killed", start_s=START_S, end_s=END_S)
