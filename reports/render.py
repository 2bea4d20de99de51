"""All reports of a run. `write_all` renders one settled judgement into every format, so that they cannot disagree."""

from __future__ import annotations

from pathlib import Path

from harness.judging.ledger import Ledger
from harness.judging.ledger import load as load_ledger
from harness.records.verdict import Judgement
from harness.suite.plan import Plan, load_plan
from reports import html, json_report, junit, markdown, pictures, published
from reports.json_report import read_report

__all__ = ["read_report", "write_all"]


def write_all(
    judgement: Judgement,
    run_dir: Path,
    *,
    plan: Plan | None = None,
    ledger: Ledger | None = None,
    all_pictures: bool = False,
) -> dict[str, Path]:
    """Write report.json, junit.xml, report.md and report.html into `run_dir`. Returns file name → path.

    `plan` and `ledger` default to those of the scenarios. Each file is replaced whole. Pictures come from the recordings in
    `run_dir`, if any. `all_pictures` draws every scenario.
    """
    plan = load_plan() if plan is None else plan
    ledger = load_ledger() if ledger is None else ledger
    settled = json_report.settle(judgement)
    contents = {
        "report.json": json_report.encode(settled),
        "junit.xml": junit.encode(settled),
        "report.md": markdown.render(settled, plan, ledger).encode(),
        "report.html": html.render(
            settled, plan, ledger, pictures.gather(settled, run_dir, everything=all_pictures)
        ).encode(),
    }
    return published.write(run_dir, contents)
