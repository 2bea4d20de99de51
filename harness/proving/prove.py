"""Drives a stack, correct and under each of its seeded faults. `harness/proving/kill_matrix.py` judges the results.

Worker processes drive pure Python stacks, with a fresh stack per fault. Any other stack starts once per topology, and its
faults are injected one after the other.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from queue import Empty, SimpleQueue
from types import CodeType
from typing import Literal, Protocol, final

import msgspec

from harness import PROJECT
from harness.contract.errors import HarnessError, StackError, UsageError
from harness.contract.faults import Fault, family
from harness.contract.messages import DEFAULT_DTYPE, Dtype
from harness.driving.stack import Stack
from harness.judging import ledger, pace
from harness.judging.pace import Timings
from harness.machine.progress import Progress, silent
from harness.machine.targets import Target, known, resolve
from harness.proving.entries import Tried, to_try
from harness.proving.kill_matrix import (
    Baseline,
    Control,
    FaultProof,
    KillMatrix,
    Lap,
    Proof,
    catching,
    judge_fault,
    paced,
    prove_target,
    together,
)
from harness.proving.swallowed import prove_entries
from harness.records.recording import ScenarioTrace
from harness.records.run_folder import RunFolder, stem
from harness.records.verdict import Cause, Conformance, Verdict
from harness.running import catalogue
from harness.running.session import Options, Seat, Session
from harness.suite.scenario import Scenario

MINIATURES = ("miniature", "miniature:retry")
"""The stacks to prove unless the command line names others."""
STALLED_S = 600.0
"""Seconds without a finished job after which the run is given up."""


@final
class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    stacks: tuple[str, ...] = MINIATURES
    faults: tuple[str, ...] = ()
    """Patterns of fault ids or names; a fault is taken if one of them matches. Empty: all."""
    expression: str = ""
    """Selects scenarios like pytest's -k. Empty: all."""
    run_dir: Path | None = None
    start: Literal["ray", "fork"] = "ray"
    engine: Literal["cpu", "cuda"] = "cpu"
    engines: int = 2
    dtype: Dtype | Literal["auto"] | None = None
    """As `Options.dtype`; miniatures are exact."""
    cuda_graphs: bool = False
    batch_invariant: bool = False
    ledger: bool = False
    """True if the entries about the real stacks are tried beside other faults (`harness/proving/swallowed.py`)."""
    whole: tuple[int, int] = (1, 1)
    """(K, N): every N-th fault, from the K-th, is driven in the whole suite; the others only until their checks have caught them."""
    jobs: int = 0
    """Worker processes for pure Python stacks; 0: one per core."""
    command: str = "parity prove"

    @property
    def dtype_name(self) -> str:
        """The dtype in which real stacks are proved."""
        return self.dtype or DEFAULT_DTYPE[self.engine]

    @property
    def filters(self) -> list[str]:
        """The filters, as on the command line."""
        return [f"--fault {pattern}" for pattern in self.faults] + [f"-k {self.expression}"] * bool(self.expression)


@final
class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The faults and scenarios to drive on one stack."""

    target: str
    inline: bool
    faults: tuple[Fault, ...]
    seats: tuple[tuple[Seat, tuple[str, ...]], ...]
    """Each topology with its scenarios."""
    unable: tuple[str, ...]
    """Scenarios whose required capabilities the target does not declare."""
    whole: bool
    hidden: tuple[str, ...] = ()
    """Faults that the dtype hides (`Fault.exact`)."""
    brief: frozenset[str] = frozenset()
    """Faults that are driven only until their checks have caught them."""
    entries: tuple[tuple[Seat, Tried], ...] = ()
    """Each topology with the scenarios of the ledger's entries."""

    @property
    def scenarios(self) -> tuple[str, ...]:
        return tuple(name for _, names in self.seats for name in names)

    def of(self, fault: Fault | None) -> tuple[tuple[Seat, tuple[str, ...]], ...]:
        """The seats and scenarios of a fault; None is the control, which has those of all faults."""
        if fault is None:
            return self.seats
        declared = catalogue.declared()
        chosen = ((seat, tuple(name for name in names if declared[name].proves(fault))) for seat, names in self.seats)
        return tuple((seat, names) for seat, names in chosen if names)


