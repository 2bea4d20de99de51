"""One run: starts stacks or takes over kept ones, drives scenarios on them, and keeps the recordings.

Stacks run one after the other; all scenarios of one target and topology share one start. The oracle runs beside them.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import psutil

import harness
from fixtures import models as checkpoints
from harness import PROJECT
from harness.checks.base import Evidence
from harness.contract import devices, messages
from harness.contract.clock import SimulatedLoop
from harness.contract.errors import Blame, CallFailed, HarnessError, NotFree, StackError, UsageError
from harness.contract.faults import Fault
from harness.contract.topology import Architecture, Topology
from harness.contract.vocabulary import TINY, Vocabulary
from harness.driving import allowance, models
from harness.driving.inline import InlineHost
from harness.driving.process import HostProcess
from harness.driving.stack import CLEAN_ROOM_DEADLINE_S, Stack
from harness.judging import judge, partings
from harness.judging.noise import noise_floors
from harness.judging.parity import Side
from harness.judging.recorded import Alone, Judging, Recorded, with_twins
from harness.machine import checkouts, environments, kept, routers
from harness.machine.git import run_git
from harness.machine.kept import Kept
from harness.machine.progress import Progress, silent
from harness.machine.targets import Target, front_of, known, needs_of, released, resolve
from harness.records.book import Book
from harness.records.index import Index
from harness.records.recorder import Recorder, Unwritten
from harness.records.recording import CallError, Header, ScenarioEnd, ScenarioStart, ScenarioTrace
from harness.records.reference import METHOD_OF, NextRequest, NoiseRequest, Query, Refusal
from harness.records.run_folder import RUNNING, RunFolder
from harness.records.verdict import NoiseFloor, RunInfo, Verdict
from harness.running.catalogue import contract, whole_waves
from harness.running.earlier import Baseline
from harness.running.run import COLLECT_EVERY
from harness.suite.scenario import Scenario

T = TypeVar("T")

MAX_STARTS = 4
"""Most starts of a stack that keeps dying. Its remaining scenarios then count as failed."""
QUERY_DEADLINE_S = 60.0
"""Seconds per query to the oracle about the tiny model. For other models the stack's slowness multiplies it, and one pass over
all weights is added."""
NOISE_DEADLINE_S = 900.0
"""Seconds for a query about noise: it starts an engine, or reads all rollouts of a training step three times."""
ORACLE_START_DEADLINE_S = 180.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    baseline: str
    candidate: str
    recorded: Path | None = None
    """The folder of an earlier run that holds the baseline's recordings: this run drives the candidate alone."""
    stacks: list[str] = []
    """Judge only these, compare nothing."""
    engine: Literal["cpu", "cuda"]
    start: Literal["ray", "fork"] = "ray"
    engines: int = 2
    model: str | None = None
    """A checkpoint folder, or a name in `harness.driving.models.NAMED`."""
    run_dir: Path | None = None
    target_python: dict[str, Path] = {}
    """Local target → its interpreter; "" → that of all others."""
    checkouts: dict[str, Path] = {}
    """The same for the git working tree of its source."""
    reference_python: Path | None = None
    """Interpreter of the oracle, on a machine where its environment cannot be made."""
    dtype: messages.Dtype | Literal["auto"] | None = None
    """Dtype of the engines. "auto": the checkpoint's; None: float32 on CPU, bfloat16 on CUDA."""
    cuda_graphs: bool = False
    batch_invariant: bool = False
    """Both as in `StartRequest`, and on CUDA only."""
    seed: int = 0
    """Draws the scenarios' prompts, and is the engines' own seed. Scenarios set seeds of their own in requests."""
    budget: float = 1.0
    """How much of what scenarios enumerate is driven; 1 is the usual extent."""
    repeat: int = 1
    twin: bool | None = None
    """True if everything of a baseline, or of a stack that is not compared, gets a second take, its twin; False if nothing does.
    None: what a baseline does otherwise than the candidate, as far as chance may explain it."""
    base_port: int | None = None
    ledger: Path | None = None
    profile: str | None = None
    """Name in ``scenarios/profiles.toml``; None: the default for the step from baseline to candidate."""
    command: str = ""
    fault_taps: bool = False
    """True if the stacks start with the fault instrument (`Session.inject`)."""
    code_swaps: messages.SwapRequest | None = None
    """The order that stacks start with, if they have the instrument that swaps code (`Session.swap`)."""
    clean_room_s: float = CLEAN_ROOM_DEADLINE_S
    """Seconds that a clean room may take, before the stack's slowness is taken into account."""
    record: bool = True
    """True if the session writes recordings. Otherwise only its verdicts remain."""
    reuse: bool = False
    """True if a kept stack or reference is used if it fits (`harness.machine.kept`)."""
    idle_s: float | None = None
    """Seconds without a driver after which stacks that this session keeps are ended (`Session.keep`)."""

    @property
    def targets(self) -> list[str]:
        """Targets in the order in which they are judged."""
        return self.stacks or [self.baseline, self.candidate]

    @property
    def driven(self) -> list[str]:
        """Those of them that are driven, in that order."""
        return self.targets if self.recorded is None else [self.candidate]

    @property
    def compares(self) -> bool:
        return not self.stacks

    def check(self) -> None:
        """Raises UsageError for an option that needs a GPU if the engine is "cpu"."""
        for name, asked in (("--cuda-graphs", self.cuda_graphs), ("--batch-invariant", self.batch_invariant)):
            if asked and self.engine == "cpu":
                raise UsageError(f"{name} needs a GPU, and this run is on --engine cpu", next_step=f"leave {name} out")

    def takes(self, target: str, *, once: bool = False) -> int:
        """Takes of a scenario on a target that are due in any case. A twin is not worth a start: not if the scenario runs `once`."""
        wanted = self.twin and not once and (target == self.baseline or not self.compares)
        return max(self.repeat, 2 if wanted else 1)


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A target in a topology. Its scenarios share one start and one recording."""

    target: str
    topology: Topology

    @property
    def name(self) -> str:
        return f"{self.target}@{self.topology.name}"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint and its hash."""

    path: Path
    sha256: str


