"""LoRA adapters: loaded by name and version, in effect only for requests that name them."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.adapters import ADAPTER_EFFECT, ADAPTER_ISOLATED, FRESH_ADAPTER_CACHE, ONLY_ADAPTER_TRAVELS
from harness.checks.errors import names_error
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import of_reference
from harness.checks.staleness import SAME_VERSION_SAME_OUTPUT
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import ANSWER, sessions

SCORED: dict[str, Any] = {**ANSWER, "logprobs": 0}
LORA = ["lora"]


@scenario(
    task=11,
    promise="loading an adapter sends the adapter alone to every server, and moves no parameter of the model",
    needs={Capability.LORA},
    checks=[
        ONLY_ADAPTER_TRAVELS,
        EVERY_PARAMETER,
        SAME_VERSION_SAME_PARAMETERS,
        UNIFORM_SERVERS,
        greedy(),
        ALL_COMPLETE,
    ],
    topologies=LORA,
)
async def test_only_the_adapter_travels(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 11: "Only LoRA weights synced". The tap reads what each engine loads."""
    batch = prompts.unique(6)
    await stack.digests()
    for version in (1, 2):
        await stack.load_lora_adapter("policy", version)
        await stack.digests()
        await stack.generate(batch, lora_adapter="policy", **SCORED)
    await stack.digests()