class Driver(Protocol):
    """The part of `Session` that proving uses."""

    def inject(self, seat: Seat, fault: Fault | None) -> int: ...

    def drive(self, scenario: Scenario, seat: Seat, body: Callable[[Stack], Awaitable[None]]) -> list[Verdict]: ...

    def driven(self, scenario: Scenario, seat: Seat) -> list[ScenarioTrace]: ...

    def close(self, outcome: str = "completed") -> None: ...


Begin = Callable[[Options, Progress], Driver]
"""Makes the session that drives: `Session`, or its substitute in tests."""
Told = Callable[[str, FaultProof | Control], None]
"""Called with the target and each judged fault, and first with the control."""


# --- plans


def plan(request: Request, target: Target) -> Plan:
    """Faults, scenarios and topologies of one stack.

    Raises UsageError for a target without faults, a pattern or expression that matches nothing, and a fault that names a
    scenario that does not exist.
    """
    seeded = tuple(target.seeded().values())
    matching_faults = [fault for fault in seeded if not request.faults or _matches(fault, request.faults)]
    sharp = target.inline or request.dtype_name == "float32"
    faults = tuple(fault for fault in matching_faults if sharp or not fault.exact)
    declared = catalogue.declared()
    if lost := sorted({name for fault in faults for name in fault.scenarios if name not in declared}):
        raise UsageError(
            f"faults of {target.name} name scenarios that do not exist: {', '.join(lost)}",
            next_step=f"correct `scenarios` of the fault in {target.faults}",
        )
    selected = catalogue.matching(request.expression, declared.values())
    narrowed = tuple(f for f in faults if not f.scenarios or f.scenarios & {s.name for s in selected})
    wanted = [s for s in selected if any(s.proves(fault) for fault in narrowed)]
    able = [s for s in wanted if s.needs <= target.capabilities]
    seats: dict[Seat, list[str]] = {}
    for scenario in able:
        seats.setdefault(seat_of(target.name, scenario, request.engines), []).append(scenario.name)
    drivable = [s for s in selected if s.needs <= target.capabilities]
    tried = (
        to_try(ledger.load(), target.name, narrowed, drivable, reads=catalogue.facts_read(), engines=request.engines)
        if request.ledger and not target.inline
        else []
    )
    return Plan(
        target=target.name,
        inline=target.inline,
        faults=narrowed,
        seats=tuple((seat, tuple(names)) for seat, names in seats.items()),
        unable=tuple(s.name for s in wanted if s not in able),
        whole=any(not fault.scenarios for fault in narrowed) and not request.filters,
        hidden=tuple(fault.id for fault in matching_faults if fault not in faults),
        brief=frozenset(fault.id for n, fault in enumerate(narrowed, 1) if _brief(fault, n, request.whole)),
        entries=tuple((Seat(target=target.name, topology=place), names) for place, names in tried),
    )


def _brief(fault: Fault, number: int, whole: tuple[int, int]) -> bool:
    """Not so if its pace has to tell: that is measured over all scenarios."""
    return number % whole[1] != whole[0] % whole[1] and pace.CHECK not in fault.caught_by


def _matches(fault: Fault, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in (fault.id, fault.name) for pattern in patterns)


def seat_of(target: str, scenario: Scenario, engines: int) -> Seat:
    """A scenario is proved in the first of its topologies."""
    return Seat(target=target, topology=scenario.driven_in(engines)[0])


