"""Mixtures of experts, on one worker and spread over several: answers, weight syncs, and the experts of each token, for a trainer
that replays the routing."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.adapters import ADAPTER_EFFECT
from harness.checks.cancellation import CANCELLATION
from harness.checks.client_lives import CONFIGURED
from harness.checks.continuation import CONTINUATION
from harness.checks.errors import answered_or_named, names_error
from harness.checks.experts import TRAJECTORY_EXPERTS, routed_experts
from harness.checks.gym import TRAJECTORIES
from harness.checks.history import EXPLAINED, explained, waited
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.pausing import ABORTED, SAME_AS_UNINTERRUPTED
from harness.checks.staleness import FORCED_EFFECT, SAME_VERSION_SAME_OUTPUT
from harness.checks.tokens import greedy, same_output
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.contract.messages import ENGINE_PLACES, GymRequest, PauseMode
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.cancellation import OTHERS, by_generate, caller_goes
from scenarios.pauses import with_and_without
from scenarios.requests import ANSWER, SPREAD, sessions, until_settled

LONG: dict[str, Any] = {"max_tokens": 120, "temperature": 0.0, "ignore_eos": True}
NEEDS = {Capability.ROUTED_EXPERTS}
SYNC = {Capability.WEIGHT_SYNC, Capability.PAUSE_KEEP}

MIXTURES = ("moe", "moe-olmoe", "moe-tp2-ep", "moe-dp2", "moe-dp2-ep")


@scenario(
    task=10,
    promise="each answer comes with the experts of each token that was fed to the model",
    needs=NEEDS,
    checks=[routed_experts(), greedy("greedy"), ALL_COMPLETE],
    topologies=MIXTURES,
)
async def test_experts_of_every_token(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices: per token, layer and expert."""
    await stack.generate(prompts.ragged(16), label="greedy", **ANSWER)
    await stack.generate(prompts.ragged(16), label="sampled", temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


@scenario(
    task=10,
    promise="a sampling parameter that does not exist means nothing to a mixture, or is refused by name",
    needs=NEEDS,
    checks=[answered_or_named("misspelt", "max_tokns")],
    topologies=["moe"],
)
async def test_a_misspelt_parameter(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams. A stack may send the requests of a mixture by another way than those of a dense model."""
    await stack.generate(prompts.unique(2), **ANSWER)
    await stack.attempt(stack.generate(prompts.unique(2), max_tokns=5, label="misspelt", **ANSWER))


@scenario(
    task=10,
    promise="a request for the experts from its prompt's end on is answered, or refused by name",
    needs=NEEDS,
    checks=[answered_or_named("from the end", "routed_experts_prompt_start"), greedy("after")],
    topologies=["moe"],
    deadline_s=60,
    spoils=True,
)
async def test_experts_from_the_prompts_end_on(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.routed_experts_prompt_start: a later turn of a conversation leaves out the tokens whose
    experts are known already, which may be all of its prompt. It spoils a stack whose engine it ends."""
    stack.spoil("experts from a place that its engine does not know")
    prompt = prompts.one()
    asked = {**ANSWER, "routed_experts_prompt_start": len(prompt)}
    await stack.attempt(stack.generate([prompt], label="from the end", **asked))
    await stack.attempt(stack.generate(prompts.unique(4), label="after", **ANSWER))


@scenario(
    task=10,
    promise="each sample comes with the experts of each token that was fed to the model",
    needs=NEEDS | {Capability.SAMPLE},
    checks=[routed_experts(), ALL_COMPLETE],
    topologies=["moe"],
)
async def test_experts_of_samples(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface.sample: an InferenceEngineOutput, as of generate(); rollout_expert_indices."""
    for prompt in prompts.ragged(4):
        await stack.sample(prompt, 2, temperature=1.0, max_tokens=16)


@scenario(
    task=10,
    promise="a mixture's answer under an adapter comes with the experts that the adapted model routes to",
    needs=NEEDS | {Capability.LORA, Capability.RESET_PREFIX_CACHE},
    checks=[routed_experts(), ADAPTER_EFFECT, greedy(), ALL_COMPLETE],
    topologies=["moe-lora"],
)
async def test_experts_under_an_adapter(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices; SkyRL documentation, LoRA Support. The adapter is one of the
    attention, and moves what the router reads."""
    batch = prompts.unique(6)
    await stack.generate(batch, **ANSWER)
    for version in (1, 2):
        await stack.load_lora_adapter("policy", version)
        await stack.reset_prefix_cache()
        await stack.generate(batch, lora_adapter="policy", **ANSWER)


@scenario(
    task=10,
    promise="a client whose configuration names another model than the servers have is refused: no other model answers in its place",
    needs=NEEDS | {Capability.CLIENT_LIVES, Capability.SERVER_ADDRESSES},
    checks=[names_error(CONFIGURED, "model")],
    topologies=["moe"],
)
async def test_a_model_that_servers_do_not_have(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: a model that a server does not have is an error. SkyRL documentation,
    external_server_urls: a user's servers may hold another checkpoint than the configuration names."""
    await stack.client_life("as configured", another_model=True)
    await stack.attempt(stack.generate(prompts.unique(4), label=CONFIGURED, **ANSWER))
    await stack.client_life("made again")
    await stack.generate(prompts.unique(4), **ANSWER)


@variants(
    {
        "test_experts_of_trajectories": {
            "promise": "each trajectory comes with the experts of each token that was fed to the model, observations included",
            "batched": False,
        },
        "test_experts_of_a_batch_of_trajectories": {
            "promise": "each answer of a batch of one turn comes with the experts of each token that was fed to the model",
            "batched": True,
        },
        "test_experts_of_trajectories_in_one_message": {
            "promise": "trajectories whose turns are one assistant message come with experts, or are refused by name",
            "batched": False,
            "conversation": False,
            "label": "one_message",
            "checks": [answered_or_named("one_message", "use_conversation_multi_turn")],
        },
    },
    conversation=True,
    label=None,
    task=10,
    needs=NEEDS | {Capability.GYM_GENERATOR},
    checks=[TRAJECTORY_EXPERTS, *TRAJECTORIES, ALL_COMPLETE],
    topologies=["moe"],
)
async def experts_of_trajectories(
    stack: Stack, prompts: Prompts, *, batched: bool, conversation: bool, label: str | None
) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices; SkyRL #1908: nothing is replayed for a token that no engine was
    fed. Some trajectories of several turns end by length, before the policy reads the last observation."""
    asked = stack.gym_generate(
        GymRequest(
            prompts=[messages[-1:] for messages in prompts.conversations(8)],
            env_extras=[{"turns": 1 + row % 3 if row % 2 else 9} for row in range(8)],
            batched=batched,
            use_conversation_multi_turn=conversation,
            max_turns=9,
            max_input_length=160,
            sampling_params={"max_tokens": 16, "temperature": 0.0, "ignore_eos": True},
        ),
        label=label,
    )
    await (asked if label is None else stack.attempt(asked))


@scenario(
    task=10,
    promise="tokens that the prefix cache holds come with the experts that they were routed to when they were fed",
    needs=NEEDS,
    checks=[routed_experts(), same_output("first", "from_the_cache"), ALL_COMPLETE],
    topologies=["moe"],
)
async def test_experts_of_cached_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices; vLLM documentation, Automatic Prefix Caching. Prompts fill more
    than one block, and each session keeps its server."""
    batch, named = prompts.long(4), sessions(4)
    for label in ("first", "from_the_cache"):
        await stack.generate(batch, session_ids=named, label=label, **ANSWER)


@scenario(
    task=10,
    promise="after a weight sync the experts are those that the new policy routes to",
    needs={*NEEDS, *SYNC},
    checks=[routed_experts(), EXPLAINED, FORCED_EFFECT, ALL_COMPLETE],
    topologies=MIXTURES,
)
async def test_experts_after_a_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 10: weight sync with experts. The router's weights move with all others."""
    batch = prompts.unique(SPREAD)
    await stack.generate(batch, **ANSWER)
    for version, chunks in ((1, 1), (2, 4)):
        await stack.sync_weights_paused(version, chunks=chunks)
        await stack.generate(batch, **ANSWER)


@scenario(
    task=10,
    promise="a sync of a mixture, whole or in chunks, brings every worker its parameters, and the same ones each time",
    needs=SYNC,
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, EXPLAINED, FORCED_EFFECT],
    topologies=MIXTURES,
    deadline_s=120.0,
)
async def test_syncs_of_a_mixture(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 10: weight sync with experts. An engine holds all experts of a layer in one parameter: chunks that end in
    the middle of a layer must leave it whole (SkyRL's legacy stack once lost experts that way)."""
    batch = prompts.unique(SPREAD)
    for version, chunks in ((1, 1), (2, 4), (1, 4), (2, 1), (1, 7)):
        await stack.sync_weights_paused(version, chunks=chunks)
        await stack.digests()
        await stack.generate(batch, **ANSWER)


@scenario(
    task=10,
    promise="syncing the version of a mixture that is there changes nothing",
    needs=SYNC,
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, EXPLAINED],
    topologies=MIXTURES,
    deadline_s=120.0,
)
async def test_syncing_a_mixture_again_changes_nothing(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 10: weight sync with experts; architecture, idempotent sync."""
    batch = prompts.unique(SPREAD)
    for chunks in (1, 1, 4, 4):
        await stack.sync_weights_paused(3, chunks=chunks)
        await stack.digests()
        await stack.generate(batch, **ANSWER)


@scenario(
    task=10,
    promise="a request that comes during a mixture's pause waits for the sync, and holds it up on no data-parallel worker",
    needs=SYNC,
    checks=[EVERY_PARAMETER, UNIFORM_SERVERS, explained(waited), ALL_COMPLETE],
    topologies=["moe-dp2"],
    deadline_s=120.0,
)
async def test_a_request_during_a_mixtures_sync(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, tasks 5 and 10; vLLM #39366: a request wakes all data-parallel workers, whose dummy batches then wait for a
    worker that waits for the sync. One session at a time, so that the request is one worker's."""
    for version, session in enumerate(sessions(6), 1):
        async with asyncio.TaskGroup() as callers:
            await stack.pause("keep")
            callers.create_task(stack.generate(prompts.unique(1), session_ids=[session], **ANSWER))
            await until_settled(stack)
            await stack.sync_weights(version, chunks=2)
            await stack.digests()
            await stack.resume()


@scenario(
    task=10,
    promise="with expert parallelism each worker holds its own experts of the policy that was synced, and no others",
    needs=SYNC,
    checks=[EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED, FORCED_EFFECT, ALL_COMPLETE],
    topologies=["moe-dp2-ep"],
    deadline_s=120.0,
)
async def test_each_worker_holds_its_own_experts(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 10: "expert parallelism"; vLLM documentation, Expert Parallel Deployment. Sessions make each
    data-parallel worker answer some requests."""
    batch, named = prompts.unique(SPREAD), sessions(SPREAD)
    await stack.generate(batch, session_ids=named, **ANSWER)
    await stack.digests()
    for version, chunks in ((1, 1), (2, 4)):
        await stack.sync_weights_paused(version, chunks=chunks)
        await stack.digests()
        await stack.generate(batch, session_ids=named, **ANSWER)


async def _paused(stack: Stack, prompts: Prompts, mode: PauseMode) -> None:
    async with with_and_without(stack, mode, prompts.unique(6), **LONG):
        pass


@scenario(
    task=10,
    promise="a pause(keep) in the middle loses no token's experts",
    needs={*NEEDS, Capability.PAUSE_KEEP},
    checks=[routed_experts(), SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
    topologies=MIXTURES,
)
async def test_experts_of_frozen_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices and pause_generation."""
    await _paused(stack, prompts, "keep")


@scenario(
    task=10,
    promise="a request for experts whose caller goes away ends at its engine, is not sent again, and disturbs no other",
    needs=NEEDS,
    checks=[CANCELLATION, greedy(OTHERS)],
    topologies=["moe"],
)
async def test_a_caller_goes(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, with_cancellation: a client that disconnects ends its request. A stack may have a route of its own for
    requests that return experts."""
    await caller_goes(stack, prompts, by_generate, tokens=20)


@scenario(
    task=10,
    promise="pause(abort) returns every answer of a mixture: what was made of it, or nothing of one that still waits for a place",
    needs={*NEEDS, Capability.PAUSE_ABORT, Capability.PARTIAL_ANSWERS},
    checks=[ABORTED],
    topologies=["moe"],
)
async def test_a_pause_over_a_mixtures_queue(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, PauseMode.ABORT: "Clients receive partial tokens with finish_reason="abort"". A request without a place has no
    tokens, and no experts."""
    batch = prompts.unique((ENGINE_PLACES + SPREAD) * stack.topology.engines)
    async with with_and_without(stack, "abort", batch, **{**LONG, "max_tokens": 64}):
        pass


@scenario(
    task=10,
    promise="an answer that was interrupted and continued has the experts of all its parts",
    needs={*NEEDS, Capability.PAUSE_ABORT, Capability.RETRY_ABORTED},
    checks=[routed_experts(), CONTINUATION, SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
    topologies=["moe"],
)
async def test_experts_of_interrupted_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorOutput.rollout_expert_indices; SkyRL #1014, task 5: partial responses accumulate."""
    await _paused(stack, prompts, "abort")
