"""Settings of the stack's configuration, as its engines have them."""

from __future__ import annotations

import asyncio
import string
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.engine_options import DRIVER_WITHOUT_A_DEVICE, ENGINE_OPTIONS, SERVING_OPTIONS, SYNC_BACKEND
from harness.checks.left_out import LEFT_OUT
from harness.checks.overrides import CONFIGURED_SAMPLING, CONTRADICTION, CONTRADICTIONS, OVERRIDES, VALID
from harness.checks.settings import SETTINGS
from harness.contract.capability import Capability
from harness.contract.messages import Scalar
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import EVERYWHERE, SPREAD


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
    generator arguments. Every number, switch and text of an engine, each also under a name that no engine has. No engine starts."""
    known = (await stack.engine_arguments()).arguments
    values = {name: others(value)[0] for name, value in known.items() if value is not None}
    for name in stack.within_budget(values):
        for given in (name, misspelt(name)):
            await stack.attempt(stack.engine_arguments(**{given: values[name]}))


@scenario(
    task=0,
    promise="weights travel by the backend that the configuration names, or it is refused by its name",
    needs={Capability.ENGINE_OPTIONS, Capability.WEIGHT_SYNC},
    checks=[SYNC_BACKEND],
)
async def test_the_backend_of_weight_syncs(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL documentation, Configuration Overview, weight_sync_backend. The last one is misspelt. No engine starts."""
    for backend in ("nccl", "gloo", misspelt("nccl")):
        await stack.attempt(stack.sync_backend(backend))


