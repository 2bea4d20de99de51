"""The kill matrix: which check catches which seeded fault, and whether that matches the fault's declaration. Pure.

Verdicts in, matrix out; `harness/proving/prove.py` drives. A fault's red checks are compared exactly with those that it names.
Every check that was judged needs a killed fault that names it in `caught_by`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from enum import StrEnum
from typing import Any, Literal, final

import msgspec

from harness.contract.errors import Blame
from harness.contract.faults import DRIVEN, NOTHING, Fact, Fault, family
from harness.judging import pace
from harness.judging.pace import Timings
from harness.proving.entries import LedgerProof
from harness.records.verdict import Cause, Conformance, Verdict

CAUGHT_BY_UNTESTABLE = frozenset({"instruments"})
"""Checks that catch a fault by `untestable`: that is their finding. For all others only `fail` is a catch."""
EVIDENCE = 2
"""Pieces of evidence kept per red check."""


class Outcome(StrEnum):
    """The outcome of a fault. All but `KILLED` are red."""

    KILLED = "killed"
    """All checks in `caught_by` turned red. All other red checks read a fact that it corrupts."""
    SURVIVED = "survived"
    """No check turned red."""
    MISSED = "missed"
    """A check in `caught_by` stayed green, was never judged, or only became untestable."""
    OVERREACH = "overreach"
    """A check turned red that reads no fact that it corrupts, or a check raised an exception."""
    UNFIRED = "unfired"
    """The fault never took effect, or could not be injected: this proves nothing."""
    INCOMPLETE = "incomplete"
    """Not driven to its end."""


class Mark(StrEnum):
    """A check's result under a fault, against the fault's declaration."""

    CAUGHT = "caught"
    """Red and in `caught_by`."""
    ALSO = "also"
    """Red, and it reads a fact that the fault corrupts."""
    UNEXPECTED = "unexpected"
    """Red, and it reads no fact that the fault corrupts; or it raised an exception."""
    MISSING = "missing"
    """In `caught_by` but not red."""
    UNTESTABLE = "untestable"
    """Could not judge under this fault and is not in `caught_by`: neither catch nor alarm."""


@final
class Lap(msgspec.Struct, frozen=True, kw_only=True):
    """The result of driving a stack under one fault, or under none."""

    fault: str | None
    """Its id; None is the control."""
    verdicts: list[Verdict]
    """All verdicts for the control; the red ones for a fault."""
    driven: int
    """Number of driven scenarios, without those whose required capabilities the stack lacks."""
    fired: int = 0
    """How often the fault took effect."""
    error: str = ""
    """Why it could not be driven to its end."""
    seconds: float = 0.0
    timings: Timings = {}
    """Digest of a call's request → seconds per token of each such call."""
    beside: str = ""
    """Topology in which it drove the scenarios of the ledger's entries (`harness/proving/entries.py`); empty for all others."""
    called: dict[str, frozenset[str]] = {}
    """For the control of a pure Python stack: scenario → those functions that it called and that a fault changes."""


@final
class Red(msgspec.Struct, frozen=True, kw_only=True):
    """A check that turned red in one scenario."""

    check: str
    """Its family."""
    labels: list[str]
    """Full names of the checks of that family, if they have labels."""
    status: Literal["fail", "untestable", "raised"]
    reason: str
    blame: Blame | None
    facts: int


@final
class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario under one fault, if anything turned red there."""

    scenario: str
    reds: list[Red]


@final
class Catch(msgspec.Struct, frozen=True, kw_only=True):
    """One check under one fault: its mark, and the first scenario in which it turned red."""

    check: str
    mark: Mark
    scenarios: int = 0
    """Number of scenarios in which it turned red."""
    first: str = ""
    reason: str = ""
    blame: Blame | None = None
    facts: int = 0
    evidence: list[dict[str, Any]] = []


@final
class FaultProof(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: the checks that it had to turn red, those that did, and the outcome."""

    id: str
    breaks: str
    caught_by: list[str]
    also: list[str]
    """Other checks that turned red and read a fact that it corrupts."""
    outcome: Outcome
    problem: str = ""
    """What is wrong, in one sentence; empty for a killed fault."""
    fired: int = 0
    driven: int = 0
    """Number of scenarios driven under it."""
    brief: bool = False
    """True if it was driven only until its checks had caught it: a false alarm in the rest of the suite went unseen."""
    seen: list[str] = []
    """Checks that turned red."""
    catches: list[Catch] = []
    """Every check that is in `caught_by` or was not green."""
    cells: list[Cell] = []
    seconds: float = 0.0
    command: str = ""
    """Command line that repeats this fault."""


