"""Every field of a request with values of every kind, as the stack's own schema lists them, one field at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fixtures.prompts import Prompts
from fixtures.request_fields import VALID, Case, in_pairs, of_its_type, of_other_types
from harness.checks.matching import SHAPING
from harness.checks.request_fields import AFTER_AN_ERROR, AS_IT_IS, FIELD_PAIRS, REQUEST_FIELDS
from harness.contract.capability import Capability
from harness.contract.errors import CallFailed, NotOffered
from harness.contract.messages import HttpRequest
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import SPREAD, one_by_one

PARAMS: dict[str, Any] = {"max_tokens": 3, "temperature": 1.0, "seed": 7}
INPUT = frozenset({"model", "messages", "prompt", "use_beam_search"})
"""Left out: what is continued, which other scenarios vary, and the search that runs many requests in place of one."""
ALONE = SHAPING | {"tools", "logprobs", "top_logprobs", "prompt_logprobs"}
"""Pairs with one of these fields are asked for one after the other: they make another prompt, by which a request is known at its
engine, or they show numbers, whose last digits depend on what else its engine computes."""
OWN: dict[str, Any] = {"session_id": {"type": ["string", "integer", "null"]}}
"""Fields that SkyRL adds to the bodies of its clients (SkyRL API reference, InferenceEngineClient.chat_completion and completion)."""
STREAMS = frozenset({"stream", "stream_options"})
"""Left out of pairs that the Python client is asked for: it asks half a minute for each. The address streams."""
ORDER = 1
"""Seed of the order of cases, and of which are batches. A case has its place whichever others a stack has."""

AT_ONCE = 16
"""Requests in flight when pairs are asked for: their values are mild, so that few break anything."""

BATCHES = 1 / 3
"""Share of batches among pairs."""

Values = Callable[[dict[str, Any], frozenset[str], int], Iterator[Case]]
Ask = Callable[[dict[str, Any], str], Coroutine[Any, Any, Any]]
"""(parameters, label) → the call."""
Send = Callable[[Stack, Prompts, int], Ask]
"""Several rows: a batch, where the call can have one."""


def by_generate(stack: Stack, prompts: Prompts, rows: int) -> Ask:
    batch = prompts.unique(rows)
    return lambda params, label: stack.generate(batch, label=label, **params)


def by_sample(stack: Stack, prompts: Prompts, rows: int) -> Ask:
    prompt = prompts.one()
    return lambda params, label: stack.sample(prompt, rows, label=label, **params)


def by_chat(stack: Stack, prompts: Prompts, _rows: int) -> Ask:
    asked = {"model": stack.model_name, "messages": prompts.conversations(1)[0]}
    return lambda params, label: stack.chat_completion(asked | params, label=label)


def by_completion(stack: Stack, prompts: Prompts, rows: int) -> Ask:
    asked = {"model": stack.model_name, "prompt": prompts.one() if rows == 1 else prompts.unique(rows)}
    return lambda params, label: stack.completion(asked | params, label=label)


def by_http(path: str) -> Send:
    def by_address(stack: Stack, prompts: Prompts, _rows: int) -> Ask:
        asked: dict[str, Any] = {"model": stack.model_name}
        asked |= {"messages": prompts.conversations(1)[0]} if path.startswith("/v1/chat") else {"prompt": prompts.one()}
        headers = {"content-type": "application/json"}
        return lambda params, label: stack.http(
            HttpRequest(path=path, headers=headers, body=json.dumps(asked | params)), label=label
        )

    return by_address


async def tried(stack: Stack, good: list[list[int]], call: Coroutine[Any, Any, Any]) -> None:
    """Make the call; a value that asks for a capability which the stack does not declare is not sent. After a server error each
    server gets good requests: a router takes a server for dead after some errors in a row, and the next cases would meet that. They
    have a seed: vLLM's CPU sampler heeds no seed in a batch in which one request has none."""
    try:
        answer = await call
    except NotOffered:
        return
    except CallFailed:
        answer = None
    if answer is None or getattr(answer, "status", 0) >= 500:
        await stack.attempt(stack.generate(good, label=AFTER_AN_ERROR, **{**PARAMS, "max_tokens": 1}))


WAYS: dict[str, dict[str, Any]] = {
    "test_generate": {"send": by_generate, "call": "generate"},
    "test_sample": {"send": by_sample, "call": "sample", "needs": {Capability.SAMPLE}},
    "test_chat_completion": {"send": by_chat, "call": "chat_completion", "needs": {Capability.CHAT_COMPLETION}},
    "test_completion": {"send": by_completion, "call": "completion", "needs": {Capability.COMPLETION}},
    "test_a_chat_at_the_address": {
        "send": by_http("/v1/chat/completions"),
        "call": "chat_completion",
        "needs": {Capability.HTTP_ENDPOINT},
    },
    "test_a_completion_at_the_address": {
        "send": by_http("/v1/completions"),
        "call": "completion",
        "needs": {Capability.HTTP_ENDPOINT},
    },
}


