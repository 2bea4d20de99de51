"""A caller goes away: its request ends at the engines, others are unharmed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.cancellation import CANCELLATION, FAILED, QUEUED
from harness.checks.errors import names_error
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.contract.messages import ENGINE_PLACES, REQUEST_CAP, HttpRequest
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.cancellation import LONG, OTHERS, SESSION, STAYS, Send, by_generate, caller_goes
from scenarios.requests import sessions, until_idle

HEADERS = {"content-type": "application/json"}
AT = {"at_the_first_token": 1, "in_the_middle": 20}
"""Moment → tokens that the engines have made for each request, on average."""


def by_sample(stack: Stack, prompts: Prompts, label: str | None = None) -> Coroutine[Any, Any, Any]:
    """Several at random: not every stack's sample() ignores an end token, and one of them goes on."""
    return stack.sample(
        prompts.one(), 3, session_id=SESSION, max_tokens=LONG["max_tokens"], temperature=1.0, label=label
    )


def by_chat(stack: Stack, prompts: Prompts, label: str | None = None) -> Coroutine[Any, Any, Any]:
    body = {"model": stack.model_name, "messages": prompts.conversations(1)[0], "session_id": SESSION}
    return stack.chat_completion(body | LONG, label=label)


def by_completion(stack: Stack, prompts: Prompts, label: str | None = None) -> Coroutine[Any, Any, Any]:
    body = {"model": stack.model_name, "prompt": prompts.one(), "session_id": SESSION}
    return stack.completion(body | LONG, label=label)


def by_address(stack: Stack, prompts: Prompts, label: str | None = None) -> Coroutine[Any, Any, Any]:
    body = {"model": stack.model_name, "prompt": prompts.one()} | LONG
    return stack.http(HttpRequest(path="/v1/completions", headers=HEADERS, body=json.dumps(body)), label=label)


def by_a_stream(stack: Stack, prompts: Prompts, label: str | None = None) -> Coroutine[Any, Any, Any]:
    body = {"model": stack.model_name, "prompt": prompts.one(), "stream": True} | LONG
    return stack.http(HttpRequest(path="/v1/completions", headers=HEADERS, body=json.dumps(body)), label=label)


WAYS: dict[str, dict[str, Any]] = {
    "generate": {"send": by_generate, "needs": set()},
    "sample": {"send": by_sample, "needs": {Capability.SAMPLE}},
    "chat_completion": {"send": by_chat, "needs": {Capability.CHAT_COMPLETION}},
    "completion": {"send": by_completion, "needs": {Capability.COMPLETION}},
    "a_completion_at_the_address": {"send": by_address, "needs": {Capability.HTTP_ENDPOINT}},
    "a_stream_at_the_address": {
        "send": by_a_stream,
        "needs": {Capability.HTTP_ENDPOINT, Capability.HTTP_STREAMING},
    },
}
HELD = {way: {**case, "needs": {*case["needs"], Capability.PAUSE_KEEP}} for way, case in WAYS.items()}
"""The same where engines stand still meanwhile."""
BEYOND = 2**20
"""A token id that no vocabulary has."""
PROMISE = "a request whose caller goes away ends at its engine, is not sent again, and disturbs no other"


@variants(
    {
        **{f"test_{way}_{moment}": {**case, "tokens": AT[moment]} for way, case in WAYS.items() for moment in AT},
        **{f"test_{way}_while_frozen": {**case, "tokens": 20, "frozen": True} for way, case in HELD.items()},
    },
    task=0,
    promise=PROMISE,
    checks=[CANCELLATION, greedy(OTHERS)],
    frozen=False,
)
async def a_caller_goes(stack: Stack, prompts: Prompts, *, send: Send, tokens: int, frozen: bool) -> None:
    """vLLM documentation, with_cancellation: a client that disconnects ends its request; AsyncLLM.generate: cancelled, it aborts."""
    await caller_goes(stack, prompts, send, tokens=tokens, frozen=frozen)


@scenario(
    task=0,
    promise="the rows of a batch that fails by one of them end at their engines",
    checks=[CANCELLATION, names_error(FAILED, "token", "vocab")],
)
async def test_a_batch_that_fails(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, with_cancellation: a request that nobody waits for ends. Whoever has the error of a batch may send it again
    at once: the rows of the first are not to run beside it. The bad row may be refused before any other has begun: in each of four
    batches of thirteen once in thirty thousand runs."""
    for _ in range(4):
        bad = [*prompts.one(), BEYOND]
        await stack.attempt(stack.generate([*prompts.unique(12), bad], label=FAILED, **LONG))
        await until_idle(stack)


FULL = {"at_the_engine": ENGINE_PLACES, "in_the_client": REQUEST_CAP}
"""Where a request waits → number of requests per server that fill that place."""


@variants(
    {
        **{f"test_{way}_queued_at_the_engine": {**case, "full": FULL["at_the_engine"]} for way, case in HELD.items()},
        "test_generate_queued_in_the_client": {
            "send": by_generate,
            "needs": {Capability.PAUSE_KEEP, Capability.REQUEST_CAP, Capability.HEALTH},
            "full": FULL["in_the_client"],
        },
    },
    task=0,
    promise="a request whose caller goes while it waits for its turn is never computed, and disturbs no other",
    checks=[CANCELLATION, greedy(OTHERS)],
    deadline_s=120,
    bulk=True,
)
async def a_caller_goes_from_a_queue(stack: Stack, prompts: Prompts, *, send: Send, full: int) -> None:
    """vLLM documentation, with_cancellation; SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE: "the rest queue locally and proceed as
    slots free up". Requests of many sessions fill the place that is meant, and stand still; the caller comes last, and goes."""
    at_engines = full == FULL["at_the_engine"]
    count = full * len(stack.servers) * (3 if at_engines else 2) // 2  # sessions do not fill servers evenly
    batch = stack.generate(prompts.unique(count), session_ids=sessions(count), label=OTHERS, **STAYS)
    if at_engines:  # frozen before they fill: no request ends before the last has come
        await stack.pause("keep")
        others = asyncio.create_task(batch)
        await stack.until(lambda seen: seen.requests >= count, f"{count} requests at the engines")
    else:
        others = asyncio.create_task(batch)
        held = full * len(stack.servers)
        await stack.until(lambda seen: seen.requests >= held and seen.tokens > 0, f"{held} requests at the engines")
        await stack.pause("keep")
    before = (await stack.in_flight()).requests
    caller = asyncio.create_task(send(stack, prompts, QUEUED))
    if at_engines:
        await stack.until(lambda seen: seen.requests > before or caller.done(), "the caller's request")
    else:
        await stack.health()  # the client has got the caller's request by now
    caller.cancel()
    await asyncio.wait({caller})
    await stack.resume()
    await others
    await until_idle(stack)