def plans(request: Request) -> list[Plan]:
    """One plan per stack. Raises UsageError if nothing would be driven, and what `plan` raises."""
    options(request, request.stacks[0], Path()).check()
    found = [plan(request, resolve(name)) for name in dict.fromkeys(request.stacks)]
    if request.whole[1] > 1 and (real := [one.target for one in found if not one.inline]):
        raise UsageError(
            f"--whole is for the miniatures: each fault of {', '.join(real)} names its few scenarios",
            next_step="leave out --whole",
        )
    for pattern in request.faults:
        if not any(_matches(fault, [pattern]) for name in request.stacks for fault in known(name).seeded().values()):
            raise UsageError(
                f"--fault {pattern} matches no fault of {', '.join(request.stacks)}",
                next_step="give a name or pattern as in docs/proving.md, such as 'session_moves*'",
            )
    if request.ledger and not any(one.entries for one in found):
        raise UsageError(
            f"--ledger: no entry about {', '.join(request.stacks)} shares a check with these faults in these scenarios",
            next_step="name a stack that the ledger has entries about, and leave out --fault and -k",
        )
    found = [one for one in found if one.faults and one.scenarios]
    if not found:
        raise UsageError(
            f"nothing is left to drive of {', '.join(request.stacks)}",
            next_step="choose --fault and -k so that a fault has a scenario",
        )
    return found


# --- driving


@final
class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one worker process: one fault, or none, on a fresh stack."""

    options: Options
    fault: Fault | None
    seats: tuple[tuple[Seat, tuple[str, ...]], ...]
    watch: frozenset[str] = frozenset()
    """What faults change; each scenario says which of it its drive meets."""
    brief: bool = False
    """True if it ends as soon as the fault's checks have caught it."""

    @property
    def may_be_narrowed(self) -> bool:
        """True if the functions that the fault changes are known."""
        return self.fault is not None and bool(self.fault.changes)

    @property
    def size(self) -> int:
        """Number of scenarios."""
        return sum(len(names) for _, names in self.seats)

    def narrowed(self, called: Mapping[str, Set[str]]) -> Job:
        """The job without the scenarios that call no function that the fault changes."""
        if self.fault is None or not self.may_be_narrowed:
            return self
        changes = self.fault.changes
        some = ((seat, tuple(name for name in names if changes & called[name])) for seat, names in self.seats)
        return msgspec.structs.replace(self, seats=tuple((seat, names) for seat, names in some if names))


@contextmanager
def _watched(functions: Set[str]) -> Iterator[Callable[[], frozenset[str]]]:
    """Yields a function that returns which of `functions` (qualified names) were called since its last call."""
    if not functions:
        yield frozenset
        return
    profiler = cProfile.Profile(builtins=False)

    def since() -> frozenset[str]:
        profiler.disable()
        seen = {entry.code.co_qualname for entry in profiler.getstats() if isinstance(entry.code, CodeType)}
        profiler.clear()
        profiler.enable()
        return frozenset(functions & seen)

    profiler.enable()
    try:
        yield since
    finally:
        profiler.disable()


def sampling_params(traces: Iterable[ScenarioTrace]) -> frozenset[str]:
    """The sampling parameters of the requests that reached an engine, named as in `Fault.changes`."""
    seen = (each for trace in traces for each in trace.observations if each.kind.endswith("request"))
    return frozenset(f"sampling_params.{name}" for each in seen for name in each.data["sampling_params"])


def lap(
    session: Driver,
    seat: Seat,
    names: Iterable[str],
    fault: Fault | None,
    watch: Set[str] = frozenset(),
    *,
    until: set[str] | None = None,
) -> Lap:
    """Drive scenarios on a seat under a fault, or under none. `Lap.called` says which scenarios call functions of `watch`.

    `until`: checks; those that catch the fault are taken out, and nothing more is driven once it is empty.
    """
    began = time.monotonic()
    verdicts: list[Verdict] = []
    timings: Timings = {}
    called: dict[str, frozenset[str]] = {}
    fired, error = 0, ""
    try:
        with _watched(watch) as since:
            session.inject(seat, fault)
            always = since()
            for name in names:
                scenario = catalogue.declared()[name]
                found = session.drive(scenario, seat, catalogue.body(name))
                verdicts += found
                traces = session.driven(scenario, seat)
                called[name] = always | since() | (sampling_params(traces) if watch else frozenset())
                timings |= pace.timings(traces)
                if until is not None:
                    until -= catching(found)
                    if not until:
                        break
            fired = session.inject(seat, None)
    except StackError as e:
        error = f"{type(e).__name__}: {e.message}"
    able = {v.scenario for v in verdicts if v.status != Conformance.MISSING}
    kept = verdicts if fault is None else [_slim(v) for v in verdicts if v.red]
    return Lap(
        fault=None if fault is None else fault.id,
        verdicts=kept,
        driven=len(able),
        fired=fired,
        error=error,
        seconds=time.monotonic() - began,
        timings=timings,
        called=called if watch else {},
    )


