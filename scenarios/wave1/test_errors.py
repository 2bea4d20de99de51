"""Bad input to generate(): an error that says what was wrong, no hang, and nothing lost afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.control_plane import GOOD, HEALTH_OF_THE_ADDRESS
from harness.checks.errors import answered_or_named, names_error, nothing_for_nothing
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.contract.messages import GenerateRequest, HttpRequest, SessionId
from harness.driving.stack import Stack
from harness.records.argument_forms import AS_IT_IS, NO_NUMBERS
from harness.suite.scenario import scenario, variants
from scenarios.requests import BEYOND, IMAGES, PIXEL

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
"""Long enough that not all decisions of a real model are near ties in 16 bits."""
AFTER = greedy("after")
JSON = {"content-type": "application/json"}
NO_TEXT_IS_SO_SHORT = {"type": "string", "minLength": -1}
"""A schema that looks right until a grammar is made of it: that is the engine's work."""
TOO_LONG = ("length", "long", "context", "tokens")
"""Words by which an error may speak of a prompt that is longer than the context."""
REFUSED = 2
"""Requests for each server: vllm-router asks each five times, and takes a server for dead after ten failures in a row."""


async def still_works(stack: Stack, prompts: Prompts) -> None:
    """Good requests to every server."""
    await stack.generate(prompts.unique(2 * stack.topology.engines), label="after", **GREEDY)


def no_samples(stack: Stack, prompts: Prompts) -> Coroutine[Any, Any, Any]:
    return stack.sample(prompts.one(), 0, label="empty", **GREEDY)


def no_prompts(stack: Stack, _: Prompts) -> Coroutine[Any, Any, Any]:
    return stack.completion({"model": stack.model_name, "prompt": [], **GREEDY}, label="empty")


