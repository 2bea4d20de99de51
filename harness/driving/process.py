"""The processes of one stack: a host below its supervisor, called over a Unix socket. Every death is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import httpx
import msgspec

from harness import PROJECT
from harness.contract.errors import (
    Blame,
    CallFailed,
    CallTimedOut,
    NotFree,
    NotOffered,
    StackDied,
    StackError,
    StartFailed,
)
from harness.contract.messages import Empty, Message
from harness.contract.runtime import Runtime
from harness.driving.host import CALLS, ErrorReply
from harness.driving.supervisor import END, FREE, GRACE_S, TAKEN, YOURS, Farewell, Job
from harness.machine.interpreters import KEPT_BYTECODE
from harness.machine.kept import Kept
from harness.machine.processes import Usage, marked, usage_below
from harness.records.recording import Raw

SOCKET_DEADLINE_S = 60.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""httpx wants one for each transport, also for those that need none, and takes a third of a millisecond to make it."""
FAREWELL_DEADLINE_S = 30.0
DEATH_S = 5.0
"""Seconds to wait for the end of a host whose connection broke, so that its exit status is known."""
LONGEST_TMPDIR = 20
"""Most characters of a usable temporary folder. Stacks add up to 87 to a socket's path, and Linux allows 107."""
LOG_TAIL_LINES = 25
TEARDOWN_DEADLINE_S = 20.0


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, or an empty string if there is no log."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """A host's answer: a result or an error, what the stack's client returned, and the dead process of the stack, if any."""

    result: Message | None = None
    error: ErrorReply | None = None
    raw: list[Raw] = []
    died: str | None = None


def read_answer(method: str, content: bytes) -> Answered:
    """Decode an answer of `harness.driving.host.Host`. Raises DecodeError or KeyError if it is malformed."""
    envelope = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    died = msgspec.json.decode(envelope["died"], type=str) if "died" in envelope else None
    raw = msgspec.json.decode(envelope["raw"], type=list[Raw]) if "raw" in envelope else []
    if "result" in envelope:
        return Answered(result=msgspec.json.decode(envelope["result"], type=CALLS[method][1]), raw=raw, died=died)
    return Answered(error=msgspec.json.decode(envelope["error"], type=ErrorReply), raw=raw, died=died)


def as_stack_error(reply: ErrorReply, log: Path) -> StackError:
    """The error for a host's error reply. `log` is the stack's log."""
    match reply.error:
        case "NotOffered":
            return NotOffered(reply.message)
        case "StartFailed" | "StackDied":
            kind = StartFailed if reply.error == "StartFailed" else StackDied
            error = kind(reply.message, log_tail=log_tail(log), next_step=reply.next_step or f"read {log}")
            error.blame = reply.blame or kind.blame
            return error
        case _:
            return CallFailed(
                reply.kind, reply.message, status=reply.status, place=reply.place, log_tail=reply.trace[-4000:]
            )


class Supervisor(Protocol):
    """The driver's hold on a supervisor."""

    pid: int

    @property
    def ended(self) -> bool: ...

    def wait(self, seconds: float) -> None:
        """Return when it has ended, or after this number of seconds."""

    def end(self) -> Farewell:
        """End everything below it, now. Raises a plain `StackError` if it does not finish."""


def _start(job: Job, environment: dict[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "harness.driving.supervisor", msgspec.json.encode(job).decode()],
        env={**os.environ, **environment},
        start_new_session=True,
        cwd=PROJECT,
        **streams,
    )


def _farewell(output: bytes, exit_code: int | None = None) -> Farewell:
    lines = output.splitlines()
    if lines and b"exit_code" in lines[-1]:
        return msgspec.json.decode(lines[-1], type=Farewell)
    return Farewell(exit_code=exit_code, killed=[], shared_memory=[])


def _unfinished() -> StackError:
    return StackError(
        f"the supervisor did not finish cleaning up in {FAREWELL_DEADLINE_S:.0f} s",
        next_step="look for leftover processes with `parity doctor`",
    )


