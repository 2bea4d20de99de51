"""Every failure of a call ends in its named error, with blame, next step and the end of the log."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from unittest import mock

import httpx
import msgspec
import psutil
import pytest
import pytest_asyncio
import respx

from harness.contract.capability import Capability
from harness.contract.errors import Blame, CallFailed, CallTimedOut, NotOffered, StackDied, StackError, StartFailed
from harness.contract.messages import Empty, GenerateRequest, Generation, HealthResult, KillServerRequest, StartRequest
from harness.contract.topology import Topology
from harness.driving.host import place_in
from harness.driving.process import HostProcess, as_stack_error, read_answer
from tests.adapters import TRIGGER
from tests.leftovers import Footprint, footprint

pytestmark = pytest.mark.asyncio
MakeHost = Callable[..., HostProcess]


@pytest_asyncio.fixture
async def hosts(tmp_path: Path, short_grace: None) -> AsyncIterator[MakeHost]:
    """Starts hosts of the adapters in `tests/adapters.py`, and ends them."""
    made: list[HostProcess] = []

    def make(adapter: str = "Toy", *, python: Path = Path(sys.executable)) -> HostProcess:
        made.append(
            HostProcess(python=python, adapter=f"tests.adapters:{adapter}", variables={}, logs=tmp_path / "logs")
        )
        return made[-1]

    yield make
    for host in made:
        await host.close()
        assert not host.scratch.exists()


def start_request(host: HostProcess) -> StartRequest:
    return StartRequest(
        target="toy", topology=Topology(), model_path="", scratch=str(host.scratch), logs=str(host.logs)
    )


async def up(host: HostProcess) -> HostProcess:
    await host.launch()
    await host.call("start", start_request(host), 60)
    return host


def seen(host: HostProcess) -> Footprint:
    return footprint(host._supervisor.pid, scratch=host.scratch)


GENERATE = GenerateRequest(prompt_token_ids=[[5, 6]], sampling_params={"max_tokens": 3})
MISBEHAVE = GenerateRequest(prompt_token_ids=[TRIGGER], sampling_params={"max_tokens": 1})


async def failure(host: HostProcess, deadline_s: float = 60) -> StackError:
    """The error of the call that makes a faulty adapter misbehave."""
    with pytest.raises(StackError) as failed:
        await host.call("generate", MISBEHAVE, deadline_s)
    return failed.value


async def test_a_call_is_answered_over_a_private_socket(hosts: MakeHost):
    host = await up(hosts())
    answer = await host.call("generate", GENERATE, 60)
    assert isinstance(answer, Generation)
    assert [len(row) for row in answer.response_ids] == [3]
    assert host.scratch.stat().st_mode & 0o777 == 0o700
    assert (host.scratch / "host.sock").is_socket()
    assert host.died is None


async def test_calls_do_not_wait_for_each_other(hosts: MakeHost):
    host = await up(hosts("Hangs"))
    hanging = asyncio.create_task(host.call("generate", MISBEHAVE, 600))
    answers = await asyncio.gather(*(host.call("generate", GENERATE, 60) for _ in range(150)))
    assert len(answers) == 150
    assert not hanging.done()
    hanging.cancel()


async def test_what_the_stack_raises_is_told_with_kind_status_place_and_trace(hosts: MakeHost):
    host = await up(hosts("Raises"))
    error = await failure(host)
    assert isinstance(error, CallFailed)
    assert (error.kind, error.detail, error.status, error.blame) == ("Refused", "not like this", 418, Blame.STACK)
    assert re.fullmatch(r"tests/adapters\.py:\d+ in misbehave: raise .+", error.place)
    assert "in misbehave" in error.log_tail
    await host.call("generate", GENERATE, 60)  # it goes on


async def test_an_adapters_own_frames_are_no_place_of_the_stack():
    frames = [("/e/site-packages/skyrl/client.py", "generate"), ("/p/backends/skyrl/http.py", "generate")]
    lines = [f'  File "{file}", line 7, in {name}\n    return x[0]\n           ~^^^' for file, name in frames]
    assert place_in("\n".join(lines), "skyrl") == "skyrl/client.py:7 in generate: return x[0]"
    assert place_in(lines[1], "skyrl") == place_in(lines[0], "") == ""


async def test_what_is_not_offered_has_one_error(hosts: MakeHost):
    host = await up(hosts())
    with pytest.raises(NotOffered) as refused:
        await host.call("sleep", Empty(), 60)
    assert refused.value.capability == Capability.SLEEP
    assert refused.value.blame == Blame.SETUP
    assert "`needs`" in refused.value.next_step


async def test_a_result_of_another_shape_is_the_stacks_failure(hosts: MakeHost):
    error = await failure(await up(hosts("Lies")))
    assert isinstance(error, CallFailed)
    assert error.kind == "ValidationError"
    assert "response_ids" in error.detail or "healthy" in error.detail


async def test_a_malformed_request_never_reaches_the_adapter(hosts: MakeHost):
    host = await up(hosts())
    with pytest.raises(CallFailed, match="ValidationError"):
        await host.call("generate", HealthResult(healthy=True), 60)


@pytest.mark.parametrize(("adapter", "how"), [("Exits", "with status 3"), ("Killed", "with signal 9")])
async def test_a_host_that_dies_in_a_call_is_told_with_its_end(hosts: MakeHost, adapter: str, how: str):
    host = await up(hosts(adapter))
    before = seen(host)
    error = await failure(host)
    assert isinstance(error, StackDied)
    assert error.message.startswith("the host's connection broke during generate")
    assert error.message.endswith(how)
    assert error.blame == Blame.STACK
    assert str(host.log) in error.next_step
    assert adapter != "Exits" or error.log_tail.endswith("the last words of the host")
    assert before.left() == []
    assert isinstance(await failure(host), StackDied), "and stays dead"


@pytest.mark.parametrize("adapter", ["Hangs", "Blocks", "Daemonizes"])
async def test_a_call_that_outlives_its_deadline_ends_the_whole_stack(hosts: MakeHost, adapter: str):
    host = await up(hosts(adapter))
    before = seen(host)
    if adapter == "Daemonizes":
        grandchild = int((host.logs / "grandchild.pid").read_text())
        assert grandchild in [p.pid for p in before.processes]
        assert before.shared_memory
    with pytest.raises(CallTimedOut) as late:
        await host.call("generate", MISBEHAVE, 1)
    assert late.value.message == "generate did not return within 1 s; the stack was killed"
    assert late.value.blame == Blame.STACK
    assert str(host.log) in late.value.next_step
    assert before.left() == []


async def test_a_call_that_waits_for_a_dead_process_is_ended(hosts: MakeHost):
    host = await up(hosts("LosesEngine"))
    error = await failure(host)
    assert isinstance(error, StackDied)
    assert error.message.startswith("engine (pid ")
    assert error.message.endswith("died while generate was waiting")
    assert host.died is not None
    assert host.died in error.message


async def test_a_server_that_is_killed_on_purpose_is_not_missed(hosts: MakeHost):
    host = await up(hosts("LosesServers"))
    await host.call("kill_server", KillServerRequest(server="server-0"), 60)
    assert isinstance(await host.call("generate", GENERATE, 60), Generation)
    assert host.died is None


async def test_the_stacks_own_error_comes_first_and_the_death_is_told_beside_it(hosts: MakeHost):
    host = await up(hosts("LosesEngineAndSays"))
    assert isinstance(await failure(host), CallFailed)
    while host.died is None:  # a killed process takes a moment to disappear
        await host.call("in_flight", Empty(), 20)
    assert host.died.startswith("engine (pid ")


@pytest.mark.parametrize(
    ("adapter", "error", "said"),
    [("NeverStarts", StartFailed, "server-1 is not up"), ("BreaksAtStart", CallFailed, "Refused: no such option")],
)
async def test_a_stack_that_does_not_come_up_says_why(
    hosts: MakeHost, adapter: str, error: type[StackError], said: str
):
    host = hosts(adapter)
    await host.launch()
    with pytest.raises(error, match=said) as failed:
        await host.call("start", start_request(host), 60)
    assert failed.value.blame == Blame.STACK


@pytest.mark.parametrize(
    ("adapter", "python", "said"),
    [
        ("NoSuchAdapter", Path(sys.executable), "has no attribute 'NoSuchAdapter'"),
        ("Toy", Path("/nowhere/python"), "/nowhere/python cannot be run"),
    ],
)
async def test_a_host_that_cannot_start_shows_its_log(hosts: MakeHost, adapter: str, python: Path, said: str):
    host = hosts(adapter, python=python)
    with pytest.raises(StartFailed, match="ended while starting") as failed:
        await host.launch()
    assert said in failed.value.log_tail
    assert str(host.log) in failed.value.next_step


async def test_a_host_that_was_never_launched_leaves_no_scratch_folder(hosts: MakeHost):
    host = hosts()
    assert host.scratch.is_dir()
    await host.close()
    assert not host.scratch.exists()


async def test_the_scratch_folder_is_short_enough_for_sockets(hosts: MakeHost, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp/" + "a-job-with-a-long-name" * 4)
    await up(hosts())


async def test_a_crowd_of_calls_some_of_them_cancelled_leaves_no_connection(hosts: MakeHost):
    """A connection that is left open is garbage later, and a warning in whatever runs then."""
    host = await up(hosts())
    before = psutil.Process().num_fds()
    await asyncio.gather(*(host.call("generate", GENERATE, 60) for _ in range(40)))
    for steps in range(12):
        call = asyncio.create_task(host.call("generate", GENERATE, 60))
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
    await host.call("generate", GENERATE, 60)
    await asyncio.sleep(0)  # a cancelled call closes its connection in the loop's next step
    assert psutil.Process().num_fds() == before


# --- answers that no real socket can give


@contextmanager
def called_through(host: HostProcess, **where: str) -> Iterator[None]:
    """Sends all calls elsewhere. The host's own socket is back afterwards, for the teardown."""
    with mock.patch.object(host, "_connection", side_effect=lambda: httpx.AsyncHTTPTransport(**where)):
        yield


