"""Runs `parity run` in a process of its own, as a user would start it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.machine.processes import kill_trees

COMMAND = (sys.executable, "-m", "harness.commands.cli", "run", "--fresh")
ENDING_S = 90.0
"""Seconds that an interrupted run may take to end its stack and write its report."""


def run(command: Sequence[str], log: Path | None = None) -> int:
    """Run to the end. Returns the exit status. `log` gets all output; without one the terminal does.

    On Ctrl-C the run is interrupted once, ends its stack, and is waited for. A second Ctrl-C kills it with all that it started.
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
            end(child)
            raise


def end(child: subprocess.Popen[bytes], patience_s: float = ENDING_S) -> None:
    """Interrupt a process once and wait for it. Kill it with all that it started after `patience_s`, or on Ctrl-C."""
    try:
        child.send_signal(signal.SIGINT)
        child.wait(patience_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        kill_trees([child.pid])
        child.wait()
