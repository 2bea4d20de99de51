"""The probe finds open sockets, distinguishes routes, and detects whether its pickle was read."""

import base64
import json
import os
import pickle
import socket

import pytest

from harness.contract.messages import HttpRequest, HttpResponse
from harness.driving.probing import JSON, NOBODYS, PICKLE, PLAIN_PICKLE, Address, Route, listeners, probe

CARRIES = (HttpRequest(path="/weights", headers=JSON, body=json.dumps({"handles": PICKLE})),)


def address(answer, **about) -> Address:
    async def ask(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=answer(request))

    routes = [Route("control", "POST", "/pause", "{}"), Route("information", "GET", "/metrics")]
    return Address(name="router", data_plane=True, ask=ask, routes=routes, **about)


def test_a_listening_socket_is_seen_once_with_its_role():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_connection(one.getsockname()):
        port = one.getsockname()[1]
        [seen] = [found for found in listeners([os.getpid()], {os.getpid(): "router"}) if found.port == port]
    assert (seen.address, seen.process) == ("127.0.0.1", "router")
    assert port not in {found.port for found in listeners([os.getpid()], {})}


@pytest.mark.asyncio
async def test_below_a_root_its_own_socket_is_left_out_and_shipped_hosts_are_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        found = await probe([], scratch=str(tmp_path), root=os.getpid(), shipped={port: "everywhere"})
    assert [(seen.port, seen.shipped) for seen in found.listeners if seen.port == port] == [(port, "everywhere")]
    assert found.canaries == {"sockets": True, "ports": True, "pickle": True}
    assert list(tmp_path.iterdir()) == [], "markers are cleared away"


@pytest.mark.asyncio
@pytest.mark.parametrize("shared", [False, True])
async def test_a_port_on_which_another_process_could_listen_too_is_told(shared, tmp_path):
    with socket.create_server(("127.0.0.1", 0), reuse_port=shared) as one:
        there = address(lambda _: 404, port=one.getsockname()[1])
        [found] = (await probe([there], scratch=str(tmp_path))).addresses
    assert found.shared is shared


@pytest.mark.asyncio
async def test_each_route_is_asked_and_so_is_a_path_that_nobody_has(tmp_path):
    there = address(lambda request: 200 if request.path == "/metrics" else 404)
    found = await probe([there], scratch=str(tmp_path))
    assert [(a.kind, a.route, a.status) for a in found.answers] == [
        ("nothing", f"GET {NOBODYS}", 404),
        ("nothing", f"POST {NOBODYS}", 404),
        ("control", "POST /pause", 404),
        ("information", "GET /metrics", 200),
        ("page", "OPTIONS /v1/completions", 404),
    ]


def reads_bodies(request: HttpRequest) -> int:
    if request.headers.get("content-type") == "application/octet-stream":
        pickle.loads(request.body.encode())
    return 400


def reads_fields(request: HttpRequest) -> int:
    if "handles" in request.body:
        pickle.loads(base64.b64decode(json.loads(request.body)["handles"]))
    return 403


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "read"), [(lambda _: 200, [False, False]), (reads_bodies, [True, False]), (reads_fields, [False, True])]
)
async def test_a_pickle_that_is_read_leaves_its_marker(tmp_path, answer, read):
    found = await probe([address(answer, pickles=[PLAIN_PICKLE, CARRIES])], scratch=str(tmp_path))
    sent = [a for a in found.answers if a.kind == "pickle"]
    assert [a.route for a in sent] == ["POST /v1/completions", "POST /weights"]
    assert [a.unpickled for a in sent] == read


@pytest.mark.asyncio
async def test_what_a_router_could_not_ask_its_server_is_asked_again_some_times(tmp_path):
    def pickles_of(statuses: list[int]) -> Address:
        return address(lambda request: statuses.pop(0) if "handles" in request.body else 404, pickles=[CARRIES])

    found = await probe([pickles_of([502, 503, 403])], scratch=str(tmp_path))
    assert found.answers[-1].status == 403
    found = await probe([pickles_of([502] * 9)], scratch=str(tmp_path))
    assert found.answers[-1].status == 502, "a gateway that always fails stays unclear"
