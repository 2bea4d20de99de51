"""SkyRL's backend of the Tinker API: its own sample(), over the same engines."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.errors import names_error
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import of_reference
from harness.checks.prompt_logprobs import OF_PROMPTS
from harness.checks.routing import SESSIONLESS_SPREAD, SESSIONS_SPREAD, STICKY
from harness.checks.sampling import independent
from harness.checks.stopping import CUT_SHORT, ends_as_asked
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.pauses import interrupted
from scenarios.requests import IMAGES, PIXEL

TINKER = {Capability.TINKER}
GROUP = 8
"""Samples of one prompt."""


def both_ways(name: str, *, also: Set[Capability] = frozenset(), **declared: Any) -> Callable[[Any], Any]:
    """Two scenarios: through Tinker's backend, and forwarded by the process of its API."""
    ways = {name: (Capability.TINKER, False), f"{name}_forwarded": (Capability.FORWARDED_TINKER, True)}
    cases = {one: {"forwarded": forwarded, "needs": {way, *also}} for one, (way, forwarded) in ways.items()}
    return variants(cases, **declared)


@scenario(
    task=0,
    promise="samples of one prompt through Tinker are spread over the servers",
    needs=TINKER,
    checks=[SESSIONLESS_SPREAD, ALL_COMPLETE],
)
async def test_samples_of_one_prompt_are_spread(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #934: "session_id=None: random load-balancing"; SkyRLTrainBackend.sample: each sample is a request of its own, with a
    seed of its own. With 32 samples per engine, a fair choice leaves out one of two engines with probability 2^-63."""
    prompt = prompts.one()
    for number in range(32 * stack.topology.engines // GROUP):
        await stack.tinker_sample(prompt, GROUP, seed=GROUP * number, max_tokens=2)


@both_ways(
    "test_repeated_requests_are_spread",
    task=0,
    promise="repeated requests through Tinker, which differ in nothing, are spread over the servers",
    checks=[SESSIONLESS_SPREAD, ALL_COMPLETE],
)
async def repeated_requests_are_spread(stack: Stack, prompts: Prompts, *, forwarded: bool) -> None:
    """SkyRL #934: "session_id=None: random load-balancing". An evaluation asks with one seed, or greedily, again and again."""
    prompt = prompts.one()
    for _ in range(32 * stack.topology.engines):
        await stack.tinker_sample(prompt, 1, seed=0, max_tokens=2, temperature=0.0, forwarded=forwarded)


@both_ways(
    "test_requests_of_a_session",
    task=0,
    promise="all samples of a request of a sampling session run on one server, and its requests are spread",
    checks=[STICKY, SESSIONS_SPREAD, ALL_COMPLETE],
)
async def requests_of_a_session(stack: Stack, prompts: Prompts, *, forwarded: bool) -> None:
    """SkyRL, make_routing_session_id: "pin all of one logical sample's traffic (including retries) to a single inference backend
    while still spreading distinct requests across backends"."""
    for number, prompt in enumerate(prompts.unique(32 * stack.topology.engines)):
        await stack.tinker_sample(
            prompt, 2, seed=number, session_id=f"sampling-{number}", max_tokens=4, forwarded=forwarded
        )


@both_ways(
    "test_samples_are_independent",
    task=0,
    promise="sample() through Tinker gives as many independent samples as were asked for, with the model's log-probabilities",
    checks=[independent(), of_reference(), ends_as_asked(causes=["length"])],
)
async def samples_are_independent(stack: Stack, prompts: Prompts, *, forwarded: bool) -> None:
    """Tinker, SamplingClient.sample: num_samples; SkyRL, prepare_sample_batch: "Derive a unique seed per sample so that num_samples >
    1 produces diverse sequences, matching vLLM's behavior (seed + index)"."""
    for count in (1, 2, 8):
        await stack.tinker_sample(prompts.one(), count, seed=11, max_tokens=16, forwarded=forwarded)


@both_ways(
    "test_samples_stop",
    task=0,
    promise="stop tokens and stop strings end samples through Tinker, and the reason says so",
    checks=[ends_as_asked(causes=["stop token", "stop string"])],
)
async def samples_stop(stack: Stack, prompts: Prompts, *, forwarded: bool) -> None:
    """Tinker, SamplingParams.stop: strings or tokens; SampledSequence.stop_reason: "length" or "stop"."""
    tokens = stack.vocabulary.scattered(range(100, 300))
    await stack.tinker_sample(prompts.one(), 8, seed=3, max_tokens=48, stop_token_ids=tokens, forwarded=forwarded)
    texts = [stack.vocabulary.text([token]) for token in stack.vocabulary.plain]
    await stack.tinker_sample(prompts.one(), 8, seed=3, max_tokens=48, stop=texts, forwarded=forwarded)


@both_ways(
    "test_log_probabilities_of_the_prompt",
    task=0,
    promise="sample() through Tinker returns the log-probabilities of the prompt if they were asked for",
    checks=[OF_PROMPTS],
)
async def log_probabilities_of_the_prompt(stack: Stack, prompts: Prompts, *, forwarded: bool) -> None:
    """Tinker, SamplingClient.sample: include_prompt_logprobs and topk_prompt_logprobs; SkyRL, SampleOutput.prompt_logprobs."""
    for prompt in prompts.unique(2):
        await stack.tinker_sample(prompt, 2, seed=5, prompt_logprobs=True, max_tokens=4, forwarded=forwarded)
    await stack.tinker_sample(
        prompts.one(), 2, seed=5, prompt_logprobs=True, topk_prompt_logprobs=3, max_tokens=4, forwarded=forwarded
    )
    await stack.tinker_sample(prompts.one(), 1, seed=5, max_tokens=4, forwarded=forwarded)


@both_ways(
    "test_a_sample_behind_an_image",
    task=0,
    promise="a sample through Tinker behind an image that the model cannot read is a named error",
    checks=[names_error("image", *IMAGES)],
)
async def a_sample_behind_an_image(stack: Stack, prompts: Prompts, *, forwarded: bool) -> None:
    """Tinker, ModelInput: chunks of images. An answer to the text alone would look like one to the image."""
    image = stack.tinker_sample(
        prompts.one(), 1, seed=0, image=PIXEL, label="image", temperature=0.0, max_tokens=8, forwarded=forwarded
    )
    await stack.attempt(image)


@both_ways(
    "test_samples_of_the_base_model",
    task=0,
    promise="Tinker's samples of the base model, and of the policy that equals it, are the reference's",
    checks=[greedy()],
)
async def samples_of_the_base_model(stack: Stack, prompts: Prompts, *, forwarded: bool) -> None:
    """Tinker, create_sampling_client(base_model=…); SkyRL: "the API maps it to model_id ''"."""
    for prompt in prompts.unique(2):
        await stack.tinker_sample(prompt, 1, seed=0, temperature=0.0, max_tokens=12, forwarded=forwarded)
        asked = stack.tinker_sample(
            prompt, 1, seed=0, of="base model", temperature=0.0, max_tokens=12, forwarded=forwarded
        )
        await stack.attempt(asked)


@both_ways(
    "test_a_pause_cuts_samples_short",
    task=0,
    promise="a sample through Tinker that a pause cuts short is not returned as one that has reached its length",
    also={Capability.PAUSE_ABORT},
    checks=[CUT_SHORT],
)
async def a_pause_cuts_samples_short(stack: Stack, prompts: Prompts, *, forwarded: bool) -> None:
    """SkyRL #904, PauseMode.ABORT: partial answers have the finish reason "abort". Tinker's SampledSequence.stop_reason has no such
    value: "length" means max_tokens."""
    samples = stack.tinker_sample(prompts.one(), 4, seed=7, max_tokens=200, forwarded=forwarded)
    async with interrupted(stack, "abort", stack.attempt(samples), requests=4):
        pass
