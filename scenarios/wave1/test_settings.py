"""Settings of the stack's configuration, as its engines have them."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.engine_options import ENGINE_OPTIONS
from harness.checks.settings import SETTINGS
from harness.contract.capability import Capability
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


def another(value: bool | float) -> bool | float:
    """Another value of the same type."""
    return not value if isinstance(value, bool) else value + 1


def misspelt(name: str) -> str:
    return name + name[-1]


@scenario(
    task=0,
    promise="an option for the engines takes effect or is refused by its name, and replaces no key of the configuration",
    needs={Capability.ENGINE_OPTIONS},
    checks=[ENGINE_OPTIONS],
)
async def test_options_for_the_engines(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL documentation, Configuration Overview, generator.engine_init_kwargs: an error is raised for kwargs that clash with
    generator arguments. Every number and switch of an engine, each also under a name that no engine has. No engine starts."""
    arguments = (await stack.engine_arguments()).arguments
    numbers = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float)}
    for name in stack.within_budget(numbers):
        for given in (name, misspelt(name)):
            await stack.attempt(stack.engine_arguments(**{given: another(numbers[name])}))
