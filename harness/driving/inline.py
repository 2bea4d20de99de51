"""A host in the driver's own process and event loop, for pure Python stacks (`backends/miniature`).

It answers through the same `Host` as a host process, JSON included, so that an adapter sees no difference.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TextIO

import msgspec

from harness.contract.errors import CallTimedOut, StackDied
from harness.contract.messages import Empty, Message
from harness.driving.host import Host, load_adapter
from harness.driving.process import as_stack_error, read_answer
from harness.driving.supervisor import Farewell
from harness.machine.processes import Usage
from harness.records.recording import Raw


class InlineHost:
    """One adapter, called directly. There is no process to clean up."""

    def __init__(self, *, adapter: str, logs: Path) -> None:
        self.died: str | None = None
        self.outlives, self.handed_over = False, b""
        self.scratch = logs
        self._adapter = adapter
        self._log = logs / "host.log"
        self._host: Host | None = None
        self._file: TextIO | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    async def launch(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._log.open("a")
        self._host = Host(load_adapter(self._adapter)(), self._file)

    async def call(self, method: str, request: Message, deadline_s: float, raw: list[Raw] | None = None) -> Any:
        """The typed result of one call of the contract. Raises a `StackError` for any failure, as `HostProcess.call` does."""
        if self._host is None or self._ended:
            raise StackDied(f"the stack was ended before {method}")
        try:
            content = await asyncio.wait_for(self._host.call(method, msgspec.json.encode(request)), deadline_s)
        except TimeoutError:
            self._ended = True
            raise CallTimedOut(f"{method} did not return within {deadline_s:.0f} s; the stack was ended") from None
        answered = read_answer(method, content)
        self.died = answered.died or self.died
        if raw is not None:
            raw += answered.raw
        if answered.error is not None:
            raise as_stack_error(answered.error, self._log)
        return answered.result

    def usage(self) -> Usage | None:
        return None

    async def end(self) -> None:
        if self._host is not None and not self._ended:
            self._ended = True
            await self._host.call("teardown", msgspec.json.encode(Empty()))
        if self._file is not None:
            self._file.close()
            self._file = None

    async def close(self, _condition: bytes = b"") -> Farewell | None:
        await self.end()
        return None
