"""The fault instrument is transparent until a fault is chosen, and each fault does what its name says. Uses real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
import respx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from backends.skyrl.http import HttpStack
from backends.taps import breaks as tap_breaks
from backends.taps import faults as tap_faults
from backends.taps import tap
from backends.taps.tap import FaultProxy, FaultyEngine, UnknownFault
from harness.checks.always import ALWAYS
from harness.contract.errors import NotOffered, StartFailed
from harness.contract.faults import by_id, family
from harness.contract.messages import HopFault, HopForm, InjectRequest, StartRequest
from harness.contract.topology import Placement, Topology
from harness.machine import ports
from harness.running import catalogue

pytestmark = pytest.mark.asyncio
GENERATE = "/inference/v1/generate"
ASKED = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "logprobs": 0}}


def choice(index: int = 0, first: int = 10) -> dict[str, Any]:
    """A choice in the form of vLLM's servers: four tokens from `first` on."""
    numbers = [{"token": f"t{i}", "logprob": -0.5 - i} for i in range(4)]
    tokens = [first + i for i in range(4)]
    return {
        "index": index,
        "token_ids": tokens,
        "text": f"text {first}",
        "finish_reason": "length",
        "logprobs": {"content": numbers},
    }


@pytest.fixture(autouse=True)
def _quick_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn looks every 100 ms whether it should exit, and pauses as long when it does."""
    quick = vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 20)}
    monkeypatch.setattr("uvicorn.server.asyncio", SimpleNamespace(**quick))


class Upstream:
    """A small server that answers like vLLM and remembers its requests."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, list[tuple[bytes, bytes]], bytes]] = []
        self.left = threading.Event()
        self.release = threading.Event()
        self.app = Starlette(routes=[Route("/{rest:path}", self._answer, methods=["GET", "POST", "PUT", "DELETE"])])
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(64)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(
            self.app, log_config=None, lifespan="off", server_header=False, timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[self.socket]), daemon=True)

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.seen]

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        target = request.scope["raw_path"].decode() + (f"?{request.url.query}" if request.url.query else "")
        self.seen.append((request.method, target, list(request.headers.raw), body))
        match request.url.path:
            case "/inference/v1/generate":
                first = json.loads(body)["token_ids"][0]
                return JSONResponse({"choices": [choice(first=first * 10)], "request_id": "r"})
            case "/v1/completions":
                choices = [choice(0, 10), choice(1, 20)]
                return JSONResponse({"choices": choices, "usage": {"completion_tokens": 8}})
            case "/stream":
                return StreamingResponse(self._pieces(), headers={"x-piece": "many"})
            case "/waits":
                while not await request.is_disconnected():
                    await asyncio.sleep(0.005)
                self.left.set()
                return Response()
            case "/refuses" | "/v1/chat/completions":
                return JSONResponse({"error": {"message": "no", "code": 400}}, status_code=400)
            case _:
                answer = Response(b"\x00\xff raw", status_code=207, media_type="application/octet-stream")
                answer.headers.append("set-cookie", "a=1")
                answer.headers.append("set-cookie", "b=2")
                return answer

    async def _pieces(self) -> AsyncIterator[bytes]:
        for number in range(3):
            yield f"piece {number}\n".encode()
            if number == 0:
                await asyncio.to_thread(self.release.wait, 10)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    server.thread.start()
    yield server
    server.release.set()
    server.server.should_exit = True
    server.thread.join(10)
    assert not server.thread.is_alive()


@contextmanager
def proxied(url: str, server: int | None = 0) -> Iterator[tuple[FaultProxy, str]]:
    proxy = FaultProxy(url, server)
    try:
        yield proxy, proxy.start()
    finally:
        proxy.stop()


@asynccontextmanager
async def through(upstream: Upstream, server: int | None = 0) -> AsyncIterator[tuple[FaultProxy, httpx.AsyncClient]]:
    with proxied(upstream.url, server) as (proxy, url):
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            yield proxy, client


@asynccontextmanager
async def under(upstream: Upstream, fault: str, times: int, server: int | None = 0) -> AsyncIterator[httpx.AsyncClient]:
    """A client behind a tap that makes this fault, which takes effect `times` times."""
    async with through(upstream, server) as (proxy, client):
        proxy.inject(fault)
        yield client
        assert proxy.inject(None) == times


