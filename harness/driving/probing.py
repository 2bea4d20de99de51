"""Probes a stack from outside for open sockets, ports that it shares, routes without credentials, and unpickling of a client's data.

Runs in the stack's host. The adapter names its addresses and their routes, and `harness/checks/exposure.py` judges the
answers. Requests go over loopback, or to an application in this process.
"""

from __future__ import annotations

import base64
import errno
import os
import pickle
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

import msgspec
import psutil

from harness.contract.messages import (
    ORIGIN,
    Answer,
    HttpRequest,
    HttpResponse,
    Listener,
    ProbedAddress,
    ProbeSecurityResult,
    RouteKind,
)

NOBODYS = "/nobody-has-this-path"
PICKLE, PICKLE_AS_TEXT = "{pickle}", "{pickle as text}"
"""Placeholders for the pickle in a request's body: base64, as JSON carries it, or protocol 0, which is plain text."""
JSON = {"content-type": "application/json"}
GATEWAY_ERRORS = frozenset({502, 503, 504})
"""Statuses that a router gives of its own, if it could not ask a server: a connection that a server's error has closed."""
ATTEMPTS = 5
_Ask = Callable[[HttpRequest], Awaitable[HttpResponse]]


@final
class Route(msgspec.Struct, frozen=True):
    """A request that shows whether a route is open and changes nothing. It lacks an argument that the handler needs, sets a state
    that holds already, or uses another method than the route (405 then shows that the route exists and asked no credentials)."""

    kind: RouteKind
    method: str
    path: str
    body: str = ""

    def request(self) -> HttpRequest:
        return HttpRequest(method=self.method, path=self.path, headers=JSON if self.body else {}, body=self.body)


@final
class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address of the stack and the requests to send there."""

    name: str
    data_plane: bool
    ask: _Ask
    """Sends a request. Raises only if no answer came."""
    routes: Sequence[Route]
    pickles: Sequence[Sequence[HttpRequest]] = ()
    """Attempts to get a pickle unpickled: requests in order, one of them with `PICKLE` or `PICKLE_AS_TEXT` in its body."""
    port: int | None = None


PREFLIGHT = HttpRequest(
    method="OPTIONS",
    path="/v1/completions",
    headers={
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    },
)
"""What a browser asks before a page of another origin may send JSON (Fetch standard, CORS-preflight request)."""
PLAIN_PICKLE = (
    HttpRequest(path="/v1/completions", headers={"content-type": "application/octet-stream"}, body=PICKLE_AS_TEXT),
)
"""The attempt that fits every address: a pickle as the body."""


class _Marker:
    """Unpickling it makes an empty folder and does nothing else."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self._path,)


async def probe(
    addresses: Sequence[Address],
    *,
    scratch: str,
    roles: Mapping[int, str] | None = None,
    root: int | None = None,
    shipped: Mapping[int, str] | None = None,
) -> ProbeSecurityResult:
    """Probe all addresses of a stack. `root`: pid at the root of its process tree. `roles`: pid → role. `shipped`: port → address
    that the stack asked to bind to before the harness replaced it by loopback. Markers are made below `scratch`."""
    with (
        socket.create_server(("127.0.0.1", 0)) as canary,
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as sharing,
        tempfile.TemporaryDirectory(dir=scratch) as folder,
    ):
        names = {os.getpid(): "client and trainer", **(roles or {})}
        heard = listeners({os.getpid()} if root is None else _below(root), names)
        own, shared = canary.getsockname()[1], sharing.getsockname()[1]
        marker = Path(folder) / "canary"
        pickle.loads(pickle.dumps(_Marker(str(marker))))
        asked = shipped or {}
        return ProbeSecurityResult(
            addresses=[
                ProbedAddress(
                    name=one.name,
                    data_plane=one.data_plane,
                    port=one.port,
                    shared=None if one.port is None else _is_shared(one.port),
                )
                for one in addresses
            ],
            listeners=[
                msgspec.structs.replace(one, shipped=asked.get(one.port))
                for one in heard
                if root is not None and one.port not in (own, shared)
            ],
            answers=[answer for one in addresses for answer in await _answers(one, Path(folder))],
            canaries={
                "sockets": own in {one.port for one in heard},
                "ports": _is_shared(shared) and not _is_shared(own),
                "pickle": marker.exists(),
            },
        )


async def _answers(address: Address, folder: Path) -> list[Answer]:
    methods = sorted({route.method for route in address.routes})
    answers = []
    for route in (*(Route("nothing", method, NOBODYS) for method in methods), *address.routes):
        status = (await address.ask(route.request())).status
        name = f"{route.method} {route.path}"
        answers.append(Answer(address=address.name, route=name, kind=route.kind, status=status))
    asked = await address.ask(PREFLIGHT)
    headers = {name.lower(): value for name, value in asked.headers.items()}
    shares = {name: value for name, value in headers.items() if name.startswith("access-control-")}
    name = f"{PREFLIGHT.method} {PREFLIGHT.path}"
    answers.append(Answer(address=address.name, route=name, kind="page", status=asked.status, shares=shares))
    for number, attempt in enumerate(address.pickles):
        for _ in range(ATTEMPTS):
            answer = await _unpickled(address, attempt, folder / f"{address.name}-{number}")
            if answer.unpickled or answer.status not in GATEWAY_ERRORS:
                break
        answers.append(answer)
    return answers


async def _unpickled(address: Address, attempt: Sequence[HttpRequest], marker: Path) -> Answer:
    """Make one attempt. Returns the answer to the request that carried the pickle."""
    carried = base64.b64encode(pickle.dumps(_Marker(str(marker)))).decode()
    as_text = pickle.dumps(_Marker(str(marker)), protocol=0).decode("ascii")
    told = Answer(address=address.name, route="", kind="pickle", status=0)
    for request in attempt:
        body = request.body.replace(PICKLE, carried).replace(PICKLE_AS_TEXT, as_text)
        status = (await address.ask(msgspec.structs.replace(request, body=body))).status
        if body != request.body:
            told = msgspec.structs.replace(told, route=f"{request.method} {request.path}", status=status)
    return msgspec.structs.replace(told, unpickled=marker.exists())


def _is_shared(port: int) -> bool:
    """True if a second socket can be bound to a loopback port that is listened on. It does not listen, so it gets no request."""
    with socket.socket() as second:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            second.bind(("127.0.0.1", port))
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def _below(root: int) -> set[int]:
    """The process and all its descendants."""
    return {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}


def listeners(pids: Iterable[int], roles: Mapping[int, str]) -> list[Listener]:
    """The listening TCP sockets of these processes, each once and with the oldest process that holds it: forked children
    inherit their parents' sockets. A process without a role keeps its own name."""
    alive = {pid: psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)}
    found: dict[tuple[str, int], psutil.Process] = {}
    for one in psutil.net_connections(kind="tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr and one.pid in alive:
            at = (one.laddr.ip, one.laddr.port)
            found[at] = min(found.get(at, alive[one.pid]), alive[one.pid], key=lambda process: process.create_time())
    return [
        Listener(address=address, port=port, process=roles.get(process.pid) or process.name())
        for (address, port), process in sorted(found.items(), key=lambda item: item[0])
    ]
