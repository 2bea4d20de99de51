"""completion(): an OpenAI-style body in, choices in the order of the prompts and an honest usage out."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.base import Check
from harness.checks.errors import names_error, returns_error
from harness.checks.openai import SCHEMA_ORDER, envelope, usage
from harness.checks.stopping import ends_as_asked
from harness.checks.text import text_of_tokens
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import UNSORTED, in_a_shape

COMPLETION = {Capability.COMPLETION}
METHODS = ("completion",)
ENDS = ends_as_asked(causes=["length"], methods=METHODS)
BODY: list[Check] = [envelope("completion"), usage("completion"), greedy(methods=METHODS), ENDS]
AFTER = greedy("after", methods=METHODS)


def body(stack: Stack, prompt: Any, **changes: Any) -> dict[str, Any]:
    """A greedy request that shows its tokens."""
    common = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    return {"model": stack.model_name, "prompt": prompt, **common, **changes}


@scenario(task=0, promise="completion() continues one prompt of token ids", needs=COMPLETION, checks=BODY)
async def test_one_prompt_of_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient.completion: {single, batched} × {string, token ids}."""
    for prompt in prompts.ragged(4):
        await stack.completion(body(stack, prompt))


@scenario(
    task=0, promise="choices of a batch of token ids are in the order of its prompts", needs=COMPLETION, checks=BODY
)
async def test_a_batch_of_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient.completion: "the order will be maintained, i.e. `output["choices"][i]`
    corresponds to `request["prompt"][i]`"."""
    await stack.completion(body(stack, prompts.ragged(11)))
    await stack.completion(body(stack, prompts.ragged(1)))


@variants(
    {"test_prompts_of_text": {}, "test_prompts_of_text_that_begin_with_a_token": {"topologies": ["llama"]}},
    task=0,
    promise="completion() continues texts, alone and in a batch",
    needs=COMPLETION,
    checks=BODY,
)
async def prompts_of_text(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient.completion: {single, batched} × {string, token ids}."""
    await stack.completion(body(stack, prompts.texts(1)[0]))
    await stack.completion(body(stack, prompts.texts(7)))


@scenario(
    task=0, promise="completion() gives several choices of one prompt", needs=COMPLETION, checks=[*BODY[:2], ENDS]
)
async def test_several_choices(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions: "n". `conservation` counts them, `echo` compares their seeds."""
    for prompt in prompts.unique(2):
        await stack.completion(body(stack, prompt, n=3, temperature=1.0, seed=5))


@scenario(
    task=0,
    promise="completion() gives several choices of each prompt of a batch",
    needs=COMPLETION,
    checks=[*BODY[:2], ENDS],
)
async def test_several_choices_of_a_batch(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions: "n": "How many completions to generate for each prompt"."""
    await stack.completion(body(stack, prompts.unique(6), n=2, temperature=1.0, seed=5))


@scenario(
    task=0,
    promise="the text of a choice is its decoded tokens",
    needs=COMPLETION,
    checks=[text_of_tokens(methods=METHODS)],
)
async def test_text_of_choices(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: completions return text; return_token_ids shows its tokens."""
    await stack.completion(body(stack, prompts.unique(8), allowed_token_ids=stack.vocabulary.plain))


@scenario(
    task=0,
    promise="a stop token ends a choice",
    needs=COMPLETION,
    checks=[ends_as_asked(causes=["stop token"], methods=METHODS), usage("completion")],
)
async def test_choices_stop(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: finish_reason "stop", and usage counts what was generated."""
    await stack.completion(
        body(stack, prompts.unique(8), max_tokens=40, stop_token_ids=stack.vocabulary.scattered(range(100, 300)))
    )


@scenario(
    task=0,
    promise="an unknown model is an error response, and the next request works",
    needs=COMPLETION,
    checks=[names_error("unknown_model", "model"), returns_error("unknown_model"), AFTER],
    deadline_s=100,
)
async def test_an_unknown_model(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface.completion: "Returns a plain dict, either a CompletionResponse or
    an ErrorResponse." """
    await stack.attempt(stack.completion(body(stack, prompts.one(), model="no-such-model"), label="unknown_model"))
    await stack.completion(body(stack, prompts.one(), max_tokens=64), label="after")


@scenario(
    task=0,
    promise="malformed parameters are error responses, and the next request works",
    needs=COMPLETION,
    checks=[names_error("malformed", "temperature", "max_tokens", "top_p"), returns_error("malformed"), AFTER],
    deadline_s=160,
)
async def test_malformed_parameters(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface.completion: "either a CompletionResponse or an ErrorResponse." """
    for wrong in ({"temperature": -1}, {"max_tokens": 0}, {"temperature": "hot"}, {"top_p": 7}):
        await stack.attempt(stack.completion(body(stack, prompts.one(), **wrong), label="malformed"))
    await stack.completion(body(stack, prompts.one(), max_tokens=64), label="after")


@scenario(
    task=0,
    promise="one over-long prompt fails its whole batch: there is no partial success",
    needs=COMPLETION,
    checks=[
        names_error("over_long", "context length", "input length", "maximum", "tokens"),
        returns_error("over_long"),
        AFTER,
    ],
    deadline_s=100,
)
async def test_no_partial_success(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineClient.completion: "If one of the sub-requests fails, we return an error response. That is,
    there is no partial success, following vLLM's behavior." """
    batch = [*prompts.unique(5), prompts.over_long(), *prompts.unique(2)]
    await stack.attempt(stack.completion(body(stack, batch), label="over_long"))
    await stack.completion(body(stack, prompts.unique(4)), label="after")


@scenario(
    task=0,
    promise="the fields of a structured completion come in the order of its schema",
    needs=COMPLETION,
    checks=[SCHEMA_ORDER],
)
async def test_fields_in_the_order_of_the_schema(stack: Stack, prompts: Prompts) -> None:
    """OpenAI documentation, Structured Outputs; vLLM documentation, Structured Outputs: response_format."""
    for prompt in prompts.unique(2):
        await stack.completion(body(stack, prompt, **in_a_shape(stack, UNSORTED)))
