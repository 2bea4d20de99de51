"""What a caller of the client meets: methods, parameters, attributes, types, exceptions, configuration keys."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.interface import DOCUMENTED_INTERFACE, VARIABLES
from harness.driving.stack import Stack
from harness.suite.scenario import scenario


@scenario(task=0, promise="the client offers the documented interface", checks=[DOCUMENTED_INTERFACE])
async def test_the_client_offers_the_documented_interface(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface. The comparison lists what else a caller has to change when one client replaces
    the other. Looking at the client leaves it as it is."""
    await stack.census()
    await stack.generate(prompts.unique(2), max_tokens=4, temperature=0.0)


@scenario(task=0, promise="each variable of the stack reaches the processes that read it", checks=[VARIABLES])
async def test_variables_reach_the_stacks_processes(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - every scenario has both
    """SkyRL #1800: a limit that a user sets in the shell, on a cluster that is up already."""
    await stack.census()
