"""What a run shows of the plan: the state of each checklist bullet on each stack, and on each pair of stacks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import final

import msgspec

from harness.records.verdict import Conformance, Parity, RunInfo, Verdict
from harness.suite.plan import Bullet, counts_for


class State(StrEnum):
    """One bullet (or one task) in one column. Listed worst first; the worst of its verdicts decides."""

    RED = "red"
    """At least one verdict is red."""
    UNTESTABLE = "untestable"
    """Something could not be judged."""
    MISSING = "missing"
    """The stack lacks a capability that a scenario needs."""
    NOT_EXERCISED = "not exercised"
    """No verdict at all."""
    INCOMPLETE = "incomplete"
    """Some of the scenarios that the bullet names have no verdict."""
    KNOWN = "known"
    """Differs, and the ledger explains it."""
    OPEN = "open"
    """Differs where the contract leaves it open."""
    PASS = "pass"


@final
class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One stack (conformance) or one pair of stacks (parity)."""

    target: str
    baseline: str | None = None

    @property
    def name(self) -> str:
        return f"{self.baseline}~{self.target}" if self.baseline else self.target

    def holds(self, verdict: Verdict) -> bool:
        return (verdict.target, verdict.baseline) == (self.target, self.baseline)


@final
class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one column says about some scenarios."""

    state: State
    verdicts: list[Verdict]
    unexercised: list[str]
    """Named scenarios without a verdict here."""


def columns(run: RunInfo, verdicts: Iterable[Verdict]) -> list[Column]:
    """Stacks first, baseline before candidate, then pairs. The run's own stacks and pair are there even without verdicts."""
    stacks = [Column(target=name) for name in (run.baseline, run.candidate) if name]
    pairs = [Column(target=run.candidate, baseline=run.baseline)] if run.candidate and run.baseline else []
    for verdict in verdicts:
        column = Column(target=verdict.target, baseline=verdict.baseline)
        into = pairs if verdict.baseline else stacks
        if column not in into:
            into.append(column)
    return stacks + pairs


def state_of(verdict: Verdict) -> State:
    """What one verdict says, in the words of `State`."""
    if verdict.known is not None:
        return State.KNOWN
    if verdict.status == Conformance.UNTESTABLE:
        return State.UNTESTABLE
    if verdict.status == Conformance.MISSING:
        return State.MISSING
    if verdict.red:
        return State.RED
    return State.OPEN if verdict.status in (Parity.OPEN, Parity.ADDED, Parity.BASELINE_DEFECT) else State.PASS


def worst(states: Iterable[State]) -> State:
    """The worst of some states; `NOT_EXERCISED` for none at all, since no evidence is no pass."""
    order = list(State)
    return min(states, key=order.index, default=State.NOT_EXERCISED)


def cell(bullet: Bullet, column: Column, verdicts: Sequence[Verdict]) -> Cell:
    """The state of one bullet in one column."""
    named = {name.partition("@")[0] for name in bullet.scenarios}
    here = [v for v in verdicts if v.scenario in named and column.holds(v)]
    found = [v for v in here if any(counts_for(name, v) for name in bullet.scenarios)]
    unexercised = [name for name in bullet.scenarios if not any(counts_for(name, v) for v in here)]
    states = [state_of(v) for v in found]
    if found and unexercised:
        states.append(State.INCOMPLETE)
    return Cell(state=worst(states), verdicts=found, unexercised=unexercised)