async def asked(client: httpx.AsyncClient, path: str = GENERATE, **changes: Any) -> dict[str, Any]:
    """The answer's content."""
    answer = await client.post(path, json=ASKED | changes)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


# --- transparency


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/health"),
        ("POST", "/pause?mode=keep&clear_cache=false"),
        ("PUT", "/a%2Fb/%C3%BC?x=%20y&x=2&empty="),
        ("DELETE", "/x;y=1/../z"),
    ],
)
async def test_a_request_arrives_as_it_was_sent(upstream: Upstream, method: str, target: str):
    body = b"" if method == "GET" else bytes(range(256))
    headers = [(b"x-session-id", b"one two"), (b"x-double", b"1"), (b"x-double", b"2"), (b"accept", b"text/x")]
    async with through(upstream) as (_, client):
        request = client.build_request(method, "/", content=body or None, extensions={"target": target.encode()})
        request.headers = httpx.Headers([*request.headers.raw, *headers])
        await client.send(request)
    (seen,) = upstream.seen
    sent = [(name.lower(), value) for name, value in request.headers.raw]
    assert seen == (method, target, sent, body)


async def test_an_answer_comes_back_as_it_was_given(upstream: Upstream):
    async with through(upstream) as (_, client), httpx.AsyncClient(base_url=upstream.url) as direct:
        there, here = await direct.get("/anything"), await client.get("/anything")
    assert (here.status_code, here.content) == (207, b"\x00\xff raw") == (there.status_code, there.content)
    without_date = [[(n, v) for n, v in a.headers.raw if n != b"date"] for a in (there, here)]
    assert without_date[0] == without_date[1]
    assert here.headers.get_list("set-cookie") == ["a=1", "b=2"]


async def test_an_error_comes_back_as_it_was_given(upstream: Upstream):
    async with through(upstream) as (_, client):
        answer = await client.post("/refuses", json={})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no")


async def test_a_stream_is_passed_on_piece_by_piece(upstream: Upstream):
    async with through(upstream) as (_, client), client.stream("GET", "/stream") as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"piece 0\n"
        assert not upstream.release.is_set()  # the server has not gone on yet
        upstream.release.set()
        assert b"".join([piece async for piece in pieces]) == b"piece 1\npiece 2\n"
    assert answer.headers["x-piece"] == "many"


async def test_many_requests_at_once_are_not_mixed(upstream: Upstream):
    async with through(upstream) as (_, client):
        answers = await asyncio.gather(*(asked(client, token_ids=[n]) for n in range(1, 65)))
    assert [a["choices"][0]["token_ids"][0] for a in answers] == [10 * n for n in range(1, 65)]


async def test_a_caller_that_leaves_takes_its_request_along(upstream: Upstream):
    async with through(upstream) as (_, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/waits", timeout=0.2)
        assert await asyncio.to_thread(upstream.left.wait, 10), "the server was never told"


async def test_a_server_that_is_gone_is_a_bad_gateway():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with proxied(gone) as (_, url):
            async with httpx.AsyncClient() as client:
                answer = await client.get(url)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "BadGateway")


async def test_an_answer_that_breaks_off_breaks_off():
    """If a peer dies in the middle of a body, the tap passes on the received part and closes the connection."""

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    async with server:
        with proxied(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as (_, url):
            async with httpx.AsyncClient() as client:
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get(url)


async def test_stopping_leaves_no_port_and_no_thread_behind(upstream: Upstream):
    proxy = FaultProxy(upstream.url)
    port = httpx.URL(proxy.start()).port
    async with httpx.AsyncClient() as client:
        await client.get(f"http://127.0.0.1:{port}/anything")
        proxy.stop()
    proxy.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith("fault-proxy")]
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0


# --- faults on HTTP


async def test_a_fault_can_be_switched_and_counts_how_often_it_took_effect(upstream: Upstream):
    async with through(upstream) as (proxy, client):
        whole = await asked(client)
        assert proxy.inject("finish_reason_edited") == 0
        broken = [await asked(client) for _ in range(3)]
        assert proxy.inject("usage_wrong") == 3
        assert await asked(client) == whole
        assert proxy.inject(None) == 0
        assert await asked(client) == whole
    assert [b["choices"][0]["finish_reason"] for b in broken] == ["stop"] * 3
    with pytest.raises(UnknownFault, match="no tap can make the fault nonsense"):
        tap.injection_of("nonsense")