class Oracle(msgspec.Struct, frozen=True, kw_only=True):
    """The host that answers about one model, and the book of its answers."""

    host: HostProcess | InlineHost
    book: Book


async def _or_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """An interrupt cancels what a runner runs. What answers that with a result or another error is interrupted all the same: a group
    of tasks raises a task's error in place of its own cancellation. The work has a task of its own, since a group in which a task
    failed leaves a cancellation in the count of the task that waited for it (until Python 3.13)."""
    runs = asyncio.current_task()
    assert runs is not None
    try:
        return await asyncio.ensure_future(work)
    except KeyboardInterrupt:
        raise asyncio.CancelledError from None  # the loop has raised it already, out of the work's own task
    finally:
        if runs.cancelling():
            raise asyncio.CancelledError


class Session:
    """Owns the run's folder, the live stack, the oracles and the recordings."""

    def __init__(
        self,
        options: Options,
        progress: Progress,
        known: dict[str, dict[str, msgspec.Raw]] | None = None,
        selected: Mapping[Topology, Sequence[str]] | None = None,
        *,
        tell: Callable[[str], None] = lambda _: None,
        simulated: Callable[[], SimulatedLoop] = SimulatedLoop,
    ) -> None:
        """`known`: hash of a model → its oracle's answers to earlier sessions. This session adds its own. `selected`: topology →
        the scenarios to drive there. A gap in a fully selected wave is red. `tell` gets news that are no step of their own.
        `simulated` makes the loop of inline stacks.

        Raises UsageError or `RecordingError` for an earlier baseline that does not fit, before anything is started or written.
        """
        gc.set_threshold(COLLECT_EVERY)
        self.options = options
        self._known = {} if known is None else known
        _refuse_two_models(options)
        self.seconds: dict[str, float] = {}
        self._places = {topology.name: topology for topology in selected or {}}
        self.selected: dict[str, list[str]] = {}
        for topology, names in (selected or {}).items():
            self.selected.setdefault(topology.name, []).extend(names)
        self._created_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._progress, self._tell = progress, tell
        self._targets: dict[str, Target] = {name: self._resolved(name) for name in options.driven}
        self._inline = all(target.inline for target in self._targets.values())
        self._runner = asyncio.Runner(loop_factory=simulated if self._inline else None)
        self._pythons: dict[str, Path] = {}
        self._models: dict[Architecture | None, Model] = {}
        self._seat: Seat | None = None
        self._stack: Stack | None = None
        self._recorder: Recorder | None = None
        self._starts: dict[str, int] = {}
        self._deaths: dict[str, int] = {}
        self._fired: dict[str, int] = {}
        """Seat → how often its fault took effect on stacks that scenarios spoiled meanwhile."""
        self._fault: Fault | None = None
        self._first_order = options.code_swaps
        self.not_started: dict[str, CallError] = {}
        """Seats whose first start failed → why. They have no recording."""
        self._hopeless: dict[str, CallError] = {}
        self._oracles: dict[str, Oracle] = {}
        """Hash of a model → its oracle."""
        self._vocabularies: dict[str, Vocabulary] = {}
        """Hash of a model → its vocabulary, from its oracle."""
        self._recorders: dict[str, Recorder] = {}
        """Seat → its recorder, open or closed."""
        self._verdicts: dict[tuple[str, str], list[Verdict]] = {}
        self._noise: list[NoiseFloor] | None = None
        self._earlier = self._fitting()
        self.folder = RunFolder.create(options.run_dir, root=PROJECT)
        self._policies = kept.policies() if self._shares_policies else self.folder.policies
        self._started: list[tuple[HostProcess, Kept]] = []
        """Hosts that `keep` leaves running, with what they were started with."""
        self._taken_over: Kept | None = None
        """The kept stack that is driven now."""
        self._books: dict[str, Book] = {}
        """Hash of a model → the open book of its oracle's answers."""
        self._taken = self._take_over()
        """Seat of an earlier baseline → its recordings, in this run's folder."""
        self._run = self.info(RUNNING)
        """The run as it began. Seats that do not start are added to it."""
        self.folder.write_info(self._run)

    # --- what is known before anything starts

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the block's wall time to a stage of the run."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began

    def info(self, outcome: str) -> RunInfo:
        """The run in its current state."""
        options = self.options
        return RunInfo(
            run_id=self.folder.run_id,
            created_at=self._created_at,
            command=options.command,
            baseline=options.baseline if options.compares else None,
            candidate=options.candidate if options.compares else None,
            recorded=None if options.recorded is None else str(options.recorded),
            start=self._start_kind,
            engine=options.engine,
            profile=options.profile,
            contract=contract(),
            declared=({options.baseline: self._earlier.declared} if self._earlier else {})
            | {name: sorted(self._target(name).capabilities) for name in options.driven},
            checkouts=(self._earlier.checkouts if self._earlier else {})
            | {name: tree for name in options.driven if (tree := self._target(name).checkout) is not None},
            seconds={stage: round(s, 2) for stage, s in self.seconds.items()},
            outcome=outcome,
            whole_waves=whole_waves(self.selected),
            selected=self.selected,
            not_started=self.not_started,
        )

    @property
    def _start_kind(self) -> messages.Start:
        return "inline" if self._inline else self.options.start

    def _target(self, name: str) -> Target:
        if name not in self._targets:
            self._targets[name] = self._resolved(name)
        return self._targets[name]

    def _resolved(self, name: str) -> Target:
        return resolve(name, self.options.target_python, self.options.checkouts)

    def _python(self, name: str) -> Path:
        """The interpreter of a target. Makes its environment if needed."""
        target = self._target(name)
        if target.python is not None:
            return target.python
        if name == self._oracle_name and self.options.reference_python is not None:
            return self.options.reference_python
        engine, progress = self.options.engine, self._progress
        if (known := target.environment or target.name) not in self._pythons:
            with self.timed("environment"):
                self._pythons[known] = (
                    checkouts.environment(needs_of(target, engine), engine, root=PROJECT, progress=progress)
                    if target.environment is None
                    else environments.ensure(target.environment, engine, root=PROJECT, progress=progress)
                )
        return self._pythons[known]

    def _notes(self, target: Target) -> list[str]:
        """What the report has to say of a checkout's environment that this run made."""
        if target.checkout is None or target.python is not None:
            return []
        return needs_of(target, self.options.engine).notes

    def _model(self, topology: Topology) -> Model:
        """The model of a topology: the user's checkpoint if it fits, else a tiny one, made on first use."""
        if topology.model not in self._models:
            self._models[topology.model] = (
                self._own_model(topology) if self._inline else self._checkpoint(topology.model)
            )
        return self._models[topology.model]

    def _own_model(self, topology: Topology) -> Model:
        """The inline targets' own model of the topology's architecture."""
        name = self._target(self._oracle_name).adapter + (topology.model or "")
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        return Model(path=Path("miniature"), sha256=sha256)

    def _checkpoint(self, architecture: Architecture | None) -> Model:
        path = None
        if self.options.model is not None:
            python = self._python("reference")
            with self.timed("environment"):
                path = models.checkpoint(self.options.model, python, self._progress)
        if path is None or architecture not in (None, checkpoints.architecture(path)):
            python = self._python("reference")
            with self.timed("environment"):
                path = models.tiny_model(python, self._progress, architecture or "qwen2")
        return Model(path=path, sha256=checkpoints.checkpoint_hash(path))

    # --- a baseline that was recorded earlier

    def _fitting(self) -> Baseline | None:
        """The earlier baseline, checked; None if this run drives its own."""
        if self.options.recorded is None:
            return None
        earlier = Baseline(self.options.recorded, self.options.baseline, self.selected)
        for topology in self._places.values():
            earlier.refuse_unless_it_fits(self._coming(Seat(target=self.options.candidate, topology=topology)))
        if self.options.twin is not False:
            earlier.refuse_without_any_twin()
        return earlier

    def _take_over(self) -> dict[str, Index]:
        """Copy what the earlier baseline recorded, and the reference's answers, into this run's folder."""
        if self._earlier is None:
            return {}
        taken = self._earlier.take_over(self.folder)
        for one in taken.values():
            sha256, file = one.header.model_sha256, self.folder.reference_of(one.header.topology.model)
            if sha256 not in self._books and (sources := self._earlier.books(sha256)):
                self._books[sha256] = Book.united(file, sources, self._known.setdefault(sha256, {}))
        return taken

    # --- driving

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(_or_interrupted(work))

    def drive(self, scenario: Scenario, seat: Seat, body: Callable[[Stack], Awaitable[None]]) -> list[Verdict]:
        """Drive all takes of a scenario on a seat and judge the recording. Returns its conformance verdicts.

        A scenario whose required capabilities the target does not declare is `missing`, without a start. The candidate comes first:
        where the baseline's first take differs from it, a second one tells what is noise.
        """
        takes = 0
        if (earlier := self._taken.get(seat.name)) is not None:
            for take in earlier.takes(scenario.name):
                self._consult(seat.topology)
                self._ask_the_oracle(scenario, earlier.trace(scenario.name, take))
        elif seat.target in self.options.driven and scenario.needs <= self._target(seat.target).capabilities:
            self._sit(seat)
            if self._recorder is not None and scenario.needs <= set(self._recorder.header.capabilities):
                takes = self.options.takes(seat.target, once=scenario.once)
                for take in range(1, takes + 1):
                    self._take(scenario, seat, take, body)
        alone = self._alone(scenario, seat)
        if takes == 1 and self._wants_twin(scenario, seat, alone.side):
            self._take(scenario, seat, 2, body)
            alone = self._alone(scenario, seat)
        self._verdicts[scenario.name, seat.name] = alone.verdicts
        return alone.verdicts

    def _alone(self, scenario: Scenario, seat: Seat) -> Alone:
        with self.timed("judge"):
            return self._judging(seat.topology).alone(scenario, seat.target)

    def _take(self, scenario: Scenario, seat: Seat, take: int, body: Callable[[Stack], Awaitable[None]]) -> None:
        stack = self._live(seat)
        if stack is None:
            self._not_driven(scenario, take, self._hopeless[seat.name])
        else:
            # Without a result: asyncio formats what a coroutine returned, and a trace is large.
            async def driving() -> None:
                await stack.drive(scenario.name, take, scenario.deadline_s, lambda: body(stack), spoils=scenario.spoils)

            with self.timed("drive"):
                self._in_loop(driving())
        assert self._recorder is not None
        self._ask_the_oracle(scenario, self._recorder.index.trace(scenario.name, take))

    def _wants_twin(self, scenario: Scenario, seat: Seat, side: Side) -> bool:
        options = self.options
        if not options.compares or options.twin is False or seat.target != options.baseline or scenario.once:
            return False
        self._ask_where_they_part(scenario, seat.topology)
        with self.timed("judge"):
            return self._judging(seat.topology).wants_twin(scenario, side)

    def _not_driven(self, scenario: Scenario, take: int, error: CallError) -> None:
        recorder = self._recorder
        assert recorder is not None
        now = time.time_ns()
        recorder.add(ScenarioStart(scenario=scenario.name, take=take, at_ns=now))
        recorder.add(ScenarioEnd(scenario=scenario.name, take=take, outcome="failed", error=error, at_ns=now))

    def _live(self, seat: Seat) -> Stack | None:
        """The running stack of the current seat. Restarts a dead one. None if no start will help."""
        if self._stack is not None and self._stack.alive:
            return self._stack
        self._bury(seat)
        if seat.name not in self._hopeless:
            if self._deaths.get(seat.name, 0) < MAX_STARTS:
                error = self._start(seat)
            else:
                error = CallError(
                    kind="StackDied", message=f"started {MAX_STARTS} times, died each time", blame=Blame.STACK
                )
            if error is not None:
                self._hopeless[seat.name] = error
            elif self._stack is not None and self._recorder is not None:
                self._stack.record_to(self._recorder)
        return self._stack

    def _bury(self, seat: Seat) -> None:
        """Close a stack that died or that a scenario spoiled. Counts its death and the effects of its fault."""
        if self._stack is not None:
            self._deaths[seat.name] = self._deaths.get(seat.name, 0) + (not self._stack.spoiled)
            self._fired[seat.name] = self._fired.get(seat.name, 0) + self._last_fired(self._stack)
            self._in_loop(self._stack.close())
            self._stack = None

    def _last_fired(self, stack: Stack) -> int:
        """How often the fault took effect on a spoiled stack; 1 if the stack had to be ended and cannot say."""
        if self._fault is None or not stack.spoiled:
            return 0
        with suppress(StackError):
            return self._in_loop(stack.inject(None))
        return 1

    def _sit(self, seat: Seat) -> None:
        """Make `seat` the current one: end the other, start this one, open its recording."""
        if self._seat == seat:
            return
        self._rise()
        self._consult(seat.topology)
        self._seat = seat
        error = self._start(seat)
        if error is not None or self._stack is None or self._stack.description is None:
            assert error is not None
            self.not_started[seat.name] = error
            return
        header = self._header(seat, self._stack.description)
        kind = Recorder if self.options.record else Unwritten
        self._recorder = kind(self.folder.recording(seat.target, seat.topology)).open(header)
        self._recorders[seat.name] = self._recorder
        self._stack.record_to(self._recorder)

    def _start(self, seat: Seat) -> CallError | None:
        """Start the seat's stack. Returns the error if that failed."""
        assigned: devices.Devices | None = None
        if self.options.engine == "cuda" and not self._target(seat.target).inline:
            gpus = len(environments.list_gpus())
            if devices.needed(seat.topology) > gpus:
                message = f"untestable here: needs {devices.needed(seat.topology)} GPUs, there are {gpus}"
                return CallError(kind="TooFewGPUs", message=message, blame=Blame.ENVIRONMENT)
            assigned = devices.assign(seat.topology, gpus)
        try:
            self._stack = self.launch(seat, assigned)
        except StackError as e:
            return CallError(kind=type(e).__name__, message=f"{e}\n{e.log_tail}".strip(), blame=e.blame)
        return None

    def launch(self, seat: Seat, assigned: devices.Devices | None = None) -> Stack:
        """Start a stack in this seat, on these GPUs. The caller closes it. Raises StackError if it does not start."""
        number = self._starts[seat.name] = self._starts.get(seat.name, 0) + 1
        logs = self.folder.logs(seat.target, seat.topology)
        if number > 1 and not self._inline:
            logs /= f"start-{number}"
        router = self._target(seat.target).other_router
        wanted = messages.StartRequest(
            target=seat.target,
            topology=seat.topology,
            capabilities=sorted(self._target(seat.target).capabilities),
            start=self._start_kind,
            engine=self.options.engine,
            model_path=str(self._model(seat.topology).path),
            dtype=self._dtype(self._model(seat.topology)),
            cuda_graphs=self.options.cuda_graphs,
            batch_invariant=self.options.batch_invariant,
            devices=assigned,
            seed=self.options.seed,
            scratch="",
            logs=str(logs.absolute()),
            base_port=self.options.base_port,
            fault_taps=self.options.fault_taps,
            code_swaps=self._first_order,
            router_policy=None if router is None else router.policy,
            policies=str(self._policies),
        )
        asked = self._asked(seat.name, wanted, self._model(seat.topology))
        self._taken_over, host = self._running(asked) or (None, self._host(seat.target, logs))
        request = self._taken_over.request if self._taken_over else _in(host, wanted)
        stages = self._target(seat.target).runs_on.stages
        vocabulary = self._vocabularies.get(self._model(seat.topology).sha256, TINY)
        stack = Stack(host, request, vocabulary, stages)
        stack.clean_room_s = self.options.clean_room_s
        stack.budget = self.options.budget
        try:
            with self.timed("start"):
                if self._taken_over is None:
                    description = self._in_loop(stack.start(self._progress if not self._inline else silent))
                    self._keepable(host, msgspec.structs.replace(asked, request=request, description=description))
                else:
                    assert self._taken_over.description is not None
                    self._in_loop(stack.take_over(self._taken_over.description))
                if self._fault is not None:
                    self._in_loop(stack.inject(self._fault.id))
        except BaseException:
            self._in_loop(stack.close())
            raise
        return stack

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a caller's coroutine on the loop of the session's stacks."""
        return self._in_loop(coroutine)

    def _host(self, name: str, logs: Path) -> HostProcess | InlineHost:
        """A host for a target's adapter, not launched yet."""
        target = self._target(name)
        if target.inline:
            return InlineHost(adapter=target.adapter, logs=logs)
        python = self._python(name)
        front = [*routers.front(target.other_router, PROJECT, python, self._progress), *front_of(target)]
        if target.checkout is not None and target.runs_on.source is not None:
            now = checkouts.read(Path(target.checkout.path), target.runs_on.source)
            if now != target.checkout:
                raise UsageError(
                    f"{now.path} changed since the run began: {target.checkout.told} then, {now.told} now",
                    next_step="leave the tree alone while it is driven, or drive a worktree of it",
                )
            checkouts.check_front(python, target.checkout, target.runs_on.source, front)
        return HostProcess(
            python=python,
            adapter=target.adapter,
            variables=target.variables,
            logs=logs,
            runtime=target.runs_on,
            run=self.folder.path,
            front=front,
            idle_s=self.options.idle_s,
        )

    # --- stacks that outlive a session

    @property
    def _shares_policies(self) -> bool:
        return self.options.idle_s is not None or (self.options.reuse and any(kept.running()))

    def keep(self, seat: Seat) -> None:
        """Start the seat's stack and its reference, and leave both running at `close`. Needs `Options.idle_s`.

        Raises UsageError if such a stack is up already, and StackError if it cannot be started.
        """
        self._sit(seat)
        if (error := self.not_started.get(seat.name)) is not None:
            raise StackError(f"{seat.name} could not be started: {error.kind}: {error.message}")
        since = datetime.now(UTC).isoformat(timespec="seconds")
        for host, asked in self._started:
            up = msgspec.structs.replace(asked, supervisor=host.supervisor, lifeline=host.lifeline, since=since)
            up.write(self.folder.path)
        for host, _ in self._started:
            host.outlives = True

    def _asked(self, name: str, request: messages.StartRequest, model: Model) -> Kept:
        """What a stack or reference is to be started with."""
        target = self._target(request.target)
        return Kept(
            name=name,
            since="",
            supervisor=0,
            lifeline=Path(),
            adapter=target.adapter,
            request=request,
            model_sha256=model.sha256,
            python=Path() if target.inline else self._python(request.target),
            checkout=target.checkout,
            book=self.folder.reference_of(request.topology.model),
            code=kept.code() if self.options.idle_s is not None else {},
        )

    def _keepable(self, host: HostProcess | InlineHost, asked: Kept) -> None:
        if self.options.idle_s is not None and isinstance(host, HostProcess):
            self._started.append((host, asked))

    def _running(self, asked: Kept) -> tuple[Kept, HostProcess] | None:
        """A kept stack or reference that fits, taken over. Of those that do not fit it tells why.

        Raises UsageError for one that fits and is stale.
        """
        for one in kept.running() if self.options.reuse else ():
            if one.request.target != asked.request.target:
                continue
            why = "; ".join(one.differs(asked))
            if not why:
                one.refuse_stale()
                try:
                    return one, HostProcess.of_kept(one)
                except NotFree as e:
                    why = e.message
            self._tell(f"{asked.name}: started for this run, since the one that is up does not fit: {why}")
        return None

    def inject(self, seat: Seat, fault: Fault | None) -> int:
        """Drive `seat` under this fault from now on. Returns how often the previous one took effect since its injection.

        A death of the stack under it counts as one effect. Needs `Options.fault_taps`. With a fault, a dead stack is
        restarted first. Raises StackError if the stack cannot be started or has no fault instrument.
        """
        self._sit(seat)
        self._hopeless.pop(seat.name, None)
        before = self._deaths.pop(seat.name, 0)  # so that it may be started again, however often it died
        if fault is None and self._stack is not None and not self._stack.alive:
            self._bury(seat)  # the next scenario restarts it
            self._fault = None
            return before + self._deaths.pop(seat.name, 0) + self._fired.pop(seat.name, 0)
        stack = self._live(seat)
        before += self._deaths.pop(seat.name, 0) + self._fired.pop(seat.name, 0)
        if stack is None:
            error = self._hopeless.get(seat.name) or self.not_started[seat.name]
            raise StackError(f"{seat.name} could not be started: {error.kind}: {error.message}")
        self._fault = fault
        fired = self._in_loop(stack.inject(None if fault is None else fault.id))
        if self._inline:
            stack.put_together_anew()
        return before + fired

    def swap(self, seat: Seat, request: messages.SwapRequest) -> messages.SwapResult:
        """Swap the code of functions in the processes of `seat`, and put all others back. Needs `Options.code_swaps`.

        A dead stack is restarted first, however often it died, and the next clean room syncs the weights. Raises StackError if the
        stack cannot be started or does not swap code.
        """
        self._sit(seat)
        self._hopeless.pop(seat.name, None)
        self._deaths.pop(seat.name, None)
        stack = self._live(seat)
        if stack is None:
            error = self._hopeless.get(seat.name) or self.not_started[seat.name]
            raise StackError(f"{seat.name} could not be started: {error.kind}: {error.message}")
        stack.doubt_weights()
        return self._in_loop(stack.swap(request))

    def living(self, seat: Seat) -> bool:
        """True if the seat's stack runs and no scenario has spoiled it."""
        return self._seat == seat and self._stack is not None and self._stack.alive

    def renew(self, seat: Seat, swap: messages.Swap | None = None) -> None:
        """End the seat's stack. The next scenario gets a fresh start, however often it died, and later ones, with this code of a
        function."""
        if self.options.code_swaps is not None:
            self._first_order = messages.SwapRequest(watch=self.options.code_swaps.watch, swaps=[swap] if swap else [])
        if self._seat == seat:
            self._bury(seat)
        self._hopeless.pop(seat.name, None)
        self._deaths.pop(seat.name, None)

    def driven(self, scenario: Scenario, seat: Seat) -> list[ScenarioTrace]:
        """The latest recording of a scenario on a seat, one trace per take."""
        recorded = self._recorded(seat)
        if recorded is None:
            return []
        return [recorded.index.trace(scenario.name, take) for take in recorded.index.takes(scenario.name)]

    def _rise(self, outcome: Literal["completed", "failed"] = "completed") -> None:
        """End the current seat: its recording first, then its processes."""
        if self._recorder is not None:
            self._recorder.close(outcome)
            self._recorder = None
        if self._stack is not None:
            progress = silent if self._inline else self._progress
            how = "leaving it running" if self._stack.outlives else "taking it down"
            with progress(f"{self._seat.name if self._seat else 'stack'}: {how}"), self.timed("stop"):
                self._in_loop(self._stack.close())
            self._stack = None
        self._seat = None

    def _header(self, seat: Seat, description: messages.Description) -> Header:
        return msgspec.structs.replace(
            self._coming(seat),
            run_id=self.folder.run_id,
            capabilities=description.capabilities,
            packages=description.packages,
            commit=commit(),
            vocabulary=self._vocabularies[self._model(seat.topology).sha256],
            hardware=hardware(),
            servers=[server.name for server in description.servers],
            patches=description.patches,
            notes=[*description.notes, *self._notes(self._target(seat.target)), *self._of_earlier_runs()],
        )

    def _of_earlier_runs(self) -> list[str]:
        if self._taken_over is None:
            return []
        return [f"not started for this run: up since {self._taken_over.since}, and earlier runs may have driven it"]

    def _coming(self, seat: Seat) -> Header:
        """What is known of a seat's header before its stack starts."""
        model = self._model(seat.topology)
        return Header(
            harness_version=harness.__version__,
            run_id="",
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            target=seat.target,
            topology=seat.topology,
            start=self._start_kind,
            engine=self.options.engine,
            capabilities=[],
            packages={},
            checkout=self._target(seat.target).checkout,
            model={"name": model.path.name, "sha256": model.sha256, "dtype": self._dtype(model)},
            cuda_graphs=self.options.cuda_graphs,
            batch_invariant=self.options.batch_invariant,
            budget=self.options.budget,
            hardware={},
            seed=self.options.seed,
            servers=[],
        )

    def _dtype(self, model: Model) -> messages.Dtype:
        if self._inline and self.options.dtype in (None, "auto"):
            return "float32"
        if self.options.dtype == "auto":
            return models.checkpoint_dtype(model.path)
        return self.options.dtype or messages.DEFAULT_DTYPE[self.options.engine]

    # --- the oracle

    @property
    def _oracle_name(self) -> str:
        """The target that serves as the oracle, the same for all targets of a run."""
        return self._target(self.options.driven[0]).reference

    def _consult(self, topology: Topology) -> None:
        """Start the oracle of a topology's model and open its book, once. Raises HarnessError if it did not start before."""
        model = self._model(topology)
        if model.sha256 in self._vocabularies:
            return
        if model.sha256 in self._oracles:
            raise HarnessError(
                f"the reference for {model.path.name} did not start", next_step="mend what its first error names"
            )
        file = self.folder.reference_of(topology.model)
        logs = self.folder.path / "logs" / file.stem
        wanted = messages.StartRequest(
            target=self._oracle_name,
            topology=Topology(engines=1, model=topology.model),
            capabilities=sorted(self._target(self._oracle_name).capabilities),
            engine=self.options.engine,
            model_path=str(model.path),
            dtype=self._dtype(model),
            cuda_graphs=self.options.cuda_graphs,
            batch_invariant=self.options.batch_invariant,
            scratch="",
            logs=str(logs.absolute()),
            policies=str(self._policies),
        )
        asked = self._asked(self._oracle_name, wanted, model)
        taken, host = self._running(asked) or (None, self._host(self._oracle_name, logs))
        if model.sha256 not in self._books:
            answers = self._known.setdefault(model.sha256, {})
            self._books[model.sha256] = (
                Book.united(file, [taken.book], answers) if taken else Book.create(file, model.sha256, answers)
            )
        oracle = Oracle(host=host, book=self._books[model.sha256])
        self._oracles[model.sha256] = oracle
        progress = silent if self._inline or taken else self._progress
        with progress("reference: loading the model"), self.timed("start"):
            self._in_loop(oracle.host.launch())
            if taken is None:
                loading_s = ORACLE_START_DEADLINE_S + allowance.for_weights(model.path)
                self._in_loop(oracle.host.call("start", _in(host, wanted), loading_s))
                self._keepable(host, msgspec.structs.replace(asked, request=_in(host, wanted)))
            vocabulary: Vocabulary = self._in_loop(oracle.host.call("vocabulary", messages.Empty(), QUERY_DEADLINE_S))
        if not vocabulary.template:
            raise UsageError(
                f"{model.path} has no chat template", next_step="name a model that is made for conversations"
            )
        self._vocabularies[model.sha256] = vocabulary
        with progress("reference: measuring what rounding moves, with a bare engine"), self.timed("reference"):
            self._in_loop(self._ask(oracle.book.missing([NoiseRequest()]), oracle, QUERY_DEADLINE_S))

    def _ask_the_oracle(self, scenario: Scenario, trace: ScenarioTrace) -> None:
        """Ask the queries of the scenario's checks, until the answers lead to no new query."""
        oracle = self._oracles[trace.header.model_sha256]
        with self.timed("reference"):
            while new := oracle.book.missing(judge.queries(scenario, trace, oracle.book)):
                self._in_loop(self._ask(new, oracle, self._query_deadline_s(trace)))

    def _query_deadline_s(self, trace: ScenarioTrace) -> float:
        slowness = 1.0 if self._stack is None else self._stack.slowness
        return QUERY_DEADLINE_S * slowness + allowance.for_weights(self._model(trace.header.topology).path)

    async def _ask(self, queries: Sequence[Query], oracle: Oracle, deadline_s: float) -> None:
        for query in _longest_first(queries):
            within_s = NOISE_DEADLINE_S if isinstance(query, NoiseRequest) else deadline_s
            try:
                answer = await oracle.host.call(METHOD_OF[type(query)], query, within_s)
            except CallFailed as e:
                answer = Refusal(reason=str(e))
            oracle.book.add(query, answer)

    # --- comparing

    def compare(self, scenario: Scenario, topology: Topology) -> list[Verdict]:
        """Compare the two recordings of a scenario. It drives nothing, and asks the oracle where their answers part."""
        self._ask_where_they_part(scenario, topology)
        with self.timed("judge"):
            if self._noise is None:
                self._noise = noise_floors(with_twins(self._of_baseline()))
            return self._judging(topology).both(scenario, self._noise)[1]

    def _ask_where_they_part(self, scenario: Scenario, topology: Topology) -> None:
        left, right = (self._recorded(Seat(target=name, topology=topology)) for name in self.options.targets)
        oracle = self._oracles.get("" if right is None else right.index.header.model_sha256)
        if left is None or right is None or oracle is None or not left.index.takes(scenario.name):
            return
        ours = Evidence(left.index.trace(scenario.name), oracle.book)
        with self.timed("reference"):
            for take in right.index.takes(scenario.name):
                theirs = Evidence(right.index.trace(scenario.name, take), oracle.book)
                asked = oracle.book.missing(partings.queries(ours, theirs))
                self._in_loop(self._ask(asked, oracle, self._query_deadline_s(theirs.trace)))

    def of_both(self, scenario: Scenario, topology: Topology) -> list[Verdict]:
        """The conformance verdicts of both stacks on a scenario, as far as it was driven."""
        seats = [Seat(target=name, topology=topology) for name in self.options.targets]
        return [verdict for seat in seats for verdict in self._verdicts.get((scenario.name, seat.name), [])]

    @property
    def released(self) -> dict[str, str | None]:
        """As in `Judgement`, of the stacks that were started so far."""
        return released((one.header.target, one.header.packages) for one in self._indices.values())

    @property
    def _indices(self) -> dict[str, Index]:
        """Seat → its recordings so far."""
        return self._taken | {seat: recorder.index for seat, recorder in self._recorders.items()}

    def _judging(self, topology: Topology) -> Judging:
        seats = [Seat(target=name, topology=topology) for name in self.options.targets]
        here = {seat.target: recorded for seat in seats if (recorded := self._recorded(seat)) is not None}
        return Judging(self._run, topology.name, here)

    def _recorded(self, seat: Seat) -> Recorded | None:
        """The seat's recording so far; None without a recording."""
        index = self._indices.get(seat.name)
        return None if index is None else self._with_book(index)

    def _with_book(self, index: Index) -> Recorded:
        return Recorded(index=index, book=self._books.get(index.header.model_sha256) or Book.empty())

    def _of_baseline(self) -> Iterator[Recorded]:
        for index in self._indices.values():
            if index.header.target == self.options.baseline:
                yield self._with_book(index)

    # --- the end

    def close(self, outcome: str = "completed") -> None:
        """End everything that runs and write the run's outcome. Safe to call twice."""
        with ExitStack() as last:  # each callback runs even if another one fails
            last.callback(self.folder.close)
            last.callback(lambda: self.folder.write_info(self.info(outcome)))
            last.callback(self._runner.close)
            for oracle in self._oracles.values():
                last.callback(self._in_loop, oracle.host.close())
            for book in self._books.values():
                last.callback(book.close)
            self._oracles.clear()
            self._rise("completed" if outcome == "completed" else "failed")


