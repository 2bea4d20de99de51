"""The driver's handle on a host, and the `stack` of a scenario. It sends and records every call, ends it by its deadline, and
names every hang. The calls are in `calls.py`, the processes in `process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from harness.contract import messages
from harness.contract.capability import Capability
from harness.contract.clock import monotonic, now_ns
from harness.contract.errors import (
    CANCELLED,
    Blame,
    CallFailed,
    CallTimedOut,
    HarnessError,
    MissedMoment,
    NotOffered,
    StackDied,
    StackError,
)
from harness.contract.topology import Topology
from harness.contract.vocabulary import TINY, Vocabulary
from harness.driving import allowance
from harness.driving.calls import Calls, Condition, prompt_key
from harness.driving.process import HostHandle
from harness.driving.supervisor import Farewell
from harness.machine.logs import LatestStage
from harness.machine.processes import Usage
from harness.machine.progress import Progress, Say
from harness.records import recording
from harness.records.recorder import Recorder

START_GRACE_S = 30.0
"""Seconds that the driver waits longer than the adapter for a start, so that the adapter can name the part that is not up."""
TELL_EVERY_S = 20.0
"""Seconds between two progress texts of a long start."""
JOIN_DEADLINE_S = 90.0
MOST_ATTEMPTS = 3
"""Most attempts at a scenario whose requests end before the driver sees them in flight."""
LAST_WORD_S = 1.0
"""Seconds that a scenario may take longer than its calls: an expired wait says more than an expired scenario."""
CLEAN_ROOM_DEADLINE_S = 60.0
CLEAN_ROOM_PASSES = 2
"""Passes over all weights in a clean room: it may sync them, and it hashes them."""
OBSERVE_DEADLINE_S = 20.0
QUIET_ASKS = 100
"""Polls in flight without an open call after which awaited requests count as ended: a scenario that has yet to send them does
so within one poll."""
QUIET_S = 0.5
"""Seconds without a request after which nothing is left of a call whose caller went away: what follows one request by another
does so sooner (SkyRL 0.2.0, InferenceEngineInterface.sample: one sample after the other)."""
CANARY_S = 0.02
"""Seconds of the canary, a one-token answer, with a tiny model on two busy cores (SmolLM2: 0.12). Deadlines fit this speed."""
SWAP_DEADLINE_S = 30.0
SHARE_SEED = 1
"""Chooses the cases of a budget below 1."""
CANCEL_DEADLINE_S = 10.0
"""Seconds that tasks which a scenario left running may take to end after their cancellation."""

T = TypeVar("T")
R = TypeVar("R", bound=messages.Message)


class Stack(Calls):
    """The `stack` of a scenario. It records all calls. Failed calls raise a `StackError`.

    Token ids are ints; `session_ids` has one entry per prompt; `label` names a call for the checks.
    """

    def __init__(
        self,
        host: HostHandle,
        request: messages.StartRequest,
        vocabulary: Vocabulary = TINY,
        stages: Mapping[str, str] | None = None,
    ) -> None:
        """`stages`: as in `Runtime`."""
        super().__init__()
        self._host = host
        self._stages = stages or {}
        self._request = request
        self.vocabulary = vocabulary
        """The model's token ids by kind."""
        self._recorder: Recorder | None = None
        self._phase: str = "scenario"
        self._calls = 0
        self._deadline = float("inf")
        self._scenario = ""
        self._pending = 0
        """Number of open calls of the data plane. `_open` counts open calls of any kind."""
        self._open = 0
        self._slowness = 1.0
        """Factor on every deadline: the last canary's duration in units of `CANARY_S`, at least 1."""
        self._for_weights_s = allowance.for_weights(request.model_path)
        """Seconds that one pass over all weights adds to a deadline."""
        self._allowed_s: float | None = None
        """Seconds that the current scenario may take."""
        self._events: list[recording.Event] = []
        self._known = False
        """True if the stack's condition is known: it has started, and no scenario is under way or was cut short."""
        self.clean_room_s = CLEAN_ROOM_DEADLINE_S
        """Seconds that a clean room may take on a stack as fast as the tiny model."""
        self.budget = 1.0
        """How much of what scenarios enumerate they drive (`--budget`): 1 is the usual extent."""
        self.narrow: Callable[[list[Any]], list[Any]] | None = None
        """Chooses among the cases that the budget allows (`harness.running.shrink`)."""
        self.description: messages.Description | None = None

    # --- lifecycle, for the plugin

    async def start(self, progress: Progress) -> messages.Description:
        """Launch the host and the stack in it. `progress` shows the current step."""
        with progress(f"{self._request.target}: starting its host"):
            await self._host.launch()
        what = f"{self._request.topology.name} ({self._request.start}, {self._request.engine})"
        deadline_s = self._request.deadline_s + START_GRACE_S + self._for_weights_s
        with progress(f"{self._request.target}: starting {what}") as say:
            async with self._telling(say):
                self.description = await self._host.call("start", self._request, deadline_s)
        if Capability.WEIGHT_SYNC in self.capabilities:
            with progress(f"{self._request.target}: joining trainer and workers for weight sync"):
                await self._host.call("prepare_weight_sync", messages.Empty(), JOIN_DEADLINE_S)
        self._known = True
        return self.description

    @contextlib.asynccontextmanager
    async def _telling(self, say: Say) -> AsyncIterator[None]:
        """While the block runs, show the stage of the start from the stack's logs every `TELL_EVERY_S`."""
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

    async def take_over(self, description: messages.Description) -> None:
        """Go on with a kept stack where its last driver stopped. What its taps saw since then belongs to no scenario."""
        await self._host.launch()
        if handed := self._host.handed_over:
            self._condition = msgspec.json.decode(handed, type=Condition)
        self.description = description
        await self._observe()
        self._known = True

    async def close(self) -> Farewell | None:
        """End the stack. A kept one goes on for the next driver, unless its condition is not known."""
        if self._host.outlives and not self.outlives:
            await self._host.end()
        return await self._host.close(msgspec.json.encode(self._condition))

    def record_to(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def outlives(self) -> bool:
        """True if `close` leaves the stack running."""
        return self._host.outlives and self.alive and self._known

    @property
    def topology(self) -> Topology:
        return self._request.topology

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset() if self.description is None else frozenset(self.description.capabilities)

    @property
    def slowness(self) -> float:
        """Duration of the last measured token, relative to the tiny model on two busy cores; at least 1."""
        return self._slowness

    @property
    def slow(self) -> bool:
        """True if the model is so large for a CPU that scenarios ask for no more tokens than their promise needs. It follows from
        the checkpoint, so that it is the same for both stacks of a comparison."""
        return self._request.engine == "cpu" and allowance.is_large(self._request.model_path)

    @property
    def pending(self) -> int:
        """Number of open calls of the data plane."""
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
        self, name: str, take: int, deadline_s: float, scenario: Callable[[], Awaitable[None]], *, spoils: bool = False
    ) -> recording.ScenarioTrace:
        """Run the clean room, then the scenario. Returns its trace. Raises only if the stack cannot be ended.

        The trace's end says whether the scenario could be driven. If requests ended before the driver saw them in flight, it
        tries again, with `MOST_ATTEMPTS` attempts at most. Checks see the last attempt.
        """
        assert self._recorder is not None, "record_to comes first"
        before = asyncio.all_tasks()
        self._scenario, self._events, self._may_spoil, self._allowed_s = name, [], spoils, None
        self._known = False
        self._record(recording.ScenarioStart(scenario=name, take=take, at_ns=now_ns()))
        for attempts in range(1, MOST_ATTEMPTS + 1):
            try:
                error = await self._attempt(deadline_s, scenario)
            except BaseException:
                interrupted = recording.CallError(
                    kind="Interrupted", message="the run was interrupted", blame=Blame.SETUP
                )
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
        self._known = True
        if refusal is not None or (error is not None and (error.kind in FATAL or self._host.died is not None)):
            await self._host.end()
        return recording.ScenarioTrace(
            header=self._recorder.header,
            scenario=name,
            take=take,
            calls=tuple(e for e in self._events if isinstance(e, recording.Call)),
            observations=tuple(e for e in self._events if isinstance(e, recording.Observation)),
            end=end,
            marks=tuple(e for e in self._events if isinstance(e, recording.Mark)),
        )

    async def _attempt(self, deadline_s: float, scenario: Callable[[], Awaitable[None]]) -> recording.CallError | None:
        """Run clean room and scenario once. Returns the error that ended them, or None. Raises only what is not an Exception."""
        limit = asyncio.timeout(None)
        try:
            allowed_s = self.clean_room_s * self._slowness + CLEAN_ROOM_PASSES * self._for_weights_s
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
                return recording.CallError(kind="ScenarioTimedOut", message=message, blame=Blame.STACK)
            return _as_call_error(e)
        except ExceptionGroup as group:
            return _as_call_error(_first_leaf(group))
        except Exception as e:  # noqa: BLE001 - recorded with its blame; the judge turns it into a verdict
            return _as_call_error(e)
        return None

    def _took_longer(self, left_s: float) -> str:
        """The longest earlier call of the scenario, if it took more time than was left for this one: the cause may lie there."""
        calls = [e for e in self._events if isinstance(e, recording.Call) and e.phase == "scenario"]
        longest = max(calls, key=lambda call: call.ended_ns - call.started_ns, default=None)
        if longest is None or (took_s := (longest.ended_ns - longest.started_ns) / 1e9) <= left_s:
            return ""
        how = "returned" if longest.error is None else f"raised {longest.error.kind}: {longest.error.message}"
        return f"look at {longest.method} first, which took {took_s:.0f} s before that and {how}; then "

    def _abandon(self) -> None:
        """Remember this scenario's failed batches (SkyRL, RemoteInferenceClient: it does not cancel rows that wait for their turn
        or for a retry)."""
        for call in self._events:
            if isinstance(call, recording.Call) and call.method == "generate" and call.error is not None:
                for prompt in call.request.get("prompt_token_ids") or ():
                    self._condition.abandoned[prompt_key(prompt)] = self._scenario

    def _end(self, name: str, take: int, error: recording.CallError | None, attempts: int) -> recording.ScenarioEnd:
        outcome: Literal["completed", "failed"] = "completed" if error is None else "failed"
        end = recording.ScenarioEnd(
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

    def _record(self, event: recording.Event) -> None:
        if self._recorder is not None:
            self._recorder.add(event)
            self._events.append(event)

    @property
    def alive(self) -> bool:
        """True if the stack has neither died nor been ended, and no scenario has spoiled it."""
        return not self._host.ended and self._host.died is None and not self._spoiled

    @property
    def spoiled(self) -> bool:
        """True if a scenario broke the stack on purpose and nothing else did. A restart is then no sign of a fault."""
        return self._spoiled and (self._killed or self._host.died is None)

    async def _observe(self) -> None:
        for raw in await self.seen():
            kind = raw["kind"]
            if kind == "request":
                of = self._condition.abandoned.get(prompt_key(raw["data"]["prompt_token_ids"]), self._scenario)
                kind = "request" if of == self._scenario else "late_request"
            self._record(recording.Observation(kind=kind, server=raw["server"], at_ns=raw["at_ns"], data=raw["data"]))

    async def seen(self) -> list[dict[str, Any]]:
        """What the taps saw since the last time, unrecorded."""
        found: messages.ObserveResult = await self._host.call(
            "observe", messages.ObserveRequest(), OBSERVE_DEADLINE_S * self._slowness
        )
        return found.observations

    def allow(self, seconds: float) -> None:
        """Set the deadline of the coming calls, for a caller that drives no scenario."""
        self._deadline = monotonic() + seconds

    def usage(self) -> Usage | None:
        """Memory and processor time of its processes; None if it has none of its own."""
        return self._host.usage()

    async def _clean_room(self) -> None:
        """Resume, wake up, sync policy version 0, empty the prefix cache. Then verify this and the instruments."""
        if self._condition.delayed:
            await self.delay(None)
        if self._condition.broken:
            await self.break_hop(None)
        if self._condition.formed:
            await self.form(None)
        if self._condition.paused:
            await self.resume()
        await self._until_idle()
        if Capability.SLEEP in self.capabilities:
            await self.wake_up()
        if self._condition.left:
            await self.prepare_weight_sync()
        if Capability.WEIGHT_SYNC in self.capabilities and self._condition.version != 0:
            paused = self.topology.data_parallel > 1 and Capability.PAUSE_KEEP in self.capabilities
            await (self.sync_weights_paused(0) if paused else self.sync_weights(0))
        if self._condition.adapters:
            await self._call("forget_adapters", messages.Empty(), messages.Empty)
            self._condition.adapters.clear()
        if Capability.RESET_PREFIX_CACHE in self.capabilities:
            await self.reset_prefix_cache()
        await self.digests(label="clean_room")
        if self._condition.canary_seed == 0 and self._request.start != "inline":
            await self._canary()  # an engine's first answer takes many times as long, and says nothing of its speed
        began = monotonic()
        await self._canary()
        if self._request.start != "inline":  # its time is simulated
            self._slowness = max(1.0, (monotonic() - began) / CANARY_S)
        await self._observe()

    async def _canary(self) -> None:
        """One canary per server would need correct routing. A single one proves that the tap writes at all."""
        self._condition.canary_seed += 1
        prompt = [self.vocabulary.ordinary[(self._condition.canary_seed >> shift) % 200] for shift in (0, 4, 8, 12)]
        await self.generate([prompt], label="canary", max_tokens=1, temperature=0.0)

    async def _until_idle(self) -> None:
        """Wait until earlier requests have left the engines, and nothing asks for more. Raises `CallTimedOut` with the number of
        those that have not."""
        idle_s = QUIET_S * self._slowness if self._condition.cancelled else 0.0
        seen, since = await self.in_flight(), monotonic()
        while seen.requests or monotonic() < since + idle_s:
            if monotonic() > self._deadline:
                raise CallTimedOut(f"{seen.requests} requests of an earlier scenario never left the engines")
            await asyncio.sleep(0.02)
            seen = await self.in_flight()
            since = monotonic() if seen.requests else since
        self._condition.cancelled = False

    # --- one call

    async def _call(self, method: str, request: messages.Message, result: type[R], label: str | None = None) -> R:
        plain = msgspec.to_builtins(request)
        needs = messages.capabilities_of(method, plain) | self._of_adapters(method, plain)
        for needed in sorted(needs - self.capabilities - messages.REFUSABLE):
            raise NotOffered(str(needed), self._request.target)
        left = self._deadline - monotonic()
        if left <= 0:
            raise CallTimedOut(f"no time was left for {method}")
        self._calls += 1
        number, phase, started_ns = self._calls, self._phase, now_ns()
        answer: messages.Message | None = None
        error: recording.CallError | None = None
        raw: list[recording.Raw] = []
        generates = method in messages.DATA_PLANE
        self._pending += generates
        self._open += 1
        try:
            answer = await self._host.call(method, request, left, raw)
        except Exception as e:
            if isinstance(e, CallTimedOut):
                e.next_step = f"{self._took_longer(left)}{e.next_step}"
            error = _as_call_error(e)
            raise
        except asyncio.CancelledError:
            error = recording.CallError(kind=CANCELLED, message="the scenario gave up waiting", blame=Blame.HARNESS)
            self._condition.cancelled = True
            raise
        finally:
            self._pending -= generates
            self._open -= 1
            if self._recorder is not None:
                self._record(
                    recording.Call(
                        id=number,
                        method=method,
                        request=plain,
                        result=None if answer is None else msgspec.to_builtins(answer),
                        error=error,
                        started_ns=started_ns,
                        ended_ns=now_ns(),
                        phase="clean_room" if phase == "clean_room" else "scenario",
                        label=label,
                        raw=raw,
                    )
                )
        assert isinstance(answer, result)
        return answer

    async def inject(self, fault: str | None) -> int:
        """Switch to a seeded fault or none. Returns how often the last one took effect. Not recorded: scenarios know no faults."""
        result: messages.InjectResult = await self._host.call("inject", messages.InjectRequest(fault=fault), 60)
        return result.fired

    async def swap(self, request: messages.SwapRequest) -> messages.SwapResult:
        """Swap the code of functions, put all others back, and learn which functions were called. Not recorded, like `inject`."""
        result: messages.SwapResult = await self._host.call("swap", request, SWAP_DEADLINE_S)
        return result

    def put_together_anew(self) -> None:
        """The caller has rebuilt the stack: its weights are unknown, and no adapter is loaded."""
        self.doubt_weights()
        self._condition.adapters.clear()

    def doubt_weights(self) -> None:
        """The next clean room syncs the weights, whatever they are."""
        self._condition.version = None

    # --- what the scenario itself says

    def mark(self, name: str, *, step: int, **numbers: float) -> None:
        """Record a moment of the scenario's own schedule, or figures of a step (`harness.records.recording.Mark`)."""
        self._record(recording.Mark(name=name, step=step, at_ns=now_ns(), numbers=numbers))

    def within_budget(self, cases: Iterable[T], *, first: bool = False) -> list[T]:
        """The enumerated cases that the budget allows, in their order: all from 1 on, below that a share drawn evenly, the same each
        time, or the `first` ones. Records how many there are, so that the report tells what was left out."""
        every = list(cases)
        fits = min(len(every), math.ceil(len(every) * self.budget))
        chosen = range(fits) if first else sorted(random.Random(SHARE_SEED).sample(range(len(every)), fits))
        allowed = [every[index] for index in chosen]
        driven = allowed if self.narrow is None else self.narrow(allowed)
        self.mark(recording.ENUMERATED, step=0, driven=len(driven), left_out=len(every) - len(driven))
        return driven

    def times(self, usual: int) -> int:
        """A number of repetitions, scaled by the budget; at least one."""
        return max(1, round(usual * self.budget))

    # --- waiting and provoking

    async def in_flight(self) -> messages.InFlightResult:
        """The requests that engines work on now. Not recorded: the driver asks many times per second."""
        found: messages.InFlightResult = await self._host.call(
            "in_flight", messages.Empty(), OBSERVE_DEADLINE_S * self._slowness
        )
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
        self, met: Callable[[messages.InFlightResult], bool], what: str, *, every_s: float = 0.005
    ) -> messages.InFlightResult:
        """Poll the requests in flight every `every_s` seconds until `met` accepts them. Returns the accepted poll.

        Raises `CallTimedOut` with the last poll if the scenario's deadline expires first, `MissedMoment` if no call was open for
        `QUIET_ASKS` polls, and `StackDied` if a process of the stack dies meanwhile.
        """
        seen: messages.InFlightResult | None = None
        quiet = 0
        while monotonic() < self._deadline:
            seen = await self.in_flight()
            if met(seen):
                return seen
            quiet = 0 if self._open else quiet + 1
            if quiet == QUIET_ASKS:
                raise MissedMoment(
                    f"the requests ended before they were caught: {what} were awaited; saw {seen}",
                    next_step="run on a less busy machine, or make the requests longer",
                )
            if self._host.died is not None:
                raise StackDied(f"{self._host.died} while {what} were awaited; saw {seen}")
            await asyncio.sleep(every_s)
        raise CallTimedOut(
            f"waited for {what}; saw {seen}",
            next_step="calls are open, but engines do not work on what they ask for: look at the timeline",
        )

    async def attempt(self, call: Coroutine[Any, Any, T]) -> T | None:
        """The call's result, or None if the stack raised: for provoked errors. Deaths and hangs still raise."""
        try:
            return await call
        except CallFailed:
            return None


