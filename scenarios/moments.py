"""Pausing at a chosen moment of requests' lives: before their first token, in the middle, at their last, in the queue.

A pause does not aim at a single token. The requests are numerous and long enough that it meets some of them at the chosen
moment whenever it comes. The recording shows whether it did.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from fixtures.prompts import Prompts
from harness.checks.moments import Moment
from harness.checks.pausing import PAUSED, UNINTERRUPTED
from harness.contract.errors import MissedMoment
from harness.contract.messages import InFlightResult, PauseMode, SessionId
from harness.driving.stack import Stack
from scenarios.requests import GREEDY

POLL_S = 0.005
"""Seconds between two looks at whether a moment has come."""
QUEUED = 192
"""Requests for two servers that each run 64 at once: some wait for their turn on either."""
SETTLED = 30
"""After this many looks with the same number of held requests, no more are on their way."""


FREEZES = {Moment.BEFORE_FIRST_TOKEN: 2, Moment.QUEUED: 4, Moment.LAST_TOKEN: 16}
"""Moment → how often pause(keep) freezes the same requests, one or a few steps apart."""
ROUNDS = {Moment.LAST_TOKEN: 3}
"""Moment → how often the same requests are sent and paused: on a busy machine engines may take all their steps before a pause
reaches them."""
FEWEST, STEPS = 24, 32
"""Budgets are `FEWEST` tokens and up, so in each of `STEPS` steps some requests have one token left."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and the token budget of its answer."""

    prompt: list[int]
    max_tokens: int
    session: str | None = None


def ragged_budgets(prompts: Prompts) -> list[Ask]:
    """Consecutive budgets, several requests for each."""
    return [Ask(prompt=prompt, max_tokens=FEWEST + at % STEPS) for at, prompt in enumerate(prompts.unique(64))]


def asks_for(moment: Moment, prompts: Prompts, mode: PauseMode) -> list[Ask]:
    """Requests that a pause can meet at this moment. In modes other than keep it comes once, so they last until it comes, however
    late."""
    once = mode != "keep"
    match moment:
        case Moment.BEFORE_FIRST_TOKEN if once:
            return [Ask(prompt=prompt, max_tokens=64) for prompt in prompts.unique(40, length=120)]
        case Moment.BEFORE_FIRST_TOKEN:
            # More than run at once: a GPU has read 40 prompts before a pause reaches it.
            return [Ask(prompt=prompt, max_tokens=16) for prompt in prompts.unique(160, length=40)]
        case Moment.QUEUED if mode == "wait":
            # Most go to one server: what is in front of the servers may let fewer through than all of them run at once. The others
            # are short: their tokens do not tell that it has begun.
            long, short = {"max_tokens": 40, "session": "queued"}, {"max_tokens": 8}
            asked = enumerate(prompts.unique(QUEUED))
            return [Ask(prompt=prompt, **(long if at % 8 else short)) for at, prompt in asked]
        case Moment.QUEUED:
            return [Ask(prompt=prompt, max_tokens=40) for prompt in prompts.unique(QUEUED)]
        case Moment.LAST_TOKEN:
            return ragged_budgets(prompts)
        case Moment.UNDER_WAY:
            return [Ask(prompt=prompt, max_tokens=200) for prompt in prompts.unique(8)]


async def ask_all(stack: Stack, asks: list[Ask], *, label: str, batched: bool = False, **params: Any) -> None:
    """One call per prompt, all at once; if `batched`, one call for all, with the first one's budget."""
    shared = {**GREEDY, **params, "label": label}
    if batched:
        await stack.generate([ask.prompt for ask in asks], max_tokens=asks[0].max_tokens, **shared)
        return
    async with asyncio.TaskGroup() as callers:
        for ask in asks:
            asked = {"max_tokens": ask.max_tokens, **shared}
            sessions: list[SessionId] | None = None if ask.session is None else [ask.session]
            callers.create_task(stack.generate([ask.prompt], session_ids=sessions, **asked))


async def until(stack: Stack, moment: Moment, requests: int) -> None:
    """Wait until the moment has come to some of `requests` requests. Raises what `Stack.until` raises."""

    def has_come(seen: InFlightResult) -> bool:
        match moment:
            case Moment.BEFORE_FIRST_TOKEN:
                if seen.tokens > 4 * requests:
                    raise MissedMoment(f"all requests had a token before any could be met without; saw {seen}")
                return 4 * seen.requests >= requests
            case Moment.QUEUED:
                return 2 * seen.requests >= requests and seen.tokens >= 2 * requests
            case Moment.LAST_TOKEN:
                return seen.tokens >= (FEWEST - 1) * seen.requests if seen.requests else not stack.pending
            case Moment.UNDER_WAY:
                return seen.requests == requests and seen.tokens >= 16 * requests

    await stack.until(has_come, f"requests {moment}", every_s=POLL_S)


async def until_all_are_there(stack: Stack, requests: int, calls: int) -> None:
    """Wait until `requests` requests, or all that `calls` calls bring, are held. A client may hold some that no engine sees."""
    seen_before, unchanged = -1, 0

    def settled(seen: InFlightResult) -> bool:
        nonlocal seen_before, unchanged
        unchanged = unchanged + 1 if seen.requests == seen_before and stack.pending >= calls else 0
        seen_before = seen.requests
        return seen.requests == requests or unchanged >= SETTLED

    await stack.until(settled, f"{requests} requests that are held", every_s=POLL_S)


async def with_and_without_a_pause(
    stack: Stack, prompts: Prompts, mode: PauseMode, moment: Moment, *, batched: bool = False, **params: Any
) -> None:
    """The same requests alone, then again with a pause at that moment, after a reset of the prefix cache.

    Unless the moment is in the middle, the second requests begin all at once, at the end of an earlier pause. pause(keep) then
    comes repeatedly: it only stops the requests, so one of many pauses meets the moment on any machine.
    """
    asks = asks_for(moment, prompts, mode)
    await ask_all(stack, asks, label=UNINTERRUPTED, batched=batched, **params)
    for _ in range(1 if mode == "abort" else ROUNDS.get(moment, 1)):
        await stack.reset_prefix_cache()
        async with asyncio.TaskGroup() as tasks:
            together = moment is not Moment.UNDER_WAY
            if together:
                await stack.pause(mode)
            tasks.create_task(ask_all(stack, asks, label=PAUSED, batched=batched, **params))
            if together:
                await until_all_are_there(stack, len(asks), 1 if batched else len(asks))
                await stack.resume()
            if together and mode == "keep":
                if moment is Moment.LAST_TOKEN:
                    await until(stack, moment, len(asks))
                await freeze_repeatedly(stack, FREEZES[moment])
                continue
            await until(stack, moment, len(asks))
            await stack.pause(mode)
            await stack.resume()


async def freeze_repeatedly(stack: Stack, times: int) -> None:
    """pause(keep) and resume() `times` times, one or a few steps apart, however busy the machine. As often on every stack."""
    for _ in range(times):
        await stack.pause("keep")
        frozen = await stack.in_flight()
        await stack.resume()
        await _until_a_step_after(stack, frozen)


async def _until_a_step_after(stack: Stack, frozen: InFlightResult) -> None:
    def moved(seen: InFlightResult) -> bool:
        return seen.requests == 0 or seen.tokens != frozen.tokens

    await stack.until(moved, "a step after resume()", every_s=POLL_S)
