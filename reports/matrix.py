"""matrix.json, its page and its badges: which promise each release keeps. Published schema: ``reports/matrix.schema.json``.

A column is one target. Its cells come from the target's own verdicts; comparisons of two stacks stay in the reports of their runs.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, final

import msgspec

import harness
from harness.contract.errors import Blame
from harness.judging.ledger import Ledger
from harness.machine.targets import registry
from harness.records.run_folder import stem
from harness.records.verdict import LedgerProblem, RunInfo, Verdict
from harness.suite import coverage
from harness.suite.coverage import State, state_of
from harness.suite.plan import Bullet, Plan
from reports import published, reproduce
from reports.json_report import plain
from reports.text import of_no_machine

FORMAT: Literal[1] = 1
"""Version of matrix.json."""
BROKEN = frozenset({State.RED, State.KNOWN, State.MISSING})
"""States of a check that the release does not pass, for a reason that is about the release."""
BAD = BROKEN | {State.UNTESTABLE}
ONLY_CUDA = "its code path passes on CPU, and only a run on CUDA shows the promise"
Place = tuple[str, str, str]
"""Scenario, topology, check."""


@final
class Release(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one target: the input of a column."""

    target: str
    runs: list[RunInfo]
    verdicts: list[tuple[str, Verdict]]
    """Id of the run, and a verdict of it. If several runs judged the same, the worst counts."""
    problems: list[LedgerProblem] = []
    failed: list[str] = []
    """Cells that could not be driven, each with its reason. Their verdicts are untestable."""
    undriven: list[str] = []
    """Cells that were asked for and not driven yet."""


# --- the file


@final
class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check that is not green."""

    check: str
    state: State
    reason: str
    since: str
    """First of the neighbouring columns, up to this one, in which this check is not green."""
    blame: Blame | None = None
    known: list[str] = []
    """Ids of the ledger's entries that explain it or a part of it."""
    next_step: str = ""
    evidence: list[dict[str, Any]] = []
    """Of a red one: the first piece. The run's own report has all."""


@final
class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario in one topology."""

    scenario: str
    topology: str
    run: str
    passed: list[str]
    """Checks that passed."""
    facts: int
    """How much these compared."""
    findings: list[Finding]


@final
class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A known divergence in one cell."""

    entry: str
    verdicts: int
    since: str
    """First of the neighbouring columns, up to this one, whose cell it explains."""


@final
class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One promise of one release."""

    target: str
    state: State
    """The worst of its verdicts. A pass that only CUDA can show is "incomplete" on a CPU."""
    since: str
    """First of the neighbouring columns, up to this one, with this state."""
    counts: dict[str, int]
    """State → number of verdicts."""
    note: str = ""
    unexercised: list[str] = []
    """Scenarios of the promise without a verdict here."""
    known: list[Known] = []
    evidence: list[Evidence] = []
    """What is not green comes first."""
    command: str = ""
    """Drives the promise again; empty if it has no scenario."""


@final
class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """A row."""

    id: str
    place: str
    """"<task>.<position>" in the plan."""
    text: str
    level: str
    source: str
    since: str
    """First release of this suite that has it."""
    engine: str
    cells: list[Cell]
    """One per column."""

    @property
    def exercised(self) -> bool:
        """True if any column has evidence, or lacks a part of it."""
        return any(cell.state is not State.NOT_EXERCISED for cell in self.cells)

    @property
    def differs(self) -> bool:
        """True if the columns do not agree."""
        return len({cell.state for cell in self.cells}) > 1


@final
class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A group of rows."""

    number: int
    wave: int
    title: str
    promises: list[Promise]