FATAL = ("StackDied", "CallTimedOut", "ScenarioTimedOut")
"""Errors after which a stack is not used again. The next scenario gets a fresh start."""


async def _cancel(tasks: set[asyncio.Task[Any]]) -> recording.CallError | None:
    """Cancel the tasks that a scenario left running. Tasks that refuse are closed, and the returned error names them."""
    for task in tasks:
        task.cancel()
    refusing = (await asyncio.wait(tasks, timeout=CANCEL_DEADLINE_S))[1] if tasks else set()
    if not refusing:
        return None
    for task in refusing:
        if (coroutine := task.get_coro()) is not None:
            coroutine.close()  # else the loop's end would wait for it (asyncio.Runner.close)
        task.cancel()
    await asyncio.wait(refusing)
    names = ", ".join(sorted(getattr(task.get_coro(), "__qualname__", "?") for task in refusing))
    message = f"the scenario left running what refuses to be cancelled: {names}"
    return recording.CallError(kind="TaskRefusesToEnd", message=message, blame=Blame.HARNESS)


def _with_death(error: recording.CallError | None, died: str) -> recording.CallError:
    """The error of a scenario during which a process of the stack died: its own error, if any, with the death added."""
    if error is None:
        return recording.CallError(kind="StackDied", message=f"{died} in the course of the scenario", blame=Blame.STACK)
    return error if died in error.message else msgspec.structs.replace(error, message=f"{error.message}\n({died})")


def _first_leaf(group: BaseExceptionGroup[Any]) -> BaseException:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def _as_call_error(error: BaseException) -> recording.CallError:
    match error:
        case CallFailed():
            return recording.CallError(
                kind=error.kind, message=error.detail, status=error.status, place=error.place, blame=error.blame
            )
        case HarnessError():
            return recording.CallError(kind=type(error).__name__, message=str(error), blame=error.blame)
        case _:
            return recording.CallError(kind=type(error).__name__, message=str(error)[:2000], blame=Blame.HARNESS)