class Child:
    """A supervisor whose standard input is its lifeline."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self._process = _start(job, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self) -> Farewell:
        if self._process.stdin is not None:
            self._process.stdin.close()
            self._process.stdin = None  # communicate() must not flush it again
        try:
            output, _ = self._process.communicate(timeout=FAREWELL_DEADLINE_S)
        except subprocess.TimeoutExpired as e:
            self._process.kill()
            raise _unfinished() from e
        return _farewell(output, self._process.returncode)


class Holder:
    """Holds the lifeline of a supervisor that outlives its drivers (`harness.driving.supervisor.Reachable`).

    Raises `NotFree` if another driver holds it, or nobody answers.
    """

    def __init__(self, pid: int, lifeline: Path) -> None:
        self.pid = pid
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(FAREWELL_DEADLINE_S)
        try:
            self._connection.connect(str(lifeline))
            word, _, self.handed_over = self._connection.makefile("rb").readline().rstrip(b"\n").partition(b" ")
        except OSError:
            word = b""
        if word != YOURS:
            self._connection.close()
            how = f"another driver (pid {self.handed_over.decode()}) has it" if word == TAKEN else "it has just ended"
            raise NotFree(how, next_step="wait for that driver, or start it again")

    @classmethod
    def started(cls, job: Job, environment: dict[str, str]) -> Holder:
        """The lifeline of a new supervisor. Raises `StartFailed` if it does not open its socket."""
        with Path(job.log).open("ab") as log:
            process = _start(job, environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + SOCKET_DEADLINE_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(NotFree):
                held = cls(process.pid, Path(job.lifeline))
                process.returncode = 0  # it outlives this process, which does not wait for it
                return held
            time.sleep(0.05)
        process.kill()
        raise StartFailed("the supervisor did not open its socket", next_step=f"read {job.log}")

    @property
    def ended(self) -> bool:
        return self._news(0)

    def wait(self, seconds: float) -> None:
        self._news(seconds)

    def _news(self, seconds: float) -> bool:
        """True if the farewell or the connection's end has come."""
        return self._connection.fileno() == -1 or bool(select.select([self._connection], [], [], seconds)[0])

    def end(self) -> Farewell:
        output = b""
        with self._connection as connection, contextlib.suppress(ConnectionError):
            connection.sendall(END + b"\n")
            connection.settimeout(FAREWELL_DEADLINE_S)
            try:
                while said := connection.recv(65_536):
                    output += said
            except TimeoutError as e:
                raise _unfinished() from e
        return _farewell(output)

    def free(self, condition: bytes) -> None:
        """Leave the stack to the next driver."""
        with self._connection:
            self._connection.sendall(b"%s %s\n" % (FREE, condition))


class HostHandle(Protocol):
    """The driver's end of a host, in a process of its own (`HostProcess`) or in the driver's (`harness.driving.inline`)."""

    died: str | None
    """A dead process that the stack needs, from the host's latest report of one."""

    @property
    def ended(self) -> bool:
        """True if the host was killed or taken down."""

    async def launch(self) -> None: ...

    async def call(self, method: str, request: Message, deadline_s: float, raw: list[Raw] | None = None) -> Any:
        """The typed result of one call of the contract. What the stack's client returned is added to `raw`. Raises a `StackError`."""

    def usage(self) -> Usage | None:
        """Memory and processor time of everything below it; None if it has no process of its own."""

    async def end(self) -> None:
        """Kill it now, with everything below it."""

    outlives: bool
    """True if `close` leaves the host running."""

    @property
    def handed_over(self) -> bytes:
        """The condition in which the last driver of a kept stack left it; empty for a stack of one's own."""

    async def close(self, condition: bytes = b"") -> Farewell | None: ...


