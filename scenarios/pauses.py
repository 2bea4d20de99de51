"""Pausing at an observed moment, long enough to catch an engine that runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from harness.checks.pausing import PAUSED, UNINTERRUPTED
from harness.contract.clock import monotonic
from harness.contract.messages import PauseMode
from harness.driving.stack import Stack

TOKENS = 16
"""Tokens per request before a pause."""
HOLD = 3
"""A pause lasts this many times as long as those tokens took, since a machine may be busier later."""


@asynccontextmanager
async def pause_in_flight(
    stack: Stack, mode: PauseMode, *, requests: int, clear_cache: bool = False
) -> AsyncIterator[None]:
    """Pause once `requests` requests are in flight with about `TOKENS` tokens each; resume on leaving.

    The body runs while paused. The pause is long enough for a running engine to make at least as many tokens again.
    """
    began = monotonic()
    await stack.until_generating(requests=requests, tokens=TOKENS * requests)
    took = monotonic() - began
    await stack.pause(mode, clear_cache=clear_cache)
    yield
    await asyncio.sleep(HOLD * took)
    await stack.resume()


@asynccontextmanager
async def interrupted(
    stack: Stack, mode: PauseMode, *answers: Coroutine[Any, Any, Any], requests: int, clear_cache: bool = False
) -> AsyncIterator[asyncio.TaskGroup]:
    """Start `answers` and pause in the middle of their `requests` requests. The body runs while paused and may start more."""
    async with asyncio.TaskGroup() as tasks:
        for answer in answers:
            tasks.create_task(answer)
        async with pause_in_flight(stack, mode, requests=requests, clear_cache=clear_cache):
            yield tasks


@asynccontextmanager
async def with_and_without(
    stack: Stack, mode: PauseMode, batch: list[list[int]], *, clear_cache: bool = False, **params: Any
) -> AsyncIterator[asyncio.TaskGroup]:
    """A batch without a pause, then again with a pause in the middle, for checks of the two. The body runs while paused."""
    await stack.generate(batch, label=UNINTERRUPTED, **params)
    again = stack.generate(batch, label=PAUSED, **params)
    async with interrupted(stack, mode, again, requests=len(batch), clear_cache=clear_cache) as tasks:
        yield tasks


@asynccontextmanager
async def pause_idle(stack: Stack, mode: PauseMode, prompt: list[int]) -> AsyncIterator[None]:
    """Pause while nothing is in flight; resume on leaving. An answer to `prompt` first measures how long tokens take."""
    began = monotonic()
    await stack.generate([prompt], max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    took = monotonic() - began
    await stack.pause(mode)
    yield
    await asyncio.sleep(HOLD * took)
    await stack.resume()
