"""The driver's handle on a host: the same contract, every call recorded, every hang and death named.

`HostProcess` owns the processes. `Stack` is what a scenario gets: it turns words into requests, keeps to deadlines and
records. It imports nothing of a stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import httpx
import msgspec

from harness import PROJECT
from harness.contract.capability import Capability
from harness.contract.clock import monotonic, now_ns
from harness.contract.errors import (
    Blame,
    CallFailed,
    CallTimedOut,
    HarnessError,
    MissedMoment,
    NotOffered,
    StackDied,
    StackError,
    StartFailed,
)
from harness.contract.messages import (
    DATA_PLANE,
    Description,
    DetokenizeRequest,
    DetokenizeResult,
    DeviceMemoryResult,
    DigestsResult,
    Empty,
    GenerateRequest,
    Generation,
    GymOutput,
    GymRequest,
    HealthResult,
    HttpRequest,
    HttpResponse,
    InFlightResult,
    InjectRequest,
    InjectResult,
    IsPausedResult,
    KillServerRequest,
    Layout,
    LoadLoraRequest,
    Message,
    ObserveRequest,
    ObserveResult,
    OpenAIRequest,
    OpenAIResponse,
    PauseMode,
    PauseRequest,
    ProbeSecurityResult,
    ResetPrefixCacheRequest,
    RolloutRequest,
    SampleRequest,
    SessionId,
    SleepRequest,
    StalenessRequest,
    StartRequest,
    SyncWeightsRequest,
    TokenizeRequest,
    TokenizeResult,
    TrainedRequest,
    TrainRequest,
    TrainResult,
    UnloadLoraRequest,
    WakeUpRequest,
    WorkerDescription,
    WorkerMemory,
    WorkersResult,
    WorldSizeResult,
    capabilities_of,
)
from harness.contract.runtime import Runtime
from harness.contract.topology import Topology
from harness.contract.vocabulary import TINY, Vocabulary
from harness.driving import allowance
from harness.driving.host import CALLS, ErrorReply
from harness.driving.supervisor import Farewell, Job
from harness.machine.logs import LatestStage
from harness.machine.progress import Progress, Say
from harness.records.recording import (
    Call,
    CallError,
    Event,
    Mark,
    Observation,
    Recorder,
    ScenarioEnd,
    ScenarioStart,
    ScenarioTrace,
)

START_GRACE_S = 30.0
"""How much longer than the adapter the driver waits for a start: the adapter says which part is not up."""
TELL_EVERY_S = 20.0
"""How often a start that lasts says what the stack is doing."""
JOIN_DEADLINE_S = 90.0
SOCKET_DEADLINE_S = 60.0
TEARDOWN_DEADLINE_S = 20.0
FAREWELL_DEADLINE_S = 30.0
MOST_ATTEMPTS = 3
"""How often a scenario is begun whose requests end before they are caught in flight."""
LAST_WORD_S = 1.0
"""How much longer than its calls a scenario may take: what was waited for says more than that time was up."""
DEATH_S = 5.0
"""How long a host whose connection broke may take to be gone: then its exit status is known."""
LONGEST_TMPDIR = 20
"""Characters. A stack's sockets lie up to 87 below the temporary folder, and a socket's path has 107 at most (Linux)."""
CLEAN_ROOM_DEADLINE_S = 60.0
CLEAN_ROOM_PASSES = 2
"""A clean room may sync the weights, and hashes them."""
OBSERVE_DEADLINE_S = 20.0
CANARY_S = 0.02
"""How long the canary, an answer of one token, takes with a tiny model on two busy cores; SmolLM2 takes 0.12. Deadlines fit this."""
LOG_TAIL_LINES = 25
CANCEL_DEADLINE_S = 10.0
"""How long what a scenario left running may take to end once it is cancelled."""

T = TypeVar("T")
R = TypeVar("R", bound=Message)


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, or an empty string where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What a host said: a result or an error, and which process of the stack is dead, if one is."""

    result: Message | None = None
    error: ErrorReply | None = None
    died: str | None = None


def read_answer(method: str, content: bytes) -> Answered:
    """An answer of `harness.driving.host.Host`. Raises DecodeError or KeyError for what is none."""
    envelope = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    died = msgspec.json.decode(envelope["died"], type=str) if "died" in envelope else None
    if "result" in envelope:
        return Answered(result=msgspec.json.decode(envelope["result"], type=CALLS[method][1]), died=died)
    return Answered(error=msgspec.json.decode(envelope["error"], type=ErrorReply), died=died)