@scenario(
    task=0,
    promise="a driver without an accelerator configures engines as any other does",
    needs={Capability.ENGINE_OPTIONS},
    checks=[DRIVER_WITHOUT_A_DEVICE],
)
async def test_a_driver_without_a_device(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """Ray documentation, Cluster Key Concepts: drivers run on the head node, which needs no GPU; SkyRL 0.3.0, build_vllm_cli_args:
    "This function may run a GPU-less Ray head node". No engine starts."""
    await stack.engine_arguments()
    await stack.attempt(stack.engine_arguments_without_a_device())


def others(value: Scalar) -> list[Scalar]:
    """Other values of the same type: of a number also a small one, of a text also such as look like something else."""
    match value:
        case None:
            return [None]
        case bool() | int():
            return [another(value)]
        case float():
            return [another(value), 1e-05]
        case _:
            return [misspelt(value or "text"), "12", "null"]


TOOLS: dict[str, Scalar] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
SERVING: list[dict[str, Any]] = [
    TOOLS,
    {"enable_auto_tools": True, "tool_parser": "hermes"},
    {"reasoning_parser": "qwen3"},
    TOOLS | {"reasoning_parser": "qwen3"},
    {"chat_template": "{{ messages[0]['content'] }}"},
    {"default_chat_template_kwargs": {"enable_thinking": False}},
    {"host": "127.0.0.2"},
    {"api_key": ["secret"]},
    {"api_key": "secret"},
    {"allowed_origins": "https://page.invalid"},
]
"""Options of the OpenAI address that are given together; the second are other names of the first. A template is given as text or as
the path of a file (vLLM documentation, --chat-template). `enable_thinking` is Qwen3's (vLLM documentation,
--default-chat-template-kwargs). A key is given as a list, and as the text that a command line makes of it."""


@scenario(
    task=0,
    promise="an option for the OpenAI address takes effect under each of its names, or is refused by its name",
    needs={Capability.ENGINE_OPTIONS},
    checks=[SERVING_OPTIONS],
)
async def test_options_for_the_openai_address(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL #322: engine_init_kwargs.enable_auto_tool_choice and tool_call_parser; #358: "as well as their alias naming"; #796:
    reasoning_parser; vLLM documentation, vllm serve, Frontend: every number, switch and text, each alone. No engine starts."""
    known = await stack.serving_arguments()
    single = [{name: others(value)[0]} for name, value in known.items() if value is not None]
    for options in SERVING + stack.within_budget(single):
        await stack.attempt(stack.serving_arguments(**options))


@scenario(
    task=0,
    promise="a configuration made of values by key holds these values with their types, and requests get its sampling parameters",
    needs={Capability.CONFIGURATION_OVERRIDES},
    checks=[OVERRIDES, CONFIGURED_SAMPLING],
)
async def test_overrides_of_the_configuration(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL, SkyRLTrainConfig.from_cli_overrides: "a dict mapping dot-notation keys to values". Every number, switch, text and None of
    the configuration for generation, each alone. No engine starts."""
    values = await stack.override_configuration()
    for key in stack.within_budget(values):
        for value in others(values[key]):
            await stack.attempt(stack.override_configuration({key: value}))


ENGINES = "generator.inference_engine."
OWN: dict[str, Scalar | list[str]] = {
    "trainer.logger": "console",
    "trainer.placement.colocate_all": True,
    "trainer.placement.policy_num_gpus_per_node": 1,
    f"{ENGINES}num_engines": 1,
    f"{ENGINES}tensor_parallel_size": 1,
}
"""A small configuration of colocated engines."""
OUTSIDE: dict[str, Scalar | list[str]] = {
    f"{ENGINES}external_server_urls": ["http://127.0.0.1:9"],
    f"{ENGINES}external_proxy_url": "http://127.0.0.1:9",
}
"""Addresses of servers that colocated engines exclude."""
EXCLUDED: tuple[dict[str, Scalar | list[str]], ...] = (
    *({key: value} for key, value in OUTSIDE.items()),
    OUTSIDE,
    {f"{ENGINES}expert_parallel_size": 2},
    {"generator.max_turns": 1, "generator.max_input_length": 513},
    {"generator.merge_stepwise_output": True, "generator.step_wise_trajectories": False},
)
"""Settings that exclude each other or one of `OWN`."""


@scenario(
    task=0,
    promise="settings that exclude each other are refused by name before anything starts",
    needs={Capability.CONFIGURATION_OVERRIDES},
    checks=[CONTRADICTIONS],
)
async def test_settings_that_exclude_each_other(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - as all
    """SkyRL, validate_cfg: "Cannot use external_proxy_url or external_server_urls with colocate_all=true"; SkyRL documentation,
    Configuration Overview. No engine starts."""
    apart = {**OWN, "trainer.placement.colocate_all": False}
    for valid in (OWN, apart, {**apart, **OUTSIDE}):
        await stack.attempt(stack.override_configuration(valid, validated=True, label=VALID))
    for settings in EXCLUDED:
        await stack.attempt(stack.override_configuration({**OWN, **settings}, validated=True, label=CONTRADICTION))


@scenario(
    task=0,
    promise="a sampling parameter that a request leaves out is the one that the checkpoint recommends, or vLLM's own",
    needs={Capability.CHAT_COMPLETION, Capability.COMPLETION},
    checks=[LEFT_OUT],
    topologies=[*EVERYWHERE, "moe"],
)
async def test_parameters_that_a_request_leaves_out(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: "By default, the server applies generation_config.json from the Hugging Face model
    repository if it exists." Which of the two it is, and for which call, is compared between stacks."""
    assert stack.vocabulary.defaults
    body = {"model": stack.model_name, "max_tokens": 8}
    whole = stack.vocabulary.spelled(string.digits)  # the same as text and as tokens: no vocabulary here joins digits
    async with asyncio.TaskGroup() as callers:
        callers.create_task(stack.generate(prompts.unique(SPREAD), max_tokens=1, allowed_token_ids=whole))
        callers.create_task(stack.generate(prompts.unique(2), allowed_token_ids=whole))
        callers.create_task(stack.completion({**body, "prompt": prompts.unique(SPREAD)}))
        for messages in prompts.conversations(SPREAD):
            callers.create_task(stack.chat_completion({**body, "messages": messages}))


@scenario(
    task=0,
    promise="without max_tokens generate() and sample() end by one rule, whatever the model is",
    needs={Capability.SAMPLE},
    checks=[LEFT_OUT],
    topologies=["disaggregated", "moe"],
)
async def test_the_length_that_calls_for_tokens_leave_out(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.max_tokens: 16 by default; vLLM #42329: /inference/v1/generate goes on to the end of the
    context. Both calls take SamplingParams. Which of the two lengths it is, is compared between stacks."""
    await stack.generate(prompts.unique(2), temperature=1.0)
    await stack.sample(prompts.one(), 1, temperature=1.0)


@scenario(
    task=0,
    promise="a chat without max_tokens ends at the checkpoint's max_new_tokens, or at the end of the context",
    needs={Capability.CHAT_COMPLETION},
    checks=[LEFT_OUT],
    topologies=["llama"],
)
async def test_the_length_that_a_chat_leaves_out(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: generation_config.json; --generation-config: "If max_new_tokens is specified in
    generation config, then it sets a server-wide limit on the number of output tokens for all requests." Comparisons of two stacks
    show which of the two applies."""
    assert stack.vocabulary.defaults
    for messages in prompts.conversations(2):
        await stack.chat_completion({"model": stack.model_name, "messages": messages, "temperature": 1.0})
