"""The OpenAI address of both stacks. Written for skyrl 0.1.0 and 0.2.0, which serve it alike.

The new stack's address is its router. The legacy stack's is the endpoint that `InferenceEngineClient` starts in its own thread with
`enable_http_endpoint`. Engines held in this process (--start fork) belong to this event loop, so the adapter calls the same
application here, without its socket.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from harness.contract.messages import HttpRequest, HttpResponse
from harness.driving import raw
from harness.machine import ports

HOST = "127.0.0.1"
IN_PROCESS_NOTE = (
    "the legacy stack's HTTP endpoint is called in the host's process: its application, without its socket"
)


async def passed_on(client: httpx.AsyncClient, address: str, request: HttpRequest) -> HttpResponse:
    """Send the request to an address and return the answer, however late: the driver keeps the deadline. Raises
    httpx.TransportError without an answer."""
    # As text, httpx takes ASCII alone.
    headers = [(name.encode(), value.encode("latin-1")) for name, value in request.headers.items()]
    answer = await client.request(
        request.method, address + request.path, headers=headers, content=request.content, timeout=None
    )
    return HttpResponse(status=answer.status_code, headers=dict(answer.headers), body=answer.text)


def open_on_loopback(engine_cfg: Any) -> None:
    """Configure the OpenAI address: a free loopback port, which no other process of the stack takes by chance."""
    engine_cfg.http_endpoint_port = ports.apart()
    engine_cfg.http_endpoint_host = HOST
    engine_cfg.enable_http_endpoint = True


@contextmanager
def taken() -> Iterator[int]:
    """A port of loopback at which another server answers each request with an error."""
    server = ThreadingHTTPServer((HOST, 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _shipped() -> Any:
    from skyrl.backends.skyrl_train.inference_engines import inference_engine_client_http_endpoint

    return inference_engine_client_http_endpoint


def served() -> tuple[Any, Any]:
    """The client and the server of the legacy endpoint that was started last: the process has one of each."""
    return _shipped()._global_inference_engine_client, _shipped()._global_uvicorn_server


def close(engine_cfg: Any, serving: tuple[Any, Any]) -> None:
    """Stop a legacy client's endpoint and wait until it is gone. `serving`: what `served` said once it had started."""
    _shipped().set_global_state(*serving)
    _shipped().shutdown_server(host=HOST, port=engine_cfg.http_endpoint_port, max_wait_seconds=10)


class InProcess:
    """The legacy endpoint's application, over the client that its caller named last, unless a later client has taken it over."""

    def __init__(self) -> None:
        self._over: Any = None
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(_shipped().create_app(), raise_app_exceptions=False)
        )

    def serve(self, client: Any) -> None:
        """Answer by this client from now on. Told twice, it changes nothing: a later client may have taken the endpoint over."""
        if client is not self._over:
            self._over = client
            _shipped().set_global_state(client, None)

    async def http(self, client: Any, request: HttpRequest) -> HttpResponse:
        self.serve(client)
        with raw.aside():  # as over a socket, the endpoint calls the client, not the adapter
            return await passed_on(self._client, "http://endpoint", request)