def _slim(verdict: Verdict) -> Verdict:
    return msgspec.structs.replace(
        verdict, evidence=verdict.evidence[:1] if verdict.cause == Cause.NOT_DRIVEN else verdict.evidence[:2]
    )


_KNOWN: dict[str, dict[str, msgspec.Raw]] = {}
"""Model → its oracle's answers in this process. They do not depend on the stack."""


def _knowing(options: Options, progress: Progress) -> Driver:
    """A session that knows the oracle's answers to earlier sessions."""
    return Session(options, progress, _KNOWN)


@contextmanager
def _collected_once() -> Iterator[None]:
    """Collect garbage only at the end: each collection walks through all that a job has made. What lives on is not walked again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        if collects:
            gc.enable()


def drive_job(job: Job, begin: Begin = _knowing) -> Lap:
    """Drive a job in its own session. Returns its laps as one."""
    with _collected_once():  # the session is gone by its end
        try:
            return _drive(job, begin)
        except HarnessError as e:  # as text: not every error can be pickled out of another process
            fault = None if job.fault is None else job.fault.id
            return Lap(fault=fault, verdicts=[], driven=0, error=f"{type(e).__name__}: {e.message}")
        except asyncio.CancelledError as e:
            raise RuntimeError("the job was cancelled") from e  # a pool's worker that no Exception ends never answers


def _drive(job: Job, begin: Begin) -> Lap:
    session = begin(job.options, silent)
    try:
        until = set(job.fault.caught_by) if job.fault is not None and job.brief else None
        seats = (seat for seat in likely_first(job.seats, until or ()) if until is None or until)
        laps = [lap(session, seat, names, job.fault, job.watch, until=until) for seat, names in seats]
        return together(laps) if laps else Lap(fault=job.fault and job.fault.id, verdicts=[], driven=0)
    finally:
        session.close()
        if job.options.run_dir is not None:
            shutil.rmtree(job.options.run_dir, ignore_errors=True)


def likely_first(
    seats: Iterable[tuple[Seat, tuple[str, ...]]], checks: Collection[str]
) -> list[tuple[Seat, list[str]]]:
    """The same, those scenarios first that name one of these checks: a fault that is driven briefly ends with its last catch."""

    def unlikely(name: str) -> bool:
        return not {family(check.name) for check in catalogue.declared()[name].checks} & set(checks)

    found = [(seat, sorted(names, key=unlikely)) for seat, names in seats]
    return sorted(found, key=lambda one: all(map(unlikely, one[1])))


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its workers


def inline_laps(control: Job, faults: Sequence[Job], workers: int, begin: Begin = _knowing) -> Iterator[Lap]:
    """The laps of all jobs as they finish. One worker means this process. Raises HarnessError if the jobs stall.

    The control shows which scenarios a fault cannot change; they are left out. Faults with unknown changes start beside it.
    """
    if workers == 1:
        correct = drive_job(control, begin)
        yield correct
        yield from (drive_job(job if correct.error else job.narrowed(correct.called), begin) for job in faults)
        return
    done: SimpleQueue[Lap | BaseException] = SimpleQueue()
    with multiprocessing.get_context("spawn").Pool(workers, _ignore_interrupts) as pool:

        def begin_job(job: Job) -> None:
            pool.apply_async(drive_job, (job,), callback=done.put, error_callback=done.put)

        begin_job(control)
        for job in faults:
            if not job.may_be_narrowed:
                begin_job(job)
        for _ in (control, *faults):
            try:
                found = done.get(timeout=STALLED_S)
            except Empty:
                raise HarnessError(
                    f"no fault was driven to its end within {STALLED_S:.0f} s",
                    next_step="drive the next one alone, in this process: --fault … --jobs 1",
                ) from None
            if isinstance(found, BaseException):
                raise found
            yield found
            if found.fault is None:
                late = [job if found.error else job.narrowed(found.called) for job in faults if job.may_be_narrowed]
                for job in sorted(late, key=lambda job: -job.size):  # a long one at the end would run alone
                    begin_job(job)


def started_laps(planned: Plan, session: Driver) -> Iterator[Lap]:
    """The laps of a stack that starts once per topology."""
    for seat, names in planned.seats:
        yield lap(session, seat, names, None)
        for fault in planned.faults:
            chosen = dict(planned.of(fault)).get(seat)
            if chosen:
                yield lap(session, seat, chosen, fault)
    for seat, tried in planned.entries:
        ids = set().union(*tried.values())
        for one in (None, *(fault for fault in planned.faults if fault.id in ids)):
            here = [name for name, under in tried.items() if one is None or one.id in under]
            yield msgspec.structs.replace(lap(session, seat, here, one), beside=seat.topology.name)


def told(target: str, news: FaultProof | Control) -> str:
    """One line about a judged fault or control."""
    if isinstance(news, Control):
        said = "green" if news.green else f"red: {news.error or f'{len(news.reds)} of {news.verdicts} verdicts'}"
        return f"{target}: correct stack: {said}"
    return (
        f"{target}: {news.id}: {news.outcome}"
        + (f": {news.problem}" if news.problem else "")
        + f" ({news.seconds:.1f} s)"
    )


@final
class Collected:
    """Collects the laps of one stack. Judges each fault once its laps and the control's are complete."""

    def __init__(self, request: Request, planned: Plan, tell: Told) -> None:
        self._request, self._plan, self._tell = request, planned, tell
        parts = 1 if planned.inline else None
        self._due = {f.id: parts or len(planned.of(f)) for f in planned.faults}
        self._control_due = parts or len(planned.seats)
        self._parts: dict[str | None, list[Lap]] = {}
        self._laps: dict[str | None, Lap] = {}
        self._baseline: Baseline | None = None
        self._beside: list[Lap] = []

    def add(self, found: Lap) -> None:
        """Add a lap, and report the faults that can be judged now."""
        if found.beside:
            self._beside.append(found)
            return
        parts = self._parts.setdefault(found.fault, [])
        parts.append(found)
        due = self._control_due if found.fault is None else self._due[found.fault]
        if len(parts) < due:
            return
        whole = together(parts)
        self._laps[found.fault] = whole
        if found.fault is not None:
            self._settle([found.fault])
            return
        whole = paced(whole, whole.timings)
        explained, _ = ledger.apply(ledger.load(), whole.verdicts, datetime.now(UTC).date())
        self._laps[None] = msgspec.structs.replace(whole, verdicts=explained)
        self._baseline = Baseline(explained, whole.error)
        self._tell(self._plan.target, self._baseline.control)
        self._settle([fault.id for fault in self._plan.faults if fault.id in self._laps])

    def _settle(self, ids: Iterable[str]) -> None:
        if self._baseline is None:
            return
        for fault in self._plan.faults:
            if fault.id in ids:
                self._laps[fault.id] = paced(self._laps[fault.id], self._laps[None].timings)
                self._tell(self._plan.target, self._judged(fault, self._baseline))

    def _judged(self, fault: Fault, baseline: Baseline) -> FaultProof:
        names = [name for _, names in self._plan.of(fault) for name in names]
        filtered = bool(self._request.expression)
        reads = catalogue.facts_read()
        return judge_fault(fault, self._laps.get(fault.id), baseline, reads=reads, scenarios=names, filtered=filtered)

    def proof(self) -> Proof:
        """The stack's proof so far."""
        planned = self._plan
        made = prove_target(
            planned.target,
            planned.faults,
            self._laps,
            reads=catalogue.facts_read(),
            plan={f.id: [name for _, names in planned.of(f) for name in names] for f in planned.faults},
            scenarios=planned.scenarios,
            unable=planned.unable,
            dtype="" if planned.inline else self._request.dtype_name,
            hidden=planned.hidden,
            whole=planned.whole,
            filtered=bool(self._request.expression),
            brief=planned.brief,
            commands={f.id: command(planned, f, self._request) for f in planned.faults},
        )
        if not planned.entries:
            return made
        tried = {seat.topology.name: names for seat, names in planned.entries}
        day = datetime.now(UTC).date()
        return msgspec.structs.replace(
            made, ledger=prove_entries(ledger.load(), planned.target, tried, self._beside, day)
        )


