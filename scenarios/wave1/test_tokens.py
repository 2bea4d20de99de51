"""Tokens and log-probabilities: the model's own when greedy, its distribution when sampled, repeatable with a seed."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.errors import answered_or_named
from harness.checks.logprobs import after_filters, are_numbers, of_reference, over_many
from harness.checks.sampling import goodness_of_fit, independent, within_filters
from harness.checks.tokens import different_output, greedy, same_output
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import sessions

OTHERS = "others"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}


@scenario(
    task=0,
    promise="greedy tokens and their log-probabilities are those of the model's own forward pass",
    checks=[greedy(), of_reference(), are_numbers()],
)
async def test_greedy_tokens_and_logprobs_are_the_models(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams: "Zero means greedy sampling"; "The API will always return the log probability
    of the sampled token"."""
    await stack.generate(prompts.ragged(24), temperature=0, max_tokens=32, logprobs=0, ignore_eos=True)


@scenario(task=0, promise="log-probabilities that nobody asked for do not come", checks=[are_numbers(), greedy()])
async def test_no_logprobs_unless_asked_for(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.logprobs: "When set to None, no probability is returned." """
    await stack.generate(prompts.unique(4), temperature=0, max_tokens=12, ignore_eos=True)


@scenario(
    task=0,
    promise="log-probabilities of sampled tokens are the model's own, whatever the temperature",
    checks=[of_reference(), are_numbers()],
)
async def test_logprobs_of_sampled_tokens(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, ModelConfig.logprobs_mode: by default raw, before temperature and filters."""
    for temperature in (1.0, 0.7):
        await stack.generate(
            prompts.unique(8), temperature=temperature, seed=5, max_tokens=16, logprobs=0, ignore_eos=True
        )


@scenario(
    task=0,
    promise="engines that are configured so give log-probabilities after temperature and filters",
    checks=[after_filters(), are_numbers()],
    topologies=["processed"],
)
async def test_logprobs_after_filters(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, ModelConfig.logprobs_mode: "processed_logprobs"; SkyRL documentation, Configuration Overview,
    engine_init_kwargs. A training under top_k or top_p compares with the policy under the same filters."""
    common: dict[str, Any] = {"max_tokens": 4, "logprobs": 0, "ignore_eos": True, "seed": 3}
    few = stack.vocabulary.plain[:3]
    for drawn in ({"top_k": 5}, {"top_p": 0.5}, {"top_k": 40, "top_p": 0.8, "temperature": 0.7}, {"top_k": 1}, {}):
        await stack.generate(prompts.unique(6), **{"temperature": 1.0, **common, **drawn})
    for temperature in (0.0, 1.0):
        await stack.generate(prompts.unique(6), **{**common, "temperature": temperature, "allowed_token_ids": few})


@scenario(
    task=0,
    promise="a request whose parameters leave no token is refused by name, or its log-probabilities are numbers",
    checks=[answered_or_named("none_left", "allowed_token_ids", "min_tokens", "nan", "float"), greedy("after")],
    topologies=["processed"],
)
async def test_parameters_that_leave_no_token(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams: allowed_token_ids; min_tokens, before which stop_token_ids are not generated; RFC 8259, 6:
    JSON has no NaN."""
    none: dict[str, Any] = {
        "allowed_token_ids": [stack.vocabulary.plain[0]],
        "stop_token_ids": [stack.vocabulary.plain[0]],
    }
    for temperature in (0.0, 1.0):
        asked = {**none, "min_tokens": 4, "max_tokens": 4, "temperature": temperature, "logprobs": 0}
        await stack.attempt(stack.generate(prompts.unique(1), label="none_left", **asked))
    await stack.generate(prompts.unique(4), label="after", temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


@scenario(
    task=0,
    promise="over thousands of tokens log-probabilities are the model's in the mean",
    checks=[over_many(), are_numbers()],
)
async def test_logprobs_of_many_tokens(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, ModelConfig.logprobs_mode: raw log-probabilities. Sampled at temperature 1, since noise biases the
    choice of greedy tokens. In 16 bits a real model's rows differ more in their mean noise, and more of them are needed."""
    rows = 144 if stack.slow else 96
    await stack.generate(prompts.unique(rows), temperature=1.0, seed=3, max_tokens=96, logprobs=0, ignore_eos=True)


@scenario(
    task=0,
    promise="the same seed gives the same output, another seed another",
    checks=[same_output("once", "again"), different_output("once", "other")],
)
async def test_a_seed_repeats_its_output(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.seed: "Random seed to use for the generation." """
    batch = prompts.unique(8)
    await stack.generate(batch, seed=11, label="once", **SAMPLED)
    await stack.generate(batch, seed=11, label="again", **SAMPLED)
    await stack.generate(batch, seed=12, label="other", **SAMPLED)


@scenario(
    task=0,
    promise="a seeded request gives the same output elsewhere in a batch and under load",
    checks=[same_output("alone", "in_a_batch"), same_output("alone", "under_load")],
)
async def test_a_seed_does_not_depend_on_company(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.seed: a seed belongs to its request, not to the batch or the server."""
    few, drawn = prompts.unique(24), {**SAMPLED, "temperature": 2.0}  # in 16 bits, noise flips fewer draws then
    for prompt in few:
        await stack.generate([prompt], seed=7, label="alone", **drawn)
    await stack.generate([*prompts.ragged(9), *few, *prompts.ragged(4)], seed=7, label="in_a_batch", **drawn)
    async with asyncio.TaskGroup() as load:
        load.create_task(stack.generate(prompts.unique(24), temperature=1.0, max_tokens=96, ignore_eos=True))
        await stack.until_generating(requests=24, tokens=24)
        await stack.generate(few, seed=7, label="under_load", **drawn)


@scenario(task=0, promise="sampled tokens come from the model's distribution", checks=[goodness_of_fit()])
async def test_samples_follow_the_models_distribution(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams: temperature 1.0, and no filter unless one is asked for. Several prompts, since after
    one of them a real model may be sure of its next token."""
    await stack.generate(prompts.unique(4) * 192, temperature=1.0, max_tokens=1)


@scenario(task=0, promise="the temperature shapes the distribution as documented", checks=[goodness_of_fit()])
async def test_samples_follow_the_temperature(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.temperature: "Lower values make the model more deterministic"."""
    await stack.generate(prompts.unique(4) * 192, temperature=0.7, max_tokens=1)


@scenario(
    task=0,
    promise="top_k, top_p and min_p leave only the tokens that they should",
    checks=[within_filters("top_k"), within_filters("top_p"), within_filters("min_p"), within_filters("together")],
)
async def test_filters_hold(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.top_k, top_p, min_p. In 16 bits the edge of a large top_p is uncertain: a small one still
    leaves tokens out for sure. A high temperature leaves a choice to a model that is sure of its next token."""
    common: dict[str, Any] = {"max_tokens": 4, "seed": 3, "ignore_eos": True}
    await stack.generate(prompts.unique(16), temperature=1.0, top_k=5, label="top_k", **common)
    await stack.generate(prompts.unique(16), temperature=1.0, top_p=0.5, label="top_p", **common)
    await stack.generate(prompts.unique(32), temperature=2.0, top_p=0.1, label="top_p", **common)
    await stack.generate(prompts.unique(16), temperature=1.0, min_p=0.2, label="min_p", **common)
    await stack.generate(prompts.unique(16), temperature=1.5, top_k=8, top_p=0.6, label="together", **common)
    await stack.generate(prompts.unique(32), temperature=2.0, top_k=64, top_p=0.1, label="together", **common)


@scenario(
    task=0,
    promise="unseeded rows of one prompt are drawn independently, on one server and across servers",
    checks=[independent(on_every_server=True)],
)
async def test_rows_of_one_prompt_are_independent(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface: several rollouts of a prompt are copies of it in a batch. Servers
    that draw the same random numbers would return the same rollout twice. Each row has a session of its own, since a router may
    send equal requests without one to one server."""
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    await stack.generate([prompts.one()] * 32, session_ids=sessions(32), **drawn)


@scenario(task=0, promise="the tokens that one request allows bind no other request", checks=[greedy(OTHERS)])
async def test_allowed_tokens_bind_no_other_request(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.allowed_token_ids: "only the given token ids are allowed", of this request. Requests that end
    make place in the engine's batch: those with allowed tokens move there, and new requests get the places that they leave.
    All of the first 16 have to be in flight at once. The router of SkyRL 0.1.0 takes about 100 ms to pass 16 requests on, and a
    tiny model makes 24 tokens in that time, so they ask for more."""
    ours: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    for _ in range(3):
        async with asyncio.TaskGroup() as callers:
            first = callers.create_task(stack.generate(prompts.unique(16), label=OTHERS, max_tokens=96, **ours))
            await stack.until_generating(requests=16)
            allowed = {"allowed_token_ids": [stack.vocabulary.plain[0]], "max_tokens": 256, **ours}
            callers.create_task(stack.generate(prompts.unique(8), **allowed))
            await first
            await stack.generate(prompts.unique(16), label=OTHERS, max_tokens=8, **ours)
