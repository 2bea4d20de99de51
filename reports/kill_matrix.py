"""kill_matrix.json and its page, the output of `parity prove`. Published schema: ``reports/kill_matrix.schema.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, final

import msgspec

from harness.proving.kill_matrix import CheckProof, Figures, KillMatrix
from reports import kill_matrix_html, published
from reports.json_report import plain

FORMAT: Literal[1] = 1
"""Version of kill_matrix.json."""


@final
class KillReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which seeded fault is caught by which check, on each stack of one run, and what that comes to."""

    format: Literal[1] = FORMAT
    exit_status: int
    """0 only if every fault was killed, every required check has a killed fault, and the correct stacks are green."""
    figures: Figures
    problems: list[str]
    """Everything that is red, worst first."""
    checks: list[CheckProof]
    matrix: KillMatrix


SCHEMA = published.Schema(
    KillReport,
    "kill_matrix.schema.json",
    "rollout-parity kill matrix",
    "kill_matrix.json of one run of `parity prove`: seeded faults × checks, and faults × scenarios.",
)


def encode(matrix: KillMatrix) -> bytes:
    """The bytes of kill_matrix.json. The matrix must have been settled."""
    return published.encode(
        KillReport(
            exit_status=matrix.exit_status,
            figures=matrix.figures,
            problems=matrix.problems,
            checks=matrix.checks,
            matrix=matrix,
        )
    )


def settle(matrix: KillMatrix) -> KillMatrix:
    """The same matrix, with values that JSON cannot hold written as text."""
    return msgspec.convert(plain(msgspec.to_builtins(matrix), as_number=False), KillMatrix)


def write_all(matrix: KillMatrix, folder: Path) -> dict[str, Path]:
    """Write kill_matrix.json and kill_matrix.html into `folder`. Returns file name → path. Each is replaced whole."""
    settled = settle(matrix)
    contents = {"kill_matrix.json": encode(settled), "kill_matrix.html": kill_matrix_html.render(settled).encode()}
    return published.write(folder, contents)