async def test_a_request_for_a_single_token_passes(upstream: Upstream):
    """The clean room's canary is such a request."""
    async with under(upstream, "server_error/always", 0) as client:
        await asked(client, sampling_params={"max_tokens": 1})


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def numbers(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("tokens_edited/a_lot", lambda a: all(x != y for x, y in zip(tokens(a), (50, 51, 52, 53), strict=True))),
        ("tokens_edited/a_little", lambda a: tokens(a)[:3] == [50, 51, 52] and tokens(a)[3] != 53),
        ("output_cut_short", lambda a: tokens(a) == [50, 51] and numbers(a) == [-0.5, -1.5]),
        ("logprobs_off_by_constant/a_lot", lambda a: numbers(a) == [-1.0, -2.0, -3.0, -4.0]),
        ("logprobs_off_by_constant/a_little", lambda a: numbers(a)[0] == pytest.approx(-0.52)),
        ("logprobs_off_by_constant/a_hair", lambda a: numbers(a)[0] == pytest.approx(-0.502)),
        ("logprobs_shifted", lambda a: numbers(a) == [-0.5, -0.5, -1.5, -2.5]),
        ("logprobs_nan", lambda a: math.isnan(numbers(a)[3]) and numbers(a)[:3] == [-0.5, -1.5, -2.5]),
        ("finish_reason_edited", lambda a: a["choices"][0]["finish_reason"] == "stop"),
        ("text_not_of_tokens", lambda a: a["choices"][0]["text"] == "text 50~"),
        ("result_lost", lambda a: a["choices"] == []),
        ("response_doubled", lambda a: len(a["choices"]) == 2),
    ],
)
async def test_an_answer_is_edited(upstream: Upstream, fault: str, shows: Any):
    async with under(upstream, fault, 1) as client:
        answer = await asked(client)
    assert shows(answer)
    assert answer["request_id"] == "r"  # the fault leaves other fields unchanged


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("usage_wrong", lambda a: a["usage"]["completion_tokens"] == 9),
        ("choice_index_wrong", lambda a: [c["index"] for c in a["choices"]] == [1, 2]),
        (
            "results_swapped/within_an_answer",
            lambda a: [(c["index"], c["text"]) for c in a["choices"]] == [(0, "text 20"), (1, "text 10")],
        ),
    ],
)
async def test_a_body_of_choices_is_edited(upstream: Upstream, fault: str, shows: Any):
    async with under(upstream, fault, 1) as client:
        answer = await asked(client, "/v1/completions")
    assert shows(answer)


async def test_errors_are_not_edited(upstream: Upstream):
    async with under(upstream, "tokens_edited/a_lot", 0) as client:
        assert (await client.post("/v1/chat/completions", json={})).status_code == 400


async def test_two_callers_get_each_others_answers(upstream: Upstream):
    async with under(upstream, "results_swapped/between_requests", 1) as client:
        one, other = await asyncio.gather(asked(client, token_ids=[1]), asked(client, token_ids=[2]))
    assert sorted((tokens(one)[0], tokens(other)[0])) == [10, 20]
    assert tokens(one)[0] == 20


async def test_an_answer_without_a_partner_is_given_back(upstream: Upstream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tap_breaks, "PARTNER_S", 0.05)
    async with under(upstream, "results_swapped/between_requests", 0) as client:
        assert tokens(await asked(client, token_ids=[1]))[0] == 10


async def test_a_request_is_executed_twice_and_answered_once(upstream: Upstream):
    async with under(upstream, "executed_twice", 1) as client:
        assert tokens(await asked(client)) == [50, 51, 52, 53]
    assert upstream.paths == [GENERATE] * 2


async def test_the_first_request_fails_after_it_was_executed(upstream: Upstream):
    async with under(upstream, "server_error/first_time_after_execution", 1) as client:
        statuses = [(await client.post(GENERATE, json=ASKED)).status_code for _ in range(3)]
    assert statuses == [500, 200, 200]
    assert upstream.paths == [GENERATE] * 3


