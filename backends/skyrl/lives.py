"""Clients of the HTTP stack in other threads and loops, and what dead ones leave behind. Written for skyrl 0.1.0 to 0.4.0."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any


class Thread:
    """A thread with an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="another loop", daemon=True)
        self._thread.start()

    async def run(self, method: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """A call of a method in this loop. It is cancelled with its caller."""

        async def inside() -> Any:
            return await method(*args, **given)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(inside(), self.loop))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class InThread:
    """A client whose calls run in another thread's loop: all of them, or by turns with the loop of their caller."""

    def __init__(self, client: Any, thread: Thread, *, by_turns: bool) -> None:
        self._client, self._other, self._by_turns = client, thread, by_turns
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **given: Any) -> Any:
            self._calls += 1
            if self._by_turns and self._calls % 2:
                return await found(*args, **given)
            return await self._other.run(found, args, given)

        return call


class Leftovers:
    """What Python says of objects that nobody closed, since the last look: the messages of event loops' exception handlers."""

    def __init__(self) -> None:
        self._said: list[str] = []

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.set_exception_handler(lambda _loop, context: self._said.append(str(context["message"])))

    def take(self) -> list[str]:
        gc.collect()
        said, self._said = self._said, []
        return said
