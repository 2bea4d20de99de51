"""The processes of one stack: a host below its supervisor, called over a Unix socket. Every death is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from harness import PROJECT
from harness.contract.errors import Blame, CallFailed, CallTimedOut, NotOffered, StackDied, StackError, StartFailed
from harness.contract.messages import Empty, Message
from harness.contract.runtime import Runtime
from harness.driving.host import CALLS, ErrorReply
from harness.driving.supervisor import GRACE_S, Farewell, Job
from harness.machine.interpreters import KEPT_BYTECODE
from harness.machine.processes import Usage, marked, usage_below
from harness.records.recording import Raw

SOCKET_DEADLINE_S = 60.0
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
            return CallFailed(reply.kind, reply.message, status=reply.status, log_tail=reply.trace[-4000:])


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

    async def close(self) -> Farewell | None: ...


class HostProcess:
    """One adapter in its own process group and environment, below a supervisor.

    `python` is the interpreter of the target's environment, `adapter` "module:Class", `variables` the target's additions
    to the environment, `runtime` its processes' needs. `logs` is kept, the scratch folder is not. `run` is the run's folder, `front`
    are folders with modules that replace those of the environment.
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
    ) -> None:
        self.logs = logs
        self._front = front
        self._run = run or logs
        usual = tempfile.gettempdir()
        self.scratch = Path(tempfile.mkdtemp(prefix="parity-", dir=usual if len(usual) <= LONGEST_TMPDIR else "/tmp"))
        self.died: str | None = None
        """As in `HostHandle`."""
        self._socket = self.scratch / "host.sock"
        self._python, self._adapter, self._variables = python, adapter, variables
        self._runtime = runtime or Runtime()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._client: httpx.AsyncClient | None = None
        self._farewell: Farewell | None = None
        self._ending = threading.Lock()

    @property
    def log(self) -> Path:
        return self.logs / "host.log"

    @property
    def ended(self) -> bool:
        return self._farewell is not None

    async def launch(self) -> None:
        """Start supervisor and host and wait until the socket answers. Raises `StartFailed`."""
        self.logs.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_", "VIRTUAL_ENV"))}
        environment |= {
            **KEPT_BYTECODE,
            **self._variables,
            "PYTHONPATH": os.pathsep.join(
                dict.fromkeys(map(str, (PROJECT, PROJECT / self._runtime.import_path, *self._front)))
            ),
            "PYTHONUNBUFFERED": "1",
            **marked(self._run),
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
        job = Job(
            command=command,
            environment=environment,
            log=str(self.log),
            scratch=str(self.scratch),
            keep=str(self.logs),
            more_logs=self._runtime.logs,
            grace_s=GRACE_S,
        )
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "harness.driving.supervisor", msgspec.json.encode(job).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **marked(self._run)},
            start_new_session=True,
            cwd=PROJECT,
        )
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self._socket), limits=httpx.Limits(max_connections=None)),
            base_url="http://host",
            timeout=None,
        )
        deadline = time.monotonic() + SOCKET_DEADLINE_S
        while time.monotonic() < deadline:
            if self._supervisor.poll() is not None:
                raise StartFailed(
                    f"the host of {self._adapter} ended while starting",
                    log_tail=log_tail(self.log),
                    next_step=f"read {self.log}",
                )
            try:
                await self._client.get("/alive", timeout=5)
            except httpx.TransportError:
                await asyncio.sleep(0.05)
            else:
                return
        raise StartFailed(
            f"the host of {self._adapter} did not open its socket in {SOCKET_DEADLINE_S:.0f} s",
            log_tail=log_tail(self.log),
            next_step=f"read {self.log}",
        )

    async def call(self, method: str, request: Message, deadline_s: float, raw: list[Raw] | None = None) -> Any:
        """The typed result of one call of the contract, as in `HostHandle`. Raises a `StackError` for any failure.

        After `deadline_s` seconds it kills the host with all its processes: a later answer would be useless.
        """
        assert self._client is not None, "launch comes first"
        body = msgspec.json.encode(request)
        answer = asyncio.ensure_future(self._client.post(f"/call/{method}", content=body))
        ended = asyncio.ensure_future(self._until_ended())
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
            ended.cancel()
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

    async def _until_ended(self) -> None:
        assert self._supervisor is not None
        while self._supervisor.poll() is None:
            await asyncio.sleep(0.1)

    def _death(self, what: str) -> StackDied:
        if self._supervisor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(DEATH_S)  # the supervisor sees the host's end and its exit status
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
        if self._supervisor is None or self._farewell is not None:
            return self._farewell
        if self._supervisor.stdin is not None:
            self._supervisor.stdin.close()
            self._supervisor.stdin = None  # communicate() must not flush it again
        try:
            output, _ = self._supervisor.communicate(timeout=FAREWELL_DEADLINE_S)
        except subprocess.TimeoutExpired as e:
            self._supervisor.kill()
            raise StackError(
                f"the supervisor did not finish cleaning up in {FAREWELL_DEADLINE_S:.0f} s",
                next_step="look for leftover processes with `parity doctor`",
            ) from e
        lines = output.splitlines()
        self._farewell = (
            msgspec.json.decode(lines[-1], type=Farewell)
            if lines and b"exit_code" in lines[-1]
            else Farewell(exit_code=self._supervisor.returncode, killed=[], shared_memory=[])
        )
        return self._farewell

    def usage(self) -> Usage | None:
        return None if self._supervisor is None or self.ended else usage_below(self._supervisor.pid)

    async def end(self) -> None:
        await asyncio.to_thread(self.kill)

    async def close(self) -> Farewell | None:
        """Stop the stack in an orderly way, then kill what is left."""
        if self._supervisor is not None and self._supervisor.poll() is None and self._farewell is None:
            try:
                await self.call("teardown", Empty(), TEARDOWN_DEADLINE_S)
            except StackError as e:
                with self.log.open("a") as log:
                    print(f"[driver] teardown: {e}", file=log)
        if self._client is not None:
            await self._client.aclose()
        farewell = await asyncio.to_thread(self.kill)
        shutil.rmtree(self.scratch, ignore_errors=True)  # still there if the host was never launched
        return farewell