def as_stack_error(reply: ErrorReply, log: Path) -> StackError:
    """The error that stands for a host's reply. `log` is the stack's."""
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
    """A process that the stack cannot do without and that is gone, as the host's latest answer said."""

    @property
    def ended(self) -> bool:
        """Was it killed, or taken down?"""

    async def launch(self) -> None: ...

    async def call(self, method: str, request: Message, deadline_s: float) -> Any: ...

    async def end(self) -> None:
        """Kill it now, with everything below it."""

    async def close(self) -> Farewell | None: ...


class HostProcess:
    """One adapter in its own process group and environment, below a supervisor.

    `python` is the interpreter of the target's environment, `adapter` "module:Class", `variables` what the target adds
    to the environment, `runtime` what its processes need of the machine. `logs` is kept, the scratch folder is not.
    """

    def __init__(
        self, *, python: Path, adapter: str, variables: dict[str, str], logs: Path, runtime: Runtime | None = None
    ) -> None:
        self.logs = logs
        usual = tempfile.gettempdir()
        self.scratch = Path(tempfile.mkdtemp(prefix="parity-", dir=usual if len(usual) <= LONGEST_TMPDIR else "/tmp"))
        self.died: str | None = None
        """A process that the stack cannot do without and that is gone, as the host's latest answer said."""
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
            **self._variables,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys((str(PROJECT), str(PROJECT / self._runtime.import_path)))),
            "PYTHONUNBUFFERED": "1",
            "PARITY_MARKER": secrets.token_hex(8),
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
        )
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "harness.driving.supervisor", msgspec.json.encode(job).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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

    async def call(self, method: str, request: Message, deadline_s: float) -> Any:
        """One call of the contract; its typed result. Raises a `StackError` for every other end.

        After `deadline_s` seconds the host is killed with all its processes: what it would still do is of no use.
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
                self._supervisor.wait(DEATH_S)  # it sees the host's end by itself, and how it ended
        farewell = self.kill()
        code = None if farewell is None else farewell.exit_code
        how = "" if code is None else f" with signal {-code}" if code < 0 else f" with status {code}"
        return StackDied(f"{what}{how}", log_tail=log_tail(self.log), next_step=f"read {self.log}")

    def kill(self) -> Farewell | None:
        """End everything below the supervisor, now. Idempotent; returns what the supervisor had to do.

        Raises a plain `StackError` if that cannot be done: no other stack should be started then.
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

    async def end(self) -> None:
        await asyncio.to_thread(self.kill)

    async def close(self) -> Farewell | None:
        """Take the stack down in an orderly way, then kill what is left."""
        if self._supervisor is not None and self._supervisor.poll() is None and self._farewell is None:
            try:
                await self.call("teardown", Empty(), TEARDOWN_DEADLINE_S)
            except StackError as e:
                with self.log.open("a") as log:
                    print(f"[driver] teardown: {e}", file=log)
        if self._client is not None:
            await self._client.aclose()
        farewell = await asyncio.to_thread(self.kill)
        shutil.rmtree(self.scratch, ignore_errors=True)  # there still, if it was never launched
        return farewell