async def test_a_server_error_needs_no_server(upstream: Upstream):
    async with through(upstream) as (proxy, client):
        proxy.inject("server_error/always")
        answer = await client.post(GENERATE, json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, 500)
    assert upstream.seen == []


async def test_the_connection_is_cut_in_the_middle_of_a_response(upstream: Upstream):
    async with under(upstream, "disconnected/first_time", 1) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(GENERATE, json=ASKED)
        assert tokens(await asked(client)) == [50, 51, 52, 53]


@pytest.mark.parametrize(
    ("fault", "runs", "ends"),
    [
        (HopFault(hop="server", status=422, body="html"), 0, (422, "text/html; charset=utf-8")),
        (HopFault(hop="server", status=503, moment="after"), 1, (503, "application/json")),
        (HopFault(hop="server", body="empty"), 0, (500, "application/json")),
        (HopFault(hop="server", connection="closed"), 0, httpx.RemoteProtocolError),
        (HopFault(hop="server", connection="reset", moment="after"), 1, httpx.ReadError),
        (HopFault(hop="server", connection="torn", moment="after"), 1, httpx.RemoteProtocolError),
    ],
)
async def test_a_hop_breaks_once_as_the_scenario_says(upstream: Upstream, fault: HopFault, runs: int, ends: Any):
    async with through(upstream) as (proxy, client):
        proxy.break_hop(fault)
        if isinstance(ends, tuple):
            answer = await client.post(GENERATE, json=ASKED)
            assert (answer.status_code, answer.headers["content-type"]) == ends
        else:
            with pytest.raises(ends):
                await client.post(GENERATE, json=ASKED)
        assert len(upstream.seen) == runs
        assert tokens(await asked(client)) == [50, 51, 52, 53]
        assert proxy.break_hop(None) == 1


@pytest.mark.parametrize("form", [form for form in get_args(HopForm) if form != "absolute"])
async def test_a_message_in_another_legal_form_says_the_same(upstream: Upstream, form: HopForm):
    async with through(upstream) as (proxy, client):
        proxy.break_hop(HopFault(hop="server", connection="whole", form=form))
        answer = await client.post(GENERATE, json=ASKED)
        assert tokens(answer.json()) == [50, 51, 52, 53]
        names = [name for name, _ in answer.headers.raw]
        shown = {
            "chunked": b"content-length" not in names,
            "sized": b"content-length" in names,
            "upper_case": b"CONTENT-TYPE" in names,
            "repeated": names.count(b"vary") == 2,
            "charset": "UTF-8" in answer.headers["content-type"],
        }
        assert shown.get(form, True)
        assert form == "idle" or tokens(await asked(client)) == [50, 51, 52, 53], "on the same connection"
        assert proxy.break_hop(None) == 1


