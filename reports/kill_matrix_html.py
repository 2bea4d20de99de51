"""kill_matrix.html: one file without scripts that opens without a network. It shows a `KillMatrix` and decides nothing."""

from __future__ import annotations

import hashlib
from typing import final

import msgspec

from harness.contract.faults import DRIVEN
from harness.proving.entries import Stays
from harness.proving.kill_matrix import Cell, FaultProof, KillMatrix, Mark, Outcome, Proof
from reports.html import environment

SIGN = {Mark.CAUGHT: "●", Mark.ALSO: "○", Mark.UNEXPECTED: "✕", Mark.MISSING: "∅", Mark.UNTESTABLE: "?"}
"""One sign per mark, so that colour is never needed."""
SAID = {
    Mark.CAUGHT: "red, and there for it", Mark.ALSO: "red as a named consequence", Mark.UNEXPECTED: "red and not named",
    Mark.MISSING: "named and not red", Mark.UNTESTABLE: "could not judge",
}  # fmt: skip
OUTCOME_SIGN = {
    Outcome.KILLED: "✓", Outcome.SURVIVED: "✕", Outcome.MISSED: "∅", Outcome.OVERREACH: "✕",
    Outcome.UNFIRED: "?", Outcome.INCOMPLETE: "◐",
}  # fmt: skip


@final
class Square(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario under one fault, as the page shows it."""

    kind: str
    """ "expected", "unexpected" or "untestable"."""
    reds: int
    title: str


@final
class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in both tables."""

    fault: FaultProof
    anchor: str
    marks: dict[str, Mark]
    """Check → mark, for checks that have one."""
    counts: dict[str, int]
    squares: dict[str, Square]
    """Scenario → square, for scenarios in which a check turned red."""


@final
class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """One stack's tables."""

    proof: Proof
    anchor: str
    checks: list[str]
    scenarios: list[tuple[str, list[str]]]
    """Module → its scenarios."""
    rows: list[Row]
    killers: dict[str, int]
    """Check → number of killed faults that name it."""


def render(matrix: KillMatrix) -> str:
    """The text of kill_matrix.html."""
    made = environment()
    made.globals |= {"SIGN": SIGN, "SAID": SAID, "OUTCOME_SIGN": OUTCOME_SIGN, "DRIVEN": DRIVEN, "STAYS": Stays}
    template = made.get_template("kill_matrix.html.j2")
    return template.render(
        matrix=matrix,
        figures=matrix.figures,
        problems=matrix.problems,
        checks=matrix.checks,
        sheets=[sheet(proof, number) for number, proof in enumerate(matrix.proofs)],
    )


def sheet(proof: Proof, number: int) -> Sheet:
    """Rows and columns of one stack: every check that was judged or named, and every driven scenario."""
    named = {catch.check for fault in proof.faults for catch in fault.catches}
    named |= {name for fault in proof.faults for name in (*fault.caught_by, *fault.also)}
    checks = sorted({*proof.checks, *named} - {DRIVEN}) + [DRIVEN] * (DRIVEN in named)
    return Sheet(
        proof=proof,
        anchor=f"p{number}",
        checks=checks,
        scenarios=_modules(proof.scenarios),
        rows=[_row(fault, number) for fault in proof.faults],
        killers={name: len(proof.killers(name)) for name in checks},
    )


def _modules(scenarios: list[str]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for name in sorted(scenarios):
        found.setdefault(name.partition(".")[0], []).append(name)
    return list(found.items())


def _row(fault: FaultProof, number: int) -> Row:
    marks = {catch.check: catch.mark for catch in fault.catches}
    return Row(
        fault=fault,
        anchor="f-" + hashlib.sha256(f"{number} {fault.id}".encode()).hexdigest()[:10],
        marks=marks,
        counts={catch.check: catch.scenarios for catch in fault.catches},
        squares={cell.scenario: _square(cell, marks) for cell in fault.cells},
    )


def _square(cell: Cell, marks: dict[str, Mark]) -> Square:
    names = [f"{red.check} ({marks[red.check]})" for red in cell.reds]
    of = {marks[red.check] for red in cell.reds}
    kind = "unexpected" if Mark.UNEXPECTED in of else "expected" if of & {Mark.CAUGHT, Mark.ALSO} else "untestable"
    return Square(kind=kind, reds=len(names), title=f"{cell.scenario}: {', '.join(names)}")
