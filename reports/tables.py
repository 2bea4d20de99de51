"""The columns of the tables in every rendered report: terminal, Markdown and HTML. A new column takes one line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import msgspec

from harness.records.verdict import Change, Exposure, Gap, NoiseFloor, Verdict
from harness.suite.concessions import EVERY_STACK
from reports.text import number
from reports.view import chance, weakest_fault


@final
class Column(msgspec.Struct, frozen=True):
    """A column: its head, and the text of a row's cell."""

    head: str
    of: Callable[[Any], str]
    width: int = 0
    """Share of a terminal's width; 0 leaves the column out there."""


def _above(floor: NoiseFloor) -> str:
    return f"{number(floor.bound / floor.floor)}×" if floor.floor else "no noise seen"


def _below(floor: NoiseFloor) -> str:
    if floor.weakest_fault is None:
        return "not measured"
    return f"{number(floor.weakest_fault / floor.bound)}×" if floor.bound else "any is red"


def _weakest(floor: NoiseFloor) -> str:
    return ", ".join(filter(None, (weakest_fault(floor), chance(floor))))


NOISE = (
    Column("Numeric check", lambda floor: f"{floor.check}, {floor.unit}", 5),
    Column("Floor", lambda floor: number(floor.floor), 2),
    Column("Bound", lambda floor: number(floor.bound), 2),
    Column("Weakest seeded fault", _weakest, 6),
    Column("Facts", lambda floor: str(floor.facts)),
    Column("Bound over floor", _above),
    Column("Fault over bound", _below),
)
"""A row is a `NoiseFloor`."""


def _where(row: tuple[Verdict, Exposure]) -> str:
    return f"{row[0].target} @ {row[0].topology}"


EXPOSED = (
    Column("Severity", lambda row: row[1].severity),
    Column("Stack", _where),
    Column("What is open", lambda row: row[1].what),
    Column("By", lambda row: ", ".join(row[1].by)),
)
"""A row is a verdict and an exposure that it found."""


def _change(head: str, of: Callable[[Change], str]) -> Column:
    return Column(head, lambda row: of(row[1]))


CHANGED = (
    _change("Change", lambda change: change.how),
    _change("On the baseline", lambda change: change.baseline or "not there"),
    _change("On the candidate", lambda change: change.candidate or "not there"),
    _change(
        "What a caller does",
        lambda change: change.do or ("no entry says it: this is red" if change.bare else "nothing"),
    ),
    _change("Released source", lambda change: change.source),
)
"""A row is a verdict and a change that it found."""


OPEN = (
    Column("Cause", lambda one: one.cause),
    Column("Stacks", lambda one: one.pair.replace("~", " ~ ")),
    Column("Verdicts", lambda one: str(one.verdicts)),
    Column("Places", lambda one: str(one.places)),
    Column(
        "Scenarios",
        lambda one: (
            ", ".join(one.scenarios[:3]) + (f" and {len(one.scenarios) - 3} more" if len(one.scenarios) > 3 else "")
        ),
    ),
    Column("Released source", lambda one: one.source or "no entry: it counts against the gate"),
)
"""A row is an `OpenCause`."""


CONCESSIONS = (
    Column("Kind", lambda one: one.kind),
    Column("Where", lambda one: f"{one.name}, {one.place}"),
    Column("Stacks", lambda one: "every stack" if one.stacks == [EVERY_STACK] else ", ".join(one.stacks)),
    Column("What the suite does", lambda one: one.what),
    Column("What it hides", lambda one: one.hides or "nothing"),
)
"""A row is a `Concession`."""


def _gap(head: str, of: Callable[[Gap], str]) -> Column:
    return Column(head, lambda row: of(row[2]))


GAPS = (
    Column("Step", lambda row: str(row[0])),
    Column("Stack", lambda row: row[1]),
    _gap("Tokens", lambda gap: number(gap.tokens)),
    _gap("Mean", lambda gap: number(gap.mean)),
    _gap("p99", lambda gap: number(gap.p99)),
    _gap("Largest", lambda gap: number(gap.largest)),
    _gap("Outside 1 ± 0.1", lambda gap: f"{number(100 * gap.outside)} %"),
    _gap("KL (k3)", lambda gap: number(gap.k3)),
)
"""A row is (step, stack, gap)."""


def cells(columns: Iterable[Column], row: Any) -> list[str]:
    """The texts of a row's cells."""
    return [column.of(row) for column in columns]