@final
class ControlRed(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on the correct stack that is neither green nor in the ledger."""

    scenario: str
    check: str
    status: str
    reason: str
    blame: Blame | None


@final
class Control(msgspec.Struct, frozen=True, kw_only=True):
    """The correct stack, with the instrument in place and no fault."""

    verdicts: int
    """Number of verdicts."""
    known: list[str] = []
    """Ledger entries that explain red verdicts."""
    reds: list[ControlRed] = []
    error: str = ""
    """Why it could not be driven to its end."""

    @property
    def green(self) -> bool:
        return self.verdicts > 0 and not self.reds and not self.error


@final
class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A check that was judged on the correct stack."""

    guards: str
    """The fault that it guards against, in words."""
    scenarios: int


@final
class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """One stack, correct and under each of its faults."""

    target: str
    dtype: str
    """Dtype of the engines; empty for a pure Python stack."""
    whole: bool
    """True if every scenario was driven, under every fault that is seeded for the stack."""
    scenarios: list[str]
    """Driven scenarios."""
    unable: list[str]
    """Scenarios whose required capabilities the stack lacks."""
    control: Control
    checks: dict[str, Judged]
    """All checks that were judged on the correct stack."""
    faults: list[FaultProof]
    hidden: list[str] = []
    """Faults that were not driven, because they are smaller than what rounding does in this dtype."""
    ledger: LedgerProof | None = None
    """The ledger's entries about it beside other faults; None if they were not asked for."""
    complete: bool = True

    @property
    def killed(self) -> list[FaultProof]:
        return [fault for fault in self.faults if fault.outcome == Outcome.KILLED]

    def killers(self, check: str) -> list[str]:
        """Killed faults that name the check in `caught_by`."""
        return [fault.id for fault in self.killed if check in fault.caught_by]

    @property
    def checks_killed(self) -> int:
        return sum(bool(self.killers(check)) for check in self.checks)

    @property
    def drives(self) -> int:
        """Scenarios driven under a fault, over all faults."""
        return sum(fault.driven for fault in self.faults)


@final
class CheckProof(msgspec.Struct, frozen=True, kw_only=True):
    """One check and the faults that show that it can fail."""

    check: str
    guards: str
    killed_by: list[str]
    """ "target fault" of each killed fault that names it."""
    required: bool
    """True if it was judged on a stack whose proof is whole. Only then must a fault kill it."""

    @property
    def red(self) -> bool:
        return self.required and not self.killed_by


@final
class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of the matrix."""

    faults: int
    faults_killed: int
    checks: int
    checks_killed: int
    scenarios: int
    """Different scenarios driven."""
    drives: int
    """Scenarios driven under a fault, over all faults and stacks."""
    control_green: bool


@final
class KillMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """All stacks of one run."""

    run_id: str
    created_at: str
    """UTC, ISO 8601."""
    command: str
    start: str
    engine: str
    proofs: list[Proof]
    outcome: str = "completed"
    """ "completed", or why the run ended early."""
    filters: list[str] = []
    """Filters of the command line; empty for a whole run."""
    seconds: float = 0.0

    @property
    def brief(self) -> int:
        """Number of faults that were driven only until their checks had caught them."""
        return sum(fault.brief for proof in self.proofs for fault in proof.faults)

    @property
    def partial(self) -> bool:
        return bool(self.filters or self.brief)

    @property
    def checks(self) -> list[CheckProof]:
        """Every check that was judged on any correct stack, by name."""
        names = sorted({check for proof in self.proofs for check in proof.checks} - {DRIVEN})
        return [self._check(name) for name in names]

    def _check(self, name: str) -> CheckProof:
        judged = [proof for proof in self.proofs if name in proof.checks]
        return CheckProof(
            check=name,
            guards=judged[0].checks[name].guards,
            killed_by=[f"{proof.target} {fault}" for proof in self.proofs for fault in proof.killers(name)],
            required=not self.filters and any(proof.whole for proof in judged),
        )

    @property
    def figures(self) -> Figures:
        checks = self.checks
        return Figures(
            faults=sum(len(proof.faults) for proof in self.proofs),
            faults_killed=sum(len(proof.killed) for proof in self.proofs),
            checks=len(checks),
            checks_killed=sum(bool(check.killed_by) for check in checks),
            scenarios=len({name for proof in self.proofs for name in proof.scenarios}),
            drives=sum(proof.drives for proof in self.proofs),
            control_green=bool(self.proofs) and all(proof.control.green for proof in self.proofs),
        )

    @property
    def problems(self) -> list[str]:
        """Everything that is red, worst first."""
        found = [] if self.outcome == "completed" else [f"the run is incomplete: {self.outcome}"]
        for proof in self.proofs:
            found += _of_control(proof)
        for proof in self.proofs:
            found += [
                f"{proof.target}: {fault.id} {fault.outcome}: {fault.problem}"
                for fault in proof.faults
                if fault.outcome != Outcome.KILLED
            ]
            if not proof.faults:
                found.append(f"{proof.target}: no fault was driven: nothing is proved")
            if proof.ledger is not None:
                found += [f"{proof.target}: {problem}" for problem in proof.ledger.problems]
        if not self.proofs:
            found.append("no stack was driven: nothing is proved")
        found += [f"no fault kills {check.check}, which is for: {check.guards}" for check in self.checks if check.red]
        return found

    @property
    def exit_status(self) -> int:
        """0 only if every fault was killed, every required check has a killed fault, and the correct stacks are green."""
        return int(bool(self.problems))


def _of_control(proof: Proof) -> list[str]:
    if proof.control.error:
        return [f"{proof.target}: the correct stack could not be driven to its end: {proof.control.error}"]
    if proof.control.verdicts == 0:
        return [f"{proof.target}: nothing was judged on the correct stack"]
    reds = proof.control.reds
    shown = [
        f"{proof.target}: the correct stack is red: {red.check} in {red.scenario}: {red.reason}" for red in reds[:5]
    ]
    more = [f"{proof.target}: and {len(reds) - 5} more red verdicts on the correct stack"] if len(reds) > 5 else []
    return shown + more


# --- from verdicts to the matrix


def settled(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The verdicts. One verdict of `DRIVEN` replaces those of a scenario that did not reach its end."""
    found: list[Verdict] = []
    ended: dict[str, Verdict] = {}
    for verdict in verdicts:
        if verdict.cause != Cause.NOT_DRIVEN:
            found.append(verdict)
        elif verdict.scenario not in ended or verdict.known is None:  # known only if all of them are
            ended[verdict.scenario] = verdict
    return found + [msgspec.structs.replace(verdict, check=DRIVEN, fault="", cause=None) for verdict in ended.values()]


@final
class Baseline:
    """The control's verdicts, indexed for the comparison with each fault."""

    def __init__(self, verdicts: Sequence[Verdict], error: str = "") -> None:
        judged = [v for v in settled(verdicts) if v.status != Conformance.MISSING]
        self.red = {(v.scenario, v.check): v.reason for v in judged if v.status != Conformance.PASS}
        """Scenario and check → reason, known ones included."""
        self._families: dict[str, set[str]] = {}
        self._guards: dict[str, str] = {}
        for verdict in judged:
            if verdict.check != DRIVEN:
                self._families.setdefault(verdict.scenario, set()).add(family(verdict.check))
                self._guards.setdefault(family(verdict.check), verdict.fault)
        self.control = Control(
            verdicts=len(judged),
            known=sorted({v.known for v in judged if v.known is not None}),
            reds=[
                ControlRed(scenario=v.scenario, check=v.check, status=v.status, reason=v.reason, blame=v.blame)
                for v in judged
                if v.red
            ],
            error=error,
        )
        self.unable = sorted({v.scenario for v in verdicts if v.status == Conformance.MISSING})

    def families(self, scenarios: Iterable[str] | None = None) -> dict[str, Judged]:
        """The checks that were judged in these scenarios (default all), by name."""
        names = self._families if scenarios is None else {*scenarios, pace.SCENARIO}
        counts: dict[str, int] = {}
        for scenario in names:
            for name in self._families.get(scenario, ()):
                counts[name] = counts.get(name, 0) + 1
        return {name: Judged(guards=self._guards[name], scenarios=counts[name]) for name in sorted(counts)}

    def turned(self, verdict: Verdict) -> bool:
        """True if a fault's verdict is red, unless the control is red for the same reason."""
        if verdict.status not in (Conformance.FAIL, Conformance.UNTESTABLE):
            return False
        return self.red.get((verdict.scenario, verdict.check)) != verdict.reason


def judge_fault(
    fault: Fault,
    lap: Lap | None,
    baseline: Baseline,
    *,
    reads: Mapping[str, Fact],
    scenarios: Iterable[str],
    filtered: bool,
    brief: bool = False,
    command: str = "",
) -> FaultProof:
    """Compare the red checks under a fault with those that may and those that must turn red.

    `lap` is None if the fault was not driven to its end. `reads`: check → the facts that it reads. `scenarios`: those to drive.
    `filtered`: True if the command line left scenarios out. One catch is then enough: other checks may turn red only there.
    """
    caught_by = sorted(fault.caught_by)
    if lap is None:
        return FaultProof(
            id=fault.id, breaks=fault.breaks, caught_by=caught_by, also=[], command=command,
            outcome=Outcome.INCOMPLETE, problem="it was not driven to its end",
        )  # fmt: skip
    turned = [v for v in settled(lap.verdicts) if baseline.turned(v)]
    seen = {family(v.check) for v in turned if _caught(v)}
    broken = {family(v.check) for v in turned if v.cause == Cause.RAISED}
    judged = baseline.families(scenarios).keys() | seen | {DRIVEN}
    must = (filtered and fault.caught_by & seen) or fault.caught_by
    also = {check for check in seen - fault.caught_by if reads.get(check, NOTHING) & fault.corrupts}
    missed, unexpected = must - seen, seen - must - also - broken
    differences = [
        f"no driven scenario judges {_listed(missed - judged)}" if missed - judged else "",
        f"not red: {_listed(missed & judged)}" if missed & judged else "",
        f"red, and reads nothing that it corrupts: {_listed(unexpected)}" if unexpected else "",
        f"broke, and a check may not raise: {_listed(broken)}" if broken else "",
    ]
    outcome, problem = _outcome(lap, seen | broken, missed, unexpected | broken, differences)
    return FaultProof(
        id=fault.id,
        breaks=fault.breaks,
        caught_by=caught_by,
        also=sorted(also),
        outcome=outcome,
        problem=problem,
        fired=lap.fired,
        driven=lap.driven,
        brief=brief,
        seen=sorted(seen | broken),
        catches=_catches(fault, also, turned, seen, broken),
        cells=_cells(turned),
        seconds=round(lap.seconds, 3),
        command=command,
    )


def catching(verdicts: Iterable[Verdict]) -> set[str]:
    """The checks that catch a fault in these verdicts, if the correct stack is green in them."""
    red = (Conformance.FAIL, Conformance.UNTESTABLE)
    return {family(v.check) for v in settled(verdicts) if v.status in red and _caught(v)}


def _caught(verdict: Verdict) -> bool:
    if verdict.cause == Cause.RAISED:
        return False
    return verdict.status == Conformance.FAIL or family(verdict.check) in CAUGHT_BY_UNTESTABLE


def _outcome(
    lap: Lap, seen: Set[str], missed: Set[str], unexpected: Set[str], differences: Iterable[str]
) -> tuple[Outcome, str]:
    if lap.error:
        return Outcome.UNFIRED, f"it could not be driven: {lap.error}"
    if lap.fired <= 0:
        return Outcome.UNFIRED, "it never took effect, so nothing is known"
    problem = "; ".join(filter(None, differences))
    if not seen:
        return Outcome.SURVIVED, f"no check turned red; {problem}" if problem else "no check turned red"
    if missed:
        return Outcome.MISSED, problem
    return (Outcome.OVERREACH if unexpected else Outcome.KILLED), problem


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _catches(fault: Fault, also: Set[str], turned: Sequence[Verdict], seen: Set[str], broken: Set[str]) -> list[Catch]:
    by_family: dict[str, list[Verdict]] = {}
    for verdict in sorted(turned, key=lambda v: (not _caught(v), v.scenario, v.check)):
        by_family.setdefault(family(verdict.check), []).append(verdict)
    return [
        _catch(name, _mark(fault, also, name, seen, broken), by_family.get(name, []))
        for name in sorted(fault.caught_by | by_family.keys())
    ]


def _mark(fault: Fault, also: Set[str], name: str, seen: Set[str], broken: Set[str]) -> Mark:
    if name in broken:
        return Mark.UNEXPECTED
    if name not in seen:
        return Mark.MISSING if name in fault.caught_by else Mark.UNTESTABLE
    if name in fault.caught_by:
        return Mark.CAUGHT
    return Mark.ALSO if name in also else Mark.UNEXPECTED


def _catch(name: str, mark: Mark, verdicts: Sequence[Verdict]) -> Catch:
    if not verdicts:
        return Catch(check=name, mark=mark)
    first = verdicts[0]
    return Catch(
        check=name,
        mark=mark,
        scenarios=len({v.scenario for v in verdicts}),
        first=first.scenario,
        reason=first.reason,
        blame=first.blame,
        facts=first.facts,
        evidence=first.evidence[:EVIDENCE],
    )


def _cells(turned: Sequence[Verdict]) -> list[Cell]:
    found: dict[str, dict[str, list[Verdict]]] = {}
    for verdict in turned:
        found.setdefault(verdict.scenario, {}).setdefault(family(verdict.check), []).append(verdict)
    return [
        Cell(scenario=scenario, reds=[_red(name, families[name]) for name in sorted(families)])
        for scenario, families in sorted(found.items())
    ]


def _red(name: str, verdicts: Sequence[Verdict]) -> Red:
    first = min(verdicts, key=lambda v: not _caught(v))
    return Red(
        check=name,
        labels=[v.check for v in verdicts if v.check != name],
        status="fail"
        if first.status == Conformance.FAIL
        else "raised"
        if first.cause == Cause.RAISED
        else "untestable",
        reason=first.reason,
        blame=first.blame,
        facts=first.facts,
    )


def together(laps: Sequence[Lap]) -> Lap:
    """Join the laps of one fault in several topologies."""
    return Lap(
        fault=laps[0].fault,
        verdicts=[verdict for lap in laps for verdict in lap.verdicts],
        driven=sum(lap.driven for lap in laps),
        fired=sum(lap.fired for lap in laps),
        error=next((lap.error for lap in laps if lap.error), ""),
        seconds=sum(lap.seconds for lap in laps),
        timings={key: times for lap in laps for key, times in lap.timings.items()},
        called={name: functions for lap in laps for name, functions in lap.called.items()},
    )


def paced(lap: Lap, control: Timings) -> Lap:
    """The lap with a verdict on its pace against the control's, if both have enough similar calls. Only this check needs two
    recordings."""
    measured = pace.between(control, lap.timings)
    if not measured.enough:
        return lap
    target = lap.verdicts[0].target if lap.verdicts else ""
    compared = pace.verdict(
        measured, pace.Pace(pairs=0, ratio=0.0), baseline=target, candidate=target, topology="all", wave=0
    )
    status = Conformance.FAIL if compared.red else Conformance.PASS
    return msgspec.structs.replace(
        lap, verdicts=[*lap.verdicts, msgspec.structs.replace(compared, status=status, baseline=None)]
    )


def prove_target(
    target: str,
    faults: Iterable[Fault],
    laps: Mapping[str | None, Lap],
    *,
    reads: Mapping[str, Fact],
    plan: Mapping[str, Sequence[str]],
    scenarios: Sequence[str],
    unable: Sequence[str] = (),
    dtype: str = "",
    hidden: Sequence[str] = (),
    whole: bool,
    filtered: bool,
    brief: Set[str] = frozenset(),
    commands: Mapping[str, str] | None = None,
) -> Proof:
    """One stack's part of the matrix.

    `laps`: fault id → its finished lap; None → the control's. `plan`: fault id → its scenarios. `scenarios`: the control's.
    `unable`: scenarios left out because the stack does not declare their required capabilities. `reads`: check → the facts
    that it reads. `brief`: as `FaultProof.brief`.
    """
    control = laps.get(None)
    baseline = Baseline([] if control is None else control.verdicts, "" if control is None else control.error)
    every_unable = sorted({*unable, *baseline.unable})
    proofs = [
        judge_fault(
            fault,
            laps.get(fault.id) if control is not None else None,
            baseline,
            reads=reads,
            scenarios=plan[fault.id],
            filtered=filtered,
            brief=fault.id in brief,
            command=(commands or {}).get(fault.id, ""),
        )
        for fault in faults
    ]
    return Proof(
        target=target,
        dtype=dtype,
        hidden=list(hidden),
        whole=whole,
        scenarios=[] if control is None else [name for name in scenarios if name not in every_unable],
        unable=every_unable,
        control=baseline.control,
        checks=baseline.families(),
        faults=proofs,
        complete=control is not None and all(p.outcome != Outcome.INCOMPLETE for p in proofs),
    )
