"""Runs ONE adapter in its own process and environment, and serves the contract on a Unix socket.

``python -m harness.driving.host --adapter backends.skyrl.http:HttpStack --socket /path/stack.sock``

One POST per call: ``/call/<method>`` with the request as JSON; the answer is ``{"result": …}`` or ``{"error": …}``,
with what the stack's own client returned in ``"raw"`` (`harness.driving.raw`).
Nothing is pickled. The socket's folder is private (mode 0700). The host watches the processes that the adapter described. When
one dies, pending calls get `GRACE_S` to end by themselves; then the host fails them and names the process. Every later answer
says ``"died": "<role> (pid …) died"``, so that the driver does not continue with half a stack.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import re
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from harness.contract import messages
from harness.contract.errors import Blame, NotOffered, StackDied, StackError
from harness.contract.vocabulary import Vocabulary
from harness.driving import raw
from harness.records.recording import Raw
from harness.records.reference import QUERIES

GRACE_S = 15.0
"""Seconds that a call may continue after a watched process died, so that the stack can report the death itself."""
WATCH_S = 0.5

CALLS: dict[str, tuple[type[messages.Message], type[messages.Message]]] = {
    **{name: (m.request, m.result) for name, m in messages.METHODS.items()},
    **QUERIES,
    "vocabulary": (messages.Empty, Vocabulary),
}


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """How a call failed inside the host. `error` names the class of `harness.contract.errors` that the driver raises.

    `blame` and `next_step` come from a `StackError` that the adapter raised itself; they are empty for other exceptions.
    """

    error: str
    kind: str
    message: str
    status: int | None = None
    place: str = ""
    """Where the stack's own code raised it, or called what did; empty if it did not."""
    trace: str = ""
    blame: Blame | None = None
    next_step: str = ""


def _status_of(error: BaseException) -> int | None:
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None


def _cause(error: BaseException) -> BaseException:
    """The exception without Ray's wrapper: Ray keeps an actor's own exception in `e.cause`."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def place_in(trace: str, code: str) -> str:
    """The innermost place in the package `code` that a traceback shows: file, line, function and statement. Empty without one.
    Adapters (``backends/<package>``) are not part of the package."""
    found = re.findall(rf'File "\S*(?<!backends)/({code}/\S+)", line (\d+), in (\S+)\n +(.+)', trace) if code else []
    return "{}:{} in {}: {}".format(*found[-1]) if found else ""


def reply_to(error: BaseException, trace: str, code: str = "") -> ErrorReply:
    """The reply for an exception of the adapter. `code` is the package of the stack's own code."""
    if isinstance(error, NotOffered):
        return ErrorReply(error="NotOffered", kind="NotOffered", message=error.capability)
    if isinstance(error, StackError):
        named = next(c.__name__ for c in type(error).__mro__ if c.__module__ == StackError.__module__)
        return ErrorReply(
            error=named,
            kind=type(error).__name__,
            message=error.message,
            trace=trace,
            blame=error.blame,
            next_step=error.next_step,
        )
    cause = _cause(error)
    return ErrorReply(
        error="CallFailed",
        kind=type(cause).__name__,
        message=str(cause)[:4000],
        status=_status_of(cause),
        place=place_in(trace, code),
        trace=trace,
    )