async def test_an_address_in_absolute_form():
    """A server of uvicorn's pure Python parser takes it for the path, so a bare socket reads the request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(line), line))
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    with proxied(url) as (proxy, here):
        async with httpx.AsyncClient(base_url=here) as client:
            proxy.break_hop(HopFault(hop="server", connection="whole", form="absolute"))
            answer = await client.post(GENERATE, json=ASKED)
    listening.close()
    assert answer.text == f"POST {url}{GENERATE} HTTP/1.1\r\n"


async def test_a_hop_that_hangs_goes_on_when_the_fault_is_over(upstream: Upstream):
    async with through(upstream) as (proxy, client):
        proxy.break_hop(HopFault(hop="server", connection="hanging"))
        first = asyncio.create_task(asked(client))
        while proxy._injection.fired == 0:
            await asyncio.sleep(0.005)
        assert tokens(await asked(client)) == [50, 51, 52, 53], "others are answered meanwhile"
        assert not first.done()
        proxy.break_hop(None)
        assert tokens(await first) == [50, 51, 52, 53]


async def test_a_control_call_meets_its_own_fault_at_the_first_server_alone(upstream: Upstream):
    async with through(upstream) as (proxy, client):
        proxy.break_hop(HopFault(hop="server", call="pause", status=503))
        assert tokens(await asked(client)) == [50, 51, 52, 53]
        assert (await client.post("/pause", json={})).status_code == 503
        assert (await client.post("/pause", json={})).status_code != 503
        proxy.server = 1
        proxy.break_hop(HopFault(hop="server", call="pause", status=503))
        assert (await client.post("/pause", json={})).status_code != 503


async def test_what_hangs_goes_on_when_the_fault_is_over(upstream: Upstream):
    async with through(upstream) as (proxy, client):
        proxy.inject("hang")
        with pytest.raises(httpx.ReadTimeout):
            await client.post(GENERATE, json=ASKED, timeout=0.2)
        held = asyncio.create_task(asked(client))
        await asyncio.sleep(0.1)
        assert not held.done()
        assert upstream.seen == []
        assert proxy.inject(None) == 2
        assert tokens(await held) == [50, 51, 52, 53]


async def test_slow_is_slow(upstream: Upstream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tap_breaks, "SLOW_S", 0.2)
    async with under(upstream, "slow", 1) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert tokens(await asked(client)) == [50, 51, 52, 53]
        assert loop.time() - began >= 0.2


async def test_an_error_becomes_an_empty_success(upstream: Upstream):
    async with under(upstream, "error_becomes_empty", 1) as client:
        assert (await client.post("/v1/chat/completions", json={})).json()["choices"][0]["token_ids"] == []
        assert tokens(await asked(client)) == [50, 51, 52, 53]


async def test_control_calls_are_swallowed(upstream: Upstream):
    """`one_server` strikes the first server; the taps of the others pass everything through."""
    for server, swallowed in ((0, True), (1, False)):
        async with through(upstream, server) as (proxy, client):
            proxy.inject("pause_reaches_some")
            paused = await client.post("/pause?mode=keep")
            await client.post("/resume")
            assert proxy.inject(None) == int(swallowed)
            if swallowed:
                assert (paused.status_code, paused.content) == (200, b"")
        assert upstream.paths == ["/resume"] if swallowed else ["/resume", "/pause?mode=keep", "/resume"]


@pytest.mark.parametrize("fault", ["sync_missed/one_server", "parameter_not_updated"])
async def test_a_weight_update_arrives_under_other_names(upstream: Upstream, fault: str):
    info = {"names": ["a", tap_breaks.LONE], "shapes": [[1], [2]], "packed": True}
    async with under(upstream, fault, 1) as client:
        await client.post("/update_weights", json={"update_info": info})
    kept = tap_breaks.SKIPPED if fault == "sync_missed/one_server" else "a"
    ((_, _, headers, body),) = upstream.seen
    assert json.loads(body) == {"update_info": {**info, "names": [kept, tap_breaks.SKIPPED]}}
    assert dict(headers)[b"content-length"] == str(len(body)).encode()


@pytest.mark.parametrize(
    ("fault", "given", "arrives"),
    [
        ("header_dropped/session", "seven", None),
        ("session_moves", "seven", "another"),
        ("session_moves", None, None),
        ("one_server_gets_all", None, "everybody"),
        ("one_server_gets_all", "seven", "seven"),
    ],
)
async def test_the_session_header_is_tampered_with(
    upstream: Upstream, fault: str, given: str | None, arrives: str | None
):
    async with under(upstream, fault, int(given != arrives), server=None) as client:
        await client.post(GENERATE, json=ASKED, headers={} if given is None else {"X-Session-ID": given})
    ((_, _, headers, _),) = upstream.seen
    got = dict(headers).get(b"x-session-id")
    assert (got is not None and got != b"seven") if arrives == "another" else got == (arrives and arrives.encode())


async def test_a_fault_strikes_only_where_it_lives(upstream: Upstream):
    async with under(upstream, "tokens_edited/a_lot", 0, server=None) as client:
        assert tokens(await asked(client)) == [50, 51, 52, 53]


@respx.mock
async def test_an_upstream_that_speaks_no_http_ends_the_connection():
    """A working server cannot produce a protocol error, so the transport's mock raises it."""
    respx.route(host="127.0.0.9").mock(side_effect=httpx.RemoteProtocolError("not HTTP"))
    respx.route(host="127.0.0.1").pass_through()
    with proxied("http://127.0.0.9:1") as (_, url):
        async with httpx.AsyncClient() as client:
            answer = await client.get(url)
    assert answer.status_code >= 500


# --- an engine of the legacy client


