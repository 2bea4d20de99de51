"""What a caller of the client meets: methods, parameters, attributes, types, exceptions, configuration keys."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.interface import DOCUMENTED_INTERFACE
from harness.driving.stack import Stack
from harness.suite.scenario import scenario


@scenario(task=0, promise="the client offers the documented interface", checks=[DOCUMENTED_INTERFACE])
async def test_the_client_offers_the_documented_interface(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface. The comparison lists what else a caller has to change when one client replaces
    the other. Looking at the client leaves it as it is."""
    await stack.census()
    await stack.generate(prompts.unique(2), max_tokens=4, temperature=0.0)
