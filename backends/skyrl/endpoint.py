"""The OpenAI address of both stacks, as a request meets it. Written for skyrl 0.1.0 and 0.2.0: they serve it alike.

The new stack's is its router. The legacy stack's is the endpoint that `InferenceEngineClient` starts in a thread of its own
with `enable_http_endpoint`; engines that are held in this process (--start fork) belong to this loop, so that the same
application is called here, without its socket.
"""

from __future__ import annotations

from typing import Any

import httpx

from harness.contract.messages import HttpRequest, HttpResponse
from harness.machine import ports

TIMEOUT_S = 120
HOST = "127.0.0.1"
IN_PROCESS_NOTE = (
    "the legacy stack's HTTP endpoint is called in the host's process: its application, without its socket"
)


async def passed_on(client: httpx.AsyncClient, address: str, request: HttpRequest) -> HttpResponse:
    """The request to an address and what came back. Raises httpx.TransportError where nothing did."""
    answer = await client.request(
        request.method,
        address + request.path,
        headers=request.headers,
        content=request.body.encode(),
        timeout=TIMEOUT_S,
    )
    return HttpResponse(status=answer.status_code, headers=dict(answer.headers), body=answer.text)


def open_on_loopback(engine_cfg: Any) -> None:
    """Have the legacy client start its endpoint, on a free port of loopback."""
    [engine_cfg.http_endpoint_port] = ports.free(1)
    engine_cfg.http_endpoint_host = HOST
    engine_cfg.enable_http_endpoint = True


def close(engine_cfg: Any) -> None:
    """Stop the legacy client's endpoint and wait until it is gone."""
    from skyrl.backends.skyrl_train.inference_engines.inference_engine_client_http_endpoint import shutdown_server

    shutdown_server(host=HOST, port=engine_cfg.http_endpoint_port, max_wait_seconds=10)


class InProcess:
    """The legacy endpoint's application over the client that is there when it is asked."""

    def __init__(self) -> None:
        from skyrl.backends.skyrl_train.inference_engines import inference_engine_client_http_endpoint as shipped

        self._shipped = shipped
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(shipped.create_app(), raise_app_exceptions=False)
        )

    async def http(self, client: Any, request: HttpRequest) -> HttpResponse:
        self._shipped.set_global_state(client, None)
        return await passed_on(self._client, "http://endpoint", request)
