"""A caller goes away: its request ends at the engines, others are unharmed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.cancellation import CANCELLATION
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.contract.messages import HttpRequest
from harness.driving.stack import Stack
from harness.suite.scenario import variants
from scenarios.requests import sessions, until_idle

LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
STAYS = LONG | {"max_tokens": 64}
SESSION = "the one that goes"
OTHERS = "others"
NEIGHBOURS = 8
"""Requests that stay: with so many sessions each server has one."""
HEADERS = {"content-type": "application/json"}
AT = {"at_the_first_token": 1, "in_the_middle": 20}
"""Moment → tokens that the engines have made for each request, on average."""
Send = Callable[[Stack, Prompts], Coroutine[Any, Any, Any]]


def by_generate(stack: Stack, prompts: Prompts) -> Coroutine[Any, Any, Any]:
    return stack.generate([prompts.one()], session_ids=[SESSION], **LONG)


def by_sample(stack: Stack, prompts: Prompts) -> Coroutine[Any, Any, Any]:
    """Several at random: not every stack's sample() ignores an end token, and one of them goes on."""
    return stack.sample(prompts.one(), 6, session_id=SESSION, max_tokens=400, temperature=1.0)


def by_chat(stack: Stack, prompts: Prompts) -> Coroutine[Any, Any, Any]:
    body = {"model": stack.model_name, "messages": prompts.conversations(1)[0], "session_id": SESSION}
    return stack.chat_completion(body | LONG)


def by_completion(stack: Stack, prompts: Prompts) -> Coroutine[Any, Any, Any]:
    return stack.completion({"model": stack.model_name, "prompt": prompts.one(), "session_id": SESSION} | LONG)


def by_address(stack: Stack, prompts: Prompts) -> Coroutine[Any, Any, Any]:
    body = {"model": stack.model_name, "prompt": prompts.one()} | LONG
    return stack.http(HttpRequest(path="/v1/completions", headers=HEADERS, body=json.dumps(body)))


WAYS: dict[str, dict[str, Any]] = {
    "generate": {"send": by_generate, "needs": {Capability.PAUSE_KEEP}},
    "sample": {"send": by_sample, "needs": {Capability.PAUSE_KEEP, Capability.SAMPLE}},
    "chat_completion": {"send": by_chat, "needs": {Capability.PAUSE_KEEP, Capability.CHAT_COMPLETION}},
    "completion": {"send": by_completion, "needs": {Capability.PAUSE_KEEP, Capability.COMPLETION}},
    "a_completion_at_the_address": {"send": by_address, "needs": {Capability.PAUSE_KEEP, Capability.HTTP_ENDPOINT}},
}
PROMISE = "a request whose caller goes away ends at its engine, is not sent again, and disturbs no other"


@variants(
    {
        **{f"test_{way}_{moment}": {**case, "tokens": AT[moment]} for way, case in WAYS.items() for moment in AT},
        **{f"test_{way}_while_frozen": {**case, "tokens": 20, "frozen": True} for way, case in WAYS.items()},
    },
    task=0,
    promise=PROMISE,
    checks=[CANCELLATION, greedy(OTHERS)],
    frozen=False,
)
async def a_caller_goes(stack: Stack, prompts: Prompts, *, send: Send, tokens: int, frozen: bool) -> None:
    """vLLM documentation, with_cancellation: a client that disconnects ends its request; AsyncLLM.generate: cancelled, it aborts."""
    batch = stack.generate(prompts.unique(NEIGHBOURS), session_ids=sessions(NEIGHBOURS), label=OTHERS, **STAYS)
    neighbours = asyncio.create_task(batch)
    caller = asyncio.create_task(send(stack, prompts))
    await stack.until_generating(requests=NEIGHBOURS + 1, tokens=NEIGHBOURS * tokens)
    if frozen:
        await stack.pause("keep")
    caller.cancel()
    await asyncio.wait({caller})
    if frozen:
        await stack.resume()
    await stack.generate(prompts.unique(1), session_ids=[SESSION], label=OTHERS, max_tokens=8, temperature=0.0)
    await neighbours
    await until_idle(stack)
