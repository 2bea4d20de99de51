"""Shared by all renderers: counts, tasks × columns, and divergences grouped by their cause. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import final

import msgspec

from harness.contract import states
from harness.judging.census import CENSUS
from harness.records.verdict import (
    WORST_FIRST,
    Cause,
    Change,
    Conformance,
    Effect,
    Exposure,
    Gap,
    GapCurve,
    How,
    Judgement,
    NoiseFloor,
    Parity,
    RunInfo,
    Severity,
    Verdict,
)
from harness.suite.coverage import Cell, Column, State, cell, columns, state_of, worst
from harness.suite.plan import Bullet, Plan, Task
from reports.text import many, number, one_line

GREEN = frozenset({Conformance.PASS, Parity.PARITY})
LACKING = 5
"""Scenarios that a line names whose cases the budget left out."""


@final
class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many verdicts there are of each kind. Red and known are disjoint."""

    verdicts: int
    red: int
    known: int
    statuses: dict[str, int]
    """Status → number of verdicts, known ones included."""
    ledger_problems: int
    takes: int
    """The most takes that a verdict stands for."""
    repeated: int
    """Number of verdicts that stand for more than one take."""
    unsteady: int
    """Number of verdicts whose takes differ in status."""


def count(judgement: Judgement) -> Counts:
    """The numbers that every format shows."""
    statuses: dict[str, int] = {}
    for verdict in judgement.verdicts:
        statuses[verdict.status] = statuses.get(verdict.status, 0) + 1
    return Counts(
        verdicts=len(judgement.verdicts),
        red=sum(v.red for v in judgement.verdicts),
        known=sum(v.known is not None for v in judgement.verdicts),
        statuses={status: statuses[status] for status in sorted(statuses, key=severity)},
        ledger_problems=len(judgement.ledger_problems),
        takes=max((v.takes for v in judgement.verdicts), default=0),
        repeated=sum(v.takes > 1 for v in judgement.verdicts),
        unsteady=sum(v.alike < v.takes for v in judgement.verdicts),
    )


def repetition(counts: Counts) -> str:
    """One line on how steady the verdicts were; empty if nothing was driven twice."""
    if not counts.repeated:
        return ""
    return f"{many(counts.takes, 'take')} per scenario: {many(counts.repeated, 'verdict')}, {counts.unsteady} varied between takes"


def open_causes(judgement: Judgement) -> list[str]:
    """One line on the open differences: unexplained ones and causes without an entry by name, the rest counted."""
    if not judgement.open_causes:
        return []
    bare = [f"{one.cause} ({one.verdicts})" for one in judgement.open_causes if not one.source]
    explained = [one for one in judgement.open_causes if one.source]
    said = [*bare, f"{many(len(explained), 'cause')} with an entry ({sum(one.verdicts for one in explained)})"]
    return [f"Open differences, verdicts by cause: {', '.join(said)}"]


def changes(judgement: Judgement) -> list[tuple[Verdict, Change]]:
    """Everything in which the candidate's client is not the baseline's, once, with the first verdict that found it. First
    what a caller has to change and no entry explains, last what is new."""
    found: dict[Change, Verdict] = {}
    for verdict in judgement.verdicts:
        for change in verdict.changes:
            found.setdefault(change, verdict)
    rows = [(verdict, change) for change, verdict in found.items()]
    return sorted(rows, key=lambda row: (not row[1].bare, row[1].how is How.NEW))


def changed(judgement: Judgement) -> list[str]:
    """One line on what a caller has to change; nothing without a census of both clients."""
    censuses = [verdict for verdict in judgement.verdicts if verdict.check == CENSUS]
    if not censuses:
        return []
    found = [change for _, change in changes(judgement)]
    counts = Counter(str(change.how) for change in found)
    bare = sum(change.bare for change in found)
    same = max(int(verdict.numbers.get("same", 0)) for verdict in censuses)
    said = [f"{same} the same", *(f"{times} {how}" for how, times in counts.most_common())]
    return [f"Client, what a caller meets: {', '.join(said)}" + (f"; {bare} without an entry" if bare else "")]


def never_called(judgement: Judgement) -> list[str]:
    """One line on each stack whose client offers what no call of the run used."""
    return [
        f"Offered by {stack} and never called: {', '.join(names)}"
        for stack, names in judgement.never_called.items()
        if names
    ]


def held_entries(judgement: Judgement) -> list[str]:
    """One line on each stack that is a release under another name: which entries of the ledger hold for it."""
    return [
        f"the ledger's entries about {release} hold for {name}: its recordings name that version"
        if release
        else f"no entry of the ledger holds for {name}: no released target has its version"
        for name, release in judgement.released.items()
    ]