@scenario(
    task=11,
    promise="under an adapter the answers are those of the model with the adapter merged into it",
    needs={Capability.LORA, Capability.RESET_PREFIX_CACHE},
    checks=[ADAPTER_EFFECT, SAME_VERSION_SAME_OUTPUT, greedy(), of_reference(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_another_version_under_the_same_name(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters, load_inplace: SkyRL's trainer loads each step's adapter under one name, then resets the
    prefix cache (SkyRL 0.2.0, broadcast_to_inference_engines)."""
    batch = prompts.unique(6)
    await stack.generate(batch, **SCORED)
    for version in (1, 2, 1):
        await stack.load_lora_adapter("policy", version)
        await stack.reset_prefix_cache()
        for _ in range(2):
            await stack.generate(batch, lora_adapter="policy", **SCORED)


@scenario(
    task=11,
    promise="no answer under an adapter reads keys and values of the base model, nor, after a reset, of its last version",
    needs={Capability.LORA, Capability.RESET_PREFIX_CACHE},
    checks=[FRESH_ADAPTER_CACHE, ADAPTER_EFFECT, greedy(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_prefix_cache_of_an_adapter(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Automatic Prefix Caching: the adapter is part of a block's hash, its version is not, so SkyRL's
    trainer resets the cache with each version. Prompts fill a block and are answered twice, so it is cached before a load."""
    batch = prompts.long(4)
    for _ in range(2):
        await stack.generate(batch, session_ids=sessions(4), **SCORED)
    for version in (1, 2):
        await stack.load_lora_adapter("policy", version)
        if version > 1:
            await stack.reset_prefix_cache()
        for _ in range(2):
            await stack.generate(batch, session_ids=sessions(4), lora_adapter="policy", **SCORED)


@scenario(
    task=11,
    promise="chat, completion and generate() under an adapter are all answered by it",
    needs={Capability.LORA, Capability.CHAT_COMPLETION, Capability.COMPLETION},
    checks=[
        greedy("tokens"),
        greedy("completion", methods=["completion"]),
        greedy("chat", methods=["chat_completion"]),
    ],
    topologies=LORA,
)
async def test_chat_under_an_adapter(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: a body's "model" is the adapter's name."""
    body = {**ANSWER, "model": "policy", "return_token_ids": True}
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(prompts.unique(4), lora_adapter="policy", label="tokens", **SCORED)
    await stack.completion({**body, "prompt": prompts.unique(4)}, label="completion")
    for messages in prompts.conversations(4):
        await stack.chat_completion({**body, "messages": messages}, label="chat")


@scenario(
    task=11,
    promise="an adapter changes the answers that ask for it and no others: without one the base model answers again",
    needs={Capability.LORA, Capability.ADAPTER_BY_NAME},
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
    topologies=LORA,
)
async def test_an_adapter_changes_only_what_asks_for_it(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: the base model serves requests without an adapter, after and beside others."""
    batch = prompts.unique(8)
    await stack.digests()
    await stack.generate(batch, **SCORED)
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(batch, lora_adapter="policy", **SCORED)
    await stack.generate(batch, **SCORED)
    async with asyncio.TaskGroup() as callers:
        for adapter in (None, "policy"):
            callers.create_task(stack.generate(batch, lora_adapter=adapter, **SCORED))
    await stack.digests()


@scenario(
    task=11,
    promise="the base model and an adapter share no prefix cache, whichever comes first",
    needs={Capability.LORA, Capability.ADAPTER_BY_NAME},
    checks=[FRESH_ADAPTER_CACHE, ADAPTER_EFFECT, ADAPTER_ISOLATED, greedy(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_prefix_cache_is_not_shared_between_adapters(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Automatic Prefix Caching: the adapter is part of a block's hash. No reset in between."""
    first, second = prompts.long(4), prompts.long(4)
    await stack.load_lora_adapter("policy", 1)
    for batch, order in ((first, (None, "policy")), (second, ("policy", None))):
        for adapter in order:
            for _ in range(2):
                await stack.generate(batch, session_ids=sessions(4), lora_adapter=adapter, **SCORED)


@scenario(
    task=11,
    promise="two adapters and the base model answer side by side and by turns, each for itself",
    needs={Capability.LORA, Capability.ADAPTER_BY_NAME, Capability.SEVERAL_ADAPTERS},
    checks=[FRESH_ADAPTER_CACHE, ADAPTER_EFFECT, ADAPTER_ISOLATED, greedy(), of_reference(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_adapters_side_by_side(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: requests for several adapters and for the base model are served at once."""
    batch, long = prompts.unique(6), prompts.long(2)
    await stack.load_lora_adapter("one", 1)
    await stack.load_lora_adapter("other", 2)
    async with asyncio.TaskGroup() as callers:
        for adapter in (None, "one", "other"):
            callers.create_task(stack.generate(batch, lora_adapter=adapter, **SCORED))
    for adapter in ("one", "one", "other", None, "one"):
        await stack.generate(long, session_ids=sessions(2), lora_adapter=adapter, **SCORED)


@scenario(
    task=11,
    promise="an adapter that is not loaded is refused by name",
    needs={Capability.LORA, Capability.ADAPTER_BY_NAME},
    checks=[names_error("unknown", "adapter", "lora", "nobody")],
    topologies=LORA,
)
async def test_an_adapter_that_is_not_loaded(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: an unknown adapter is an error, never an answer of the base model."""
    await stack.attempt(stack.generate(prompts.unique(2), lora_adapter="nobody", label="unknown", **SCORED))
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(prompts.unique(2), lora_adapter="policy", **SCORED)
    await stack.attempt(stack.generate(prompts.unique(2), lora_adapter="nobody", label="unknown", **SCORED))


@scenario(
    task=11,
    promise="an adapter that was unloaded is refused by name",
    needs={Capability.LORA, Capability.ADAPTER_BY_NAME, Capability.UNLOAD_ADAPTER},
    checks=[names_error("unloaded", "adapter", "lora", "policy")],
    topologies=LORA,
)
async def test_an_adapter_that_was_unloaded(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters, /v1/unload_lora_adapter."""
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(prompts.unique(2), lora_adapter="policy", **SCORED)
    await stack.unload_lora_adapter("policy")
    await stack.attempt(stack.generate(prompts.unique(2), lora_adapter="policy", label="unloaded", **SCORED))
    await stack.generate(prompts.unique(2), **SCORED)