class Stack:
    """What a scenario gets: the contract in words. All calls are recorded, failed ones raise a `StackError`.

    Token ids are ints; `session_ids` has one entry a prompt; `label` names a call for the checks.
    """

    def __init__(
        self,
        host: HostHandle,
        request: StartRequest,
        vocabulary: Vocabulary = TINY,
        stages: Mapping[str, str] | None = None,
    ) -> None:
        """`stages`: as of `Runtime`."""
        self._host = host
        self._stages = stages or {}
        self._request = request
        self.vocabulary = vocabulary
        """What the model's tokens are."""
        self._recorder: Recorder | None = None
        self._phase: str = "scenario"
        self._calls = 0
        self._deadline = float("inf")
        self._version: int | None = None
        self._paused = False
        self._adapters: set[str] = set()
        self._may_spoil = False
        """Does the scenario that is driven declare that it breaks the stack?"""
        self._spoiled = False
        self._killed = False
        """A scenario killed a server: that something died is no news."""
        self._left = False
        """A sync failed: the trainer has to join again (`prepare_weight_sync`)."""
        self._scenario = ""
        self._abandoned: dict[tuple[int, ...], str] = {}
        """Prompts of batches that failed, and in which scenario: their other rows may reach an engine at any time."""
        self._generating = 0
        """Calls of the data plane, counted when they begin; `_pending` are those that have not ended."""
        self._pending = 0
        self._canary_seed = 0
        self._slowness = 1.0
        """By how much every deadline is longer: what the last canary took, in units of `CANARY_S`, at least 1."""
        self._for_weights_s = allowance.for_weights(request.model_path)
        """What one pass over all weights may add to a deadline."""
        self._allowed_s: float | None = None
        """How long the scenario that is driven may take."""
        self._events: list[Event] = []
        self.description: Description | None = None

    # --- lifecycle, for the plugin

    async def start(self, progress: Progress) -> Description:
        """Launch the host and the stack in it. `progress` is told what is being waited for."""
        with progress(f"{self._request.target}: starting its host"):
            await self._host.launch()
        what = f"{self._request.topology.name} ({self._request.start}, {self._request.engine})"
        deadline_s = self._request.deadline_s + START_GRACE_S + self._for_weights_s
        with progress(f"{self._request.target}: starting {what}") as say:
            async with self._telling(say):
                self.description = await self._host.call("start", self._request, deadline_s)
        if Capability.WEIGHT_SYNC in self.capabilities:
            with progress(f"{self._request.target}: joining trainer and workers for weight sync"):
                await self._host.call("prepare_weight_sync", Empty(), JOIN_DEADLINE_S)
        return self.description

    @contextlib.asynccontextmanager
    async def _telling(self, say: Say) -> AsyncIterator[None]:
        """While the block runs, say every `TELL_EVERY_S` what the stack's logs tell of its start."""
        stage = LatestStage(Path(self._request.logs), self._stages)

        async def tell() -> None:
            while self._stages:
                await asyncio.sleep(TELL_EVERY_S)
                say(stage())

        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            telling.cancel()

    async def close(self) -> Farewell | None:
        return await self._host.close()

    def record_to(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def topology(self) -> Topology:
        return self._request.topology

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset() if self.description is None else frozenset(self.description.capabilities)

    @property
    def slowness(self) -> float:
        """How many times longer than for the tiny model on two busy cores a token took when it was last measured; at least 1."""
        return self._slowness

    @property
    def pending(self) -> int:
        """Calls of the data plane that have begun and not ended."""
        return self._pending

    @property
    def servers(self) -> list[str]:
        """Names of the servers, in the stack's own order."""
        return [] if self.description is None else [server.name for server in self.description.servers]

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self._request.model_path

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._request.max_model_len

    async def drive(
        self,
        name: str,
        take: int,
        deadline_s: float,
        scenario: Callable[[], Awaitable[None]],
        *,
        spoils: bool = False,
    ) -> ScenarioTrace:
        """Clean room, then the scenario; what was recorded of it. Raises only for a stack that cannot be ended.

        The trace's end says whether the scenario could be driven; judging is not done here. Where requests ended before
        they were caught in flight, it is begun again, at most `MOST_ATTEMPTS` times: checks see the last attempt.
        """
        assert self._recorder is not None, "record_to comes first"
        before = asyncio.all_tasks()
        self._scenario, self._events, self._may_spoil, self._allowed_s = name, [], spoils, None
        self._record(ScenarioStart(scenario=name, take=take, at_ns=now_ns()))
        for attempts in range(1, MOST_ATTEMPTS + 1):
            try:
                error = await self._attempt(deadline_s, scenario)
            except BaseException:
                interrupted = CallError(kind="Interrupted", message="the run was interrupted", blame=Blame.SETUP)
                self._end(name, take, interrupted, attempts)
                raise
            refusal = await _cancel(asyncio.all_tasks() - before)
            if refusal is not None or error is None or error.kind != MissedMoment.__name__:
                break
        error = error or refusal
        try:
            await self._observe()
        except StackError as e:
            error = error or _as_call_error(e)
        if self._host.died is not None and not self._killed:
            error = _with_death(error, self._host.died)
        end = self._end(name, take, error, attempts)
        self._abandon()
        if refusal is not None or (error is not None and (error.kind in FATAL or self._host.died is not None)):
            await self._host.end()
        return ScenarioTrace(
            header=self._recorder.header,
            scenario=name,
            take=take,
            calls=tuple(e for e in self._events if isinstance(e, Call)),
            observations=tuple(e for e in self._events if isinstance(e, Observation)),
            end=end,
            marks=tuple(e for e in self._events if isinstance(e, Mark)),
        )

    async def _attempt(self, deadline_s: float, scenario: Callable[[], Awaitable[None]]) -> CallError | None:
        """Clean room and scenario, once: how it ended badly, None if it did not. Raises only what is not an Exception."""
        limit = asyncio.timeout(None)
        try:
            allowed_s = CLEAN_ROOM_DEADLINE_S * self._slowness + CLEAN_ROOM_PASSES * self._for_weights_s
            self._phase, self._deadline = "clean_room", monotonic() + allowed_s
            await self._clean_room()
            self._allowed_s = deadline_s = deadline_s * self._slowness
            self._phase, self._deadline = "scenario", monotonic() + deadline_s
            async with limit:
                limit.reschedule(asyncio.get_running_loop().time() + deadline_s + LAST_WORD_S)
                await scenario()
        except TimeoutError as e:
            if limit.expired():
                message = f"not driven to its end within {deadline_s:.0f} s"
                return CallError(kind="ScenarioTimedOut", message=message, blame=Blame.STACK)
            return _as_call_error(e)
        except ExceptionGroup as group:
            return _as_call_error(_first_leaf(group))
        except Exception as e:  # noqa: BLE001 - recorded with its blame; the judge turns it into a verdict
            return _as_call_error(e)
        return None

    def _abandon(self) -> None:
        """Remember the batches of this scenario that failed as a whole (SkyRL, RemoteInferenceClient: rows that wait for their
        turn, or to be tried again, are not called off)."""
        for call in self._events:
            if isinstance(call, Call) and call.method == "generate" and call.error is not None:
                for prompt in call.request.get("prompt_token_ids") or ():
                    self._abandoned[tuple(prompt)] = self._scenario

    def _end(self, name: str, take: int, error: CallError | None, attempts: int) -> ScenarioEnd:
        outcome: Literal["completed", "failed"] = "completed" if error is None else "failed"
        end = ScenarioEnd(
            scenario=name,
            take=take,
            outcome=outcome,
            attempts=attempts,
            allowed_s=self._allowed_s,
            error=error,
            at_ns=now_ns(),
        )
        self._record(end)
        return end

    def _record(self, event: Event) -> None:
        if self._recorder is not None:
            self._recorder.add(event)
            self._events.append(event)

    @property
    def alive(self) -> bool:
        """Has the stack neither died nor been killed, by a scenario or by us?"""
        return not self._host.ended and self._host.died is None and not self._spoiled

    @property
    def spoiled(self) -> bool:
        """Did a scenario break it on purpose, and nothing else? Starting it anew is then no sign of a fault."""
        return self._spoiled and (self._killed or self._host.died is None)

    async def _observe(self) -> None:
        seen: ObserveResult = await self._host.call("observe", ObserveRequest(), OBSERVE_DEADLINE_S * self._slowness)
        for raw in seen.observations:
            kind = raw["kind"]
            if kind == "request":
                of = self._abandoned.get(tuple(raw["data"]["prompt_token_ids"]), self._scenario)
                kind = "request" if of == self._scenario else "late_request"
            self._record(Observation(kind=kind, server=raw["server"], at_ns=raw["at_ns"], data=raw["data"]))

    async def _clean_room(self) -> None:
        """Resumed, awake, at policy version 0, empty prefix cache: done, then verified, and the instruments with it."""
        if self._paused:
            await self.resume()
        await self._until_idle()
        if Capability.SLEEP in self.capabilities:
            await self.wake_up()
        if self._left:
            await self.prepare_weight_sync()
        if Capability.WEIGHT_SYNC in self.capabilities and self._version != 0:
            paused = self.topology.data_parallel > 1 and Capability.PAUSE_KEEP in self.capabilities
            await (self.sync_weights_paused(0) if paused else self.sync_weights(0))
        if self._adapters:
            await self._call("forget_adapters", Empty(), Empty)
            self._adapters.clear()
        if Capability.RESET_PREFIX_CACHE in self.capabilities:
            await self.reset_prefix_cache()
        await self.digests(label="clean_room")
        self._canary_seed += 1
        # One canary a server would need routing to be right; one for all proves that the tap writes at all.
        canary = [self.vocabulary.ordinary[(self._canary_seed >> shift) % 200] for shift in (0, 4, 8, 12)]
        began = monotonic()
        await self.generate([canary], label="canary", max_tokens=1, temperature=0.0)
        if self._request.start != "inline":  # its time is simulated
            self._slowness = max(1.0, (monotonic() - began) / CANARY_S)
        await self._observe()

    async def _until_idle(self) -> None:
        """Wait until earlier requests have left the engines. Raises `CallTimedOut`, naming how many have not."""
        seen = await self.in_flight()
        while seen.requests:
            if monotonic() > self._deadline:
                raise CallTimedOut(f"{seen.requests} requests of an earlier scenario never left the engines")
            await asyncio.sleep(0.02)
            seen = await self.in_flight()

    # --- one call

    async def _call(self, method: str, request: Message, result: type[R], label: str | None = None) -> R:
        plain = msgspec.to_builtins(request)
        for needed in sorted((capabilities_of(method, plain) | self._of_adapters(method, plain)) - self.capabilities):
            raise NotOffered(str(needed), self._request.target)
        left = self._deadline - monotonic()
        if left <= 0:
            raise CallTimedOut(f"no time was left for {method}")
        self._calls += 1
        number, phase, started_ns = self._calls, self._phase, now_ns()
        answer: Message | None = None
        error: CallError | None = None
        generates = method in DATA_PLANE
        self._generating += generates
        self._pending += generates
        try:
            answer = await self._host.call(method, request, left)
        except Exception as e:
            error = _as_call_error(e)
            raise
        except asyncio.CancelledError:
            error = CallError(kind="Cancelled", message="the scenario gave up waiting", blame=Blame.HARNESS)
            raise
        finally:
            self._pending -= generates
            if self._recorder is not None:
                self._record(
                    Call(
                        id=number,
                        method=method,
                        request=plain,
                        result=None if answer is None else msgspec.to_builtins(answer),
                        error=error,
                        started_ns=started_ns,
                        ended_ns=now_ns(),
                        phase="clean_room" if phase == "clean_room" else "scenario",
                        label=label,
                    )
                )
        assert isinstance(answer, result)
        return answer

    def _of_adapters(self, method: str, request: dict[str, Any]) -> set[Capability]:
        """What this call needs beyond `LORA`, by the adapters that are loaded already."""
        meant: set[str | None] = {*self._adapters} if self._adapters else {None}
        match method:
            case "load_lora_adapter" if self._adapters - {request["name"]}:
                return {Capability.SEVERAL_ADAPTERS}
            case "generate" if {request.get("lora_adapter")} != meant:
                return {Capability.ADAPTER_BY_NAME}
            case _:
                return set()

    # --- data plane

    async def generate(
        self,
        prompts: list[list[int]],
        *,
        session_ids: list[SessionId] | None = None,
        lora_adapter: str | None = None,
        label: str | None = None,
        **sampling_params: Any,
    ) -> Generation:
        """Continue each prompt, under a LoRA adapter if one is named; results in the order of the prompts."""
        request = GenerateRequest(
            prompt_token_ids=prompts,
            session_ids=session_ids,
            lora_adapter=lora_adapter,
            sampling_params=sampling_params,
        )
        return await self._call("generate", request, Generation, label)

    async def generate_messages(
        self,
        conversations: list[list[dict[str, Any]]],
        *,
        session_ids: list[SessionId] | None = None,
        label: str | None = None,
        **sampling_params: Any,
    ) -> Generation:
        """Continue each conversation, rendered by the stack with the model's chat template."""
        request = GenerateRequest(prompts=conversations, session_ids=session_ids, sampling_params=sampling_params)
        return await self._call("generate", request, Generation, label)

    async def generate_request(self, request: GenerateRequest, *, label: str | None = None) -> Generation:
        """A request as it is, for what the other two cannot say (malformed on purpose)."""
        return await self._call("generate", request, Generation, label)

    async def sample(
        self,
        prompt: list[int],
        num_samples: int,
        *,
        session_id: SessionId | None = None,
        label: str | None = None,
        **sampling_params: Any,
    ) -> Generation:
        """`num_samples` independent continuations of one prompt."""
        request = SampleRequest(
            prompt_token_ids=prompt, num_samples=num_samples, session_id=session_id, sampling_params=sampling_params
        )
        return await self._call("sample", request, Generation, label)

    async def chat_completion(self, body: dict[str, Any], *, label: str | None = None) -> dict[str, Any]:
        """The response's body, or an error body as the stack returns it."""
        return (await self._call("chat_completion", OpenAIRequest(body=body), OpenAIResponse, label)).body

    async def completion(self, body: dict[str, Any], *, label: str | None = None) -> dict[str, Any]:
        """The response's body, or an error body as the stack returns it."""
        return (await self._call("completion", OpenAIRequest(body=body), OpenAIResponse, label)).body

    async def http(self, request: HttpRequest, *, label: str | None = None) -> HttpResponse:
        """Send a request to the stack's OpenAI address. `fixtures/openai_client.py` makes them."""
        return await self._call("http", request, HttpResponse, label)

    async def gym_generate(self, request: GymRequest, *, label: str | None = None) -> GymOutput:
        """Trajectories of SkyRL's gym generator; results in the order of the prompts."""
        return await self._call("gym_generate", request, GymOutput, label)

    async def tokenize(
        self, texts: list[str], *, add_special_tokens: bool = True, label: str | None = None
    ) -> list[list[int]]:
        request = TokenizeRequest(texts=texts, add_special_tokens=add_special_tokens)
        return (await self._call("tokenize", request, TokenizeResult, label)).token_ids

    async def detokenize(self, token_ids: list[list[int]], *, label: str | None = None) -> list[str]:
        return (await self._call("detokenize", DetokenizeRequest(token_ids=token_ids), DetokenizeResult, label)).texts

    # --- control plane

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False, label: str | None = None) -> None:
        self._paused = True  # also when it fails: it may have reached some servers
        await self._call("pause", PauseRequest(mode=mode, clear_cache=clear_cache), Empty, label)

    async def resume(self, *, label: str | None = None) -> None:
        await self._call("resume", Empty(), Empty, label)
        self._paused = False

    async def sleep(self, level: int = 2, *, label: str | None = None) -> None:
        await self._call("sleep", SleepRequest(level=level), Empty, label)

    async def wake_up(self, tags: list[str] | None = None, *, label: str | None = None) -> None:
        await self._call("wake_up", WakeUpRequest(tags=tags), Empty, label)

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False, label: str | None = None) -> None:
        request = ResetPrefixCacheRequest(reset_running_requests=reset_running_requests)
        await self._call("reset_prefix_cache", request, Empty, label)

    async def health(self, *, label: str | None = None) -> bool:
        return (await self._call("health", Empty(), HealthResult, label)).healthy

    async def is_paused(self, *, label: str | None = None) -> dict[str, bool]:
        return (await self._call("is_paused", Empty(), IsPausedResult, label)).servers

    async def world_size(self, *, label: str | None = None) -> int:
        return (await self._call("world_size", Empty(), WorldSizeResult, label)).world_size

    # --- weight sync and client

    async def prepare_weight_sync(self, *, label: str | None = None) -> None:
        await self._call("prepare_weight_sync", Empty(), Empty, label)
        self._left = False

    async def sync_weights(
        self,
        version: int,
        *,
        chunks: int = 1,
        layout: Layout = "single",
        fail_after_chunks: int | None = None,
        label: str | None = None,
    ) -> None:
        """Load a policy version into every engine through the stack's own weight sync.

        With `fail_after_chunks` the trainer fails in the middle: the call has to fail. The stack is started anew for the next
        scenario.
        """
        if fail_after_chunks is not None:
            self._spoil("a sync that fails")
        self._version, self._left = None, True  # until it is done
        request = SyncWeightsRequest(version=version, chunks=chunks, layout=layout, fail_after_chunks=fail_after_chunks)
        await self._call("sync_weights", request, Empty, label)
        self._version, self._left = version, False

    async def sync_weights_paused(self, version: int, *, chunks: int = 1, label: str | None = None) -> None:
        """The same with generation paused (keep) around it, as SkyRL's trainers do (SkyRL 0.2.0, save_weights_for_sampler).

        Data-parallel engines need it: after their last answer they go on with dummy batches for a while, each for the sake of the
        others, and a batch in the middle of a sync meets half of the weights. A pause returns once they have come to rest (vLLM).
        """
        await self.pause("keep")
        await self.sync_weights(version, chunks=chunks, label=label)
        await self.resume()

    async def train(self, request: TrainRequest, *, label: str | None = None) -> TrainResult:
        """One optimizer step on rollouts: a new policy version, which no engine has before it is synced."""
        return await self._call("train", request, TrainResult, label)

    async def digests(self, *, label: str | None = None) -> dict[str, list[dict[str, str]]]:
        """server → rank → parameter → digest, out of band."""
        return (await self._call("digests", Empty(), DigestsResult, label)).servers

    async def workers(self, *, label: str | None = None) -> dict[str, list[WorkerDescription]]:
        """server → rank → by what it takes weights, out of band."""
        return (await self._call("workers", Empty(), WorkersResult, label)).servers

    async def device_memory(self, *, label: str | None = None) -> dict[str, list[WorkerMemory]]:
        """server → rank → memory of the worker's device, out of band."""
        return (await self._call("device_memory", Empty(), DeviceMemoryResult, label)).servers

    async def start_staleness_manager(
        self, *, max_concurrent: int, mini_batch_size: int, max_staleness_steps: int, label: str | None = None
    ) -> None:
        """A fresh staleness manager, at global step 1. All numbers are rollouts, but the last: steps."""
        request = StalenessRequest(
            max_concurrent=max_concurrent, mini_batch_size=mini_batch_size, max_staleness_steps=max_staleness_steps
        )
        await self._call("start_staleness_manager", request, Empty, label)

    async def acquire_slot(self, rollout: str, *, label: str | None = None) -> None:
        """Wait until this rollout may be asked for."""
        await self._call("acquire_slot", RolloutRequest(rollout=rollout), Empty, label)

    async def accept_rollout(self, rollout: str, *, label: str | None = None) -> None:
        await self._call("accept_rollout", RolloutRequest(rollout=rollout), Empty, label)

    async def trained(self, consumed: list[str], *, global_step: int, label: str | None = None) -> None:
        """A training step is done with these rollouts; `global_step` is worked on now."""
        await self._call("trained", TrainedRequest(consumed=consumed, global_step=global_step), Empty, label)

    async def load_lora_adapter(self, name: str, version: int, *, label: str | None = None) -> None:
        """Load a version of a LoRA adapter under a name into every engine; one that is there is replaced."""
        loaded = set(self._adapters)
        self._adapters.add(name)  # also when it fails: it may have reached some servers
        try:
            await self._call("load_lora_adapter", LoadLoraRequest(name=name, version=version), Empty, label)
        except NotOffered:
            self._adapters = loaded
            raise

    async def unload_lora_adapter(self, name: str, *, label: str | None = None) -> None:
        await self._call("unload_lora_adapter", UnloadLoraRequest(name=name), Empty, label)
        self._adapters.discard(name)

    async def pickle_client(self, *, label: str | None = None) -> None:
        await self._call("pickle_client", Empty(), Empty, label)

    # --- probing and breaking, out of band

    async def probe_security(self, *, label: str | None = None) -> ProbeSecurityResult:
        """Which addresses are bound, and what they do for a caller without credentials."""
        return await self._call("probe_security", Empty(), ProbeSecurityResult, label)

    async def kill_server(self, server: str, *, label: str | None = None) -> None:
        """Kill a server's processes. The stack is started anew for the next scenario."""
        self._spoil("kill_server")
        self._killed = True
        await self._call("kill_server", KillServerRequest(server=server), Empty, label)

    def _spoil(self, how: str) -> None:
        """From here on the stack is of no use to the next scenario. Raises ValueError for one that does not declare that."""
        if not self._may_spoil:
            raise ValueError(f"{how} breaks the stack, and the scenario does not declare it: spoils=True")
        self._spoiled = True

    async def inject(self, fault: str | None) -> int:
        """Switch to a seeded fault, or to none; how often the one before took effect. Not recorded: scenarios know no faults."""
        result: InjectResult = await self._host.call("inject", InjectRequest(fault=fault), 60)
        return result.fired

    def put_together_anew(self) -> None:
        """For who knows that it was: nothing is known of its weights, and no adapter is loaded."""
        self._version = None
        self._adapters.clear()

    # --- what the scenario itself says

    def mark(self, name: str, *, step: int, **numbers: float) -> None:
        """Record a moment of the scenario's own schedule, or figures of a step (`harness.records.recording.Mark`)."""
        self._record(Mark(name=name, step=step, at_ns=now_ns(), numbers=numbers))

    # --- waiting and provoking

    async def in_flight(self) -> InFlightResult:
        """What engines work on now. Not recorded: it is asked many times a second."""
        found: InFlightResult = await self._host.call("in_flight", Empty(), OBSERVE_DEADLINE_S * self._slowness)
        return found

    async def until_generating(self, *, requests: int, tokens: int = 0) -> None:
        """Wait until engines work on at least `requests` requests and have made at least `tokens` tokens for them.

        Raises what `until` raises.
        """
        await self.until(
            lambda seen: seen.requests >= requests and seen.tokens >= tokens,
            f"{requests} requests in flight with {tokens} tokens",
        )

    async def until(
        self, met: Callable[[InFlightResult], bool], what: str, *, every_s: float = 0.005
    ) -> InFlightResult:
        """Wait until what engines work on is as `met` wants it; asked again every `every_s` seconds. What was seen then.

        Raises `CallTimedOut`, saying what was seen, when the scenario's deadline expires first, `MissedMoment` when every
        call that could be meant has ended, and `StackDied` when a process of the stack dies meanwhile.
        """
        seen: InFlightResult | None = None
        begun = self._generating - (1 if self._pending else 0)  # one that is pending now may be meant
        while monotonic() < self._deadline:
            seen = await self.in_flight()
            if met(seen):
                return seen
            if self._generating > begun and not self._pending:
                raise MissedMoment(
                    f"the requests ended before they were caught: {what} were awaited; saw {seen}",
                    next_step="run on a machine that is less busy, or make the requests longer",
                )
            if self._host.died is not None:
                raise StackDied(f"{self._host.died} while {what} were awaited; saw {seen}")
            await asyncio.sleep(every_s)
        raise CallTimedOut(
            f"waited for {what}; saw {seen}",
            next_step="the requests ended too soon, or never reached an engine: look at the timeline",
        )

    async def attempt(self, call: Coroutine[Any, Any, T]) -> T | None:
        """The call's result, or None if the stack raised: for what is provoked. Deaths and hangs still raise."""
        try:
            return await call
        except CallFailed:
            return None


