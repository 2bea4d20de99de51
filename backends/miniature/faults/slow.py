"""Miniatures that answer rightly and slowly. `parity bench` has to see each of them; no scenario's check can.

Each names the rows that must be slower. `Timed` makes control calls take time, which they do not on the correct miniature.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec

from backends.miniature.client import Client
from backends.miniature.engine import Engine, Output
from backends.miniature.faults.registry import Part, registered
from backends.miniature.router import Router

CONTROL_S = 0.005
"""Time that a control call takes on a `Timed` miniature (seconds)."""
SHARE = 0.3
REST_S = 0.02
QUEUE = 12
"""Requests per server that the queue lets through."""


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that is slower, and the rows of `parity bench` that must say so."""

    id: str
    breaks: str
    slower: frozenset[str]


SLOWDOWNS: list[Slowdown] = []


def slowed(name: str, *, slower: Iterable[str]) -> Any:
    """Register a part as a slowdown; its docstring says what it does."""

    def register(part: Part) -> Part:
        SLOWDOWNS.append(Slowdown(id=name, breaks=" ".join((part.__doc__ or "").split()), slower=frozenset(slower)))
        return registered(name, part)

    return register


IN_FLIGHT = ("in_flight.1", "in_flight.8", "in_flight.64")
AT_REST = ("first_token", "rest", "rest_p99")


@slowed("slow/share", slower=["next_token", "rest", "rest_p99", *IN_FLIGHT])
class Share(Router):
    """Each request takes 1.3 times as long: its answer waits for a share of the time that it took."""

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        began = asyncio.get_running_loop().time()
        answer = await super().forward(engine, prompt, params, **more)
        await asyncio.sleep(SHARE * (asyncio.get_running_loop().time() - began))
        return answer


@slowed("slow/at_rest", slower=[*AT_REST, "in_flight.1"])
class AtRest(Engine):
    """A request that meets an idle server waits 20 ms, as one that somebody polls for."""

    async def generate(self, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if not (self.running or self.waiting):
            await asyncio.sleep(REST_S)
        return await super().generate(prompt, params, **more)


@slowed("slow/queue", slower=["in_flight.64"])
class Queue(Router):
    """A queue before each server lets 12 requests through at once; the server could take 64."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._slots = {engine.name: asyncio.Semaphore(QUEUE) for engine in engines}

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        async with self._slots[engine.name]:
            return await super().forward(engine, prompt, params, **more)


@slowed("slow/lock", slower=["in_flight.64"])
class Lock(Router):
    """A lock lets one request at a time take the hop to its server."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._lock = asyncio.Lock()

    async def generate(self, *arguments: Any, **more: Any) -> Output:
        async with self._lock:
            await asyncio.sleep(0.0003)
        return await super().generate(*arguments, **more)


class Timed(Client):
    """Control calls take time."""

    control_s = CONTROL_S

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        await asyncio.sleep(self.control_s)
        await super().tell(engine, op, **arguments)


registered("timed", Timed)


@slowed("slow/control", slower=["pause", "resume", "sync", "reset_prefix_cache", "sleep", "wake_up"])
class SlowControl(Timed):
    """Every control call takes 1.3 times as long as on a `Timed` miniature."""

    control_s = 1.3 * CONTROL_S