def _longest_first(queries: Sequence[Query]) -> list[Query]:
    """Questions about distributions last, those about one model's weights together, a prompt before its own beginnings: a reference
    loads weights once, and can tell all beginnings at once."""
    nexts = [query for query in queries if isinstance(query, NextRequest)]
    nexts.sort(key=lambda q: (q.version, str(q.adapter), str(q.quantization), q.prompt), reverse=True)
    return [*(query for query in queries if not isinstance(query, NextRequest)), *nexts]


def _in(host: HostProcess | InlineHost, request: messages.StartRequest) -> messages.StartRequest:
    return msgspec.structs.replace(request, scratch=str(host.scratch))


def _refuse_two_models(options: Options) -> None:
    """Raises UsageError for targets with different oracles: they run different models."""
    oracles = {known(name).reference for name in options.driven}
    if len(oracles) > 1:
        raise UsageError(
            f"{' and '.join(options.driven)} run different models: nothing can be compared",
            next_step="drive them in runs of their own (--stack)",
        )


def hardware() -> dict[str, str]:
    """The machine, for the header."""
    found = {
        "cpu": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.0f}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    if gpus := environments.list_gpus():
        found["gpus"] = f"{len(gpus)} × {gpus[0].partition(': ')[2].partition(' (')[0]}"
    return found


def commit() -> str | None:
    """The commit of the harness's checkout, with "+changes" if there are any; None outside a checkout."""
    if shutil.which("git") is None or not (PROJECT / ".git").exists():
        return None
    head = run_git(PROJECT, "rev-parse", "HEAD")
    if head.returncode != 0:
        return None
    dirty = run_git(PROJECT, "status", "--porcelain")
    return head.stdout.decode().strip() + ("+changes" if dirty.stdout.strip() else "")
