"""The fault instrument of real stacks: it stands between a stack's client and its engines, and breaks calls on demand.

`FaultProxy` is a reverse proxy in front of an HTTP server (a vLLM server, or the router). `FaultyEngine` replaces an engine in the
legacy client's list. Both pass every call through unchanged until a fault is chosen. `backends.taps.breaks` has the effect of each
fault, `backends.taps.faults` the checks that must see it. Loopback only. In a run whose verdicts count they carry the calls of
scenarios that break hops (`HopFault`), and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from backends.taps.breaks import BREAKS, OPENAI, Document, Exchange, Injection, of_hop
from backends.taps.faults import FAULTS, HTTP_FAULTS, LEGACY_FAULTS
from harness.contract.errors import StackError
from harness.contract.messages import BROKEN_HOP_SAYS, HopFault, HopForm

__all__ = ["FAULTS", "HTTP_FAULTS", "LEGACY_FAULTS", "FaultProxy", "FaultyEngine", "UnknownFault"]

START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 10.0
SWITCH_DEADLINE_S = 10.0
CONNECT_S = 10.0
KEEP_ALIVE_S = 600
"""Seconds: longer than any client keeps a connection to the tap, so the tap is never the first to close it."""

PIECES, PIECE_S = 8, 0.05
"""Number of pieces of a slow answer, and the seconds between two of them."""
REPEATED = [(b"vary", b"accept"), (b"vary", b"origin"), (b"x-seen-by", b"one"), (b"x-seen-by", b"two")]
"""Headers of one name, as RFC 9110, 5.2, allows for lists."""

PATHS = {
    "/inference/v1/generate": "generate",
    "/skyrl/v1/generate": "generate",
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat_completion",
    "/pause": "pause",
    "/resume": "resume",
    "/is_paused": "is_paused",
    "/sleep": "sleep",
    "/wake_up": "wake_up",
    "/reset_prefix_cache": "reset_prefix_cache",
    "/update_weights": "sync",
    "/v1/load_lora_adapter": "load_lora_adapter",
    "/skyrl/v1/load_lora_adapter": "load_lora_adapter",
}
"""Path of a server → operation. Other paths pass through under every fault."""

METHODS = {
    "generate": "generate",
    "sample": "generate",
    "completion": "completion",
    "chat_completion": "chat_completion",
    "pause_generation": "pause",
    "resume_generation": "resume",
    "sleep": "sleep",
    "wake_up": "wake_up",
    "reset_prefix_cache": "reset_prefix_cache",
    "update_named_weights": "sync",
}
"""Method of SkyRL's InferenceEngineInterface → operation. Other methods pass through under every fault."""

