"""An output ends where it was asked to end, and its finish reason says why."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.base import Check
from harness.checks.openai import SCHEMA_ORDER
from harness.checks.stopping import Cause, ends_as_asked, stop_text
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.contract.vocabulary import PAIR
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import VERDICT, in_a_shape, meets_a_stop_string


def ends_by(*causes: Cause, label: str | None = None) -> Check:
    """The outputs end as asked, and each of these causes ends at least one."""
    labels = () if label is None else (label,)
    return ends_as_asked(*labels, causes=causes)


@scenario(task=0, promise='max_tokens ends an output with "length", at exactly that many', checks=[ends_by("length")])
async def test_max_tokens(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.max_tokens: "Maximum number of tokens to generate per output sequence." """
    for most in (1, 7, 32):
        await stack.generate(prompts.ragged(6), temperature=0, max_tokens=most, ignore_eos=True)


@scenario(
    task=0,
    promise='a stop token ends an output with "stop", and is its last token',
    checks=[ends_by("stop token"), greedy()],
)
async def test_stop_token_ids(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.stop_token_ids: "The returned output will contain the stop tokens"."""
    await stack.generate(
        prompts.unique(16), temperature=0, max_tokens=48, stop_token_ids=stack.vocabulary.scattered(range(150, 250))
    )


@scenario(task=0, promise="min_tokens come before any stop token", checks=[ends_by("stop token")])
async def test_min_tokens(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.min_tokens: "before EOS or stop_token_ids can be generated"."""
    stops = stack.vocabulary.scattered(range(100, 300))
    await stack.generate(prompts.unique(12), temperature=0, max_tokens=32, min_tokens=8, stop_token_ids=stops)


@scenario(
    task=0,
    promise="the end-of-sequence token ends an output, unless it is to be ignored",
    checks=[ends_by("eos", label="heeded"), ends_by("length", label="ignored")],
)
async def test_end_of_sequence(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.ignore_eos. With one seed both calls meet the token at the same place. The
    temperature is the highest that an OpenAI request may have, since a model may otherwise not end here. A trained model would not
    even then: it has no other choice."""
    batch, few = prompts.unique(8), [stack.vocabulary.eos, *([] if stack.slow else stack.vocabulary.plain[:6])]
    for label, ignored in (("heeded", False), ("ignored", True)):
        await stack.generate(
            batch, temperature=2.0, seed=2, max_tokens=32, allowed_token_ids=few, ignore_eos=ignored, label=label
        )


@scenario(
    task=0,
    promise="a stop string ends an output, and its text does not hold it",
    checks=[ends_by("stop string"), stop_text()],
)
async def test_stop_strings(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.stop: "The returned output will not contain the stop strings." """
    await stack.generate(prompts.unique(12), **meets_a_stop_string(stack))


@scenario(
    task=0,
    promise="a stop string is the end of the text when it is to be included",
    checks=[ends_by("stop string"), stop_text()],
)
async def test_stop_strings_included(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.include_stop_str_in_output. SkyRL's generator always sets it."""
    await stack.generate(prompts.unique(12), include_stop_str_in_output=True, **meets_a_stop_string(stack))


@scenario(
    task=0,
    promise="a stop string that ends within a token is the end of the text all the same",
    checks=[ends_by("stop string"), stop_text()],
)
async def test_a_stop_string_that_ends_within_a_token(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.include_stop_str_in_output; a tokenizer joins "</answer>" and what follows into one token."""
    stopped = meets_a_stop_string(stack, within_a_token=True) | {
        "frequency_penalty": 2.0
    }  # a model may be sure of one of the two
    await stack.generate(prompts.unique(12), include_stop_str_in_output=True, **stopped)


@scenario(
    task=0,
    promise="of two stop strings that end within one token, the first in the text ends it, whatever their order in the list",
    needs={Capability.COMPLETION},
    checks=[stop_text(methods=("completion",))],
)
async def test_two_stop_strings_within_a_token(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.stop: "The returned output will not contain the stop strings"; vLLM #49391. Answers of two
    tokens only: a letter, and a pair of letters. A pair after a letter ends both strings."""
    letter, pair = stack.vocabulary.plain[0], stack.vocabulary.two_letters
    both = [PAIR, stack.vocabulary.text([letter]) + PAIR[0]]
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 32, "allowed_token_ids": [letter, pair]}
    for stop in (both, both[::-1]):
        for included in (False, True):
            body = {"model": stack.model_name, "prompt": prompts.unique(8), "return_token_ids": True, **asked}
            await stack.completion(body | {"stop": stop, "include_stop_str_in_output": included})


@variants(
    {
        "test_min_tokens_beyond_a_structured_answer": {"method": "generate"},
        "test_min_tokens_beyond_a_structured_completion": {"method": "completion"},
        "test_min_tokens_beyond_a_structured_chat": {"method": "chat_completion"},
    },
    task=0,
    promise="min_tokens adds nothing to an answer that its schema has ended",
    checks=[SCHEMA_ORDER],
)
async def min_tokens_beyond_a_schema(stack: Stack, prompts: Prompts, *, method: str) -> None:
    """vLLM documentation, Structured Outputs: "The output will exactly follow the context free grammar", here a JSON schema's, which
    leaves nothing but the end after the object; SamplingParams.min_tokens."""
    asked = {**in_a_shape(stack), "temperature": 0, "min_tokens": 60}
    if method == "generate":
        del asked["response_format"]
        await stack.generate(prompts.unique(2), **asked, structured_outputs={"json": VERDICT})
    elif method == "completion":
        for prompt in prompts.unique(2):
            await stack.completion({"model": stack.model_name, "prompt": prompt, **asked})
    else:
        for messages in prompts.conversations(2):
            await stack.chat_completion({"model": stack.model_name, "messages": messages, **asked})
