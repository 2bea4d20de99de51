"""sample(): several independent continuations of one prompt."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import are_numbers, of_reference
from harness.checks.prompt_logprobs import OF_PROMPTS
from harness.checks.sampling import independent
from harness.checks.stopping import ends_as_asked
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.contract.messages import ENGINE_PLACES
from harness.driving.stack import Stack
from harness.suite.scenario import scenario

SAMPLE = {Capability.SAMPLE}


@scenario(
    task=0,
    promise="sample() gives as many independent samples as were asked for, each with log-probabilities and a reason",
    needs=SAMPLE,
    checks=[independent(), of_reference(), ends_as_asked(causes=["length"])],
)
async def test_samples_are_independent(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, sample: "Generate multiple independent samples from a single prompt."; #934."""
    for count in (1, 2, 8):
        await stack.sample(prompts.one(), count, temperature=1.0, max_tokens=16, logprobs=0)


@scenario(
    task=0,
    promise="sample() returns log-probabilities if they were asked for, and only then",
    needs=SAMPLE,
    checks=[are_numbers()],
)
async def test_log_probabilities_of_samples(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.logprobs: "If None, no probability is returned."; 1 is also the number at the engine."""
    await stack.sample(prompts.one(), 2, temperature=1.0, max_tokens=8)
    await stack.sample(prompts.one(), 2, temperature=1.0, max_tokens=8, logprobs=1)


@scenario(task=0, promise="sample() passes on every sampling parameter", needs=SAMPLE, checks=[ALL_COMPLETE])
async def test_samples_take_every_parameter(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, sample: "sampling_params"; vLLM documentation, SamplingParams, whose names they have."""
    asked: dict[str, Any] = {
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "min_tokens": 12,
        "ignore_eos": True,
        "allowed_token_ids": stack.vocabulary.plain[:64],
        "stop_token_ids": stack.vocabulary.plain[:8],
        "stop": [stack.vocabulary.text(stack.vocabulary.plain[8:10])],
    }
    await stack.sample(prompts.one(), 4, as_given=True, temperature=1.0, max_tokens=16, **asked)


@scenario(
    task=0,
    promise="sample() returns the log-probabilities of the prompt, and the most probable tokens there, if they were asked for",
    needs={Capability.SAMPLE, Capability.PROMPT_LOGPROBS},
    checks=[OF_PROMPTS],
)
async def test_log_probabilities_of_the_prompt(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, RemoteInferenceClient.sample: include_prompt_logprobs and topk_prompt_logprobs; "Tinker always returns exactly
    top-k"."""
    for prompt in prompts.unique(2):
        await stack.sample(prompt, 2, prompt_logprobs=True, temperature=1.0, max_tokens=4)
    await stack.sample(prompts.one(), 1, prompt_logprobs=True, topk_prompt_logprobs=3, temperature=1.0, max_tokens=4)
    await stack.sample(prompts.one(), 1, temperature=1.0, max_tokens=4)


@scenario(task=0, promise="samples are independent with a seed as well", needs=SAMPLE, checks=[independent()])
async def test_seeded_samples_are_independent(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, sample: "independent samples"; vLLM gives each of n outputs a seed of its own."""
    await stack.sample(prompts.one(), 6, temperature=1.0, seed=11, max_tokens=16)


@scenario(task=0, promise="a greedy sample is the reference's", needs=SAMPLE, checks=[greedy()])
async def test_one_greedy_sample(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.temperature: "Zero means greedy sampling." """
    for prompt in prompts.ragged(6):
        await stack.sample(prompt, 1, temperature=0, max_tokens=16)


@scenario(task=0, promise="several greedy samples are all the reference's", needs=SAMPLE, checks=[greedy()])
async def test_several_greedy_samples(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, sample: num_samples and sampling_params are independent."""
    await stack.attempt(stack.sample(prompts.one(), 3, temperature=0, max_tokens=16))


@scenario(task=0, promise="stop tokens end samples", needs=SAMPLE, checks=[ends_as_asked(causes=["stop token"])])
async def test_samples_stop(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, sample: stop_reasons, one per sample."""
    await stack.sample(
        prompts.one(), 8, temperature=1.0, max_tokens=48, stop_token_ids=stack.vocabulary.scattered(range(100, 300))
    )


@scenario(
    task=0,
    promise="sample() gives more samples than an engine runs at once: what finds no place waits",
    needs=SAMPLE,
    checks=[independent(), ends_as_asked(causes=["length"]), ALL_COMPLETE],
)
async def test_more_samples_than_an_engine_has_places(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, sample: num_samples has no upper limit; vLLM documentation, max_num_seqs: "Maximum number of sequences to
    be processed in a single iteration." """
    await stack.attempt(stack.sample(prompts.one(), ENGINE_PLACES + 1, temperature=1.0, max_tokens=8))
