"""A caller goes away in the middle of a request, while others stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fixtures.prompts import Prompts
from harness.driving.stack import Stack
from scenarios.requests import sessions, until_idle

LONG: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
STAYS = LONG | {"max_tokens": 64}
SESSION = "the one that goes"
OTHERS = "others"
NEIGHBOURS = 8
"""Number of requests that stay: enough sessions for every server to have one."""
Send = Callable[[Stack, Prompts, str | None], Coroutine[Any, Any, Any]]


def by_generate(stack: Stack, prompts: Prompts, label: str | None = None) -> Coroutine[Any, Any, Any]:
    return stack.generate([prompts.one()], session_ids=[SESSION], label=label, **LONG)


async def caller_goes(stack: Stack, prompts: Prompts, send: Send, *, tokens: int, frozen: bool = False) -> None:
    """The caller goes when the engines have made so many tokens for each request, on average; `frozen`: during a pause."""
    batch = stack.generate(prompts.unique(NEIGHBOURS), session_ids=sessions(NEIGHBOURS), label=OTHERS, **STAYS)
    neighbours = asyncio.create_task(batch)
    caller = asyncio.create_task(send(stack, prompts, None))
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