def command(planned: Plan, fault: Fault, request: Request) -> str:
    """The command line that repeats one fault of one stack."""
    words = f"parity prove --stack {planned.target} --fault {fault.id}"
    if planned.inline:
        return words
    more = f" --dtype {request.dtype}" if request.dtype else ""
    more += " --cuda-graphs" * request.cuda_graphs + " --batch-invariant" * request.batch_invariant
    return f"{words} --start {request.start} --engine {request.engine}{more}"


def options(request: Request, target: str, folder: Path) -> Options:
    """The session's options for a proof: one stack, one take, with the fault instrument, no recordings."""
    return Options(
        baseline=target,
        candidate=target,
        stacks=[target],
        engine=request.engine,
        start=request.start,
        engines=request.engines,
        dtype=request.dtype,
        cuda_graphs=request.cuda_graphs,
        batch_invariant=request.batch_invariant,
        run_dir=folder,
        repeat=1,
        twin=False,
        fault_taps=True,
        record=False,
        command=request.command,
    )


def _laps(request: Request, planned: Plan, folder: Path, progress: Progress, begin: Begin | None) -> Iterator[Lap]:
    base = folder / "stacks" / stem(planned.target, "all")
    if planned.inline:
        control, *faults = [
            Job(
                options=options(request, planned.target, base / str(n)),
                fault=fault,
                seats=planned.of(fault),
                brief=fault is not None and fault.id in planned.brief,
            )
            for n, fault in enumerate((None, *planned.faults))
        ]
        watched = frozenset(name for fault in planned.faults for name in fault.changes)
        control = msgspec.structs.replace(control, watch=watched)
        workers = min(request.jobs or os.cpu_count() or 1, 1 + len(faults))
        yield from inline_laps(control, faults, workers, begin or _knowing)
        return
    session = (begin or Session)(options(request, planned.target, base), progress)
    outcome = "interrupted"
    try:
        yield from started_laps(planned, session)
        outcome = "completed"
    finally:
        session.close(outcome)