def question(judgement: Judgement) -> str:
    """What the gate was asked."""
    return judgement.gate.question if judgement.gate is not None else "May one stack replace another?"


def stacks_of(run: RunInfo, mark: str = "") -> str:
    """ "baseline → candidate", or the stacks that were judged alone, each between two marks."""
    compared = [run.baseline, run.candidate] if run.baseline and run.candidate else []
    names = compared or dict.fromkeys(str(header.get("target")) for header in run.headers)
    return (" → " if compared else ", ").join(f"{mark}{one_line(name)}{mark}" for name in names if name) or "no stack"


def earlier(judgement: Judgement) -> list[str]:
    """One line if the baseline was recorded earlier: in which run, and when."""
    run = judgement.run
    if run.recorded is None:
        return []
    about = [header for header in run.headers if header.get("target") == run.baseline]
    when = ", ".join(dict.fromkeys(f"run {header['run_id']}, {header['created_at']}" for header in about))
    return [f"{run.baseline} was not started: its recordings are those of {when or 'an earlier run'}"]


def source_trees(judgement: Judgement) -> list[str]:
    """One line on each stack that ran from a checkout."""
    return [f"{name} is a checkout: {tree.told}" for name, tree in judgement.run.checkouts.items()]


def left_out(judgement: Judgement) -> list[str]:
    """A line on the cases that the run's budget left out, with the scenarios that lack most; none if it drove all."""
    lacking: dict[str, int] = {}
    for verdict in judgement.verdicts:
        lacking[verdict.scenario] = max(lacking.get(verdict.scenario, 0), verdict.left_out)
    most = sorted((item for item in lacking.items() if item[1]), key=lambda item: -item[1])
    if not most:
        return []
    shown = ", ".join(f"{name} {count}" for name, count in most[:LACKING]) + "; …" * (len(most) > LACKING)
    cases, scenarios = many(sum(count for _, count in most), "case"), many(len(most), "scenario")
    return [f"the budget left out {cases} of {scenarios}: {shown}"]


def given_way(judgement: Judgement) -> list[str]:
    """A line on the concessions to the run's stacks, one on the bullets of the plan that were not judged whole, and one on the
    objections that do not stand under the run's profile."""
    lines = []
    if judgement.concessions:
        hiding = sum(bool(one.hides) for one in judgement.concessions)
        count = many(len(judgement.concessions), "concession")
        lines.append(f"{count} to these stacks, {hiding} of them can hide a difference")
    if judgement.gate is not None and (left_out := judgement.gate.left_out):
        count = many(len(left_out), "bullet")
        ids = ", ".join(one.partition(" ")[0] for one in left_out)
        lines.append(f"{count} judged without scenarios that {judgement.gate.needless}: {ids}")
    if judgement.gate is not None and (aside := judgement.gate.aside):
        objections = f"{many(len(aside), 'objection')} {'does' if len(aside) == 1 else 'do'} not stand"
        more = "; …" if len(aside) > 3 else ""
        lines.append(f"{objections} under profile {judgement.gate.profile}: {'; '.join(aside[:3])}{more}")
    return lines


def severity(status: str) -> int:
    """Position from worst to best; an unknown status is worst."""
    return WORST_FIRST.index(status) if status in WORST_FIRST else -1


def anchor(verdict: Verdict) -> str:
    """A stable name for a place in a document."""
    return "v-" + hashlib.sha256(verdict.id.encode("utf-8", "backslashreplace")).hexdigest()[:12]


# --- tasks × columns ------------------------------------------------------------------------------------------------


@final
class BulletRow(msgspec.Struct, frozen=True, kw_only=True):
    bullet: Bullet
    cells: list[Cell]
    """One per column."""


@final
class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task: all verdicts of its bullets' scenarios, and of scenarios that no bullet names but declare the task."""

    task: Task
    bullets: list[BulletRow]
    cells: list[Cell]
    """One per column, for the whole task."""

    @property
    def exercised(self) -> bool:
        return any(cell.verdicts for cell in self.cells)

    def evident(self, column: int) -> int:
        """Number of bullets with a verdict in that column."""
        return sum(bool(row.cells[column].verdicts) for row in self.bullets)


def task_rows(judgement: Judgement, plan: Plan) -> tuple[list[Column], list[TaskRow]]:
    """The plan as a table. Columns are stacks, then pairs of stacks."""
    across = columns(judgement.run, judgement.verdicts)
    named = {name.partition("@")[0] for bullet in plan.bullets for name in bullet.scenarios}
    unnamed = [v for v in judgement.verdicts if v.scenario not in named]
    return across, [_task_row(task, across, judgement.verdicts, unnamed) for task in plan.task]


