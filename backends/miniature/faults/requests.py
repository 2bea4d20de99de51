"""Requests that lose a header on their way, or that are too many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar

from backends.miniature.client import Client
from backends.miniature.engine import Output
from backends.miniature.faults.registry import seeded
from harness.contract.messages import REQUEST_CAP, GenerateRequest, Generation, SessionId


@seeded("header_dropped", "request_id", caught_by=["request_ids"])
class RequestIdDropped(Client):
    """Headers beside the session's do not reach the engine."""

    def identified(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        known = super().identified(body, headers)
        self.fired += known != body
        return body


class _Crowd(Client):
    """Counts the requests in flight beyond the cap."""

    at_once = 0

    @asynccontextmanager
    async def within(self, slots: asyncio.Semaphore | None = None) -> AsyncIterator[None]:
        async with slots or nullcontext():
            self.at_once += 1
            self.fired += self.at_once > REQUEST_CAP * len(self.engines)
            try:
                yield
            finally:
                self.at_once -= 1


@seeded("too_many_at_once", "no_cap", caught_by=["request_cap"])
class NoCap(_Crowd):
    """All requests are sent at once."""

    def slot(self) -> AbstractAsyncContextManager[Any]:
        return self.within()


@seeded("too_many_at_once", "serialized", caught_by=["request_cap"])
class CapLostInACopy(_Crowd):
    """A client that was read back has no cap."""

    _copied = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_copied": True}

    def slot(self) -> AbstractAsyncContextManager[Any]:
        return self.within() if self._copied else super().slot()


@seeded("too_many_at_once", "each_call", caught_by=["request_cap"])
class CapOfEachCall(_Crowd):
    """Each call of generate() has a cap of its own."""

    own: ClassVar[ContextVar[asyncio.Semaphore]] = ContextVar("own")

    async def generate(self, request: GenerateRequest) -> Generation:
        self.own.set(asyncio.Semaphore(REQUEST_CAP * len(self.engines)))
        return await super().generate(request)

    def slot(self) -> AbstractAsyncContextManager[Any]:
        return self.within(self.own.get(self.slots))


@seeded("others_starve", caught_by=["not_starved"])
class LargeBatchesAlone(Client):
    """While a batch with more rows than the client may send at once runs, no other call of generate() begins."""

    large = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        while self.large:
            self.fired += 1
            await asyncio.sleep(0.001)
        if len(request.prompt_token_ids or ()) <= REQUEST_CAP * len(self.engines):
            return await super().generate(request)
        self.large += 1
        try:
            return await super().generate(request)
        finally:
            self.large -= 1


@seeded("refusal_untold", "unknown_route", caught_by=["refusals"])
class TellsAServerInVain(Client):
    """After each answer the client tells a server that it is done, at a route that the server does not have."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        answer = await super().row(session, prompt, params, **more)
        self.engines[0].tell("refusal", method="POST", path="/done", status=404)
        self.fired += 1
        return answer