@final
class Driven(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a column rests on."""

    run: str
    created_at: str
    start: str
    computed: str
    """Engine, dtype and modes."""
    topologies: list[str] = []
    """Those of the scenarios that were selected."""


@final
class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A release."""

    target: str
    about: str
    runs: list[Driven]
    counts: dict[State, int]
    """State → number of promises."""
    verdicts: int
    red: int
    known: int
    problems: list[str]
    """What is wrong beside verdicts: cells that failed or are not driven yet, entries of the ledger that do not fit."""


@final
class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A promise with checks that changed between two neighbours."""

    promise: str
    checks: int
    first: str
    """The first of them: "scenario@topology::check"."""
    reason: str
    """Why it is not green where it is not."""
    known: list[str]
    """Entries of the ledger that explain these checks where they are not green."""


@final
class Step(msgspec.Struct, frozen=True, kw_only=True):
    """From one release to the next. A check that either could not judge, or did not drive, counts for neither list."""

    before: str
    after: str
    fixed: list[Move]
    broke: list[Move]


@final
class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the ledger that explains something here."""

    id: str
    cause: str
    """The released code behind it, with file and line."""
    owner: str
    expires: str
    link: str | None = None


@final
class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Which promise each release keeps, with the evidence."""

    format: Literal[1] = FORMAT
    version: str
    """Of this suite."""
    created_at: str
    command: str
    """Makes this file again."""
    promises: int
    columns: list[Column]
    """Releases in order: neighbours are compared."""
    tasks: list[Task]
    steps: list[Step]
    divergences: list[Divergence]

    @property
    def exit_status(self) -> int:
        """0 only if every column has verdicts, none is red, and nothing failed or is left to drive."""
        green = all(column.verdicts and not column.red and not column.problems for column in self.columns)
        return int(not (self.columns and green))


SCHEMA = published.Schema(
    Matrix,
    "matrix.schema.json",
    "rollout-parity matrix",
    "matrix.json of `parity matrix`: promises of the contract × releases.",
)


# --- how it is made


class _Seen:
    """The verdicts of one release: by promise, and by place."""

    def __init__(self, release: Release) -> None:
        worst: dict[str, tuple[str, Verdict]] = {}
        for run, verdict in release.verdicts:
            before = worst.get(verdict.id)
            if before is None or _order(state_of(verdict)) < _order(state_of(before[1])):
                worst[verdict.id] = run, verdict
        self.release = release
        self.run = {name: run for name, (run, _) in worst.items()}
        self.verdicts = [verdict for _, verdict in worst.values()]
        self.states: dict[Place, State] = {_place(v): state_of(v) for v in self.verdicts}
        self._by_scenario: dict[str, list[Verdict]] = {}
        for verdict in self.verdicts:
            self._by_scenario.setdefault(verdict.scenario, []).append(verdict)

    def of(self, bullet: Bullet) -> coverage.Cell:
        named = dict.fromkeys(name.partition("@")[0] for name in bullet.scenarios)
        about = [verdict for name in named for verdict in self._by_scenario.get(name, ())]
        return coverage.cell(bullet, coverage.Column(target=self.release.target), about)


def _place(verdict: Verdict) -> Place:
    return verdict.scenario, verdict.topology, verdict.check


def build(releases: Sequence[Release], plan: Plan, ledger: Ledger, command: str = "") -> Matrix:
    """The matrix of these releases, neighbours beside each other."""
    seen = [_Seen(release) for release in releases]
    tasks = [
        Task(
            number=task.number,
            wave=task.wave,
            title=task.title,
            promises=[_promise(bullet, seen) for bullet in task.bullet],
        )
        for task in plan.task
    ]
    rows = [promise for task in tasks for promise in task.promises]
    used = {known.entry for row in rows for cell in row.cells for known in cell.known}
    return Matrix(
        version=harness.__version__,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        promises=len(rows),
        columns=[_column(one, [row.cells[at].state for row in rows]) for at, one in enumerate(seen)],
        tasks=tasks,
        steps=[_step(before, after, plan.bullets) for before, after in pairwise(seen)],
        divergences=[
            Divergence(id=entry.id, cause=entry.sources, owner=entry.owner, expires=str(entry.expires), link=entry.link)
            for entry in ledger.entries
            if entry.id in used
        ],
    )


def _column(seen: _Seen, states: Sequence[State]) -> Column:
    release, counted = seen.release, Counter(states)
    target = registry().get(release.target)
    return Column(
        target=release.target,
        about="" if target is None else target.about,
        runs=[
            Driven(
                run=run.run_id,
                created_at=run.created_at,
                start=run.start,
                computed=run.computed,
                topologies=sorted(place for place, selected in run.selected.items() if selected),
            )
            for run in release.runs
        ],
        counts={state: counted[state] for state in State if counted[state]},
        verdicts=len(seen.verdicts),
        red=sum(verdict.red for verdict in seen.verdicts),
        known=sum(verdict.known is not None for verdict in seen.verdicts),
        problems=[
            *release.failed,
            *(f"not driven yet: {cell}" for cell in release.undriven),
            *(f"ledger entry {problem.entry}: {problem.problem}" for problem in release.problems),
        ],
    )


def _promise(bullet: Bullet, seen: Sequence[_Seen]) -> Promise:
    found = [one.of(bullet) for one in seen]
    notes = [_note(bullet, one.release, cell) for one, cell in zip(seen, found, strict=True)]
    states = [State.INCOMPLETE if note else cell.state for note, cell in zip(notes, found, strict=True)]
    entries = [Counter(entry for v in cell.verdicts for entry in _entries(v)) for cell in found]
    targets = [one.release.target for one in seen]
    cells = []
    for at, (one, cell) in enumerate(zip(seen, found, strict=True)):
        counted = Counter(map(state_of, cell.verdicts))
        cells.append(
            Cell(
                target=one.release.target,
                state=states[at],
                since=_since(targets, at, [state == states[at] for state in states]),
                counts={str(state): counted[state] for state in State if counted[state]},
                note=notes[at],
                unexercised=cell.unexercised,
                known=[
                    Known(entry=entry, verdicts=count, since=_since(targets, at, [entry in there for there in entries]))
                    for entry, count in entries[at].most_common()
                ],
                evidence=_evidence(cell.verdicts, at, seen),
                command=_command(bullet, one.release),
            )
        )
    return Promise(
        id=bullet.slug,
        place=bullet.id,
        text=bullet.text,
        level=bullet.level,
        source=bullet.source,
        since=bullet.since,
        engine=bullet.engine,
        cells=cells,
    )


def _note(bullet: Bullet, release: Release, cell: coverage.Cell) -> str:
    on_cuda = any(run.engine == "cuda" for run in release.runs)
    return ONLY_CUDA if cell.state is State.PASS and bullet.engine == "cuda" and not on_cuda else ""


def _command(bullet: Bullet, release: Release) -> str:
    if not bullet.scenarios or not release.runs:
        return ""
    return reproduce.promise_command(bullet, release.target, release.runs[-1])


def _since(targets: Sequence[str], at: int, alike: Sequence[bool]) -> str:
    """The first of the neighbouring columns, up to `at`, for which this is true."""
    first = at
    while first > 0 and alike[first - 1]:
        first -= 1
    return targets[first]


def _entries(verdict: Verdict) -> list[str]:
    """The entries of the ledger that explain the verdict, or one of its reasons."""
    return sorted({*verdict.explained.values(), *([verdict.known] if verdict.known else [])})


def _evidence(verdicts: Iterable[Verdict], at: int, seen: Sequence[_Seen]) -> list[Evidence]:
    by_place: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        by_place.setdefault((verdict.scenario, verdict.topology), []).append(verdict)
    found = [
        Evidence(
            scenario=scenario,
            topology=topology,
            run=seen[at].run[group[0].id],
            passed=[v.check for v in group if state_of(v) is State.PASS],
            facts=sum(v.facts for v in group if state_of(v) is State.PASS),
            findings=sorted(
                (_finding(v, at, seen) for v in group if state_of(v) is not State.PASS), key=lambda f: _order(f.state)
            ),
        )
        for (scenario, topology), group in by_place.items()
    ]
    return sorted(found, key=lambda one: min((_order(f.state) for f in one.findings), default=len(State)))


def _order(state: State) -> int:
    return list(State).index(state)


def _finding(verdict: Verdict, at: int, seen: Sequence[_Seen]) -> Finding:
    place, targets = _place(verdict), [one.release.target for one in seen]
    return Finding(
        check=verdict.check,
        state=state_of(verdict),
        reason=verdict.told,
        since=_since(targets, at, [one.states.get(place) in BAD for one in seen]),
        blame=verdict.blame,
        known=_entries(verdict),
        next_step=verdict.next_step if verdict.red else "",
        evidence=verdict.evidence[:1] if verdict.red else [],
    )


def _step(before: _Seen, after: _Seen, bullets: Iterable[Bullet]) -> Step:
    fixed: list[Move] = []
    broke: list[Move] = []
    for bullet in bullets:
        fixed += _moved(bullet, before, after.states)
        broke += _moved(bullet, after, before.states)
    return Step(before=before.release.target, after=after.release.target, fixed=fixed, broke=broke)


def _moved(bullet: Bullet, there: _Seen, elsewhere: Mapping[Place, State]) -> list[Move]:
    """The promise's checks that are broken `there` and pass `elsewhere`."""
    moved = [
        verdict
        for verdict in there.of(bullet).verdicts
        if state_of(verdict) in BROKEN and elsewhere.get(_place(verdict)) is State.PASS
    ]
    if not moved:
        return []
    first = moved[0]
    return [
        Move(
            promise=bullet.slug,
            checks=len(moved),
            first=f"{first.scenario}@{first.topology}::{first.check}",
            reason=first.told,
            known=sorted({entry for verdict in moved for entry in _entries(verdict)}),
        )
    ]


# --- what is written


def kept(column: Column) -> int:
    """Promises that the release keeps."""
    return column.counts.get(State.PASS, 0)


def badge(column: Column, promises: int) -> dict[str, Any]:
    """The column for a badge of shields.io (its endpoint schema)."""
    words = {State.RED: "red", State.UNTESTABLE: "untestable", State.MISSING: "missing", State.KNOWN: "known"}
    told = [f"{column.counts[state]} {word}" for state, word in words.items() if column.counts.get(state)]
    rest = promises - sum(column.counts.get(state, 0) for state in (*words, State.PASS))
    message = ", ".join(
        [f"{kept(column)} of {promises} promises kept", *told, *([f"{rest} not shown"] if rest else [])]
    )
    red = column.problems or column.counts.get(State.RED) or column.counts.get(State.UNTESTABLE)
    color = "red" if red else "brightgreen" if kept(column) == promises else "yellow"
    return {"schemaVersion": 1, "label": column.target, "message": message, "color": color}


def settle(matrix: Matrix) -> Matrix:
    """The same matrix, with values that JSON cannot hold written as text, and without the machine's paths."""
    return msgspec.convert(of_no_machine(plain(msgspec.to_builtins(matrix), as_number=False)), Matrix)


def write_all(matrix: Matrix, folder: Path) -> dict[str, Path]:
    """Write matrix.json, matrix.html and a badge per column into `folder`. Returns file name → path. Each is replaced whole."""
    from reports import matrix_html

    settled = settle(matrix)
    contents = {"matrix.json": published.encode(settled), "matrix.html": matrix_html.render(settled).encode()}
    for column in settled.columns:
        name = f"badge-{stem(column.target, '').rstrip('@')}.json"
        contents[name] = msgspec.json.format(msgspec.json.encode(badge(column, settled.promises)), indent=1) + b"\n"
    return published.write(folder, contents)