class Host:
    """Answers an adapter's calls and watches its processes."""

    def __init__(self, adapter: Any, log: TextIO | None = None) -> None:
        self._adapter = adapter
        self._log = log or sys.stderr  # a host process writes its standard error into the stack's log
        self._processes: dict[str, int] = {}
        self._died: asyncio.Future[str] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def call(self, method: str, body: bytes) -> bytes:
        """Answer one call. Every failure becomes a reply; nothing is raised to the server."""
        with raw.noting() as notes:
            content = await self._answer(method, body)
        return self._reply(raw=notes.noted(), **content)

    async def _answer(self, method: str, body: bytes) -> dict[str, messages.Message | ErrorReply]:
        if method not in CALLS:
            return {"error": ErrorReply(error="CallFailed", kind="UnknownMethod", message=f"no method {method!r}")}
        request_type, result_type = CALLS[method]
        function = getattr(self if method == "form" else self._adapter, method, None)
        if function is None:
            return {"error": ErrorReply(error="NotOffered", kind="NotOffered", message=method)}
        try:
            request = msgspec.json.decode(body, type=request_type)
            if isinstance(request, messages.KillServerRequest):
                self._give_up(request.server)
            result = await self._unless_dead(function(request), method)
            checked = (
                messages.Empty()
                if result_type is messages.Empty
                else msgspec.convert(msgspec.to_builtins(result), result_type)
            )
        except asyncio.CancelledError:
            raise
        except Exception as e:  # noqa: BLE001 - the boundary: whatever a stack raises becomes a named reply
            trace = traceback.format_exc()
            print(f"[host] {method} failed\n{trace}", file=self._log, flush=True)
            return {"error": reply_to(e, trace, getattr(self._adapter, "code", ""))}
        if isinstance(checked, messages.Description):
            self._guard(checked)
        return {"result": checked}

    def _reply(self, **content: messages.Message | ErrorReply | list[Raw]) -> bytes:
        dead = self._dead()
        return msgspec.json.encode({**content, "died": dead} if dead else content)

    async def form(self, request: messages.FormRequest) -> messages.FormResult:
        """Answered here and not by the adapter, which gets its arguments in their usual form."""
        return messages.FormResult(forms=raw.ask_for(request.form))

    async def _unless_dead(self, work: Awaitable[messages.Message | None], method: str) -> messages.Message | None:
        if self._died is None or method in ("teardown", "observe", "in_flight"):
            return await work
        call = asyncio.ensure_future(work)
        waited: set[asyncio.Future[Any]] = {call, self._died}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                await asyncio.wait({call}, timeout=GRACE_S)
            if call.done():
                return call.result()
        finally:
            call.cancel()
        raise StackDied(f"{self._died.result()} while {method} was waiting")

    def _guard(self, description: messages.Description) -> None:
        """Watch the processes of this description instead of those of an earlier one."""
        if self._watch is not None:
            self._watch.cancel()
        self._processes = description.processes
        self._died = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._look_after(self._died))

    def _give_up(self, server: str) -> None:
        """Stop watching the processes of a server, or the router: the harness is about to kill them."""
        self._processes = {role: pid for role, pid in self._processes.items() if not messages.belongs(role, server)}

    async def _look_after(self, died: asyncio.Future[str]) -> None:
        while (dead := self._dead()) is None:
            await asyncio.sleep(WATCH_S)
        died.set_result(dead)

    def _dead(self) -> str | None:
        """Names a described process that died, or returns None. An adapter without processes reports it itself (`dead`)."""
        said = getattr(self._adapter, "dead", None)
        if said is not None and (dead := said()) is not None:
            return str(dead)
        return next((f"{role} (pid {pid}) died" for role, pid in self._processes.items() if not _alive(pid)), None)


def _alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def application(host: Host) -> Any:
    """The ASGI application: two routes."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def call(request: Request) -> Response:
        method, body = request.path_params["method"], await request.body()
        answer = asyncio.ensure_future(host.call(method, body))
        if method in messages.DATA_PLANE:
            gone = asyncio.ensure_future(request.receive())  # after the body comes only the end of the connection
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not answer.done():  # the scenario cancelled its call, and so does the stack's caller
                answer.cancel()
                await asyncio.wait({answer})
                return Response(status_code=499)
        return Response(await answer, media_type="application/json")

    async def alive(_request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    return Starlette(routes=[Route("/call/{method}", call, methods=["POST"]), Route("/alive", alive, methods=["GET"])])


def load_adapter(name: str) -> Callable[[], Any]:
    """The adapter class named "package.module:Class"."""
    module, _, attribute = name.partition(":")
    found: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
    return found


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m harness.driving.host", description=__doc__)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--socket", required=True, type=Path)
    arguments = parser.parse_args()
    os.umask(0o077)
    host = Host(load_adapter(arguments.adapter)())
    uvicorn.run(
        application(host),
        uds=str(arguments.socket),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=600,
        loop="asyncio",
    )


if __name__ == "__main__":
    main()
