"""The command that drives a verdict's scenario again. Only this module knows its options."""

from __future__ import annotations

import shlex

from harness.contract import topology
from harness.records.verdict import RunInfo, Verdict

OF_A_RUN = ("run", "capabilities")
"""Names in place of a scenario's module, in verdicts about a whole run."""


def command(verdict: Verdict, run: RunInfo) -> str:
    """``parity run --wave 1 -k test_… --topology …`` for the stack or the pair that the verdict is about."""
    words = ["parity", "run", "--wave", str(verdict.wave)]
    if verdict.scenario.partition(".")[0] not in OF_A_RUN:
        words += ["-k", verdict.scenario.rpartition(".")[2]]
    if verdict.topology in topology.names():  # a verdict about a whole run has no single topology
        words += ["--topology", verdict.topology]
    shapes = [shape for h in run.headers if (shape := h.get("topology", {})).get("name") == verdict.topology]
    words += ["--engines", str(shapes[0]["engines"])] if shapes else []
    if verdict.baseline is not None:
        words += ["--baseline", verdict.baseline, "--candidate", verdict.target]
    else:
        words += ["--stack", verdict.target]
    for name, tree in run.checkouts.items():
        words += ["--checkout", f"{name}={tree.path}"] if name in (verdict.baseline, verdict.target) else []
    words += ["--start", run.start, "--engine", run.engine]
    return shlex.join(words)