def _task_row(task: Task, across: Sequence[Column], verdicts: Sequence[Verdict], unnamed: Sequence[Verdict]) -> TaskRow:
    bullets = [BulletRow(bullet=b, cells=[cell(b, column, verdicts) for column in across]) for b in task.bullet]
    cells = []
    for position, column in enumerate(across):
        found = {v.id: v for v in unnamed if column.holds(v) and v.task == task.number}
        parts = [row.cells[position] for row in bullets]
        found |= {v.id: v for part in parts for v in part.verdicts}
        states = [state_of(v) for v in found.values()]
        if found and any(part.state in (State.NOT_EXERCISED, State.INCOMPLETE) for part in parts):
            states.append(State.INCOMPLETE)
        cells.append(Cell(state=worst(states), verdicts=list(found.values()), unexercised=[]))
    return TaskRow(task=task, bullets=bullets, cells=cells)


def tally(verdicts: Iterable[Verdict]) -> str:
    """ "12 ok, 1 red, 2 known": the text of a table's cell."""
    counted: dict[str, int] = {}
    for verdict in verdicts:
        counted[_word(verdict)] = counted.get(_word(verdict), 0) + 1
    here = sorted(word for word in counted if word.startswith(Cause.NOT_HERE))
    order = ("red", "untestable", *here, "missing", "known", "defect", "open", "ok")
    return ", ".join(f"{counted[word]} {word}" for word in order if word in counted)


def _word(verdict: Verdict) -> str:
    if verdict.cause == Cause.NOT_HERE:
        return verdict.reason.removeprefix("is ")
    if verdict.status == Parity.BASELINE_DEFECT and verdict.known is None:
        return "defect"
    state = state_of(verdict)
    return "ok" if state is State.PASS else str(state)


# --- divergences ----------------------------------------------------------------------------------------------------


@final
class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one scenario in one topology, as all stacks and comparisons saw it."""

    scenario: str
    topology: str
    stacks: list[Verdict | None]
    """One per stack column."""
    pairs: list[Verdict]

    @property
    def verdicts(self) -> list[Verdict]:
        return [v for v in self.stacks if v is not None] + self.pairs

    @property
    def because(self) -> str | None:
        """The check that explains everything here that is not green; None if one of these verdicts stands by itself."""
        named = [v.because for v in self.verdicts if v.status not in GREEN]
        return named[0] if all(named) else None

    @property
    def head(self) -> Verdict:
        """The most important verdict: red ones first, then known ones, then the worst status."""
        return min(self.verdicts, key=lambda v: (not v.red, v.known is None, severity(v.status)))

    def tells(self, pair: Verdict) -> bool:
        """True if a comparison says more than the stacks' own verdicts."""
        return pair.status not in CAUSED or all(v is None or v.status in GREEN for v in self.stacks)

    @property
    def size(self) -> int:
        """Characters of evidence. Reports show the smallest instance first."""
        return sum(len(str(v.evidence)) for v in self.verdicts)


@final
class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """One cause: a check that went wrong in the same way in one or more scenarios. The smallest instance is first."""

    check: str
    status: str
    reason: str
    known: str | None
    red: bool
    instances: list[Instance]
    explains: dict[str, int] = {}
    """Check → number of its red verdicts that this cause explains."""
    below: bool = False
    """True for a consequence that is listed below its cause."""

    @property
    def places(self) -> list[tuple[str, str, str]]:
        return [(i.scenario, i.topology, self.check) for i in self.instances]

    @property
    def verdicts(self) -> list[Verdict]:
        return [v for instance in self.instances for v in instance.verdicts]

    @property
    def first(self) -> Instance:
        return self.instances[0]

    @property
    def cause(self) -> Verdict:
        """The verdict with the most useful reason, evidence, blame and source: a stack's own before the comparison."""
        head = self.first.head
        own = [v for v in reversed(self.first.stacks) if v is not None and v.status not in GREEN and v.red == head.red]
        return min(own, key=lambda v: severity(v.status)) if own and head.status in CAUSED else head


CAUSED = frozenset({Parity.REGRESSION, Parity.BASELINE_DEFECT, Parity.BOTH_WRONG, Parity.UNTESTABLE, Parity.MISSING})
"""Statuses of comparisons that only repeat a stack's own verdict."""


