"""Stacks that do not notice that a caller has gone, or that bring its request back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from backends.miniature.client import Client
from backends.miniature.engine import BadRequest, Engine, Output, Request
from backends.miniature.faults.registry import REFUSED, seeded
from harness.contract.messages import GenerateRequest, Generation

_AGAIN: set[asyncio.Future[Generation]] = set()
"""Requests that nobody waits for; a client that is pickled holds none."""


@seeded("cancellation", "runs_on", caught_by=["cancellation"])
class RunsOn(Engine):
    """The engine goes on with a request whose caller has gone."""

    def drop(self, request: Request) -> None:
        self.fired += 1


@seeded("cancellation", "sent_again", caught_by=["cancellation"])
class SentAgain(Client):
    """The client takes a cancelled request for a broken connection, and sends it once more."""

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.fired += 1
            _AGAIN.add(asyncio.ensure_future(super().generate(request)))
            raise


@seeded("cancellation", "rows_of_a_failed_batch", caught_by=["cancellation"], changes=REFUSED)
class RowsRunOn(Client):
    """If one row of a batch fails, the others go on."""

    async def gather(self, calls: Sequence[Any]) -> list[Output]:
        try:
            rows: list[Output] = await asyncio.gather(*calls)
        except BadRequest:
            self.fired += 1
            raise
        return rows


@seeded("cancellation", "takes_others_along", caught_by=["tokens.greedy", "every_call_ends"])
class TakesOthersAlong(Engine):
    """With the request whose caller has gone, the engine ends one of its neighbours."""

    def drop(self, request: Request) -> None:
        super().drop(request)
        for other in self.running[:1]:
            self.fired += 1
            other.reason = "abort"
            self.running.remove(other)
            self.finish(other)