GENERATED = b'{"result": {"response_ids": [[5]], "responses": ["a"], "stop_reasons": ["stop"]}'


UNREADABLE = [
    b"Internal Server Error",
    b"",
    b"{}",
    b"null",
    b"[1, 2]",
    GENERATED,  # its last brace is missing
    b'{"result": {"odd": 1}}',
    b'{"result": null}',
    b'{"result": {"response_ids": "many", "responses": null, "stop_reasons": []}}',
    GENERATED + b', "died": 3}',
    b'{"error": "it failed"}',
    b'{"error": {"error": "CallFailed"}}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("content", UNREADABLE)
async def test_what_is_no_answer_is_never_read_as_one(content: bytes):
    with pytest.raises((msgspec.DecodeError, KeyError)):
        read_answer("generate", content)


@pytest.mark.parametrize(("status", "content"), [(500, UNREADABLE[0]), (200, GENERATED)])
async def test_an_answer_that_cannot_be_read_is_the_harnesss_fault_and_ends_the_stack(
    hosts: MakeHost, status: int, content: bytes, monkeypatch: pytest.MonkeyPatch
):
    host = await up(hosts())
    before = seen(host)
    monkeypatch.setattr("harness.driving.process.DEATH_S", 0.1)
    with respx.mock(base_url="http://host") as wire:
        wire.post("/call/generate").respond(status, content=content)
        said = r"the host's answer to generate .* cannot be read"
        with called_through(host), pytest.raises(StackDied, match=said) as broken:
            await host.call("generate", GENERATE, 60)
    assert broken.value.blame == Blame.HARNESS
    assert before.left() == []


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        ({"error": "NotOffered"}, NotOffered, "does not offer 'so'"),
        ({"error": "StartFailed"}, StartFailed, "so"),
        ({"error": "StackDied"}, StackDied, "so"),
        ({"error": "StackDied", "blame": "dependency"}, StackDied, "so"),
        ({"error": "CallFailed", "status": 400}, CallFailed, "Odd: so"),
        ({"error": "SomethingNew"}, CallFailed, "Odd: so"),
    ],
)
async def test_every_kind_of_reply_has_its_error(tmp_path: Path, reply: dict, error: type[StackError], said: str):
    content = msgspec.json.encode({"error": {"kind": "Odd", "message": "so"} | reply})
    answered = read_answer("generate", content)
    assert (answered.result, answered.died) == (None, None)
    assert answered.error is not None
    made = as_stack_error(answered.error, tmp_path / "host.log")
    assert type(made) is error
    assert said in made.message
    assert made.blame == reply.get("blame", error.blame)


