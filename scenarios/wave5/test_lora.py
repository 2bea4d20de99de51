"""LoRA adapters: loaded by name and version, in effect where they are asked for, and nowhere else."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.capability import Capability
from harness.checks.adapters import ADAPTER_EFFECT, ADAPTER_ISOLATED, FRESH_ADAPTER_CACHE
from harness.checks.errors import names_error
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import of_reference
from harness.checks.staleness import SAME_VERSION_SAME_OUTPUT
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS
from harness.scenario import scenario
from harness.stack import Stack

ANSWER: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
NEEDS = {Capability.LORA}


@scenario(
    task=11,
    promise="an adapter changes the answers that ask for it and leaves the base model as it was",
    needs=NEEDS,
    checks=[
        ADAPTER_EFFECT,
        ADAPTER_ISOLATED,
        EVERY_PARAMETER,
        SAME_VERSION_SAME_PARAMETERS,
        SAME_VERSION_SAME_OUTPUT,
        greedy(),
        of_reference(),
        ALL_COMPLETE,
    ],
)
async def test_an_adapter_changes_only_what_asks_for_it(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 11: "Only LoRA weights synced": no parameter of the base model moves."""
    batch = prompts.unique(8)
    await stack.digests()
    await stack.generate(batch, **ANSWER)
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(batch, lora_adapter="policy", **ANSWER)
    await stack.generate(batch, **ANSWER)
    await stack.digests()
    await stack.unload_lora_adapter("policy")
    await stack.generate(batch, **ANSWER)
    await stack.digests()


@scenario(
    task=11,
    promise="two adapters and the base model answer side by side, each for itself",
    needs=NEEDS,
    checks=[ADAPTER_EFFECT, ADAPTER_ISOLATED, greedy(), of_reference(), ALL_COMPLETE],
)
async def test_adapters_side_by_side(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: requests for several adapters and for the base model run in one batch."""
    batch = prompts.unique(6)
    await stack.load_lora_adapter("one", 1)
    await stack.load_lora_adapter("other", 2)
    for _ in range(2):
        async with asyncio.TaskGroup() as callers:
            for adapter in (None, "one", "other"):
                callers.create_task(stack.generate(batch, lora_adapter=adapter, **ANSWER))


@scenario(
    task=11,
    promise="loading another version under a name replaces the one that was there",
    needs=NEEDS,
    checks=[ADAPTER_EFFECT, ADAPTER_ISOLATED, SAME_VERSION_SAME_OUTPUT, greedy(), of_reference(), ALL_COMPLETE],
)
async def test_another_version_under_the_same_name(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters, load_inplace: SkyRL's trainer sends each step's adapter under one name."""
    batch = prompts.unique(6)
    for version in (1, 2, 1):
        await stack.load_lora_adapter("policy", version)
        await stack.generate(batch, lora_adapter="policy", **ANSWER)
        await stack.generate(batch, **ANSWER)


@scenario(
    task=11,
    promise="no answer reads keys and values of another adapter, nor of an adapter's last version",
    needs=NEEDS,
    checks=[FRESH_ADAPTER_CACHE, ADAPTER_EFFECT, ADAPTER_ISOLATED, greedy(), ALL_COMPLETE],
)
async def test_prefix_cache_is_not_shared_between_adapters(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Automatic Prefix Caching. Prompts fill more than one block and are answered twice each time, so
    that their blocks are cached when the next adapter comes."""
    batch = prompts.long(4)
    for version in (1, 2):
        for _ in range(2):
            await stack.generate(batch, **ANSWER)
        await stack.load_lora_adapter("policy", version)
        for _ in range(2):
            await stack.generate(batch, lora_adapter="policy", **ANSWER)
    await stack.generate(batch, **ANSWER)


@scenario(
    task=11,
    promise="an adapter that is not loaded, or not any more, is refused by name",
    needs=NEEDS,
    checks=[names_error("unknown", "adapter", "lora", "nobody"), names_error("unloaded", "adapter", "lora", "policy")],
)
async def test_an_adapter_that_is_not_loaded(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: an adapter that is not there is an error, never an answer of the base model."""
    await stack.attempt(stack.generate(prompts.unique(2), lora_adapter="nobody", label="unknown", **ANSWER))
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(prompts.unique(2), lora_adapter="policy", **ANSWER)
    await stack.unload_lora_adapter("policy")
    await stack.attempt(stack.generate(prompts.unique(2), lora_adapter="policy", label="unloaded", **ANSWER))