@dataclasses.dataclass(frozen=True)
class Update:
    names: list[str]
    shapes: list[int]


class Engine:
    """Answers like SkyRL's vLLM engine and remembers its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def tp_size(self) -> int:
        return 3

    async def generate(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(("generate", batch))
        if not all(batch["prompt_token_ids"]):
            raise ValueError("an empty prompt")
        rows = [[p[0] * 10 + i for i in range(4)] for p in batch["prompt_token_ids"]]
        return {
            "response_ids": rows,
            "responses": [f"text {row[0]}" for row in rows],
            "stop_reasons": ["length"] * len(rows),
            "response_logprobs": [[-0.5, -1.5, -2.5, -3.5] for _ in rows],
            "rollout_expert_indices": None,
        }

    async def sample(self, prompt_token_ids: list[int], num_samples: int, sampling_params: dict[str, Any]) -> Any:
        return await self.generate({"prompt_token_ids": [prompt_token_ids] * num_samples})

    async def completion(self, payload: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(("completion", payload))
        return {"choices": [choice(0, 10), choice(1, 20)], "usage": {"completion_tokens": 8}}

    async def pause_generation(self) -> None:
        self.seen.append(("pause_generation", None))

    async def update_named_weights(self, request: Update) -> None:
        self.seen.append(("update_named_weights", request))


BATCH = {"prompt_token_ids": [[1], [2], [3]], "sampling_params": {"max_tokens": 4}}


async def test_an_engine_behind_a_tap_is_the_engine():
    engine = Engine()
    wrapped = FaultyEngine(engine, 0)
    assert wrapped.tp_size() == 3
    assert await wrapped.generate(BATCH) == await engine.generate(BATCH)
    await wrapped.pause_generation()
    assert engine.seen == [("generate", BATCH)] * 2 + [("pause_generation", None)]
    assert engine.seen[0][1] is BATCH
    with pytest.raises(AttributeError):
        wrapped.nothing_of_the_kind  # noqa: B018 - the test is about the look-up
    with pytest.raises(ValueError, match="an empty prompt"):
        await wrapped.generate({"prompt_token_ids": [[]]})


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("tokens_edited/a_little", lambda a: a["response_ids"][0][3] != 13 and a["response_ids"][1][3] == 23),
        ("output_cut_short", lambda a: a["response_ids"][2] == [30, 31] and a["response_logprobs"][2] == [-0.5, -1.5]),
        ("logprobs_off_by_constant/a_lot", lambda a: a["response_logprobs"][0] == [-1.0, -2.0, -3.0, -4.0]),
        ("logprobs_nan", lambda a: math.isnan(a["response_logprobs"][0][3])),
        ("finish_reason_edited", lambda a: a["stop_reasons"] == ["stop"] * 3),
        ("text_not_of_tokens", lambda a: a["responses"] == ["text 10~", "text 20~", "text 30~"]),
        ("result_lost", lambda a: len(a["response_ids"]) == len(a["responses"]) == 2),
        ("response_doubled", lambda a: a["response_ids"][2] == a["response_ids"][3]),
        ("results_swapped/within_an_answer", lambda a: a["responses"] == ["text 20", "text 10", "text 30"]),
    ],
)
async def test_an_engines_answer_is_edited(fault: str, shows: Any):
    engine = Engine()
    wrapped = FaultyEngine(engine, 1)
    whole = await wrapped.generate(BATCH)
    wrapped.inject(fault)
    assert shows(await wrapped.generate(BATCH))
    assert wrapped.inject(None) == 1
    assert await wrapped.generate(BATCH) == whole


async def test_an_engines_samples_are_lost_too():
    wrapped = FaultyEngine(Engine(), 0)
    wrapped.inject("result_lost")
    answer = await wrapped.sample(prompt_token_ids=[4], num_samples=3, sampling_params={"max_tokens": 4})
    assert len(answer["response_ids"]) == 2
    await wrapped.sample(prompt_token_ids=[4], num_samples=3, sampling_params={"max_tokens": 1})
    assert wrapped.inject(None) == 1


async def test_an_engines_body_of_choices_is_edited():
    wrapped = FaultyEngine(Engine(), 0)
    payload = {"json": {"prompt": [[1], [2]], "max_tokens": 4}, "headers": {}}
    wrapped.inject("usage_wrong")
    assert (await wrapped.completion(payload))["usage"] == {"completion_tokens": 9}
    wrapped.inject("text_not_of_tokens")
    assert (await wrapped.completion(payload))["choices"][1]["text"] == "text 20~"
    assert wrapped.inject(None) == 1


async def test_an_engine_executes_twice_fails_and_is_cut_off():
    engine = Engine()
    wrapped = FaultyEngine(engine, 0)
    wrapped.inject("executed_twice")
    await wrapped.generate(BATCH)
    assert len(engine.seen) == 2
    for fault, error in (
        ("server_error/first_time_after_execution", tap.ServerError),
        ("disconnected/first_time", tap.Disconnected),
    ):
        wrapped.inject(fault)
        with pytest.raises(error, match="a seeded fault"):
            await wrapped.generate(BATCH)
        await wrapped.generate(BATCH)
        assert wrapped.inject(None) == 1


async def test_an_engine_is_behind_a_broken_hop():
    engine = Engine()
    wrapped = FaultyEngine(engine, 0)
    wrapped.break_hop(HopFault(hop="server", status=503))
    with pytest.raises(tap.ServerError, match="503: the hop is broken"):
        await wrapped.generate(BATCH)
    assert engine.seen == []
    assert wrapped.break_hop(HopFault(hop="server", connection="closed", moment="after")) == 1
    with pytest.raises(tap.Disconnected):
        await wrapped.generate(BATCH)
    assert len(engine.seen) == 1


async def test_an_engines_error_becomes_an_empty_success():
    wrapped = FaultyEngine(Engine(), 0)
    wrapped.inject("error_becomes_empty")
    answer = await wrapped.generate({"prompt_token_ids": [[1], []], "sampling_params": {}})
    assert (answer["response_ids"], answer["stop_reasons"]) == ([[], []], ["stop", "stop"])
    assert wrapped.inject(None) == 1


async def test_an_engine_is_not_told_to_pause_and_gets_weights_under_other_names():
    engine = Engine()
    first, second = FaultyEngine(engine, 0), FaultyEngine(engine, 1)
    for wrapped in (first, second):
        wrapped.inject("pause_reaches_some")
        await wrapped.pause_generation()
    assert [wrapped.inject("sync_missed/one_server") for wrapped in (first, second)] == [1, 0]
    for wrapped in (first, second):
        await wrapped.update_named_weights(request=Update(["a", "b"], [1, 2]))
    missed = Update([tap_breaks.SKIPPED] * 2, [1, 2])
    assert engine.seen == [
        ("pause_generation", None),
        ("update_named_weights", missed),
        ("update_named_weights", Update(["a", "b"], [1, 2])),
    ]


# --- what is declared, and where taps can stand


async def test_every_declared_fault_can_be_made_and_its_checks_judge_its_scenarios():
    scenarios = catalogue.declared()
    for faults in (tap.HTTP_FAULTS, tap.LEGACY_FAULTS):
        for name, fault in by_id(faults).items():
            checks = {family(c.name) for s in fault.scenarios for c in (*scenarios[s].checks, *ALWAYS)}
            assert name in tap_breaks.BREAKS
            assert fault.scenarios
            assert fault.caught_by <= checks | {tap_faults.DRIVEN}, name


async def test_taps_are_refused_where_they_cannot_stand():
    for start, placement in (("ray", Placement.DISAGGREGATED), ("fork", Placement.REMOTE)):
        request = StartRequest(
            target="t",
            topology=Topology(placement=placement),
            start=start,  # type: ignore[arg-type]
            model_path="/m",
            scratch="/s",
            logs="/l",
            fault_taps=True,
        )
        with pytest.raises(StartFailed, match="fault taps stand in forked, disaggregated stacks only"):
            await HttpStack().start(request)


async def test_a_stack_without_taps_offers_no_faults():
    with pytest.raises(NotOffered):
        await HttpStack().inject(InjectRequest(fault="hang"))


async def test_servers_start_at_ports_that_are_free_and_differ():
    found = ports.free(8)
    assert len(set(found)) == 8
    for port in found:
        with socket.socket() as free:
            free.bind(("127.0.0.1", port))