FAULT_TAPS_NOTE = "fault taps are in: verdicts of this start do not count"
FAULT_TAPS_PATCH = {
    "name": "fault-taps",
    "reason": "every call passes a tap that can break it on purpose (seeded faults)",
    "version": "backends/taps/tap.py",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class UnknownFault(StackError):
    """The taps cannot make the requested fault."""


def injection_of(fault: str | None) -> Injection:
    """An injection of the fault with this id. Raises `UnknownFault`."""
    if fault is None:
        return Injection()
    if fault not in BREAKS:
        raise UnknownFault(f"no tap can make the fault {fault}", next_step=f"choose one of {', '.join(BREAKS)}")
    return Injection(BREAKS[fault])


async def _through(exchange: Exchange) -> Any:
    """The answer to a call under the chosen fault. Without a fault, the exchange is forwarded."""
    chosen = exchange.injection.chosen
    return await (chosen.act(exchange) if chosen is not None else exchange.forward())


def _strikes(exchange: Exchange) -> bool:
    chosen = exchange.injection.chosen
    return chosen is not None and chosen.strikes(exchange)


# --- HTTP


@dataclasses.dataclass
class Response:
    """A whole answer of a server. If `lost` is True, the connection is cut in the middle of it. `gone`: it ends before the answer.
    `form`: how it arrives."""

    status: int
    headers: Headers
    content: bytes
    lost: bool = False
    gone: Literal["closed", "reset"] | None = None
    form: HopForm | None = None


class HttpExchange(Exchange):
    """One request on its way to an upstream server."""

    def __init__(self, proxy: FaultProxy, injection: Injection, scope: Scope, body: bytes) -> None:
        self.op = PATHS.get(scope["path"], "other")
        self.server = proxy.server
        self.injection = injection
        self.method: str = scope["method"]
        self.headers: Headers = list(scope["headers"])
        self.body = body
        query: bytes = scope["query_string"]
        self._target = scope["raw_path"] + (b"?" + query if query else b"")
        self._proxy = proxy
        self._asked = _parsed(body)
        self.budget = (self._asked or {}).get("sampling_params", self._asked or {}).get("max_tokens")

    def request(self) -> httpx.Request:
        """The request to the server: the caller's bytes, except those that a fault changed."""
        extensions = {"timeout": {"connect": CONNECT_S}, "target": self._target}
        body = httpx.ByteStream(self.body)
        return httpx.Request(
            self.method, self._proxy.upstream, headers=self.headers, stream=body, extensions=extensions
        )

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[httpx.Response]:
        """The server's answer as it arrives. Raises httpx.TransportError."""
        answer = await self._proxy.transport.handle_async_request(self.request())
        try:
            yield answer
        finally:
            await answer.stream.aclose()  # type: ignore[union-attr]

    async def forward(self) -> Response:
        async with self.stream() as answer:
            content = b"".join([chunk async for chunk in answer.stream])  # type: ignore[union-attr]
        return Response(answer.status_code, answer.headers.raw, content)

    def document(self, answer: Response) -> Document | None:
        return None if self.is_error(answer) else _parsed(answer.content)

    def with_document(self, answer: Response, document: Document) -> Response:
        return _json(200, document, answer.headers)

    def accepted(self) -> Response:
        return Response(200, [(b"content-length", b"0")], b"")

    def failed(self) -> Response:
        error = {"message": "a seeded fault", "type": "InternalServerError", "param": None, "code": 500}
        return _json(500, {"error": error})

    def cut(self, answer: Response) -> Response:
        return dataclasses.replace(answer, lost=True)

    def reform(self, form: HopForm) -> None:
        match form:
            case "absolute":
                self._target = str(self._proxy.upstream).rstrip("/").encode() + self._target
            case "request_upper_case":
                self.headers = _upper(self.headers)
            case "request_repeated":
                self.headers = [*self.headers, *REPEATED]
            case "request_chunked":
                self.headers = [*_unsized(self.headers), (b"transfer-encoding", b"chunked")]

    def broken(self, fault: HopFault, answer: Response | None) -> Response:
        if fault.connection == "whole" and answer is not None:
            return dataclasses.replace(answer, form=fault.form)
        kind, content = _body(fault)
        framed = _sized([(b"content-type", kind)], len(content))
        if fault.connection == "kept":
            return Response(fault.status, framed, content)
        if fault.connection == "torn":
            return dataclasses.replace(answer or Response(200, framed, content), lost=True)
        assert fault.connection in ("closed", "reset"), fault
        return Response(fault.status, framed, content, gone=fault.connection)

    def is_error(self, answer: Response) -> bool:
        return answer.status >= 400

    def emptied(self) -> Document:
        choice = {"index": 0, "token_ids": [], "text": "", "finish_reason": "stop", "logprobs": None}
        return {"choices": [choice], "object": "text_completion"}

    def rename_parameters(self, rename: Callable[[str], str]) -> None:
        assert self._asked is not None, "a weight update is JSON"
        info = self._asked["update_info"]
        info["names"] = [rename(name) for name in info["names"]]
        self.body = json.dumps(self._asked).encode()
        self.headers = _sized(self.headers, len(self.body))

    def has_header(self, name: str) -> bool:
        return any(key == name.encode() for key, _ in self.headers)

    def set_header(self, name: str, value: str | None) -> bool:
        had = self.has_header(name)
        self.headers = [(key, held) for key, held in self.headers if key != name.encode()]
        if value is not None:
            self.headers.append((name.encode(), value.encode()))
        return had


def _body(fault: HopFault) -> tuple[bytes, bytes]:
    """Content type and content of an error's body."""
    error = {"message": BROKEN_HOP_SAYS, "type": HTTPStatus(fault.status).phrase, "param": None, "code": fault.status}
    page = f"<html><head><title>{fault.status}</title></head><body>{BROKEN_HOP_SAYS}</body></html>"
    whole = json.dumps({"error": error}).encode()
    return {
        "vllm": (b"application/json", whole),
        "sentence": (b"application/json", json.dumps({"error": BROKEN_HOP_SAYS}).encode()),
        "json": (b"application/json", json.dumps({"detail": BROKEN_HOP_SAYS}).encode()),
        "string": (b"application/json", json.dumps(BROKEN_HOP_SAYS).encode()),
        "html": (b"text/html; charset=utf-8", page.encode()),
        "text": (b"text/plain", BROKEN_HOP_SAYS.encode()),
        "empty": (b"application/json", b""),
        "cut": (b"application/json", whole[: len(whole) // 2]),
    }[fault.body]


def _parsed(content: bytes) -> Document | None:
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _sized(headers: Headers, length: int) -> Headers:
    """These headers, for a body of `length` bytes."""
    return [*_unsized(headers), (b"content-length", str(length).encode())]


def _unsized(headers: Headers) -> Headers:
    """These headers, for a body whose length they leave open."""
    return [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]


def _upper(headers: Headers) -> Headers:
    return [(name.upper(), value) for name, value in headers]


def _json(status: int, document: Document, headers: Headers = ((b"content-type", b"application/json"),)) -> Response:  # type: ignore[assignment]
    content = json.dumps(document).encode()
    return Response(status, _sized(list(headers), len(content)), content)


class FaultProxy:
    """A reverse proxy in front of one upstream server. It has its own thread, so that no stall of the host delays it.

    `server` is the engine's number; None in front of the router. The proxy reads a request's whole body before sending it on, and
    passes an answer on as it arrives. Header names arrive in lower case. If the caller disconnects, the proxy drops its request.
    For a server that cannot be reached it answers 502.
    """

    def __init__(self, upstream: str, server: int | None = 0) -> None:
        self.upstream = httpx.URL(upstream)
        self.server = server
        self.transport: httpx.AsyncHTTPTransport
        self._injection = Injection()
        self._loop: asyncio.AbstractEventLoop
        self._uvicorn: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Listen on a free loopback port; returns the URL. Raises `StackError` if the proxy is not up in time."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)  # connections from now on wait until the thread is up
        # SkyRL forks its router from this process: a child that kept the socket would occupy the port.
        os.register_at_fork(after_in_child=listener.close)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        up = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, up)), name=f"fault-proxy-{urlsplit(url).port}", daemon=True
        )
        self._thread.start()
        if not up.wait(START_DEADLINE_S):
            raise StackError(f"the fault proxy of {self.upstream} is not up after {START_DEADLINE_S:.0f} s")
        return url

    def inject(self, fault: str | None) -> int:
        """Switch to another fault, or to none. Returns how often the previous one took effect. Raises `UnknownFault`."""
        return self._next(injection_of(fault))

    def break_hop(self, fault: HopFault | None) -> int:
        """As `inject`, with a fault that a scenario chose."""
        return self._next(Injection(None if fault is None else of_hop(fault)))

    def _next(self, chosen: Injection) -> int:
        return asyncio.run_coroutine_threadsafe(self._switch(chosen), self._loop).result(SWITCH_DEADLINE_S)

    def stop(self) -> None:
        """Close the port and every connection. Idempotent."""
        if self._thread is not None:
            self._uvicorn.should_exit = True
            self._thread.join(STOP_DEADLINE_S)
            self._thread = None

    async def _switch(self, chosen: Injection) -> int:
        before, self._injection = self._injection, chosen
        before.over.set()
        return before.fired

    async def _serve(self, listener: socket.socket, up: threading.Event) -> None:
        import uvicorn

        self._loop = asyncio.get_running_loop()
        # No connection is reused: a connection that the server is about to close would fail a good request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # Plain HTTP on loopback: no certificates.
        self.transport = httpx.AsyncHTTPTransport(limits=limits, verify=False)
        config = uvicorn.Config(
            self._application,
            interface="asgi3",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(config)
        self._loop.call_soon(up.set)
        try:
            await self._uvicorn.serve(sockets=[listener])
        finally:
            await self.transport.aclose()

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        exchange = HttpExchange(self, self._injection, scope, body)
        work = asyncio.ensure_future(self._answer(exchange, send))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait({work, gone})

    async def _answer(self, exchange: HttpExchange, send: Send) -> None:
        try:
            if _strikes(exchange):
                await _give(await _through(exchange), send)
            else:
                await self._pass_on(exchange, send)
        except httpx.ConnectError:
            error = {"message": f"{self.upstream} cannot be reached", "type": "BadGateway", "code": 502}
            await _give(_json(502, {"error": error}), send)

    @staticmethod
    async def _pass_on(exchange: HttpExchange, send: Send) -> None:
        async with exchange.stream() as answer:
            await send(
                {"type": "http.response.start", "status": answer.status_code, "headers": _lower(answer.headers.raw)}
            )
            async for chunk in answer.stream:  # type: ignore[union-attr]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end_connection(send: Send, how: Literal["closed", "reset"]) -> None:
    """End the connection before the answer's first byte. ASGI cannot; uvicorn's own cycle, whose method `send` is, can."""
    cycle: Any = send.__self__  # type: ignore[attr-defined]
    if how == "reset":
        linger = struct.pack("ii", 1, 0)
        cycle.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    cycle.transport.abort() if how == "reset" else cycle.transport.close()
    while not cycle.disconnected:
        await asyncio.sleep(0)


async def _give(answer: Response, send: Send) -> None:
    if answer.gone is not None:
        await _end_connection(send, answer.gone)
        return
    if answer.form is not None:
        await _give_in_form(answer, send)
        return
    await send({"type": "http.response.start", "status": answer.status, "headers": _lower(answer.headers)})
    if answer.lost:
        half = answer.content[: max(1, len(answer.content) // 2)]
        await send({"type": "http.response.body", "body": half, "more_body": True})
        return  # uvicorn closes the connection of an application that ends here
    await send({"type": "http.response.body", "body": answer.content, "more_body": False})


async def _give_in_form(answer: Response, send: Send) -> None:
    headers, content, pieces = _lower(answer.headers), answer.content, 1
    match answer.form:
        case "slow":
            pieces = PIECES
        case "chunked":
            headers = _unsized(headers)
        case "sized":
            headers = _sized(headers, len(content))
        case "upper_case":
            headers = _upper(headers)
        case "repeated":
            headers = [*headers, *REPEATED]
        case "charset":
            others = [(name, value) for name, value in headers if name != b"content-type"]
            headers = [*others, (b"content-type", b'application/json; Charset="UTF-8"')]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    size = -(-len(content) // pieces)
    for at in range(0, len(content), max(1, size)):
        if pieces > 1:
            await asyncio.sleep(PIECE_S)
        await send({"type": "http.response.body", "body": content[at : at + size], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    if answer.form == "idle":
        send.__self__.transport.close()  # type: ignore[attr-defined]


def _lower(headers: Headers) -> Headers:
    return [(name.lower(), value) for name, value in headers]


# --- engines of the legacy client


class Disconnected(ConnectionError):
    """The engine's answer was lost on its way back (a seeded fault)."""


class ServerError(RuntimeError):
    """The engine failed (a seeded fault)."""


class EngineExchange(Exchange):
    """One method call on its way to an engine."""

    def __init__(self, engine: FaultyEngine, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.server, self.injection = METHODS[name], engine.server, engine.injection
        if "LoraLoadRequest" in {type(one).__name__ for one in (*args, *kwargs.values())}:
            self.op = "load_lora_adapter"
        self._method = getattr(engine.engine, name)
        self._args, self._kwargs = args, kwargs
        params = self._asked().get("sampling_params") or self._asked().get("json") or kwargs.get("sampling_params")
        self.budget = (params or {}).get("max_tokens")

    def _asked(self) -> dict[str, Any]:
        """The batch or payload of the call; empty if it has none."""
        first = next(iter((*self._args, *self._kwargs.values())), None)
        return first if isinstance(first, dict) else {}

    async def forward(self) -> Any:
        return await self._method(*self._args, **self._kwargs)

    def document(self, answer: Any) -> Document | None:
        return None if self.is_error(answer) else answer

    def with_document(self, answer: Any, document: Document) -> Document:  # noqa: ARG002 - a document is a whole answer
        return document

    def accepted(self) -> None:
        return None

    def failed(self) -> Any:
        raise ServerError("a seeded fault")

    def cut(self, answer: Any) -> Any:  # noqa: ARG002 - the answer is lost
        raise Disconnected("a seeded fault")

    def is_error(self, answer: Any) -> bool:
        return not isinstance(answer, dict) or bool(answer.get("error"))

    def emptied(self) -> Document:
        count = len(self._asked().get("prompt_token_ids") or [None])
        return {
            "response_ids": [[] for _ in range(count)],
            "responses": [""] * count,
            "stop_reasons": ["stop"] * count,
            "response_logprobs": None,
        }

    def reform(self, form: HopForm) -> None:
        """A method call has one form."""

    def broken(self, fault: HopFault, answer: Any) -> Any:
        if fault.connection == "whole":
            return answer
        at = "" if fault.call == "request" else f" (engine {self.server})"  # Ray's errors name the actor
        if fault.connection != "kept":
            raise Disconnected(f"{BROKEN_HOP_SAYS}{at}")
        if self.op not in OPENAI:
            raise ServerError(f"{fault.status}: {BROKEN_HOP_SAYS}{at}")
        kind = HTTPStatus(fault.status).phrase
        return {"error": {"message": BROKEN_HOP_SAYS, "type": kind, "param": None, "code": fault.status}}

    def rename_parameters(self, rename: Callable[[str], str]) -> None:
        request = self._kwargs.get("request") or self._args[0]
        changed = dataclasses.replace(request, names=[rename(name) for name in request.names])
        self._args, self._kwargs = (changed,), {}


class FaultyEngine:
    """Replaces an engine of SkyRL's InferenceEngineClient. Attributes outside `METHODS` are the engine's own."""

    def __init__(self, engine: Any, server: int) -> None:
        self.engine = engine
        self.server = server
        self.injection = Injection()

    def inject(self, fault: str | None) -> int:
        """Switch to another fault, or to none. Returns how often the previous one took effect. Raises `UnknownFault`."""
        return self._next(injection_of(fault))

    def break_hop(self, fault: HopFault | None) -> int:
        """As `inject`, with a fault that a scenario chose."""
        return self._next(Injection(None if fault is None else of_hop(fault)))

    def _next(self, chosen: Injection) -> int:
        before, self.injection = self.injection, chosen
        before.over.set()
        return before.fired

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.engine, name)
        if name not in METHODS:
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            exchange = EngineExchange(self, name, args, kwargs)
            return await (_through(exchange) if _strikes(exchange) else found(*args, **kwargs))

        return call
