"""The kill matrix in a terminal: 100 columns, readable without colour, ends with one line of figures."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.proving.entries import LedgerProof, Stays
from harness.proving.kill_matrix import KillMatrix, Proof
from reports.terminal import SHOWN, WIDTH
from reports.text import many, one_line, seconds, shortened


def show(matrix: KillMatrix, console: Console | None = None, *, report: Path | None = None) -> None:
    """Print the summary. `report` is the path that it names before the last line."""
    out = console or Console(highlight=False)
    out.print(Group(*_parts(matrix, report)), width=min(out.width, WIDTH), highlight=False)
    status, style = ("green", "bold green") if matrix.exit_status == 0 else ("red", "bold red")
    out.print(Text.assemble((f"{status}: ", style), closing(matrix)), soft_wrap=True, highlight=False)


def closing(matrix: KillMatrix) -> str:
    """ "killed N of M faults; K of L checks are killed by a fault; control green"."""
    figures = matrix.figures
    control = "control green" if figures.control_green else f"control red: {', '.join(_red_controls(matrix))}"
    return (
        f"killed {figures.faults_killed} of {many(figures.faults, 'fault')}; "
        f"{figures.checks_killed} of {many(figures.checks, 'check')} are killed by a fault; {control}"
    )


def _red_controls(matrix: KillMatrix) -> list[str]:
    return [one_line(proof.target) for proof in matrix.proofs if not proof.control.green] or ["nothing was driven"]


def _parts(matrix: KillMatrix, report: Path | None) -> list[RenderableType]:
    return [
        Text(),
        _stacks(matrix.proofs),
        *(part for proof in matrix.proofs if proof.ledger for part in _ledger(proof.target, proof.ledger)),
        *_reds(matrix.problems),
        *_hidden(matrix.proofs),
        *_part(matrix),
        Text(),
        Text(f"{seconds(matrix.seconds)}", style="dim"),
        *([Text(f"report: {report}", overflow="fold")] if report is not None else []),
    ]


def _stacks(proofs: list[Proof]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for column in ("stack", "dtype", "faults killed", "checks killed", "scenarios", "drives", "correct stack"):
        table.add_column(column, overflow="fold")
    for proof in proofs:
        table.add_row(
            Text(one_line(proof.target)),
            proof.dtype or "–",
            f"{len(proof.killed)} of {len(proof.faults)}",
            f"{proof.checks_killed} of {len(proof.checks)}",
            str(len(proof.scenarios)),
            str(proof.drives),
            Text("green", style="green") if proof.control.green else Text("red", style="bold red"),
        )
    return table


def _ledger(target: str, ledger: LedgerProof) -> list[RenderableType]:
    """The entries about a stack beside other faults: one row per entry, one line of figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for column in (f"ledger, {one_line(target)}", "known", *Stays):
        table.add_column(column, overflow="fold")
    for entry in ledger.entries:
        table.add_row(Text(entry.entry), str(entry.known), *(str(entry.count(stays)) for stays in Stays))
    figures = ", ".join(f"{ledger.count(stays)} {stays}" for stays in Stays)
    closing = f"faults beside entries: {figures}; {len(ledger.untried)} entries without such a fault"
    return [Text(), table, Text(closing)]


def _reds(problems: list[str]) -> list[RenderableType]:
    lines: list[RenderableType] = [Text()] if problems else []
    for problem in problems[:SHOWN]:
        lines.append(Padding(Text(f"✗ {shortened(one_line(problem), 400)}"), (0, 0, 0, 0)))
    if len(problems) > SHOWN:
        lines.append(Text(f"  … and {len(problems) - SHOWN} more in the report", style="red"))
    return lines


def _hidden(proofs: list[Proof]) -> list[RenderableType]:
    """The faults that a dtype hides, one line per stack."""
    return [
        Text(one_line(f"{proof.target}: smaller than {proof.dtype}'s rounding, not driven: {', '.join(proof.hidden)}"))
        for proof in proofs
        if proof.hidden
    ]


def _part(matrix: KillMatrix) -> list[RenderableType]:
    said: list[RenderableType] = [Text()] if matrix.partial else []
    if matrix.brief:
        ended = f"{many(matrix.brief, 'fault')} ended with the last catch: false alarms in the rest of the suite went unseen."
        said.append(Text(ended, style="yellow"))
    if not matrix.filters:
        return said
    left_out = ", ".join(one_line(part) for part in matrix.filters)
    return [*said, Text(f"A part only ({left_out}): which checks no fault kills is not asked.", style="yellow")]
