"""The figures of the kill matrix in README.md: one row per stack and dtype, from a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from harness.contract.errors import UsageError
from harness.proving.kill_matrix import KillMatrix, Proof
from reports.readme import block, with_block

NAME = "kill matrix"
HEAD = (
    "| stack | dtype | faults killed | in the whole suite | checks killed | scenarios | drives under a fault | correct stack |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)
ROW = re.compile(
    r"\| `(?P<stack>[^`|]+)` \| (?P<dtype>\w+|–) \| (?P<killed>\d+) of (?P<faults>\d+) \| (?P<whole>\d+|–) "
    r"\| (?P<checks_killed>\d+) of (?P<checks>\d+) \| (?P<scenarios>\d+) \| (?P<drives>\d+) \| (?P<control>green|red) \|"
)
"""A line of the table. A pure Python stack has no dtype; on a real one each fault has its few scenarios, not the suite."""


def row(proof: Proof) -> str:
    """One stack's line of the table."""
    whole = "–" if proof.dtype else sum(not fault.brief for fault in proof.killed)
    return (
        f"| `{proof.target}` | {proof.dtype or '–'} | {len(proof.killed)} of {len(proof.faults)} | {whole} "
        f"| {proof.checks_killed} of {len(proof.checks)} | {len(proof.scenarios)} | {proof.drives} "
        f"| {'green' if proof.control.green else 'red'} |"
    )


def renewed(text: str, proofs: Iterable[Proof]) -> str:
    """A README's text with the rows of these stacks and dtypes replaced or added; all others stay.

    Raises UsageError for a text without the two markers.
    """
    rows = rows_of(text) | {(proof.target, proof.dtype or "–"): row(proof) for proof in proofs}
    return with_block(text, NAME, [*HEAD, *rows.values()])


def rows_of(text: str) -> dict[tuple[str, str], str]:
    """(stack, dtype) → its line, for all lines of the block. Raises UsageError for a text without the two markers."""
    return {(match["stack"], match["dtype"]): line for line in block(text, NAME) if (match := ROW.fullmatch(line))}


def renew(readme: Path, matrix: KillMatrix) -> None:
    """Put the figures of a run into README.md. Raises UsageError for a filtered or incomplete run."""
    if matrix.filters or matrix.outcome != "completed":
        raise UsageError(
            "the README shows runs of all faults only, and this one is a part",
            next_step="leave out --fault and -k, let it end",
        )
    readme.write_text(renewed(readme.read_text(encoding="utf-8"), matrix.proofs), encoding="utf-8")
