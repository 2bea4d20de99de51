"""matrix.html: one file that opens without a network. It shows a `Matrix` and decides nothing.

Each cell is a link to its panel, so that the page works without its script, which adds the filter and the keys.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.suite.coverage import State
from reports.html import MARK, environment
from reports.matrix import Cell, Column, Finding, Matrix, Promise, kept

SCRIPT = Path(__file__).with_name("matrix.js")
MOVES_OPEN = 8
"""A step with more promises than this is folded at first, so that the table below is in reach."""
LEVELS = ("must", "should", "may")


def render(matrix: Matrix) -> str:
    """The text of matrix.html."""
    script = SCRIPT.read_text(encoding="utf-8")
    made = environment()
    made.globals |= {
        "MARK": MARK,
        "LEVELS": LEVELS,
        "STATES": list(State),
        "kept": kept,
        "words": words,
        "searched": searched,
        "alike": alike,
        "driven": driven,
        "MOVES_OPEN": MOVES_OPEN,
    }
    return made.get_template("matrix.html.j2").render(
        matrix=matrix,
        rows={promise.id: promise for task in matrix.tasks for promise in task.promises},
        divergences={one.id: one for one in matrix.divergences},
        runs={column.target: len(column.runs) for column in matrix.columns},
        targets=[column.target for column in matrix.columns],
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def words(cell: Cell) -> str:
    """The text of a cell beside its sign: the number of verdicts that decide it, and the state."""
    count = cell.counts.get(cell.state, 0)
    return f"{count} {cell.state}" if count and cell.state not in (State.PASS, State.NOT_EXERCISED) else str(cell.state)


def driven(column: Column) -> list[str]:
    """How the release was driven, one line for each way: "start fork, cpu, float32: disaggregated"."""
    ways: dict[str, dict[str, None]] = {}
    for run in column.runs:
        ways.setdefault(f"start {run.start}, {run.computed}", {}).update(dict.fromkeys(run.topologies))
    return [f"{way}: {', '.join(places)}" if places else way for way, places in ways.items()]


def alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings in groups that differ in nothing but their check. What has evidence of its own is a group alone."""
    return [list(group) for _, group in groupby(findings, key=_but_for_the_check)]


def _but_for_the_check(found: Finding) -> tuple[Any, ...]:
    alone = found.check if found.evidence else ""
    return found.state, found.reason, found.since, found.blame, found.known, found.next_step, alone


def searched(promise: Promise) -> str:
    """What the filter's words are looked up in: the promise, and what its cells say."""
    found = [promise.id, promise.place, promise.text, promise.source]
    for cell in promise.cells:
        found += [known.entry for known in cell.known]
        for one in cell.evidence:
            found += [one.scenario, *(word for finding in one.findings for word in (finding.check, finding.reason))]
    return " ".join(dict.fromkeys(found)).lower()