class HostProcess:
    """One adapter in its own process group and environment, below a supervisor.

    `python` is the interpreter of the target's environment, `adapter` "module:Class", `variables` the target's additions
    to the environment, `runtime` its processes' needs. `logs` is kept, the scratch folder is not. `run` is the run's folder, `front`
    are folders with modules that replace those of the environment. With `idle_s` the host outlives its driver, and ends when it had
    none for so many seconds.
    """

    def __init__(
        self,
        *,
        python: Path,
        adapter: str,
        variables: dict[str, str],
        logs: Path,
        runtime: Runtime | None = None,
        run: Path | None = None,
        front: Sequence[Path] = (),
        idle_s: float | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.logs = logs
        self._front = front
        self._run = run or logs
        usual = tempfile.gettempdir()
        self.scratch = scratch or Path(
            tempfile.mkdtemp(prefix="parity-", dir=usual if len(usual) <= LONGEST_TMPDIR else "/tmp")
        )
        self.died: str | None = None
        """As in `HostHandle`."""
        self._socket, self.lifeline = self.scratch / "host.sock", self.scratch / "lifeline.sock"
        self._python, self._adapter, self._variables = python, adapter, variables
        self._runtime = runtime or Runtime()
        self._idle_s = idle_s
        self.outlives = False
        """As in `HostHandle`."""
        self._supervisor: Supervisor | None = None
        self._watch: asyncio.Task[None] | None = None
        """Ends with the host. One for all calls: thousands may be in flight."""
        self._farewell: Farewell | None = None
        self._ending = threading.Lock()

    @classmethod
    def of_kept(cls, kept: Kept) -> Self:
        """A host that an earlier driver started and kept. Raises `NotFree`."""
        host = cls(
            python=Path(),
            adapter=kept.adapter,
            variables={},
            logs=Path(kept.request.logs),
            scratch=Path(kept.request.scratch),
        )
        host._supervisor = Holder(kept.supervisor, kept.lifeline)
        host.outlives = True
        return host

    @property
    def handed_over(self) -> bytes:
        return self._supervisor.handed_over if isinstance(self._supervisor, Holder) else b""

    @property
    def supervisor(self) -> int:
        """The supervisor's pid."""
        assert self._supervisor is not None, "launch comes first"
        return self._supervisor.pid

    @property
    def log(self) -> Path:
        return self.logs / "host.log"

    @property
    def ended(self) -> bool:
        return self._farewell is not None

    async def launch(self) -> None:
        """Start supervisor and host and wait until the socket answers. Raises `StartFailed`.

        A kept host runs already.
        """
        if self._supervisor is None:
            self.logs.mkdir(parents=True, exist_ok=True)
            start = Child if self._idle_s is None else Holder.started
            self._supervisor = start(self._job(), marked(self._run, kept=self._idle_s is not None))
        deadline = time.monotonic() + SOCKET_DEADLINE_S
        while time.monotonic() < deadline:
            if self._supervisor.ended:
                raise StartFailed(
                    f"the host of {self._adapter} ended while starting",
                    log_tail=log_tail(self.log),
                    next_step=f"read {self.log}",
                )
            try:
                async with asyncio.timeout(5):
                    await self._answer("GET", "/alive")
            except (httpx.TransportError, TimeoutError):
                await asyncio.sleep(0.05)
            else:
                return
        raise StartFailed(
            f"the host of {self._adapter} did not open its socket in {SOCKET_DEADLINE_S:.0f} s",
            log_tail=log_tail(self.log),
            next_step=f"read {self.log}",
        )

    def _job(self) -> Job:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_", "VIRTUAL_ENV"))}
        environment |= {
            **KEPT_BYTECODE,
            **self._variables,
            "PYTHONPATH": os.pathsep.join(
                dict.fromkeys(map(str, (PROJECT, PROJECT / self._runtime.import_path, *self._front)))
            ),
            "PYTHONUNBUFFERED": "1",
            **marked(self._run, kept=self._idle_s is not None),
            "TMPDIR": str(self.scratch),
        }
        environment.pop("PYTHONHOME", None)
        if self._runtime.cache_variable:
            environment[self._runtime.cache_variable] = str(PROJECT / ".parity" / "cache" / self._python.parts[-3])
        command = [
            str(self._python),
            "-m",
            "harness.driving.host",
            "--adapter",
            self._adapter,
            "--socket",
            str(self._socket),
        ]
        return Job(
            command=command,
            environment=environment,
            log=str(self.log),
            scratch=str(self.scratch),
            keep=str(self.logs),
            more_logs=self._runtime.logs,
            grace_s=GRACE_S,
            lifeline="" if self._idle_s is None else str(self.lifeline),
            idle_s=self._idle_s or 0.0,
        )

    async def call(self, method: str, request: Message, deadline_s: float, raw: list[Raw] | None = None) -> Any:
        """The typed result of one call of the contract, as in `HostHandle`. Raises a `StackError` for any failure.

        After `deadline_s` seconds it kills the host with all its processes: a later answer would be useless.
        """
        assert self._supervisor is not None, "launch comes first"
        answer = asyncio.ensure_future(self._answer("POST", f"/call/{method}", msgspec.json.encode(request)))
        if self._watch is None:
            self._watch = asyncio.create_task(self._until_ended())
        ended = self._watch
        try:
            await asyncio.wait({answer, ended}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                if ended.done():
                    raise self._death(f"the host died during {method}")
                self.kill()
                raise CallTimedOut(
                    f"{method} did not return within {deadline_s:.0f} s; the stack was killed",
                    log_tail=log_tail(self.log),
                    next_step=f"read {self.log} and the stack's logs beside it",
                )
            try:
                reply = answer.result()
            except httpx.RequestError as e:
                raise self._death(f"the host's connection broke during {method} ({type(e).__name__})") from e
        finally:
            answer.cancel()
        try:
            answered = read_answer(method, reply.content)
        except (msgspec.DecodeError, KeyError) as e:
            broken = self._death(f"the host's answer to {method} (HTTP {reply.status_code}) cannot be read: {e}")
            broken.blame = Blame.HARNESS
            raise broken from e
        self.died = answered.died or self.died
        if raw is not None:
            raw += answered.raw
        if answered.error is not None:
            raise as_stack_error(answered.error, self.log)
        return answered.result

    async def _answer(self, verb: str, path: str, body: bytes = b"") -> httpx.Response:
        """The host's answer, by a connection of its own.

        A pool would keep those that a crowd of calls leaves, and would close them all in one later call. If the caller of that one is
        cancelled meanwhile, the rest of them stays open (httpcore 1.0.9, AsyncConnectionPool._close_connections).
        """
        async with self._connection() as connection:
            answer = await connection.handle_async_request(httpx.Request(verb, f"http://host{path}", content=body))
            await answer.aread()
            return answer

    def _connection(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(uds=str(self._socket), verify=_NO_TLS)

    async def _until_ended(self) -> None:
        assert self._supervisor is not None
        while not self._supervisor.ended:
            await asyncio.sleep(0.1)

    def _death(self, what: str) -> StackDied:
        if self._supervisor is not None:
            self._supervisor.wait(DEATH_S)  # it sees the host's end and its exit status
        farewell = self.kill()
        code = None if farewell is None else farewell.exit_code
        how = "" if code is None else f" with signal {-code}" if code < 0 else f" with status {code}"
        return StackDied(f"{what}{how}", log_tail=log_tail(self.log), next_step=f"read {self.log}")

    def kill(self) -> Farewell | None:
        """End everything below the supervisor, now. Idempotent. Returns the supervisor's report.

        Raises a plain `StackError` if the supervisor does not finish. No other stack should start then.
        """
        with self._ending:
            return self._kill()

    def _kill(self) -> Farewell | None:
        if self._supervisor is not None and self._farewell is None:
            self._farewell = self._supervisor.end()
        return self._farewell

    def usage(self) -> Usage | None:
        return None if self._supervisor is None or self.ended else usage_below(self._supervisor.pid)

    async def end(self) -> None:
        await asyncio.to_thread(self.kill)

    async def close(self, condition: bytes = b"") -> Farewell | None:
        """Stop the stack in an orderly way, then kill what is left. A kept one is left to its next driver, in this condition."""
        running = self._supervisor is not None and not self._supervisor.ended and self._farewell is None
        if running and not self.outlives:
            try:
                await self.call("teardown", Empty(), TEARDOWN_DEADLINE_S)
            except StackError as e:
                with self.log.open("a") as log:
                    print(f"[driver] teardown: {e}", file=log)
        if self._watch is not None:
            self._watch.cancel()
        if running and self.outlives and isinstance(self._supervisor, Holder):
            self._supervisor.free(condition)
            return None
        farewell = await asyncio.to_thread(self.kill)
        shutil.rmtree(self.scratch, ignore_errors=True)  # still there if the host was never launched
        return farewell