def divergences(judgement: Judgement) -> list[Divergence]:
    """Everything that is not plain green, by cause: red first, then known, then the rest. What explains most comes first; its
    consequences follow it."""
    stacks = [column.target for column in columns(judgement.run, judgement.verdicts) if column.baseline is None]
    places: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in judgement.verdicts:
        places.setdefault((verdict.scenario, verdict.topology, verdict.check), []).append(verdict)
    causes: dict[tuple[object, ...], list[Instance]] = {}
    for (scenario, topology, check), verdicts in places.items():
        if all(v.status in GREEN for v in verdicts):
            continue
        own = {v.target: v for v in verdicts if v.baseline is None}
        instance = Instance(
            scenario=scenario,
            topology=topology,
            stacks=[own.get(target) for target in stacks],
            pairs=[v for v in verdicts if v.baseline is not None],
        )
        signature = tuple((v.target, v.baseline, v.status, v.reason, v.known) for v in verdicts)
        causes.setdefault((check, signature, instance.because), []).append(instance)
    return _causes_first([_divergence(instances) for instances in causes.values()])


def _causes_first(found: Sequence[Divergence]) -> list[Divergence]:
    at = {place: divergence for divergence in found for place in divergence.places}
    explained: dict[tuple[str, str, str], Counter[str]] = {}
    for verdict in (v for d in found for v in d.verdicts if v.because and v.red):
        place = (verdict.scenario, verdict.topology, verdict.because or "")
        explained.setdefault(place, Counter())[verdict.check] += 1
    below: dict[tuple[str, str, str], list[Divergence]] = {}
    heads: list[Divergence] = []
    for divergence in found:
        first = divergence.first
        cause = at.get((first.scenario, first.topology, first.because or ""))
        if cause is None or cause.first.because or cause.red != divergence.red:
            names = sum((explained.get(place, Counter()) for place in divergence.places), Counter())
            heads.append(msgspec.structs.replace(divergence, explains=dict(names.most_common())))
        else:
            below.setdefault(cause.places[0], []).append(msgspec.structs.replace(divergence, below=True))
    ordered = sorted(heads, key=lambda d: (not d.red, d.known is None, -sum(d.explains.values()), *_frequent(d)))
    return [d for head in ordered for d in (head, *sorted(below.get(head.places[0], ()), key=_frequent))]


def _frequent(divergence: Divergence) -> tuple[int, int, str]:
    return severity(divergence.status), -len(divergence.instances), divergence.check


def explained(divergence: Divergence) -> str:
    """ "4 more: tokens.greedy (3), logprobs": what a cause explains, with the number of red verdicts; empty if nothing."""
    names = [name if times == 1 else f"{name} ({times})" for name, times in divergence.explains.items()]
    return f"{sum(divergence.explains.values())} more: {', '.join(names)}" if names else ""


def _divergence(instances: list[Instance]) -> Divergence:
    ordered = sorted(instances, key=lambda i: (i.size, i.scenario, i.topology))
    head = ordered[0].head
    made = Divergence(
        check=head.check,
        status=head.status,
        reason=head.told,
        known=next((v.known for v in ordered[0].verdicts if v.known), None),
        red=any(v.red for i in ordered for v in i.verdicts),
        instances=ordered,
    )
    return msgspec.structs.replace(made, reason=made.cause.told or head.told)


def weakest_fault(floor: NoiseFloor) -> str:
    """Size and name of the fault that is nearest to passing, in words."""
    if floor.weakest_fault is None:
        return "not measured"
    names = [name for name, size in floor.faults.items() if size == floor.weakest_fault]
    return f"{number(floor.weakest_fault)} ({', '.join(names)})" if names else number(floor.weakest_fault)


def chance(floor: NoiseFloor) -> str:
    """False-alarm rate and power in words; empty if the check is not statistical."""
    if floor.false_alarm_rate is None:
        return ""
    power = "" if floor.power is None else f", power {number(floor.power)}"
    return f"false alarms {number(floor.false_alarm_rate)}{power}"


def gap_rows(curves: Sequence[GapCurve]) -> list[tuple[int, str, Gap]]:
    """(step, stack, gap) of the runs of one scenario, in order of steps."""
    rows = [(gap.step, curve.target, gap) for curve in curves for gap in curve.steps]
    return sorted(rows, key=lambda row: row[0])


def trainings(judgement: Judgement) -> dict[tuple[str, str], list[GapCurve]]:
    """Scenario and topology → the runs there."""
    found: dict[tuple[str, str], list[GapCurve]] = {}
    for curve in judgement.gaps:
        found.setdefault((curve.scenario, curve.topology), []).append(curve)
    return found


def bounds(curves: Sequence[GapCurve]) -> str:
    """The bound of a single token in words."""
    found = sorted({curve.bound for curve in curves if curve.bound is not None})
    return (
        f"bound of a token: {', '.join(map(number, found))} nats"
        if found
        else "no bound: rollouts may be older than the policy"
    )


