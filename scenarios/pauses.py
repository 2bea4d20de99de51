"""Pausing at a moment that was observed, for as long as an engine would have needed to give itself away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness.contract.clock import monotonic
from harness.contract.messages import PauseMode
from harness.driving.stack import Stack

TOKENS = 16
"""Tokens per request that are made before a pause."""
HOLD = 3
"""A pause is held for so many times as long as those tokens took: a machine may be busier later than it was then."""


@asynccontextmanager
async def pause_in_flight(
    stack: Stack, mode: PauseMode, *, requests: int, clear_cache: bool = False
) -> AsyncIterator[None]:
    """Pause once `requests` requests are in flight with about `TOKENS` tokens each; resume on leaving.

    The body runs while paused. The pause lasts so long that a running engine would have made at least as many again.
    """
    began = monotonic()
    await stack.until_generating(requests=requests, tokens=TOKENS * requests)
    took = monotonic() - began
    await stack.pause(mode, clear_cache=clear_cache)
    yield
    await asyncio.sleep(HOLD * took)
    await stack.resume()


@asynccontextmanager
async def pause_idle(stack: Stack, mode: PauseMode, prompt: list[int]) -> AsyncIterator[None]:
    """Pause while nothing is in flight; resume on leaving. `prompt` is answered first: so long do tokens take."""
    began = monotonic()
    await stack.generate([prompt], max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    took = monotonic() - began
    await stack.pause(mode)
    yield
    await asyncio.sleep(HOLD * took)
    await stack.resume()