@variants(
    {
        "test_an_empty_batch": {"nothing": lambda stack, _: stack.generate([], label="empty", **GREEDY)},
        "test_no_samples": {"nothing": no_samples, "needs": {Capability.SAMPLE}},
        "test_a_completion_of_no_prompts": {"nothing": no_prompts, "needs": {Capability.COMPLETION}},
    },
    task=0,
    promise="a call for no rows gives nothing or a named error",
    checks=[nothing_for_nothing("empty"), AFTER],
    deadline_s=100,
)
async def asks_for_nothing(
    stack: Stack, prompts: Prompts, *, nothing: Callable[[Stack, Prompts], Coroutine[Any, Any, Any]]
) -> None:
    """SkyRL API reference, InferenceEngineInterface: generate() has one output for each prompt, sample() num_samples of them."""
    await stack.attempt(nothing(stack, prompts))
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="an empty prompt is a named error",
    checks=[names_error("empty_prompt", "empty", "prompt", "token_ids"), AFTER],
    deadline_s=100,
)
async def test_an_empty_prompt(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, LLM.generate: a prompt has at least one token."""
    await stack.attempt(stack.generate([*prompts.unique(2), []], label="empty_prompt", **GREEDY))
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="a prompt longer than the context is a named error, alone and in a batch",
    checks=[names_error("over_long", *TOO_LONG), AFTER],
    topologies=["disaggregated", "remote", "moe"],
    deadline_s=160,
)
async def test_an_over_long_prompt(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Engine Arguments: --max-model-len, "prompt and output"."""
    await stack.attempt(stack.generate([prompts.over_long()], label="over_long", **GREEDY))
    batch = [*prompts.unique(3), prompts.over_long(), *prompts.unique(3)]
    await stack.attempt(stack.generate(batch, label="over_long", **GREEDY))
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="sampling parameters out of range are named errors",
    checks=[names_error("temperature", "temperature"), names_error("max_tokens", "max_tokens"), AFTER],
    topologies=["disaggregated", "remote", "moe"],
    deadline_s=160,
)
async def test_sampling_parameters_out_of_range(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams: temperature is not negative, max_tokens at least 1."""
    await stack.attempt(stack.generate(prompts.unique(2), temperature=-1, max_tokens=8, label="temperature"))
    await stack.attempt(stack.generate(prompts.unique(2), temperature=0, max_tokens=0, label="max_tokens"))
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="a sampling parameter of the wrong type is a named error",
    checks=[names_error("wrong_type", "temperature"), AFTER],
    topologies=["disaggregated", "moe"],
    deadline_s=100,
)
async def test_sampling_parameters_of_a_wrong_type(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams: temperature is a number."""
    await stack.attempt(stack.generate(prompts.unique(2), temperature="hot", max_tokens=8, label="wrong_type"))
    await still_works(stack, prompts)


Ask = Callable[..., Coroutine[Any, Any, Any]]


@variants(
    {
        "test_a_temperature_that_is_no_number": {"ask_of": lambda stack: stack.generate, "several": True},
        "test_a_repetition_penalty_that_is_no_number": {
            "ask_of": lambda stack: stack.generate,
            "several": True,
            "parameter": "repetition_penalty",
        },
        "test_a_sample_at_no_number": {
            "ask_of": lambda stack: lambda prompt, **params: stack.sample(prompt, 1, **params),
            "several": False,
            "needs": {Capability.SAMPLE},
        },
    },
    task=0,
    promise="a sampling parameter of NaN is a named error, and not an answer; so is an infinite one, or it is answered whole",
    checks=[
        names_error("not_a_number", "temperature", "repetition_penalty", "nan", "json"),
        answered_or_named("infinite", "temperature", "repetition_penalty", "inf", "json"),
        AFTER,
    ],
    deadline_s=100,
    parameter="temperature",
)
async def no_number(
    stack: Stack, prompts: Prompts, *, ask_of: Callable[[Stack], Ask], several: bool, parameter: str
) -> None:
    """vLLM documentation, SamplingParams: temperature and repetition_penalty are numbers with a least value; RFC 8259, 6: JSON has
    neither NaN nor infinity. A schedule that divides by zero makes one. What is drawn at NaN is no rollout of the policy; infinity may
    be a limit."""
    ask = ask_of(stack)
    given = prompts.unique(1) if several else prompts.one()
    params = {"temperature": 0.5, "max_tokens": 8} | {parameter: 0.5}
    await stack.form(AS_IT_IS)
    await ask(given, **params)
    forms = await stack.form(None)
    for place in {form.rpartition(": ")[0] for form in forms if f".{parameter}: " in form}:
        for form in NO_NUMBERS:
            await stack.form(f"{place}: {form}")
            await stack.attempt(ask(given, **params, label=form.replace(" ", "_")))
    await stack.form(None)
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="generate() refuses n > 1 by name: it has one answer per prompt",
    checks=[names_error("several_answers", "n > 1", "n>1"), AFTER],
    deadline_s=100,
)
async def test_several_answers_of_a_prompt(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, RemoteInferenceClient.generate: "n > 1 is not supported. Use `config.generator.n_samples_per_prompt` instead."; API
    reference, InferenceEngineInterface.generate: one output for each prompt."""
    several = stack.generate(prompts.unique(2), n=2, temperature=1.0, max_tokens=8, label="several_answers")
    await stack.attempt(several)
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="images for a model that reads none are a named error",
    checks=[names_error("features", *IMAGES), AFTER],
    deadline_s=100,
)
async def test_features_of_images(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineInput.mm_features; vLLM documentation, Multimodal Inputs: a text-only model has none. An answer to the
    text alone would look like one to the image."""
    images = {
        "mm_hashes": {"image": ["a"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": 4}]},
        "kwargs_data": None,
    }
    await stack.attempt(stack.generate(prompts.unique(1), mm_features=[images], label="features", **GREEDY))
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="a sample behind an image that the model cannot read is a named error",
    needs={Capability.SAMPLE},
    checks=[names_error("image", *IMAGES), AFTER],
    deadline_s=100,
)
async def test_a_sample_behind_an_image(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, RemoteInferenceClient.sample: the prompt's chunks, as Tinker has them; vLLM documentation, Multimodal Inputs."""
    await stack.attempt(stack.sample(prompts.one(), 1, image=PIXEL, label="image", temperature=0, max_tokens=8))
    await still_works(stack, prompts)


def a_completion(stack: Stack, prompts: Prompts, response_format: dict[str, Any]) -> Coroutine[Any, Any, Any]:
    asked = {"model": stack.model_name, "prompt": prompts.one(), "max_tokens": 4, "response_format": response_format}
    return stack.completion(asked, label="refused")


def without_a_tag(stack: Stack, prompts: Prompts) -> Coroutine[Any, Any, Any]:
    return a_completion(stack, prompts, {"type": "structural_tag", "format": 37})


def over_long(stack: Stack, prompts: Prompts) -> Coroutine[Any, Any, Any]:
    return stack.generate([prompts.over_long()], label="refused", **GREEDY)


@variants(
    {
        "test_many_requests_that_are_refused": {
            "refused": without_a_tag,
            "needs": {Capability.COMPLETION},
            "checks": [names_error("refused", "response_format", "structural", "format"), AFTER],
        },
        "test_many_prompts_that_are_refused": {
            "refused": over_long,
            "checks": [names_error("refused", *TOO_LONG), AFTER],
            "topologies": ["moe"],
        },
    },
    task=0,
    promise="requests that are refused again and again leave their server to the others",
    deadline_s=160,
    spoils=True,
)
async def refused_again_and_again(
    stack: Stack, prompts: Prompts, *, refused: Callable[[Stack, Prompts], Coroutine[Any, Any, Any]]
) -> None:
    """vLLM documentation, Structured Outputs: response_format, and Engine Arguments: --max-model-len; RFC 9110, 15.5 and 15.6: an
    error that the request has caused says nothing of the server.

    It spoils the stack: what takes a server for dead does so for a while."""
    stack.spoil("a router that counts refusals")
    for _ in range(REFUSED * stack.topology.engines):
        await stack.attempt(refused(stack, prompts))
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="while an address turns good requests away, its health says so",
    needs={Capability.COMPLETION, Capability.HTTP_ENDPOINT, Capability.HEALTH},
    checks=[HEALTH_OF_THE_ADDRESS],
    spoils=True,
)
async def test_health_while_requests_are_refused(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #899, review of /health: true if at least one engine is healthy; RFC 9110, 15.6.4: a 503 says that there is no server for
    the request. A load balancer goes by /health. It spoils the stack, as the scenario before it does."""
    stack.spoil("a router that counts refusals")
    for _ in range(REFUSED * stack.topology.engines):
        await stack.attempt(without_a_tag(stack, prompts))
    for prompt in prompts.unique(2 * stack.topology.engines):
        body = json.dumps({"model": stack.model_name, "prompt": prompt, **GREEDY})
        await stack.http(HttpRequest(path="/v1/completions", headers=JSON, body=body), label=GOOD)
        await stack.health()


@scenario(
    task=0,
    promise="a response format that an engine can make no grammar of is a named error, and ends no engine",
    needs={Capability.COMPLETION},
    checks=[names_error("refused", "response_format", "schema", "grammar", "minlength"), AFTER],
    deadline_s=100,
    spoils=True,
)
async def test_a_format_without_a_grammar(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Structured Outputs: response_format with a JSON schema. It spoils a stack whose engine ends by it."""
    stack.spoil("a schema that no grammar fits")
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": NO_TEXT_IS_SO_SHORT}}
    await stack.attempt(a_completion(stack, prompts, shape))
    await still_works(stack, prompts)


@variants(
    {
        "test_min_tokens_beyond_the_context": {
            "beyond": lambda stack: {"min_tokens": stack.max_model_len, "max_tokens": stack.max_model_len},
        },
        "test_min_tokens_before_a_stop_token_beyond_the_vocabulary": {
            "beyond": lambda _: {"min_tokens": 4, "max_tokens": 8, "stop_token_ids": [BEYOND]},
        },
    },
    task=0,
    promise="what fits neither the context nor the vocabulary is refused by name, or the answer ends all the same",
    checks=[answered_or_named("beyond", "min_tokens", "max_tokens", "stop_token_ids", "vocab"), AFTER],
    deadline_s=30,
    spoils=True,
)
async def beyond_what_there_is(stack: Stack, prompts: Prompts, *, beyond: Callable[[Stack], dict[str, Any]]) -> None:
    """vLLM documentation, SamplingParams: min_tokens, stop_token_ids; vLLM #54218. It spoils a stack in which such a request never
    ends, or ends its engine."""
    stack.spoil("a request that its engine cannot serve")
    await stack.attempt(stack.generate(prompts.unique(1), label="beyond", **{**GREEDY, **beyond(stack)}))
    await stack.attempt(still_works(stack, prompts))


@scenario(
    task=0,
    promise="fewer session ids than prompts are a named error",
    checks=[names_error("sessions", "session"), AFTER],
)
async def test_fewer_session_ids_than_prompts(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, route_prompts_to_engines: "Required: len(session_ids) == num_prompts if provided"."""
    few: list[list[SessionId]] = [["a", "b"], []]
    for ids in few:
        await stack.attempt(stack.generate(prompts.unique(4), session_ids=ids, label="sessions", **GREEDY))
    await still_works(stack, prompts)


@scenario(
    task=0, promise="a request without any prompt is a named error", checks=[names_error("neither", "prompt"), AFTER]
)
async def test_neither_prompts_nor_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineInput: "Either prompts or prompt_token_ids must be provided, but not both." """
    await stack.attempt(stack.generate_request(GenerateRequest(sampling_params=GREEDY), label="neither"))
    await still_works(stack, prompts)


@scenario(
    task=0,
    promise="a request with both messages and tokens is a named error",
    needs={Capability.GENERATE_MESSAGES},
    checks=[names_error("both", "prompt"), AFTER],
)
async def test_both_prompts_and_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineInput: "Either prompts or prompt_token_ids must be provided, but not both." """
    both = GenerateRequest(prompt_token_ids=prompts.unique(1), prompts=prompts.conversations(1), sampling_params=GREEDY)
    await stack.attempt(stack.generate_request(both, label="both"))
    await still_works(stack, prompts)