@variants(
    {
        **{name: {**way, "values": of_its_type} for name, way in WAYS.items()},
        **{f"{name}_of_other_types": {**way, "values": of_other_types} for name, way in WAYS.items()},
    },
    task=0,
    promise="every field of a request takes effect at the engine, or is refused by an error that names it",
    checks=[REQUEST_FIELDS],
    deadline_s=240,
    bulk=True,
)
async def every_field(stack: Stack, prompts: Prompts, *, send: Send, call: str, values: Values) -> None:
    """vLLM documentation, SamplingParams and OpenAI-Compatible Server: the fields, their types and ranges; SkyRL API reference,
    InferenceEngineInput.sampling_params."""
    schema = (await stack.request_schemas())[call]
    if send in (by_chat, by_completion):
        schema |= {"properties": schema["properties"] | OWN}
    await send(stack, prompts, 1)(PARAMS, AS_IT_IS)
    cases = stack.within_budget(values(schema, INPUT, stack.times(VALID)))
    cases.sort(key=lambda case: (isinstance(case.values[case.field], dict), drawn(case)))  # records break most
    await ask(stack, prompts, send, cases)


@variants(
    {
        **{f"{name}_in_pairs": way for name, way in WAYS.items()},
        **{
            f"{name}_in_pairs": {**WAYS[name], "without": STREAMS}
            for name in ("test_chat_completion", "test_completion")
        },
    },
    task=0,
    promise="two fields of a request take effect together as each does alone, in a batch too",
    checks=[FIELD_PAIRS],
    deadline_s=240,
    bulk=True,
    without=frozenset(),
)
async def every_pair(stack: Stack, prompts: Prompts, *, send: Send, call: str, without: frozenset[str]) -> None:
    """vLLM documentation, SamplingParams and OpenAI-Compatible Server; SkyRL API reference, InferenceEngineInput.sampling_params.

    Each field alone, then two at a time: many requests at once, but for those of `ALONE`."""
    schema = (await stack.request_schemas())[call]
    await send(stack, prompts, 1)(PARAMS, AS_IT_IS)
    singles, pairs = in_pairs(schema, INPUT | without, stack.times(1))
    await ask(stack, prompts, send, singles)
    if stack.alive:
        pairs = stack.within_budget(pairs)
        await ask(stack, prompts, send, [pair for pair in pairs if not ALONE & pair.values.keys()], at_once=AT_ONCE)
        await ask(stack, prompts, send, [pair for pair in pairs if ALONE & pair.values.keys()])


async def ask(stack: Stack, prompts: Prompts, send: Send, cases: list[Case], at_once: int = 1) -> None:
    """Each case in a request. Of several at once every third is a batch. A case has prompts of its own: stacks whose schemas differ
    in a field are asked the same in all others."""
    calls = (
        tried(
            stack,
            own.unique(SPREAD),
            send(stack, own, 2 if at_once > 1 and drawn(case) < BATCHES else 1)({**PARAMS, **case.values}, case.label),
        )
        for case in cases
        for own in (prompts.of(case.label),)
    )
    await one_by_one(stack, calls, at_once)


def drawn(case: Case) -> float:
    """A number between 0 and 1, always the same for a case."""
    return random.Random(f"{ORDER} {case.label}").random()


@scenario(
    task=0,
    promise="the format of an answer of generate() takes effect, or is refused by an error that names it",
    checks=[REQUEST_FIELDS],
    topologies=["disaggregated", "moe"],
    bulk=True,
)
async def test_a_format_for_generate(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInput.sampling_params: a dict; vLLM documentation, Structured Outputs: choice."""
    ask = by_generate(stack, prompts, 1)
    await ask(PARAMS, AS_IT_IS)
    await stack.attempt(ask({**PARAMS, "structured_outputs": {"choice": ["12", "34"]}}, "structured_outputs: choice"))


@scenario(
    task=0,
    promise="a bias of generate() towards a token takes effect, or is refused by an error that names it",
    checks=[REQUEST_FIELDS],
    topologies=["disaggregated", "moe"],
    bulk=True,
)
async def test_a_bias_for_generate(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInput.sampling_params: a dict; vLLM documentation, SamplingParams.logit_bias: token ids with
    their bias. In JSON these ids are texts."""
    ask = by_generate(stack, prompts, 1)
    await ask(PARAMS, AS_IT_IS)
    await stack.attempt(ask({**PARAMS, "logit_bias": {str(stack.vocabulary.plain[0]): 100.0}}, "logit_bias: one token"))