def exposures(judgement: Judgement) -> list[tuple[Verdict, Exposure]]:
    """All exposures, each with the verdict that found it: the worst first, then by stack."""
    order = list(Severity)
    found = [(verdict, exposure) for verdict in judgement.verdicts for exposure in verdict.exposures]
    return sorted(found, key=lambda item: (order.index(item[1].severity), item[0].target, item[1].where))


def field_effects(judgement: Judgement) -> dict[str, list[tuple[str, dict[str, str], bool]]]:
    """Scenario → rows of (field, stack → what became of it with which values, True if the stacks differ), those first."""
    told: dict[str, dict[str, dict[str, dict[str, list[str]]]]] = {}
    for verdict in judgement.verdicts:
        for one in verdict.effects:
            by_field = told.setdefault(verdict.scenario, {}).setdefault(one.field, {})
            by_field.setdefault(verdict.target, {}).setdefault(one.effect, []).append(one.given)
    found = {}
    for scenario, fields in sorted(told.items()):
        rows = []
        for field, by_target in sorted(fields.items()):
            words = {
                target: "; ".join(f"{effect}: {', '.join(sorted(kinds))}" for effect, kinds in sorted(effects.items()))
                for target, effects in by_target.items()
            }
            rows.append((field, words, len(set(words.values())) > 1))
        found[scenario] = sorted(rows, key=lambda row: not row[2])
    return found


def sequence_tables(judgement: Judgement) -> dict[str, tuple[list[str], list[tuple[str, list[str]]], list[str]]]:
    """Stack → (states, rows of (step, a cell for each state), why cells are empty). A cell says what requests did when a sequence
    took the step there, with the first such sequence, and what is left; or the number of the reason why the contract has none."""
    visited: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for verdict in judgement.verdicts:
        for one in verdict.visits:
            cell = visited.setdefault(verdict.target, {}).setdefault((one.step, one.state), {})
            cell.setdefault(one.requests, verdict.scenario.partition("test_")[2])
    columns = list(dict.fromkeys(map(str, states.reachable())))
    open_to, why = _cells()
    reasons = list(dict.fromkeys(why.values()))
    found = {}
    for target, cells in visited.items():
        rows = []
        for step in (str(one) for one in states.STEPS if one.do not in ("send", "finish")):
            texts = []
            for state in columns:
                seen, kinds = cells.get((step, state), {}), open_to.get((step, state), set())
                words = [f"{kind} ({where})" for kind, where in sorted(seen.items())]
                words += [f"not driven: {', '.join(left)}"] if (left := sorted(kinds - set(seen))) else []
                texts.append("; ".join(words) or f"[{1 + reasons.index(why[step, state])}]")
            rows.append((step, texts))
        found[target] = columns, rows, reasons
    return found


def _cells() -> tuple[dict[tuple[str, str], set[str]], dict[tuple[str, str], str]]:
    """(step, state) → what requests may do there, and (step, state) → why the contract does not allow it."""
    open_to: dict[tuple[str, str], set[str]] = {}
    why: dict[tuple[str, str], str] = {}
    for state in states.reachable():
        for step in states.STEPS:
            reason = states.forbidden(state, step)
            if reason is None:
                open_to.setdefault((str(step), str(state)), set()).add(state.requests)
            else:
                why[str(step), str(state)] = reason
    return open_to, why


def effect_counts(judgement: Judgement) -> dict[str, str]:
    """Stack → "412 took effect, 90 dropped, …": what became of the fields of its requests, in the order of `Effect`."""
    told: dict[str, Counter[str]] = {}
    for verdict in judgement.verdicts:
        told.setdefault(verdict.target, Counter()).update(one.effect for one in verdict.effects if not verdict.baseline)
    return {
        target: ", ".join(f"{counted[effect]} {effect}" for effect in Effect if counted[effect])
        for target, counted in told.items()
        if counted
    }


def severities(judgement: Judgement) -> str:
    """ "2 critical, 1 high": the number of exposures per severity; empty if there are none."""
    counted = Counter(exposure.severity for _, exposure in exposures(judgement))
    return ", ".join(f"{counted[severity]} {severity}" for severity in Severity if counted[severity])


def known_ids(judgement: Judgement) -> dict[str, int]:
    """Ledger entry → number of verdicts that it explains."""
    found: dict[str, int] = {}
    for verdict in judgement.verdicts:
        if verdict.known is not None:
            found[verdict.known] = found.get(verdict.known, 0) + 1
    return found
