"""The rollout plan in README.md: the results of the last run of each task's whole wave, one row per task."""

from __future__ import annotations

import re
from pathlib import Path

from harness.contract.errors import UsageError
from harness.records.verdict import Judgement
from harness.suite.plan import Plan
from reports.readme import block, with_block
from reports.view import tally, task_rows

NAME = "plan"
UNDRIVEN = "not driven yet"
ROW = re.compile(r"\| (?P<task>\d+) [^|]*\|.*\|")


def renewed(text: str, judgement: Judgement, plan: Plan) -> str:
    """A README's text with the rows of this run's tasks replaced; the rows of other tasks stay as they are.

    Raises UsageError for a text without the markers, and for a run that compares other stacks than the table or holds no
    whole wave.
    """
    run = judgement.run
    if run.outcome != "completed" or not run.whole_waves or run.baseline is None:
        raise UsageError(
            "the README shows comparisons of whole waves only",
            next_step="name a completed run, made without -k and --stack",
        )
    across, rows = task_rows(judgement, plan)
    head = ["task of the plan", *(column.name.replace("~", " → ") for column in across), "driven"]
    top = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    here = block(text, NAME)
    if here and here[: len(top)] != top:
        raise UsageError(
            f"the README's table is headed {here[0]}, which this run is not about",
            next_step="name a run of these stacks",
        )
    kept = {int(found["task"]): line for line in here if (found := ROW.fullmatch(line))}
    driven = f"{run.start}, {run.engine}, {run.created_at[:10]}"
    lines = []
    for row in rows:
        title = f"{row.task.number} {row.task.title}"
        if row.exercised and row.task.wave in run.whole_waves:
            cells = [*(tally(cell.verdicts) or "–" for cell in row.cells), driven]
        elif row.task.number in kept:
            lines.append(kept[row.task.number])
            continue
        else:
            cells = ["–"] * len(across) + [UNDRIVEN]
        lines.append(f"| {' | '.join([title, *cells])} |")
    return with_block(text, NAME, [*top, *lines])


def renew(readme: Path, judgement: Judgement, plan: Plan) -> None:
    """Put a run's tasks into README.md. Raises what `renewed` raises."""
    readme.write_text(renewed(readme.read_text(encoding="utf-8"), judgement, plan), encoding="utf-8")