@final
class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. `error` is the named error that ended it, if any."""

    matrix: KillMatrix
    folder: Path
    error: HarnessError | None = None


def prove(request: Request, planned: Sequence[Plan], progress: Progress, tell: Told, begin: Begin | None = None) -> Run:
    """Drive all plans. Ctrl-C or a named error ends the driving; finished laps are judged, and the run is incomplete."""
    began = time.monotonic()
    created_at = datetime.now(UTC).isoformat(timespec="seconds")
    folder = RunFolder.create(request.run_dir, root=PROJECT)
    collected = [Collected(request, one, tell) for one in planned]
    outcome, error = "completed", None
    try:
        for one, into in zip(planned, collected, strict=True):
            for found in _laps(request, one, folder.path, progress, begin):
                into.add(found)
    except KeyboardInterrupt:
        outcome = "interrupted"
    except HarnessError as e:
        outcome, error = f"{type(e).__name__}: {e.message}", e
    finally:
        folder.close()
    matrix = KillMatrix(
        run_id=folder.run_id,
        created_at=created_at,
        command=request.command,
        start=request.start,
        engine=request.engine,
        proofs=[into.proof() for into in collected],
        outcome=outcome,
        filters=request.filters,
        seconds=round(time.monotonic() - began, 2),
    )
    return Run(matrix=matrix, folder=folder.path, error=error)
