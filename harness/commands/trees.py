"""Runs on worktrees of a checkout, each in a process of its own, as a user would start it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from harness.contract.checkout import Checkout
from harness.contract.errors import UsageError
from harness.driving.process import log_tail
from harness.machine.checkouts import read
from harness.machine.git import commit_of, git, worktree
from harness.machine.progress import Progress
from harness.machine.targets import LABEL, known
from harness.running.bisect import Judge, Verdict, of_check
from reports.json_report import read_report

COMMAND = (sys.executable, "-m", "harness.commands.cli", "run")
NOTHING_SELECTED = 5
"""Exit status of pytest."""
FAREWELL_S = 90.0
"""Seconds that an interrupted run may take to end its stack and write its report."""


def judge_of(target: str, check: str, arguments: Sequence[str], folder: Path, progress: Progress) -> Judge:
    """A judge for `harness.running.bisect`: each commit gets a run, in a folder below `folder`."""

    def judge(work: Path, commit: str) -> tuple[Verdict, str]:
        name, run = f"{target}{LABEL}{commit[:9]}", folder / commit[:9]
        log = folder / f"{commit[:9]}.log"
        command = [*COMMAND, "--stack", name, "--checkout", f"{name}={work}", "--run-dir", str(run), *arguments]
        with progress(f"driving {commit[:9]} (log: {log})"):
            status = _run(command, log)
        if status == NOTHING_SELECTED:
            return "skip", "`parity run` selected no scenario: look at -k, --wave and --topology"
        if not (run / "report.json").is_file():
            return "skip", f"the run ended with status {status} without a report: {log_tail(log, 5)}"
        return of_check(read_report(run / "report.json"), check)

    return judge


def _run(command: Sequence[str], log: Path | None = None) -> int:
    """Run to the end. Returns its exit status. `log` gets all output; without one the terminal does.

    On Ctrl-C the run gets its interrupt once, ends its stack, and is waited for.
    """
    with ExitStack() as open_until_then:
        out = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = open_until_then.enter_context(log.open("wb"))
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out and subprocess.STDOUT, start_new_session=True
        )
        try:
            return child.wait()
        except BaseException:
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(FAREWELL_S)
            child.kill()  # its supervisor ends what is left
            child.wait()
            raise


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
            f"{tree} has neither commits beside {base} nor uncommitted changes: there is nothing to compare",
            next_step="check the branch out, or name another --base",
        )
    baseline, candidate = f"{target}{LABEL}{left[:9]}", f"{target}{LABEL}{head.label}"
    with worktree(tree, left) as work:
        trees = ["--checkout", f"{baseline}={work}", "--checkout", f"{candidate}={head.path}"]
        pair = ["--baseline", baseline, "--candidate", candidate, *trees]
        return _run([*COMMAND, *pair, "--run-dir", str(folder), *arguments])
