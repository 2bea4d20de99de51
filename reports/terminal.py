"""The summary in a terminal: 100 columns, readable without colour. Text from outside cannot move the cursor."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.records.verdict import Judgement, RunInfo, Severity
from harness.suite.coverage import State
from harness.suite.plan import Plan, load_plan
from reports import reproduce, view
from reports.tables import NOISE, cells
from reports.text import many, number, one_line, seconds, shortened

WIDTH = 100
SHOWN = 12
"""Causes shown in full, and entries of the ledger named; the rest are counted."""
STYLE = {
    State.RED: "bold red", State.UNTESTABLE: "bold red", State.MISSING: "red", State.KNOWN: "yellow",
    State.INCOMPLETE: "yellow", State.NOT_EXERCISED: "dim", State.OPEN: "cyan", State.PASS: "green",
}  # fmt: skip


def show(
    judgement: Judgement, console: Console | None = None, *, report: Path | None = None, plan: Plan | None = None
) -> None:
    """Print the summary. `report` is the path that it ends with."""
    out = console or Console(highlight=False)
    width = min(out.width, WIDTH)
    out.print(Group(*_parts(judgement, plan or load_plan(), report)), width=width, highlight=False)


def _parts(judgement: Judgement, plan: Plan, report: Path | None) -> list[RenderableType]:
    found = view.divergences(judgement)
    return [
        *_head(judgement),
        _tasks(judgement, plan),
        *_reds([d for d in found if d.red], judgement.run),
        *_ledger(judgement),
        *_security(judgement),
        *_fields(judgement),
        *_training(judgement),
        *_noise(judgement),
        *_gate(judgement),
        *_end(judgement, report),
    ]


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts)


def _head(judgement: Judgement) -> list[RenderableType]:
    run = judgement.run
    lines: list[RenderableType] = [
        Text(),
        _line(
            (view.stacks_of(run), "bold"),
            f"  start {one_line(run.start)}, engine {one_line(run.computed)}, run {one_line(run.run_id)}",
        ),
    ]
    lines += [Text(one_line(said)) for said in view.earlier(judgement)]
    lines += [Text(one_line(said)) for said in view.source_trees(judgement)]
    if run.outcome != "completed":
        lines.append(_line(("the run did not complete: ", "bold red"), one_line(run.outcome)))
    for where, error in run.not_started.items():
        said = shortened(one_line(f"{error.kind}: {error.message}"), 400)
        lines.append(_line((f"{one_line(where)} did not start: ", "bold red"), said))
    if not judgement.verdicts:
        lines.append(Text("nothing was judged: that is red", style="bold red"))
    return lines


def _tasks(judgement: Judgement, plan: Plan) -> RenderableType:
    across, rows = view.task_rows(judgement, plan)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column("task", overflow="fold", ratio=3)
    for column in across:
        table.add_column("parity" if column.baseline else one_line(column.name), overflow="fold", ratio=2)
    for row in (row for row in rows if row.exercised):
        cells = [Text(f"{view.tally(cell.verdicts) or 'not exercised'}", style=STYLE[cell.state]) for cell in row.cells]
        table.add_row(Text(f"{row.task.number}  {one_line(row.task.title)}"), *cells)
    bare = [str(row.task.number) for row in rows if not row.exercised]
    if bare:
        table.add_row(Text(f"not exercised: tasks {', '.join(bare)}", style="dim"))
    return Padding(table, (1, 0, 0, 0))


def _reds(reds: list[view.Divergence], run: RunInfo) -> list[RenderableType]:
    lines: list[RenderableType] = []
    causes = [d for d in reds if not d.below]
    if causes:
        more = f", {many(len(reds) - len(causes), 'consequence')}" if len(causes) < len(reds) else ""
        lines += [Text(), Text(f"Red: {many(len(causes), 'cause')}{more}", style="bold red")]
    for divergence in causes[:SHOWN]:
        cause, first = divergence.cause, divergence.first
        more = f" and {len(divergence.instances) - 1} more" if len(divergence.instances) > 1 else ""
        lines.append(_line((f"✗ {one_line(divergence.status)} ", "bold red"), (one_line(divergence.check), "bold")))
        facts = [
            shortened(one_line(divergence.reason), 400),
            f"in {one_line(first.scenario)} @ {one_line(first.topology)}{more}",
            f"explains {one_line(said)}" if (said := view.explained(divergence)) else "",
            f"blame: {cause.blame}" if cause.blame else "",
            f"next: {one_line(cause.next_step)}" if cause.next_step else "",
            f"again: {one_line(reproduce.command(first.head, run))}",
        ]
        lines += [Padding(Text(fact), (0, 0, 0, 4)) for fact in facts if fact]
    if len(causes) > SHOWN:
        lines.append(Text(f"  … and {len(causes) - SHOWN} more causes in the report", style="red"))
    return lines


def _ledger(judgement: Judgement) -> list[RenderableType]:
    counted = view.known_ids(judgement)
    lines: list[RenderableType] = []
    if counted:
        most = sorted(counted.items(), key=lambda one: -one[1])[:SHOWN]
        named = ", ".join(f"{one_line(name)} ({times})" for name, times in most)
        if len(counted) > SHOWN:
            named += f" and {len(counted) - SHOWN} more entries in the report"
        lines += [Text(), _line((f"Known: {many(sum(counted.values()), 'verdict')}. ", "yellow"), named)]
    if judgement.ledger_problems:
        lines += [Text(), Text("Ledger", style="bold red")]
    for problem in judgement.ledger_problems:
        lines.append(_line((f"✗ {one_line(problem.entry)}: ", "bold red"), shortened(one_line(problem.problem), 400)))
        lines.append(Padding(Text(f"next: {one_line(problem.next_step)}"), (0, 0, 0, 4)))
    return lines + [Text(one_line(said)) for said in view.held_entries(judgement)]


def _fields(judgement: Judgement) -> list[RenderableType]:
    counts = view.effect_counts(judgement)
    lines = [
        _line((f"{one_line(target)}, fields of requests and forms of arguments: ", "bold"), said)
        for target, said in counts.items()
    ]
    return [Text(), *lines] if lines else []


def _security(judgement: Judgement) -> list[RenderableType]:
    found = view.exposures(judgement)
    if not found:
        return []
    lines: list[RenderableType] = [Text(), _line(("Open without credentials: ", "bold"), view.severities(judgement))]
    for verdict, one in found:
        if one.severity in (Severity.CRITICAL, Severity.HIGH):
            said = f"{one_line(verdict.target)}: {one_line(one.what)}"
            lines.append(Padding(_line((f"{one.severity} ", "bold"), said), (0, 0, 0, 2)))
    return lines


def _training(judgement: Judgement) -> list[RenderableType]:
    """The worst step of each training run, in one line."""
    lines: list[RenderableType] = []
    for curve in judgement.gaps:
        worst = max(curve.steps, key=lambda gap: gap.mean)
        run = f"{curve.scenario.partition('.')[0]}@{curve.topology}, {curve.target}"
        said = f"mean {number(worst.mean)}, p99 {number(worst.p99)}, KL {number(worst.k3)}"
        lines.append(Text(f"{one_line(run)}: {said}"))
    return [Text(), Text("Trainer against rollouts, nats, worst step", style="bold"), *lines] if lines else []


def _noise(judgement: Judgement) -> list[RenderableType]:
    if not judgement.noise:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    shown = [column for column in NOISE if column.width]
    for column in shown:
        table.add_column(column.head.lower(), overflow="fold", ratio=column.width)
    for floor in judgement.noise:
        table.add_row(*(Text(one_line(cell)) for cell in cells(shown, floor)))
    return [Padding(table, (1, 0, 0, 0))]


def _gate(judgement: Judgement) -> list[RenderableType]:
    gate = judgement.gate
    yes = gate is not None and gate.may_replace
    answer = ("YES", "bold green") if yes else ("NO", "bold red")
    lines: list[RenderableType] = [Text(), _line((f"{one_line(view.question(judgement))} ", "bold"), answer)]
    lines += [Padding(Text(one_line(gate.means)), (0, 0, 0, 2))] if gate and gate.means else []
    reasons = gate.reasons if gate else ["the gate was not asked"]
    lines += [Padding(Text(f"- {shortened(one_line(reason), 300)}"), (0, 0, 0, 2)) for reason in reasons[:SHOWN]]
    if len(reasons) > SHOWN:
        lines.append(Text(f"  … and {len(reasons) - SHOWN} more in the report"))
    return lines


def _end(judgement: Judgement, report: Path | None) -> list[RenderableType]:
    counts, run = view.count(judgement), judgement.run
    took = ", ".join(f"{one_line(stage)} {seconds(value)}" for stage, value in run.seconds.items())
    status = "green" if judgement.exit_status == 0 else "red"
    lines: list[RenderableType] = [
        Text(),
        _line(
            (f"{status}: ", f"bold {status}"),
            f"{many(counts.verdicts, 'verdict')}, {counts.red} red, {counts.known} known, "
            f"{many(counts.ledger_problems, 'problem')} with the ledger",
        ),
    ]
    if repeated := view.repetition(counts):
        lines.append(Text(repeated))
    told = (
        *view.changed(judgement),
        *view.never_called(judgement),
        *view.open_causes(judgement),
        *view.given_way(judgement),
        *view.left_out(judgement),
    )
    lines += [Text(one_line(said)) for said in told]
    if took:
        lines.append(Text(took, style="dim"))
    if report is not None:
        lines.append(Text(f"report: {report}", overflow="fold"))
    return lines
