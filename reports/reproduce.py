"""The command that drives one scenario again, as a verdict was reached. The one place that knows its options."""

from __future__ import annotations

import re
import shlex

from harness.verdict import RunInfo, Verdict

OF_A_RUN = ("run", "capabilities")
"""What stands for a scenario's module in a verdict about a whole run."""
TOPOLOGY = re.compile(r"(?P<placement>\w+)-(?P<engines>\d+)x(?P<tp>\d+)(?:-pp(?P<pp>\d+))?(?:-dp(?P<dp>\d+))?")


def command(verdict: Verdict, run: RunInfo) -> str:
    """``parity run --wave 1 -k test_… --placement …`` for the stack or the pair that the verdict is about."""
    words = ["parity", "run", "--wave", str(verdict.wave)]
    if verdict.scenario.partition(".")[0] not in OF_A_RUN:
        words += ["-k", verdict.scenario.rpartition(".")[2]]
    at = TOPOLOGY.fullmatch(verdict.topology)
    if at is not None:
        words += ["--placement", at["placement"], "--engines", at["engines"]]
    if verdict.baseline is not None:
        words += ["--baseline", verdict.baseline, "--candidate", verdict.target]
    else:
        words += ["--stack", verdict.target]
    words += ["--start", run.start, "--engine", run.engine]
    return shlex.join(words)