FATAL = ("StackDied", "CallTimedOut", "ScenarioTimedOut")
"""Ends after which a stack is not used again: it is started anew for the next scenario."""


async def _cancel(tasks: set[asyncio.Task[Any]]) -> CallError | None:
    """End what a scenario left running. What refuses to end is named, and nothing waits for it any more."""
    for task in tasks:
        task.cancel()
    refusing = (await asyncio.wait(tasks, timeout=CANCEL_DEADLINE_S))[1] if tasks else set()
    if not refusing:
        return None
    for task in refusing:
        asyncio._unregister_task(task)  # else the loop's end would wait for it (asyncio.Runner.close)
    names = ", ".join(sorted(getattr(task.get_coro(), "__qualname__", "?") for task in refusing))
    message = f"the scenario left running what refuses to be cancelled: {names}"
    return CallError(kind="TaskRefusesToEnd", message=message, blame=Blame.HARNESS)


def _with_death(error: CallError | None, died: str) -> CallError:
    """How a scenario ended in the course of which a process of the stack died: its own error, if there was one, and that."""
    if error is None:
        return CallError(kind="StackDied", message=f"{died} in the course of the scenario", blame=Blame.STACK)
    return error if died in error.message else msgspec.structs.replace(error, message=f"{error.message}\n({died})")


def _first_leaf(group: BaseExceptionGroup[Any]) -> BaseException:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def _as_call_error(error: BaseException) -> CallError:
    match error:
        case CallFailed():
            return CallError(kind=error.kind, message=error.detail, status=error.status, blame=error.blame)
        case HarnessError():
            return CallError(kind=type(error).__name__, message=str(error), blame=error.blame)
        case _:
            return CallError(kind=type(error).__name__, message=str(error)[:2000], blame=Blame.HARNESS)
