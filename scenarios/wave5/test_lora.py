"""LoRA adapters: loaded by name and version, in effect only for requests that name them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fixtures.prompts import Prompts
from harness.checks.adapters import (
    ADAPTER_EFFECT,
    ADAPTER_ISOLATED,
    ADAPTER_UNDISTURBED,
    BASE_MODEL_KEPT,
    FRESH_ADAPTER_CACHE,
    ONE_POLICY,
    ONLY_ADAPTER_TRAVELS,
)
from harness.checks.client_lives import CLIENT_LIVES, CONFIGURED
from harness.checks.errors import answered_or_named, names_error
from harness.checks.hops import BROKEN_CONTROL
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import of_reference
from harness.checks.staleness import SAME_VERSION_SAME_OUTPUT
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.contract.messages import HopFault
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.hops import AFTER_THE_ENGINE, CONTROL_FAULTS
from scenarios.pauses import interrupted
from scenarios.requests import ANSWER, ask_as_configured, long, sessions

SCORED: dict[str, Any] = {**ANSWER, "logprobs": 0}
LORA = ["lora"]
OF_THE_TRAINER = "skyrl-lora"
"""The name under which SkyRL's trainer loads each step's adapter (SkyRL 0.3.0, SKYRL_LORA_ADAPTER_NAME)."""
BY_NAME = {Capability.LORA, Capability.ADAPTER_BY_NAME}
SEVERAL = {*BY_NAME, Capability.SEVERAL_ADAPTERS}
EVERY_CALL = {Capability.SAMPLE, Capability.CHAT_COMPLETION, Capability.COMPLETION}


async def ask_by_every_call(stack: Stack, prompts: Prompts, adapter: str | None, label: str | None = None) -> None:
    """One prompt by generate() and sample(), one by completion() and one by chat_completion(), under a name. Each may be refused."""
    prompt, body = prompts.one(), {**ANSWER, "model": adapter or stack.model_name, "return_token_ids": True}
    messages = prompts.conversations(1)[0]
    short: dict[str, Any] = {"temperature": 0, "max_tokens": 16}  # what sample() passes on in every release
    await stack.attempt(stack.generate([prompt], lora_adapter=adapter, label=label or "tokens", **SCORED))
    await stack.attempt(stack.sample(prompt, 1, lora_adapter=adapter, label=label or "tokens", **short))
    await stack.attempt(stack.completion({**body, "prompt": prompt}, label=label or "completion"))
    await stack.attempt(stack.chat_completion({**body, "messages": messages}, label=label or "chat"))


@scenario(
    task=11,
    promise="a sync of an adapter that succeeds has loaded it into every engine",
    needs={Capability.ADAPTER_SYNC},
    checks=[ONLY_ADAPTER_TRAVELS],
    topologies=LORA,
)
async def test_a_sync_of_an_adapter(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 11: "Only LoRA weights synced". For stacks that take the sync, whether or not a request can follow it."""
    for version in (1, 2):
        await stack.generate(prompts.unique(2), **ANSWER)
        await stack.load_lora_adapter("policy", version)


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
    promise="a version that the trainer has written to the adapter's folder takes no effect before it is loaded",
    needs={Capability.LORA, Capability.RESET_PREFIX_CACHE},
    checks=[ADAPTER_UNDISTURBED, ADAPTER_EFFECT, SAME_VERSION_SAME_OUTPUT, greedy(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_a_version_that_is_only_written(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, lora_sync_path: one folder for the adapters of all steps. While the trainer writes the next one into it, or after a load
    that failed, rollouts go on under the last one that was loaded (vLLM documentation, /v1/load_lora_adapter)."""
    batch = prompts.unique(6)
    await stack.generate(batch, **SCORED)
    for version in (1, 2):
        await stack.load_lora_adapter("policy", version)
        await stack.reset_prefix_cache()
        await stack.generate(batch, lora_adapter="policy", **SCORED)
        await stack.write_lora_adapter("policy", version + 1)
        for prompted in (batch, prompts.unique(6)):
            await stack.generate(prompted, lora_adapter="policy", **SCORED)


@scenario(
    task=11,
    promise="an adapter that made room for others answers in its loaded version, whatever its folder holds by now",
    needs=SEVERAL,
    checks=[ADAPTER_UNDISTURBED, greedy(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_an_adapter_that_made_room(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters, --max-cpu-loras: an engine drops the adapter that was used longest ago, and reads its folder
    when the next request has it. A trainer of several adapters writes each one's next version there (SkyRL, lora_sync_path)."""
    batch = prompts.unique(4)
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(batch, lora_adapter="policy", **SCORED)
    await stack.write_lora_adapter("policy", 2)
    for other in ("first", "second", "third", "fourth"):
        await stack.load_lora_adapter(other, 3)
        await stack.generate(prompts.unique(4), lora_adapter=other, **SCORED)
    for prompted in (batch, prompts.unique(4)):
        await stack.generate(prompted, lora_adapter="policy", **SCORED)


@scenario(
    task=11,
    promise="while the trainer writes the next version into an adapter's folder, the loaded one goes on answering",
    needs={Capability.LORA, Capability.RESET_PREFIX_CACHE},
    checks=[ADAPTER_UNDISTURBED, greedy(), ALL_COMPLETE],
    topologies=LORA,
    spoils=True,
)
async def test_a_version_that_is_being_written(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, lora_sync_path: one folder for the adapters of all steps, whose file the trainer writes in place. Under fully
    asynchronous training rollouts are under way meanwhile."""
    batch = prompts.unique(6)
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(batch, lora_adapter="policy", **ANSWER)
    stack.spoil("an adapter that is half written")
    await stack.write_lora_adapter("policy", 2, half=True)
    await stack.attempt(stack.generate(prompts.unique(6), lora_adapter="policy", **ANSWER))
    await stack.attempt(stack.load_lora_adapter("policy", 2))
    await stack.attempt(stack.reset_prefix_cache())
    await stack.attempt(stack.generate(batch, lora_adapter="policy", **ANSWER))


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
    promise="answers after a load are the new version's, also of prompts that the cache knows, without a reset",
    needs={Capability.LORA},
    checks=[FRESH_ADAPTER_CACHE, ALL_COMPLETE],
    topologies=["lora"],
)
async def test_a_load_without_a_reset(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 11: LoRA weights are synced and used. SkyRL's trainer resets the cache after each load, so this is about what
    is asked in between, or by callers who do not know. A stack may give each load a name of its own, which is in a block's hash
    (vLLM documentation, Automatic Prefix Caching)."""
    batch = prompts.long(4)
    for version in (1, 2):
        await stack.load_lora_adapter("policy", version)
        for _ in range(2):
            await stack.generate(batch, session_ids=sessions(4), lora_adapter="policy", **SCORED)


@scenario(
    task=11,
    promise="requests that a pause has frozen under an adapter end whole after its next version was loaded, and new ones are its own",
    needs={Capability.LORA, Capability.PAUSE_KEEP, Capability.RESET_PREFIX_CACHE},
    checks=[ALL_COMPLETE, greedy("after")],
    topologies=LORA,
    spoils=True,
)
async def test_a_load_over_frozen_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, Fully Async Training: pause, sync and resume, while rollouts are under way. With LoRA the sync is a load.
    Which version makes the rest of a frozen answer is left open; that it comes is not."""
    batch = prompts.unique(4)
    await stack.load_lora_adapter("policy", 1)
    rollouts = stack.generate(batch, lora_adapter="policy", **long(stack))
    async with interrupted(stack, "keep", rollouts, requests=len(batch)):
        await stack.load_lora_adapter("policy", 2)
    await stack.reset_prefix_cache()
    await stack.generate(prompts.unique(4), lora_adapter="policy", label="after", **SCORED)


@scenario(
    task=11,
    promise="engines that sleep while an adapter is trained keep the base model, which no sync brings back",
    needs={Capability.LORA, Capability.SLEEP, Capability.RESET_PREFIX_CACHE},
    checks=[BASE_MODEL_KEPT, EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, ADAPTER_EFFECT, greedy(), ALL_COMPLETE],
    topologies=["lora-colocated"],
)
async def test_sleep_keeps_the_base_model(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 1: "Sleep before training step, wake before generation"; task 11: "Only LoRA weights synced". The trainer
    sleeps engines at level 2, which discards weights (vLLM documentation, Sleep Mode)."""
    batch = prompts.unique(6)
    await stack.digests()
    await stack.generate(batch, **SCORED)
    for version in (1, 2):
        await stack.sleep(level=2)
        await stack.wake_up()
        await stack.load_lora_adapter("policy", version)
        await stack.reset_prefix_cache()
        await stack.generate(batch, lora_adapter="policy", **SCORED)
        await stack.digests()


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
    promise="the client that the configuration makes is answered before its first adapter is loaded",
    needs={Capability.LORA, Capability.CLIENT_LIVES, Capability.CHAT_COMPLETION, Capability.COMPLETION},
    checks=[CLIENT_LIVES],
    topologies=LORA,
)
async def test_the_configured_client_before_a_load(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, LoRA Support: training starts from the base model, whose adapter changes nothing. A run that is evaluated
    before its first step generates before the first load."""
    await stack.client_life("as configured")
    await ask_as_configured(stack, prompts)
    await stack.client_life("made again")
    await stack.generate(prompts.unique(4), **ANSWER)


@scenario(
    task=11,
    promise="every call of the client that the configuration makes is answered by the same policy, or refused by name",
    needs={Capability.LORA, Capability.CLIENT_LIVES, *EVERY_CALL},
    checks=[ONE_POLICY, answered_or_named(CONFIGURED, "model")],
    topologies=LORA,
)
async def test_every_call_of_the_configured_client(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, LoRA Support: the policy is the model with its adapter. A rollout that generates token ids and one that
    chats must come from the same policy. No call names the adapter: the client knows of it by the configuration."""
    await stack.client_life("as configured")
    await stack.load_lora_adapter(OF_THE_TRAINER, 1)
    body = {**ANSWER, "model": stack.model_name, "return_token_ids": True}
    await stack.attempt(stack.generate(prompts.unique(4), label=CONFIGURED, **ANSWER))
    await stack.attempt(stack.completion({**body, "prompt": prompts.unique(4)}, label=CONFIGURED))
    for messages in prompts.conversations(4):
        await stack.attempt(stack.sample(prompts.one(), 1, label=CONFIGURED, temperature=0, max_tokens=16))
        await stack.attempt(stack.chat_completion({**body, "messages": messages}, label=CONFIGURED))
    await stack.client_life("made again")


@scenario(
    task=11,
    promise="where engines keep earlier adapters, answers after a load are the newest one's",
    needs={Capability.LORA, Capability.RESET_PREFIX_CACHE},
    checks=[FRESH_ADAPTER_CACHE, ALL_COMPLETE],
    topologies=["lora-spare"],
)
async def test_a_load_beside_earlier_ones(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters, --max-cpu-loras: an engine keeps adapters that no request uses. A stack may give each load a
    name of its own, so that the earlier ones stay. Several loads, since their order in an engine may be any."""
    batch = prompts.long(4)
    for version in range(1, 7):
        await stack.load_lora_adapter("policy", version)
        await stack.reset_prefix_cache()
        for _ in range(2):
            await stack.generate(batch, session_ids=sessions(4), lora_adapter="policy", **ANSWER)


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
    promise="generate() without a name is answered by the base model, also once an adapter is loaded",
    needs={Capability.LORA},
    checks=[ADAPTER_ISOLATED],
    topologies=LORA,
)
async def test_a_request_without_a_name(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: a request without an adapter is the base model's."""
    batch = prompts.unique(8)
    await stack.load_lora_adapter("policy", 1)
    await stack.generate(batch, lora_adapter="policy", **SCORED)
    await stack.generate(batch, **SCORED)


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


@scenario(
    task=11,
    promise="generate(), sample(), completion() and chat are each answered by the adapter that they name, or by the base model",
    needs={*SEVERAL, *EVERY_CALL},
    checks=[
        greedy("tokens"),
        greedy("completion", methods=["completion"]),
        greedy("chat", methods=["chat_completion"]),
        ADAPTER_ISOLATED,
        ALL_COMPLETE,
    ],
    topologies=LORA,
)
async def test_every_call_by_name(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.3.0, load_lora_adapter: "generation/chat/completion requests can target this LoRA by passing model=lora_name"."""
    await stack.load_lora_adapter("one", 1)
    await stack.load_lora_adapter("other", 2)
    async with asyncio.TaskGroup() as callers:
        for adapter in (None, "one", "other"):
            for _ in range(2):
                callers.create_task(ask_by_every_call(stack, prompts, adapter))


@scenario(
    task=11,
    promise="every call refuses a name that was never loaded or was unloaded, by that name",
    needs={*BY_NAME, *EVERY_CALL, Capability.UNLOAD_ADAPTER},
    checks=[names_error("unknown", "nobody"), names_error("unloaded", "policy"), greedy("tokens")],
    topologies=LORA,
)
async def test_every_call_refuses_a_name_that_is_not_loaded(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.3.0, unload_lora_adapter: "After unloading, lora_name is no longer accepted as a model target on any server"."""
    await stack.load_lora_adapter("policy", 1)
    await ask_by_every_call(stack, prompts, "nobody", "unknown")
    await ask_by_every_call(stack, prompts, "policy")
    await stack.unload_lora_adapter("policy")
    for _ in range(4):  # with two servers, each refuses some
        await ask_by_every_call(stack, prompts, "policy", "unloaded")
    await ask_by_every_call(stack, prompts, None)


@scenario(
    task=11,
    promise="a body that names no model is refused where adapters are served: the base model does not answer in their place",
    needs={*BY_NAME, Capability.NAMED_MODELS, Capability.CHAT_COMPLETION, Capability.COMPLETION},
    checks=[names_error("no_model", "model"), greedy("tokens")],
    topologies=LORA,
)
async def test_a_call_that_names_no_model(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.3.0, RemoteInferenceClient: "falling back to the base model would silently bypass LoRA"."""
    await stack.load_lora_adapter("policy", 1)
    await stack.attempt(stack.completion({**ANSWER, "prompt": prompts.one()}, label="no_model"))
    await stack.attempt(stack.chat_completion({**ANSWER, "messages": prompts.conversations(1)[0]}, label="no_model"))
    await stack.generate(prompts.unique(2), lora_adapter="policy", label="tokens", **SCORED)


@scenario(
    task=11,
    promise="a name that was unloaded can be loaded again, with another version, beside an adapter that stays",
    needs={*SEVERAL, Capability.UNLOAD_ADAPTER, Capability.RESET_PREFIX_CACHE},
    checks=[names_error("unloaded", "policy"), ADAPTER_EFFECT, greedy("tokens"), of_reference("tokens")],
    topologies=LORA,
)
async def test_a_name_that_is_loaded_again(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters, /v1/load_lora_adapter and /v1/unload_lora_adapter."""
    batch = prompts.unique(6)
    await stack.load_lora_adapter("stays", 3)
    await stack.generate(batch, label="tokens", **SCORED)
    for version in (1, 2):
        await stack.load_lora_adapter("policy", version)
        await stack.reset_prefix_cache()
        for adapter in ("policy", "stays"):
            await stack.generate(batch, lora_adapter=adapter, label="tokens", **SCORED)
        await stack.unload_lora_adapter("policy")
        await stack.attempt(stack.generate(batch, lora_adapter="policy", label="unloaded", **SCORED))


@scenario(
    task=11,
    promise="unloading a name that is not loaded is refused by that name, and leaves the others",
    needs={*BY_NAME, Capability.UNLOAD_ADAPTER},
    checks=[names_error("unload", "nobody"), greedy("tokens")],
    topologies=LORA,
)
async def test_a_name_that_is_not_there_to_unload(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /v1/unload_lora_adapter: an adapter that cannot be found is an error."""
    await stack.load_lora_adapter("policy", 1)
    await stack.attempt(stack.unload_lora_adapter("nobody", label="unload"))
    await stack.generate(prompts.unique(2), lora_adapter="policy", label="tokens", **SCORED)


@variants(
    {
        "test_an_adapter_whose_folder_is_missing": {
            "wrong": "folder",
            "checks": [names_error("folder", "policy"), greedy()],
        },
        "test_an_adapter_above_the_largest_rank": {"wrong": "rank", "checks": [names_error("rank", "rank"), greedy()]},
    },
    task=11,
    promise="an adapter that engines cannot take is refused with what is wrong, and leaves the base model and the next load alone",
    needs={Capability.LORA},
    topologies=LORA,
)
async def a_wrong_adapter(stack: Stack, prompts: Prompts, *, wrong: Literal["folder", "rank"]) -> None:
    """vLLM documentation, LoRA Adapters: /v1/load_lora_adapter refuses an adapter that cannot be loaded; max_lora_rank."""
    batch = prompts.unique(4)
    await stack.attempt(stack.load_lora_adapter("policy", 1, wrong=wrong, label=wrong))
    await stack.generate(batch, **SCORED)
    await stack.load_lora_adapter("policy", 2)
    await stack.generate(batch, lora_adapter="policy", **SCORED)


@scenario(
    task=11,
    promise="an adapter cannot take the base model's name: a request for the base model is answered by it",
    needs=BY_NAME,
    checks=[names_error("taken", "name", "model"), greedy()],
    topologies=LORA,
)
async def test_an_adapter_under_the_base_models_name(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: a request's "model" is the base model's name or that of an adapter."""
    await stack.attempt(stack.load_lora_adapter(stack.model_name, 1, label="taken"))
    await stack.generate(prompts.unique(4), **SCORED)


@scenario(
    task=11,
    promise="requests in flight go on unharmed while another adapter is loaded and replaced",
    needs=SEVERAL,
    checks=[ADAPTER_UNDISTURBED, greedy(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_requests_beside_a_load(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.3.0, save_weights_for_sampler: "no need to pause - can just rely on load_lora_adapter to swap adapter in place"."""
    batch = prompts.unique(4)
    await stack.load_lora_adapter("one", 1)
    async with asyncio.TaskGroup() as callers:
        for adapter in (None, "one"):
            callers.create_task(stack.generate(batch, lora_adapter=adapter, **long(stack)))
        await stack.until_generating(requests=2 * len(batch), tokens=2 * len(batch))
        for version in (2, 3):
            await stack.load_lora_adapter("other", version)
    await stack.generate(batch, lora_adapter="other", **SCORED)


@scenario(
    task=11,
    promise="requests of two adapters go on unharmed while a third one is loaded",
    needs=SEVERAL,
    checks=[ADAPTER_UNDISTURBED, greedy(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_a_load_beside_requests_of_two_adapters(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters: --max-loras, --max-cpu-loras. Where an engine has two places, the third adapter takes one,
    and gives it back."""
    batch = prompts.unique(4)
    adapters = {"one": 1, "two": 2, "three": 3}
    for adapter in ("one", "two"):
        await stack.load_lora_adapter(adapter, adapters[adapter])
    async with asyncio.TaskGroup() as callers:
        for adapter in ("one", "two"):
            callers.create_task(stack.generate(batch, lora_adapter=adapter, **long(stack)))
        await stack.until_generating(requests=2 * len(batch), tokens=2 * len(batch))
        await stack.load_lora_adapter("three", adapters["three"])
    for adapter in adapters:
        await stack.generate(batch, lora_adapter=adapter, **SCORED)


@scenario(
    task=11,
    promise="requests in flight go on unharmed while another adapter is unloaded",
    needs={*SEVERAL, Capability.UNLOAD_ADAPTER},
    checks=[ADAPTER_UNDISTURBED, greedy(), ALL_COMPLETE],
    topologies=LORA,
)
async def test_requests_beside_an_unload(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LoRA Adapters, Dynamically serving LoRA Adapters; SkyRL 0.3.0, unload_lora_adapter."""
    batch = prompts.unique(4)
    await stack.load_lora_adapter("one", 1)
    await stack.load_lora_adapter("other", 2)
    await stack.generate(batch, lora_adapter="other", **SCORED)
    async with asyncio.TaskGroup() as callers:
        for adapter in (None, "one"):
            callers.create_task(stack.generate(batch, lora_adapter=adapter, **long(stack)))
        await stack.until_generating(requests=2 * len(batch), tokens=2 * len(batch))
        await stack.unload_lora_adapter("other")


@scenario(
    task=11,
    promise="a load that fails at one of several servers says so and where, and the next one reaches every server",
    needs={Capability.LORA, Capability.BROKEN_HOPS, Capability.RESET_PREFIX_CACHE},
    checks=[BROKEN_CONTROL, ONLY_ADAPTER_TRAVELS, ADAPTER_EFFECT, greedy()],
    topologies=LORA,
)
async def test_a_load_that_fails_at_one_server(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, "Control plane (fan-out)"; architecture, uniform fleet. The other servers hold the new adapter by then: whoever goes
    on would roll out two policies under one name. Each load has another version than the last."""
    batch = prompts.unique(4)
    await stack.generate(batch, **SCORED)
    await stack.load_lora_adapter("policy", 1)
    for version, fault in enumerate((*CONTROL_FAULTS, *AFTER_THE_ENGINE), start=2):
        await stack.break_hop(HopFault(hop="server", call="load_lora_adapter", **fault))
        await stack.attempt(stack.load_lora_adapter("policy", version))
        await stack.break_hop(None)
        await stack.attempt(stack.load_lora_adapter("policy", version))
        await stack.reset_prefix_cache()
        await stack.attempt(stack.generate(batch, lora_adapter="policy", **SCORED))