async def test_a_result_may_come_with_word_of_a_death_which_is_not_forgotten(hosts: MakeHost):
    host = await up(hosts())
    with respx.mock(base_url="http://host") as wire:
        wire.post("/call/generate").mock(
            side_effect=[
                httpx.Response(200, content=GENERATED + b', "died": "no engine of ours (pid 1) died"}'),
                httpx.Response(200, content=GENERATED + b"}"),
            ]
        )
        with called_through(host):
            for _ in range(2):
                assert isinstance(await host.call("generate", GENERATE, 60), Generation)
                assert host.died == "no engine of ours (pid 1) died"


async def test_a_broken_connection_of_a_living_host_ends_it(hosts: MakeHost, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.driving.process.DEATH_S", 0.1)
    host = await up(hosts())
    before = seen(host)
    with respx.mock(base_url="http://host") as wire:
        wire.post("/call/generate").mock(side_effect=httpx.RemoteProtocolError("half an answer"))
        with (
            called_through(host),
            pytest.raises(StackDied, match=r"connection broke during generate \(RemoteProtocolError\)"),
        ):
            await host.call("generate", GENERATE, 60)
    assert before.left() == []


# --- real sockets that misbehave


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answered_by(host: HostProcess, answer: Answer, path: Path) -> AsyncIterator[None]:
    """Redirects all calls to the host to another socket, on which `answer` writes the answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        writer.close()

    async with await asyncio.start_unix_server(serve, path=path):
        with called_through(host, uds=str(path)):
            yield


def half(length: int) -> Answer:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length + GENERATED)
        await writer.drain()

    return answer


async def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    writer.transport.abort()


async def hang_up(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Closes the connection without an answer."""


async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 smtp ready\r\n")
    await writer.drain()


async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends an endless answer, byte by byte."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (half(1000), "RemoteProtocolError"),
        (reset, "Error"),
        (hang_up, "RemoteProtocolError"),
        (babble, "ProtocolError"),
    ],
    ids=["half a body", "reset", "hangs up", "no HTTP"],
)
async def test_a_connection_that_breaks_in_an_answer_ends_the_stack_by_name(
    hosts: MakeHost, tmp_path: Path, answer: Answer, how: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("harness.driving.process.DEATH_S", 0.1)
    host = await up(hosts())
    before = seen(host)
    async with answered_by(host, answer, tmp_path / "s"):
        with pytest.raises(StackDied, match=rf"connection broke during generate \(\w*{how}\)"):
            await host.call("generate", GENERATE, 30)
    assert before.left() == []


async def test_an_answer_that_never_stops_coming_does_not_outlive_the_deadline(hosts: MakeHost, tmp_path: Path):
    host = await up(hosts())
    before = seen(host)
    async with answered_by(host, drip, tmp_path / "s"):
        with pytest.raises(CallTimedOut, match="generate did not return within 1 s"):
            await host.call("generate", GENERATE, 1)
    assert before.left() == []


async def test_a_large_request_crosses_the_socket_whole(hosts: MakeHost):
    host = await up(hosts())
    prompts = [[n % 200 + 3 for n in range(length)] for length in (1, 500_000, 1_000_000)]
    request = GenerateRequest(prompt_token_ids=prompts, sampling_params={"max_tokens": 1})
    assert len(msgspec.json.encode(request)) > 5_000_000
    answer = await host.call("generate", request, 120)
    assert [len(row) for row in answer.response_ids] == [1, 1, 1]


async def test_a_large_answer_crosses_the_socket_whole(hosts: MakeHost, tmp_path: Path):
    large = Generation(response_ids=[[7] * 5_000_000], responses=["a" * 5_000_000], stop_reasons=["length"])
    body = b'{"result": ' + msgspec.json.encode(large) + b"}"

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    host = await up(hosts())
    async with answered_by(host, answer, tmp_path / "s"):
        assert await host.call("generate", GENERATE, 60) == large


async def test_a_host_that_is_killed_from_outside_ends_every_call_that_waits_for_it(hosts: MakeHost):
    host = await up(hosts("Hangs"))
    before = seen(host)
    waiting = [asyncio.create_task(host.call("generate", MISBEHAVE, 600)) for _ in range(3)]
    while (await host.call("in_flight", Empty(), 20)).requests < 3:
        await asyncio.sleep(0.01)
    (process,) = psutil.Process(host._supervisor.pid).children()
    process.kill()
    ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert [type(end) for end in ends] == [StackDied] * 3
    assert all("with signal 9" in str(end) for end in ends)
    assert before.left() == []
