"""Settings of the stack's configuration, as its engines have them."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.settings import SETTINGS
from harness.driving.stack import Stack
from harness.suite.scenario import scenario


@scenario(
    task=0,
    promise="each engine runs with the settings of the stack's configuration",
    checks=[SETTINGS],
    topologies=["disaggregated", "colocated"],
)
async def test_engines_run_with_the_configured_settings(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL documentation, Configuration Overview: generator.inference_engine. Not with external servers, since the user who starts
    them chooses their command line."""
    await stack.workers()
