"""Drives a real stack under machine-made mutants of its own code, and judges what the suite sees of them.

A stack starts once per topology. The control, without a mutant, shows which lines of the code each scenario runs. Each mutant is
then put into the running processes after the clean room of a scenario and taken out at its end. Only scenarios in which its
statement runs are driven, until one turns red. That scenario must be green again without the mutant.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, final

import msgspec

from harness import PROJECT
from harness.contract.errors import HarnessError, MissedMoment, StackError, UsageError
from harness.contract.faults import DRIVEN, family
from harness.contract.messages import Swap, SwapRequest, SwapResult
from harness.driving.stack import Stack
from harness.judging import ledger
from harness.machine import environments
from harness.machine.progress import Progress
from harness.machine.targets import Target, resolve
from harness.proving.kill_matrix import Baseline
from harness.proving.mutations import Equivalent, Mutant, Surveyed, explained, mutated, sample, survey
from harness.proving.prove import seat_of
from harness.records.run_folder import RunFolder
from harness.records.verdict import Cause, Conformance, Verdict
from harness.running import catalogue
from harness.running.session import Options, Seat, Session
from harness.suite.scenario import Scenario

CLEAN_ROOM_S = 20.0
"""Seconds that a clean room may take (default: 60): one that a mutant has left unusable is found out sooner."""
LEAST_S = 8.0
"""Least deadline (seconds) of a scenario under a mutant."""
SLOWER = 4.0
"""Deadline of a scenario under a mutant, in units of its time in the control."""
ALONE_S = 12.0
"""Seconds of driving under one mutant that nothing has killed. A scenario that would take longer is left to the group, unless it is
the first."""
START_S = 45.0
"""The same for a mutant with a start of its own, which no group drives."""
MOST_ACCIDENTS = 3
"""Scenarios that may end by accident under a mutant before the next ones are left out."""
ONCE = "its statement ran in the control, and not under it: once per start, such as what fills a cache"
ROOM_S = 0.3
"""Seconds of a drive beside its body: clean room and judging (two cores, tiny model)."""
STARTED = "start"
"""Stands for a check where a mutant kept the stack from starting."""
BEFORE = ("clean_room", "scenario")
"""Phases whose failed calls count under a mutant that is in the stack from its start."""
NAMELESS = ("StackDied", "ScenarioTimedOut", "TaskRefusesToEnd")
"""Errors that say that the stack is gone or late, but no call and no cause."""
NAMES = re.compile(r"""(['"`])(?!\w+\1 object )[^'"`]+\1|\b\w+\(\)|\b\w+=\S|\w\.\w+:\d+|\bdid not return within\b""")
"""What a message names: something quoted (but no type of Python: "'NoneType' object …"), a function, an argument with its
value, a server's address, or the call that hangs."""

FIND = """
import json, sys
from importlib.machinery import PathFinder
from pathlib import Path
found = {}
for name in sys.argv[1:]:
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top)
    places = [Path(p).joinpath(*rest) for p in spec.submodule_search_locations] if spec else []
    files = [file for p in places for file in (p.with_suffix(".py"), p / "__init__.py") if file.is_file()]
    found[name] = str(files[0]) if files else None
print(json.dumps(found))
"""
"""Finds the files of modules without importing them or their packages."""


class Fate(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    """A check turned red, or a call of the scenario failed with a named error."""
    ACCIDENT = "killed by accident"
    """The stack died, or nothing could be judged: red, but it does not name the matter."""
    SURVIVED = "survived"
    UNREACHED = "not reached"
    """Its statement runs in no driven scenario after the clean room, or ran in the control only."""
    EQUIVALENT = "equivalent"
    """An entry of the target's file explains why no scenario can see it. It is not driven."""
    SKIPPED = "skipped"
    """Its code could not be swapped, or a scenario turned red without it."""
    NOT_DRIVEN = "not driven"
    """The time was up, or the run was interrupted."""


@final
class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One mutant and what became of it."""

    id: str
    function: str
    line: int
    before: str
    after: str
    fate: Fate
    by: list[str] = []
    """Families of the checks that turned red; `DRIVEN` for a call of the scenario that failed."""
    scenario: str = ""
    """The scenario that killed it."""
    reason: str = ""
    driven: int = 0
    """Scenarios that were driven under it."""
    passed: list[str] = []
    """Those of them that stayed as in the control while its statement ran."""
    started: bool = False
    """True if the stack was started with it."""
    callers: int = 0
    """Scenarios in which its statement runs."""
    fired: bool = False
    """True if the changed statement ran under it, or the stack died of it."""
    seconds: float = 0.0

    @property
    def seen(self) -> str:
        """What turned red, and in which scenario."""
        return ", ".join(self.by) + (f" in {self.scenario}" if self.scenario else "")


@final
class Excluded(msgspec.Struct, frozen=True, kw_only=True):
    """Public functions that no scenario can use: they need a CUDA device, a configuration that SkyRL's entry points do not make, or
    have no caller. Their mutants count as not reached, also where the probe of exposed routes enters them."""

    function: str
    """Pattern of their names ("module:name")."""
    reason: str


@final
class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario of the control."""

    scenario: str
    topology: str
    seconds: float
    green: bool
    called: dict[str, list[int]]
    """Function ("module:name") → its lines that ran after the clean room."""
    reds: dict[str, str] = {}
    """Check → reason of each verdict that is no pass, known ones included."""
    red_once: bool = False
    """Red, and green when it was driven again on a fresh stack: it judges no mutant."""

    @property
    def why(self) -> str:
        """Its name, and what is red there."""
        reasons = "; ".join(f"{check}: {reason}" for check, reason in self.reds.items())
        return f"{self.scenario} ({reasons}){' (green when driven again)' if self.red_once else ''}"


@final
class MutantProof(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one stack."""

    target: str
    seed: int
    population: int
    """All mutants of the listed modules."""
    judged: list[Judged]
    control: list[Ran]
    public: list[str]
    """Functions of the public path."""
    prepared: dict[str, list[int]]
    """Function → its lines that run while the stack starts, or in a clean room."""
    begun: dict[str, list[int]] = {}
    """The same, only while it starts."""
    excluded: dict[str, str] = {}
    """Function of the public path that no scenario can run → reason (`Excluded`)."""
    seconds: float = 0.0
    error: str = ""

    def of(self, *fates: Fate) -> list[Judged]:
        return [one for one in self.judged if one.fate in fates]

    @property
    def reached(self) -> list[Judged]:
        """Mutants that were judged: reached, and not equivalent."""
        return self.of(Fate.KILLED, Fate.ACCIDENT, Fate.SURVIVED)

    @property
    def score(self) -> float | None:
        """Killed share of the reached ones; None if none was reached."""
        return len(self.of(Fate.KILLED)) / len(self.reached) if self.reached else None

    @property
    def called(self) -> set[str]:
        return {name for ran in self.control for name in ran.called}

    @property
    def unreached(self) -> list[str]:
        """Functions of the public path that no scenario of the control calls."""
        called = self.called
        return [name for name in self.public if name not in called]

    @property
    def problems(self) -> list[str]:
        """Why the figures do not count: the instrument did not work, or the control was red. A low score is no problem."""
        reds = [ran.why for ran in self.control if not ran.green and not ran.red_once]
        found = {
            f"ended early: {self.error}": self.error,
            "the control drove no scenario": not self.control,
            f"red without a mutant: {', '.join(reds)}": reds,
            "the control saw no code run": self.control and not self.called,
            "no mutant was judged": not self.reached and self.of(Fate.SKIPPED, Fate.NOT_DRIVEN),
            "no changed statement ran": self.reached and not any(one.fired for one in self.reached),
        }
        return [problem for problem, there in found.items() if there]


@final
class MutantRun(msgspec.Struct, frozen=True, kw_only=True):
    """All stacks of one run."""

    run_id: str
    created_at: str
    command: str
    outcome: str
    proofs: list[MutantProof]

    @property
    def exit_status(self) -> int:
        """0 if every stack was driven to the end and the instrument worked, whatever the score."""
        return int(self.outcome != "completed" or any(proof.problems for proof in self.proofs))


@final
class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    stacks: tuple[str, ...]
    sample: int
    seed: int
    minutes: float | None = None
    """Minutes of driving mutants per stack, after its first start and control."""
    mutants: tuple[str, ...] = ()
    """Ids; instead of a sample."""
    at_start: bool = False
    """True to drive only mutants whose statement runs while a stack starts, or in a clean room, and in no scenario."""
    earlier: tuple[MutantProof, ...] = ()
    """What an earlier run knows of these stacks: its control and the mutants that it judged are not driven again."""
    expression: str = ""
    topologies: tuple[str, ...] = ()
    run_dir: Path | None = None
    start: Literal["ray", "fork"] = "fork"
    engine: Literal["cpu", "cuda"] = "cpu"
    command: str = "parity prove --mutants"


class Driver(Protocol):
    """The part of `Session` that this uses."""

    def drive(self, scenario: Scenario, seat: Seat, body: Callable[[Stack], Awaitable[None]]) -> list[Verdict]: ...

    def swap(self, seat: Seat, request: SwapRequest) -> SwapResult: ...

    def living(self, seat: Seat) -> bool: ...

    def renew(self, seat: Seat, swap: Swap | None = None) -> None: ...

    def close(self, outcome: str = "completed") -> None: ...


Tell = Callable[[str], None]


# --- what there is to change


@final
class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The code of a stack that is changed."""

    sources: dict[str, str]
    """Module → its text."""
    surveyed: list[Surveyed]
    equivalent: dict[str, str]
    """Id of an equivalent mutant → reason."""
    excluded: Sequence[Excluded] = ()

    @property
    def mutants(self) -> list[Mutant]:
        return [mutant for one in self.surveyed for mutant in one.mutants]

    @property
    def public(self) -> list[str]:
        return [name for one in self.surveyed for name in one.public]


def code_of(sources: dict[str, str], entries: Sequence[Equivalent], excluded: Sequence[Excluded] = ()) -> Code:
    """All mutants of these modules."""
    surveyed = [survey(module, text) for module, text in sources.items()]
    return Code(
        sources=sources,
        surveyed=surveyed,
        equivalent=explained((mutant for one in surveyed for mutant in one.mutants), entries),
        excluded=excluded,
    )


def load(target: Target, progress: Progress, engine: Literal["cpu", "cuda"]) -> Code:
    """The code of a target: the modules that its file lists, as its environment has them.

    Raises UsageError for a target without such a file, and for a module that its environment lacks.
    """
    if target.mutants is None:
        raise UsageError(f"no code of {target.name!r} is listed for mutants", next_step="add `mutants` to its target")
    data = tomllib.loads((PROJECT / target.mutants).read_text())
    modules = data["targets"].get(target.like if target.local else target.name, {}).get("modules", [])
    if target.python is not None:
        python = target.python
    else:
        assert target.environment is not None
        python = environments.ensure(target.environment, engine, root=PROJECT, progress=progress)
    said = subprocess.run(
        [python, "-c", FIND, *modules], capture_output=True, text=True, check=True, timeout=60, cwd="/"
    )
    files: dict[str, str | None] = json.loads(said.stdout)
    if lost := [name for name, file in files.items() if file is None]:
        raise UsageError(f"{target.name} has no {', '.join(lost)}", next_step=f"correct {target.mutants}")
    sources = {name: Path(str(file)).read_text() for name, file in files.items()}
    with progress(f"{target.name}: looking for what can be changed in {len(sources)} modules"):
        return code_of(
            sources,
            msgspec.convert(data.get("equivalent", []), list[Equivalent]),
            msgspec.convert(data.get("excluded", []), list[Excluded]),
        )


def chosen(code: Code, request: Request) -> list[Mutant]:
    """The mutants to drive: those that are named, or a sample. Raises UsageError for an unknown id."""
    if not request.mutants:
        return sample(code.mutants, request.sample, request.seed)
    by_id = {mutant.id: mutant for one in code.surveyed for mutant in one.mutants}
    if lost := [name for name in request.mutants if name not in by_id]:
        raise UsageError(f"there is no mutant {', '.join(lost)}", next_step="mutants.json of a run lists ids")
    return [by_id[name] for name in request.mutants]


# --- judging


@final
class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario's verdicts say about a mutant."""

    fate: Literal[Fate.KILLED, Fate.ACCIDENT]
    by: list[str]
    reason: str


def _missed(verdict: Verdict) -> bool:
    """True if the scenario did not meet its requests in flight, which says nothing about the stack."""
    return verdict.cause == Cause.NOT_DRIVEN and any(e.get("error") == MissedMoment.__name__ for e in verdict.evidence)


def names_the_matter(ended: Verdict, phases: tuple[str, ...] = ("scenario",)) -> bool:
    """True if the error that ended a scenario says what is wrong: a call of the scenario failed on the stack's side, and its error
    has an HTTP status, a message that names something (an argument, a key, a server, the call that hangs), or the place in the
    stack's own code that raised it.

    False for a stack that died or was late as a whole, an error without a message, and an error of the clean room, which is the
    harness's own use of the stack. It counts among the `phases` of a mutant that is in the stack from its start.
    """
    error = ended.evidence[0] if ended.evidence else {}
    return (
        ended.status == Conformance.FAIL
        and error.get("phase") in phases
        and error.get("error") not in NAMELESS
        and (error.get("status") is not None or bool(error.get("place") or NAMES.search(error.get("message") or "")))
    )


def judge(verdicts: Iterable[Verdict], baseline: Baseline, phases: tuple[str, ...] = ("scenario",)) -> Kill | None:
    """What turned red that is not red in the control. None if nothing did.

    A check's own finding kills. So does a failed call that `names_the_matter`. Other ends of a scenario, and checks that could not
    judge or broke, are an accident. A scenario whose requests ended before they were caught says nothing.
    """
    turned = [v for v in verdicts if baseline.turned(v) and not _missed(v)]
    found = [v for v in turned if v.status == Conformance.FAIL and v.cause is None]
    if found:
        return Kill(fate=Fate.KILLED, by=sorted({family(v.check) for v in found}), reason=found[0].reason)
    ended = [v for v in turned if v.cause == Cause.NOT_DRIVEN]
    if ended:
        error = ended[0].evidence[0] if ended[0].evidence else {}
        reason = f"{ended[0].reason}: {error.get('message', '')}"[:300]
        reason += f" ({place})" if (place := error.get("place")) else ""
        return Kill(
            fate=Fate.KILLED if names_the_matter(ended[0], phases) else Fate.ACCIDENT, by=[DRIVEN], reason=reason
        )
    if turned:
        return Kill(fate=Fate.ACCIDENT, by=sorted({family(v.check) for v in turned}), reason=turned[0].reason)
    return None


def _explained(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return ledger.apply(ledger.load(), verdicts, datetime.now(UTC).date())[0]


def _red(verdicts: Sequence[Verdict]) -> set[str]:
    """Scenarios with a verdict that is red and in no ledger entry."""
    return {v.scenario for v in _explained(verdicts) if v.red}


# --- driving


def families(ran: Ran) -> set[str]:
    """The families of the checks that a scenario names."""
    return {family(check.name) for check in catalogue.declared()[ran.scenario].checks}


@final
class Proving:
    """Drives the mutants of one stack."""

    def __init__(self, request: Request, code: Code, mutants: Sequence[Mutant], target: str, tell: Tell) -> None:
        self._request, self._code, self._target, self._tell = request, code, target, tell
        earlier = next((one for one in request.earlier if one.target == target), None)
        self._began = time.monotonic() - (earlier.seconds if earlier else 0.0)
        kept = {one.id: one for one in earlier.judged if one.driven or one.by} if earlier else {}
        self._mutants = {mutant.id: mutant for mutant in [*mutants, *(one for one in code.mutants if one.id in kept)]}
        kept = {name: one for name, one in kept.items() if name not in request.mutants}
        self._judged = {name: one for name, one in kept.items() if one.fate not in (Fate.SURVIVED, Fate.UNREACHED)} | {
            mutant.id: _judged(mutant, Fate.EQUIVALENT, reason=code.equivalent[mutant.id])
            for mutant in self._mutants.values()
            if mutant.id in code.equivalent and mutant.id not in request.mutants
        }
        self._judged |= {
            mutant.id: _judged(mutant, Fate.UNREACHED, reason=one.reason)
            for mutant in self._mutants.values()
            for one in code.excluded
            if fnmatchcase(mutant.place, one.function) and mutant.id not in request.mutants
        }
        self._survived = {name: one for name, one in kept.items() if name not in self._judged}
        """Mutants that survived so far, or whose statement did not run, in what was driven."""
        self._sound = False
        """True if nothing was driven under a mutant since a scenario was green without one."""
        self._control: list[Ran] = [one for one in earlier.control if one.green] if earlier else []
        self._before: dict[str, set[int]] = {n: {*lines} for n, lines in earlier.prepared.items()} if earlier else {}
        """Function → its lines that ran while a stack started, or in a clean room."""
        self._begun: dict[str, set[int]] = {n: {*lines} for n, lines in earlier.begun.items()} if earlier else {}
        """The same, only while a stack started."""
        self._seats: dict[Seat, Controlled] = {}
        """Topologies with a control, and their green scenarios."""
        self._killers: dict[str, list[str]] = {}
        """Function → scenarios that killed a mutant of it, latest first."""
        for one in kept.values():
            if one.fate == Fate.KILLED and one.scenario:
                self._remember(one)
        self._ends: float | None = None
        self._left = 1
        """Topologies without a control so far."""
        self.error = ""

    def proof(self) -> MutantProof:
        """What is known so far."""
        every = {**self._survived, **self._judged}
        for mutant in self._mutants.values():
            if mutant.id not in every:
                every[mutant.id] = self._not_driven(mutant)
        return MutantProof(
            target=self._target,
            seed=self._request.seed,
            population=len(self._code.mutants),
            judged=[every[name] for name in self._mutants],
            control=self._control,
            public=self._code.public,
            prepared={name: sorted(lines) for name, lines in sorted(self._before.items())},
            begun={name: sorted(lines) for name, lines in sorted(self._begun.items())},
            excluded={
                name: one.reason
                for one in self._code.excluded
                for name in self._code.public
                if fnmatchcase(name, one.function)
            },
            seconds=round(time.monotonic() - self._began, 1),
            error=self.error,
        )

    def _not_driven(self, mutant: Mutant) -> Judged:
        if self._left or any(mutant.runs_in(ran.called) for ran in self._control) or self._only_before(mutant):
            return _judged(mutant, Fate.NOT_DRIVEN)
        called = any(mutant.place in ran.called for ran in self._control)
        return _judged(
            mutant, Fate.UNREACHED, reason="the function is called, this statement never runs" if called else ""
        )

    @property
    def _late(self) -> bool:
        return self._ends is not None and time.monotonic() > self._ends

    def drive(self, session: Driver, seats: Sequence[tuple[Seat, Sequence[str]]]) -> None:
        """Control and mutants in each topology. A topology whose stack cannot be started is left, and `error` says so."""
        self._left = len(seats)
        for seat, names in seats:
            if self._late:
                return
            try:
                self._drive_in(session, seat, names)
            except StackError as e:
                self.error = f"{seat.name}: {type(e).__name__}: {e.message}"
                self._tell(self.error)
        self._drive_starts(session)

    def _drive_in(self, session: Driver, seat: Seat, names: Sequence[str]) -> None:
        """Scenarios that send few requests first: each mutant alone, then the survivors together. Then those that send many."""
        declared = catalogue.declared()
        for bulk in (False, True):
            some = [name for name in names if declared[name].bulk == bulk]
            if some and self._late:
                return
            self._drive_control(session, seat, some)
            if self._request.minutes is not None and self._ends is None:
                self._ends = time.monotonic() + 60 * self._request.minutes
            for mutant in [] if self._request.at_start else self._mutants.values():
                callers = [one for one in self._seats[seat].ran if mutant.runs_in(one.called)]
                if callers and mutant.id not in {**self._judged, **self._survived} and not self._late:
                    self._settle(self._drive_mutant(session, seat, mutant, self._in_order(mutant, callers)))
            self._drive_together(session, seat)
        self._left -= 1

    def _drive_together(self, session: Driver, seat: Seat) -> None:
        """Drive each scenario under all survivors that have not passed it: once for all, and if it turns red, in halves."""
        for one in sorted(self._seats[seat].ran, key=lambda one: one.seconds):
            due = [
                mutant
                for mutant in map(self._mutants.__getitem__, self._due(Fate.SURVIVED))
                if mutant.runs_in(one.called) and one.scenario not in self._survived[mutant.id].passed
            ]
            while due and not self._late:
                group = list({mutant.place.partition(".<locals>.")[0]: mutant for mutant in due}.values())
                due = [mutant for mutant in due if mutant not in group]
                self._split(session, seat, group, one)

    def _due(self, fate: Fate) -> list[str]:
        return [name for name, one in self._survived.items() if one.fate == fate]

    def _split(self, session: Driver, seat: Seat, group: list[Mutant], one: Ran) -> None:
        """Drive a scenario under all mutants of the group, each of another function, and under each half if it is red."""
        began = time.monotonic()
        told = self._under(session, seat, [self._swap(mutant) for mutant in group], one)
        if not told.refused and judge(told.verdicts, self._seats[seat].baseline) is None:
            for mutant in group:
                fired = mutant.runs_in(told.called)
                self._settle(
                    _judged(
                        mutant,
                        Fate.SURVIVED if fired else Fate.UNREACHED,
                        reason="" if fired else ONCE,
                        fired=fired,
                        driven=1,
                        passed=[one.scenario] if fired else [],
                        seconds=(time.monotonic() - began) / len(group),
                    ),
                    quiet=True,
                )
        elif self._green_again(session, seat, one) is None:
            return
        elif len(group) > 1:
            for half in (group[: len(group) // 2], group[len(group) // 2 :]):
                self._split(session, seat, half, one)
        else:
            [mutant] = group
            passed = self._survived[mutant.id].passed
            others = [ran for ran in self._seats[seat].ran if mutant.runs_in(ran.called) and ran.scenario not in passed]
            order = [one, *(ran for ran in self._in_order(mutant, others) if ran is not one)]
            self._settle(self._drive_mutant(session, seat, mutant, order))

    def _swap(self, mutant: Mutant) -> Swap:
        source = mutated(mutant, self._code.sources[mutant.module])
        return Swap(module=mutant.module, function=mutant.function, source=source)

    def _only_before(self, mutant: Mutant) -> bool:
        """True if the mutant's statement runs while a stack starts, or in a clean room, and in no scenario."""
        return mutant.runs_in(self._before) and not any(mutant.runs_in(one.called) for one in self._control)

    def _drive_starts(self, session: Driver) -> None:
        """The mutants whose statement runs before a scenario or once per start, and that no scenario has seen: each gets a start of
        its own."""

        def is_due(mutant: Mutant) -> bool:
            earlier = self._survived.get(mutant.id)
            if earlier is None:
                return mutant.id not in self._judged and self._only_before(mutant)
            return not earlier.started and (earlier.fate == Fate.UNREACHED or mutant.runs_in(self._begun))

        due = [mutant for mutant in self._mutants.values() if is_due(mutant)]
        usable = [seat for seat, controlled in self._seats.items() if controlled.ran]
        if not due or not usable or self._late:
            return
        seat = usable[0]
        killed: list[Judged] = []
        for mutant in due:
            if self._late:
                break
            judged = self._drive_from_start(session, seat, mutant)
            self._settle(judged)
            if judged.fate == Fate.KILLED and judged.scenario:
                killed.append(judged)
        session.renew(seat)
        by_name = {one.scenario: one for one in self._seats[seat].ran}
        red = {n for n in {one.scenario for one in killed} if self._green_again(session, seat, by_name[n]) is None}
        for one in killed:
            if one.scenario in red:
                reason = f"{one.scenario} turned red without it too"
                self._judged[one.id] = msgspec.structs.replace(one, fate=Fate.SKIPPED, reason=reason)

    def _drive_from_start(self, session: Driver, seat: Seat, mutant: Mutant) -> Judged:
        """Start the stack with the mutant, and drive scenarios until one turns red."""
        began = time.monotonic()
        session.renew(seat, self._swap(mutant))
        watch = SwapRequest(watch=[mutant.module])
        baseline, ran = self._seats[seat].baseline, self._seats[seat].ran
        about: dict[str, object] = {"callers": len(ran), "started": True}
        try:
            said = session.swap(seat, watch)
        except StackError as e:
            reason = e.message.splitlines()[0][:300]
            fate = Fate.KILLED if NAMES.search(reason.partition(" could not be started: ")[2]) else Fate.ACCIDENT
            about |= {"by": [STARTED], "reason": reason, "fired": True, "seconds": time.monotonic() - began}
            return _judged(mutant, fate, **about)
        driven, fired, accidents = 0, mutant.runs_in(said.called), 0
        found: tuple[Ran, Kill] | None = None
        up = time.monotonic()
        for one in self._in_order(mutant, ran):
            if accidents == MOST_ACCIDENTS or (driven and time.monotonic() - up + one.seconds > START_S):
                break
            scenario = catalogue.declared()[one.scenario]
            scenario = msgspec.structs.replace(scenario, deadline_s=_deadline_s(scenario, one))
            kill = judge(session.drive(scenario, seat, catalogue.body(one.scenario)), baseline, BEFORE)
            driven += 1
            fired = fired or not session.living(seat) or mutant.runs_in(session.swap(seat, watch).called)
            if kill is None:
                continue
            if kill.fate == Fate.KILLED:
                found = one, kill
                break
            found, accidents = found or (one, kill), accidents + 1
        about |= {"driven": driven, "fired": fired, "seconds": time.monotonic() - began}
        if found is None:
            return _judged(mutant, Fate.SURVIVED if fired else Fate.UNREACHED, reason="" if fired else ONCE, **about)
        one, kill = found
        return _judged(mutant, kill.fate, by=kill.by, scenario=one.scenario, reason=kill.reason, **about)

    def _settle(self, judged: Judged, *, quiet: bool = False) -> None:
        callers = sum(self._mutants[judged.id].runs_in(one.called) for one in self._control if one.green)
        earlier = self._survived.pop(judged.id, None)
        if earlier is not None:
            survived = Fate.SURVIVED in (earlier.fate, judged.fate)
            judged = msgspec.structs.replace(
                judged,
                fate=Fate.SURVIVED if survived and judged.fate == Fate.UNREACHED else judged.fate,
                reason="" if survived else judged.reason,
                driven=judged.driven + earlier.driven,
                passed=[*earlier.passed, *judged.passed],
                fired=judged.fired or earlier.fired,
                started=judged.started or earlier.started,
                seconds=round(judged.seconds + earlier.seconds, 1),
            )
        judged = msgspec.structs.replace(judged, callers=callers or judged.callers)
        again = judged.fate in (Fate.SURVIVED, Fate.UNREACHED)
        (self._survived if again else self._judged)[judged.id] = judged
        by = f" by {judged.seen}" if judged.by else ""
        if not quiet:
            self._tell(
                f"{judged.id}: {judged.fate}{by} ({judged.driven} of {judged.callers} scenarios, {judged.seconds:.1f} s)"
            )

    def _in_order(self, mutant: Mutant, callers: Sequence[Ran]) -> list[Ran]:
        """Scenarios that killed mutants of this function first, then those with most untried checks per second.

        A check that the mutant has passed once is half as likely to see it the next time, and so on.
        """
        killers = self._killers.get(mutant.place, [])
        ordered = [one for name in killers for one in callers if one.scenario == name]
        left = [one for one in callers if one.scenario not in killers]
        tried: Counter[str] = Counter()
        while left:
            best = max(left, key=lambda one: sum(0.5 ** tried[f] for f in families(one)) / (one.seconds + ROOM_S))
            left.remove(best)
            ordered.append(best)
            tried.update(families(best))
        return ordered

    @property
    def _watch(self) -> list[str]:
        return list(self._code.sources)

    def _ran_before(self, said: SwapResult) -> None:
        for name, lines in said.called.items():
            self._before.setdefault(name, set()).update(lines)

    def _drive_control(self, session: Driver, seat: Seat, names: Sequence[str]) -> None:
        """Drive the scenarios without a mutant, those of an earlier run excepted. Adds them to `_seats`, also if it is interrupted."""
        verdicts: list[Verdict] = []
        found: list[tuple[str, float, dict[str, list[int]]]] = []
        known = [one for one in self._control if one.topology == seat.topology.name and one.scenario in names]
        steady: set[str] = set()
        try:
            for name in [name for name in names if name not in {one.scenario for one in known}]:
                here, took, called = self._watched(session, seat, name)
                if not any(v.status == Conformance.MISSING for v in here):
                    verdicts += here
                    found.append((name, took, called))
            if red := _red(verdicts):
                session.renew(seat)
                steady = red & _red([v for name in sorted(red) for v in self._watched(session, seat, name)[0]])
        finally:
            self._keep(seat, known, verdicts, found, steady)

    def _watched(self, session: Driver, seat: Seat, name: str) -> tuple[list[Verdict], float, dict[str, list[int]]]:
        """Drive a scenario of the control. Answers its verdicts, its seconds after the clean room, and the lines that ran in them."""
        request = SwapRequest(watch=self._watch)
        said = session.swap(seat, request)
        self._ran_before(said)
        for function, lines in said.called.items():
            self._begun.setdefault(function, set()).update(lines)
        if said.refused:
            self._tell(f"{seat.name}: {said.refused}: its code is not changed")
        began: list[float] = []
        body = catalogue.body(name)

        async def watched(stack: Stack) -> None:
            self._ran_before(await stack.swap(request))
            began.append(time.monotonic())
            await body(stack)

        verdicts = session.drive(catalogue.declared()[name], seat, watched)
        took = time.monotonic() - began[-1] if began else 0.0
        return verdicts, took, session.swap(seat, request).called if began and session.living(seat) else {}

    def _keep(
        self,
        seat: Seat,
        known: list[Ran],
        verdicts: list[Verdict],
        found: Sequence[tuple[str, float, dict[str, list[int]]]],
        steady: Set[str],
    ) -> None:
        """`steady`: scenarios that were red twice."""
        baseline = Baseline(_explained(verdicts))
        red = _red(verdicts)
        new = [
            Ran(
                scenario=name,
                topology=seat.topology.name,
                seconds=round(took, 3),
                green=name not in red,
                red_once=name in red - steady,
                called=called,
                reds={check: reason for (scenario, check), reason in baseline.red.items() if scenario == name},
            )
            for name, took, called in found
        ]
        self._control += new
        ran = [*known, *new]
        baseline.red |= {(one.scenario, check): reason for one in known for check, reason in one.reds.items()}
        so_far = self._seats.setdefault(seat, Controlled(baseline=baseline, ran=[]))
        so_far.baseline.red |= baseline.red
        so_far.ran.extend(one for one in ran if one.green)
        self._tell(
            f"{seat.name}: control: {len(ran)} scenarios in {sum(one.seconds for one in ran):.0f} s, "
            f"{sum(not one.green for one in ran)} of them red: {', '.join(one.why for one in ran if not one.green) or 'none'}"
        )

    def _drive_mutant(self, session: Driver, seat: Seat, mutant: Mutant, callers: Sequence[Ran]) -> Judged:
        baseline = self._seats[seat].baseline
        began, sound = time.monotonic(), self._sound
        driven, fired, accidents = 0, False, 0
        passed: list[str] = []
        found: tuple[Ran, Kill] | None = None
        for ran in callers:
            if accidents == MOST_ACCIDENTS:
                break
            if driven and time.monotonic() - began + ran.seconds > ALONE_S:
                continue
            told = self._under(session, seat, [self._swap(mutant)], ran)
            if told.refused:
                return _judged(mutant, Fate.SKIPPED, reason=told.refused, callers=len(callers))
            driven += 1
            fired |= mutant.runs_in(told.called) or not told.lives
            kill = judge(told.verdicts, baseline)
            if kill is None:
                passed += [ran.scenario] if mutant.runs_in(told.called) else []
                continue
            if kill.fate == Fate.KILLED:
                found = ran, kill
                break
            found, accidents = found or (ran, kill), accidents + 1
            if not told.lives:
                break
        about: dict[str, object] = {"driven": driven, "passed": passed, "callers": len(callers), "fired": fired}
        if found is None:
            fate, reason = (Fate.SURVIVED, "") if fired else (Fate.UNREACHED, ONCE)
            return _judged(mutant, fate, reason=reason, seconds=time.monotonic() - began, **about)
        ran, kill = found
        starts = self._green_again(session, seat, ran)
        about["seconds"] = time.monotonic() - began
        if starts is None:
            return _judged(mutant, Fate.SKIPPED, reason=f"{ran.scenario} turned red without it too", **about)
        if starts and not sound:  # an earlier mutant may have left the stack red
            return self._drive_mutant(session, seat, mutant, callers)
        judged = _judged(mutant, kill.fate, by=kill.by, scenario=ran.scenario, reason=kill.reason, **about)
        if judged.fate == Fate.KILLED:
            self._remember(judged)
        return judged

    def _remember(self, killed: Judged) -> None:
        """The scenario comes first for other mutants of the function."""
        killers = self._killers.setdefault(killed.function, [])
        killers[:] = [killed.scenario, *(one for one in killers if one != killed.scenario)]

    def _under(self, session: Driver, seat: Seat, swaps: list[Swap], ran: Ran) -> Told:
        """Drive a scenario under the swaps."""
        self._sound = False
        request = SwapRequest(watch=sorted({one.module for one in swaps}), swaps=swaps)
        body = catalogue.body(ran.scenario)
        said: list[SwapResult] = []

        async def changed(stack: Stack) -> None:
            said.append(await stack.swap(request))
            if said[-1].refused or not said[-1].swapped:
                return
            try:
                await body(stack)
            finally:
                with suppress(StackError):  # of a stack that is gone: the scenario's own error says more
                    said.append(await stack.swap(SwapRequest()))

        session.swap(seat, SwapRequest())  # starts a stack that died, and the weights are synced anew
        scenario = catalogue.declared()[ran.scenario]
        scenario = msgspec.structs.replace(scenario, deadline_s=_deadline_s(scenario, ran))
        verdicts = session.drive(scenario, seat, changed)
        refused = said[0].refused or ("" if said[0].swapped else "no process has imported the module") if said else ""
        return Told(
            verdicts=verdicts,
            refused=refused,
            called=said[-1].called if len(said) > 1 else {},
            lives=session.living(seat),
        )

    def _green_again(self, session: Driver, seat: Seat, ran: Ran) -> int | None:
        """The canary: the scenario without a mutant. If it is red, once more on a fresh stack. Answers how many starts it needed to
        be green; None if it stays red."""
        scenario, body = catalogue.declared()[ran.scenario], catalogue.body(ran.scenario)
        for starts in range(2):
            session.swap(seat, SwapRequest())
            if judge(session.drive(scenario, seat, body), self._seats[seat].baseline) is None:
                self._sound = True
                return starts
            session.renew(seat)
        return None


@final
class Controlled(msgspec.Struct, frozen=True, kw_only=True):
    """The control of a topology."""

    baseline: Baseline
    ran: list[Ran]
    """Its green scenarios."""


@final
class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario under a mutant."""

    verdicts: list[Verdict]
    refused: str
    called: dict[str, list[int]]
    """Function → its lines that ran under the mutant."""
    lives: bool
    """True if the stack runs on."""


def _deadline_s(scenario: Scenario, ran: Ran) -> float:
    """The scenario's deadline under a mutant."""
    return min(scenario.deadline_s, max(LEAST_S, SLOWER * ran.seconds))


def _judged(mutant: Mutant, fate: Fate, **fields: object) -> Judged:
    about = {
        "id": mutant.id,
        "function": mutant.place,
        "line": mutant.line,
        "before": mutant.before,
        "after": mutant.after,
    }
    if "seconds" in fields:
        fields["seconds"] = round(float(str(fields["seconds"])), 1)
    return Judged(**about, fate=fate, **fields)  # type: ignore[arg-type]


# --- the run


def seats_of(request: Request, target: Target) -> list[tuple[Seat, tuple[str, ...]]]:
    """Each topology with its scenarios: those that the target can do, each in its first topology. Scenarios that spoil the stack are
    left out, since each costs a start. The topology with most scenarios is first. Raises UsageError if none is left."""
    able = [
        scenario
        for scenario in catalogue.matching(request.expression, catalogue.declared().values())
        if scenario.needs <= target.capabilities and not scenario.spoils
    ]
    seats: dict[Seat, list[str]] = {}
    for scenario in able:
        seats.setdefault(seat_of(target.name, scenario, 2), []).append(scenario.name)
    kept = {s: names for s, names in seats.items() if not request.topologies or s.topology.name in request.topologies}
    if not kept:
        raise UsageError("no scenario is left to drive", next_step="`parity topologies` lists them; check -k")
    return sorted(((seat, tuple(names)) for seat, names in kept.items()), key=lambda one: -len(one[1]))


def options(request: Request, target: str, folder: Path, modules: list[str]) -> Options:
    """The session's options: one stack, one take, with code swaps of these modules, no recordings."""
    return Options(
        baseline=target,
        candidate=target,
        stacks=[target],
        engine=request.engine,
        start=request.start,
        run_dir=folder,
        twin=False,
        code_swaps=SwapRequest(watch=modules),
        clean_room_s=CLEAN_ROOM_S,
        record=False,
        command=request.command,
    )


@final
class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. `error` ended it, if it was not driven to the end."""

    run: MutantRun
    folder: Path
    error: Exception | None = None


def prove_mutants(
    request: Request, progress: Progress, tell: Tell, begin: Callable[[Options, Progress], Driver] | None = None
) -> Finished:
    """Drive the mutants of all stacks. Ctrl-C or an error ends the driving; what was judged is kept."""
    created_at = datetime.now(UTC).isoformat(timespec="seconds")
    begin = begin or partial(Session, known={})  # all stacks have one oracle: it answers once
    targets = [resolve(name) for name in dict.fromkeys(request.stacks)]
    codes = {target.name: load(target, progress, request.engine) for target in targets}
    mutants = {target.name: chosen(codes[target.name], request) for target in targets}
    seats = {target.name: seats_of(request, target) for target in targets}
    folder = RunFolder.create(request.run_dir, root=PROJECT)
    proofs: list[Proving] = []
    outcome, error = "completed", None
    try:
        for target in targets:
            name = target.name
            tell(f"{name}: {len(mutants[name])} of {len(codes[name].mutants)} mutants, seed {request.seed}")
            proving = Proving(request, codes[name], mutants[name], name, tell)
            proofs.append(proving)
            session = begin(
                options(request, name, folder.path / "stacks" / name.replace(":", "-"), list(codes[name].sources)),
                progress,
            )
            ended = "interrupted"
            try:
                proving.drive(session, seats[name])
                ended = "completed"
            finally:
                session.close(ended)
    except KeyboardInterrupt:
        outcome = "interrupted"
        proofs[-1].error = proofs[-1].error or "interrupted"
    except Exception as e:  # noqa: BLE001 - the caller writes the report first, and raises it then
        outcome, error = f"{type(e).__name__}: {e.message if isinstance(e, HarnessError) else e}", e
    finally:
        folder.close()
    made = MutantRun(
        run_id=folder.run_id,
        created_at=created_at,
        command=request.command,
        outcome=outcome,
        proofs=[proving.proof() for proving in proofs],
    )
    return Finished(run=made, folder=folder.path, error=error)
