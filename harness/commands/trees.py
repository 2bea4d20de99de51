"""Runs on worktrees of a checkout, each in a process of its own, as a user would start it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.contract.checkout import Checkout
from harness.contract.errors import UsageError
from harness.driving.process import log_tail
from harness.machine.checkouts import read
from harness.machine.git import commit_of, git, worktree
from harness.machine.progress import Progress
from harness.machine.targets import LABEL, known
from harness.running import child
from harness.running.bisect import Judge, Verdict, of_check
from reports.json_report import read_report

BASE = "BASE_TREE"
"""Stands for a folder in the commands of a comment."""
NOTHING_SELECTED = 5
"""Exit status of pytest."""


def judge_of(target: str, check: str, arguments: Sequence[str], folder: Path, progress: Progress) -> Judge:
    """A judge for `harness.running.bisect`: each commit gets a run, in a folder below `folder`."""

    def judge(work: Path, commit: str) -> tuple[Verdict, str]:
        name, run = f"{target}{LABEL}{commit[:9]}", folder / commit[:9]
        log = folder / f"{commit[:9]}.log"
        if run.exists():
            raise UsageError(f"{run} holds a run already", next_step="give another --run-dir, or none")
        command = [*child.COMMAND, "--stack", name, "--checkout", f"{name}={work}", "--run-dir", str(run), *arguments]
        with progress(f"driving {commit[:9]} (log: {log})"):
            status = child.run(command, log)
        if status == NOTHING_SELECTED:
            return "skip", "`parity run` selected no scenario: look at -k, --wave and --topology"
        if status not in (0, 1) or not (run / "report.json").is_file():
            return "skip", f"the run ended with status {status} and is no evidence: {log_tail(log, 5)}"
        return of_check(read_report(run / "report.json"), check)

    return judge


def state_of(target: str, path: Path) -> Checkout:
    """The state of a checkout that is driven as `target`. Raises UsageError if it is none."""
    layout = known(target).runs_on.source
    if layout is None:
        raise UsageError(
            f"{target} has no source tree that is known", next_step="name a local target: `parity targets`"
        )
    return read(path, layout)


def run_pair(target: str, head: Checkout, base: str, arguments: Sequence[str], folder: Path) -> int:
    """Compare the working tree with the commit where it left `base`, in one run in `folder`. Returns the run's exit status."""
    tree = Path(head.path)
    left = git(tree, "merge-base", commit_of(tree, base), head.commit)
    if left == head.commit and head.changes is None:
        raise UsageError(
            f"{tree} has no commit after {base} and no uncommitted change: there is nothing to compare",
            next_step="check the branch out, or name another --base",
        )
    baseline, candidate = f"{target}{LABEL}{left[:9]}", f"{target}{LABEL}{head.label}"
    with worktree(tree, left) as work:
        trees = ["--checkout", f"{baseline}={work}", "--checkout", f"{candidate}={head.path}"]
        pair = ["--baseline", baseline, "--candidate", candidate, *trees]
        status = child.run([*child.COMMAND, *pair, "--run-dir", str(folder), *arguments])
    _without_worktree(folder / "report.md", work, tree, left)
    return status


def _without_worktree(report: Path, work: Path, tree: Path, commit: str) -> None:
    """Commands of a report name a folder of the reader's in place of a worktree that is gone, and the report says how to make it."""
    if report.is_file() and str(work) in (text := report.read_text()):
        make = shlex.join(["git", "-C", str(tree), "worktree", "add", "--detach", BASE, commit])
        report.write_text(
            text.replace(str(work), BASE).rstrip("\n") + f"\n\n`{BASE}` in a command is the base: `{make}` makes it.\n"
        )
