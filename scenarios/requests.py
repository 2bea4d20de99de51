"""What many scenarios send: sampling parameters, sessions, syncs with answers; and their topologies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Literal

from fixtures.prompts import Prompts
from harness.checks.client_lives import CONFIGURED
from harness.contract.clock import monotonic
from harness.contract.messages import SessionId
from harness.contract.vocabulary import PAIR
from harness.driving.stack import Stack

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""One right answer to a prompt, of exactly `max_tokens` tokens."""
ANSWER: dict[str, Any] = {"max_tokens": 16, **GREEDY}
BEYOND = 2**20
"""A token id that no vocabulary has."""
SPREAD = 16
"""Enough prompts that each of two servers gets some, however a router spreads them: a fair one leaves a server out once in 30,000
runs."""
IMAGES = ("image", "multimodal", "multi-modal", "mm_", "encoder cache")
"""Words by which an error names an image as its cause."""
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel, in base64."""
EVERYWHERE = ("disaggregated", "colocated", "remote")
"""Wherever two engines can live: topologies of `scenarios/topologies.toml`."""
PATIENCE_S = 1.0
"""A request that takes longer goes on beside the next ones. Each has a prompt of its own, so that none is taken for another."""
MOST_LATE = 6
"""With more requests than these unanswered at a time a stack hangs: the rest is not asked."""
LAST_S = 45.0
"""Time for the last answers. A client may ask again for half a minute."""


def long(stack: Stack) -> dict[str, Any]:
    """An answer long enough to be paused in the middle, or twice: about a second of the tiny model, more of a slow one."""
    return {"max_tokens": 96 if stack.slow else 200, **GREEDY}


async def sync_and_answer(stack: Stack, batch: list[list[int]], *syncs: tuple[int, int], **asked: Any) -> None:
    """After each of `syncs` (version, chunks): every worker's digests, and greedy answers to the batch."""
    for version, chunks in syncs:
        await stack.sync_weights(version, chunks=chunks)
        await stack.digests()
        await stack.generate(batch, **{**ANSWER, **asked})


async def ask_as_configured(stack: Stack, prompts: Prompts) -> None:
    """A batch by generate(), a completion and a chat, of the client that the configuration makes. Each may be refused."""
    await stack.attempt(stack.generate(prompts.unique(8), label=CONFIGURED, **ANSWER))
    body = {"model": stack.model_name, "max_tokens": 8, "temperature": 0.0}
    await stack.attempt(stack.completion({**body, "prompt": prompts.one()}, label=CONFIGURED))
    conversation = prompts.conversations(1)[0]
    await stack.attempt(stack.chat_completion({**body, "messages": conversation}, label=CONFIGURED))


def truths(*fields: str) -> dict[str, Any]:
    """Schema of an object of truth values, all of which are required."""
    return {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in fields},
        "required": [*fields],
        "additionalProperties": False,
    }


VERDICT = truths("because", "certain", "verdict")
UNSORTED = truths("verdict", "because")
"""Its fields are not in alphabetical order."""


def in_a_shape(stack: Stack, schema: dict[str, Any] = VERDICT) -> dict[str, Any]:
    """A body's fields for a JSON object of this schema, written without spaces."""
    shape = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    written = {str(token): 100.0 for token in stack.vocabulary.plain}
    return {"response_format": shape, "logit_bias": written, "max_tokens": 64, "ignore_eos": False}


def has_to_call(stack: Stack, choice: Literal["required", "named"], *, cut: bool = False) -> dict[str, Any]:
    """A chat's fields by which the model has to call a tool of `VERDICT`. It writes no spaces, and one call. `cut`: max_tokens ends
    the answer within the call's arguments."""
    name = "judge"
    vocabulary = stack.vocabulary
    written = dict.fromkeys(map(str, vocabulary.plain), 50.0)
    written |= {str(end): 100.0 for end in (vocabulary.characters["]"], vocabulary.eos)}
    return {
        "tools": [{"type": "function", "function": {"name": name, "parameters": VERDICT}}],
        "tool_choice": choice if choice == "required" else {"type": "function", "function": {"name": name}},
        "logit_bias": written,
        "max_tokens": 40 if cut else 120,
    }


def sessions(n: int) -> list[SessionId]:
    """One session per row, so that a prompt that is sent again meets the same server and its cache."""
    return [f"conversation-{number}" for number in range(n)]


async def until_idle(stack: Stack, within_s: float = 10.0) -> bool:
    """Wait until no engine works on a request. False if that takes longer: a request may stay with its engine for good."""
    deadline = monotonic() + within_s
    while (await stack.in_flight()).requests:
        if monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def until_settled(stack: Stack) -> None:
    """Wait until no more requests reach an engine for a second: what is held back stays there."""
    before, now = 0, -1
    while now != before:
        before = now
        await asyncio.sleep(1.0)
        now = (await stack.in_flight()).requests


async def one_by_one(stack: Stack, calls: Iterable[Coroutine[Any, Any, Any]], at_once: int = 1) -> None:
    """Each call, the next one when fewer than `at_once` are unanswered or `PATIENCE_S` are over. A stack that leaves `MOST_LATE` of
    them unanswered for that long, or one at the end, is given up."""
    asked: list[asyncio.Task[Any]] = []
    running: list[asyncio.Task[Any]] = []
    left_behind: list[asyncio.Task[Any]] = []  # no longer waited for; once it ends, it is no reason to start one more
    hangs = False
    for call in calls:
        asked.append(asyncio.create_task(call))
        running.append(asked[-1])
        if len(running) >= at_once:
            done, _ = await asyncio.wait(running, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            left_behind = [task for task in left_behind if not task.done()] + ([] if done else [running.pop(0)])
            running = [task for task in running if task not in done]
        if hangs := len(left_behind) > MOST_LATE:
            break
    done, late = await asyncio.wait(asked, timeout=0 if hangs else LAST_S) if asked else (set(), set())
    if late:
        stack.give_up()
    for task in late:
        task.cancel()
    for task in done:
        task.result()


def meets_a_stop_string(stack: Stack, *, within_a_token: bool = False) -> dict[str, Any]:
    """Answers of two tokens only, which sooner or later spell the stop string. It ends with the second, or in its middle."""
    two = stack.vocabulary.plain[:2]
    stop = stack.vocabulary.text(two)
    if within_a_token:
        two[1], stop = stack.vocabulary.two_letters, stop[0] + PAIR[0]
    spelled: dict[str, Any] = {"allowed_token_ids": two, "stop": [stop]}
    return {"temperature": 1.0, "seed": 4, "max_tokens": 32, **spelled}


def special_often(stack: Stack) -> dict[str, Any]:
    """Three special tokens among twelve, so that some outputs have special tokens in the middle."""
    some = [*stack.vocabulary.some_special(3), *stack.vocabulary.plain[:9]]
    return {"temperature": 1.0, "seed": 6, "max_tokens": 24, "ignore_eos": True, "allowed_token_ids": some}
