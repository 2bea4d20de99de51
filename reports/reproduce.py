"""The command that drives a verdict's scenario, or a promise's, again. Only this module knows its options."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.contract import topology
from harness.records.verdict import RunInfo, Verdict
from harness.suite.plan import Bullet

OF_A_RUN = ("run", "capabilities")
"""Names in place of a scenario's module, in verdicts about a whole run."""


def promise_command(bullet: Bullet, target: str, run: RunInfo) -> str:
    """``parity run --stack … -k "test_… or test_…"`` for all scenarios of a promise on one stack, as `run` drove it."""
    names = list(dict.fromkeys(name.partition("@")[0].rpartition(".")[2] for name in bullet.scenarios))
    places = dict.fromkeys(place for name in bullet.scenarios if (place := name.partition("@")[2]))
    everywhere = any("@" not in name for name in bullet.scenarios)
    words = ["parity", "run", "--stack", target.partition(" in ")[0], "-k", " or ".join(names)]
    words += [] if everywhere else [word for place in places for word in ("--topology", place)]
    words += _checkouts(run, [target])
    words += [] if run.start == "inline" else ["--start", run.start, "--engine", run.engine]
    return shlex.join(words)


def _checkouts(run: RunInfo, targets: Sequence[str]) -> list[str]:
    return [
        word
        for name in targets
        if (tree := run.checkouts.get(name)) is not None
        for word in ("--checkout", f"{name}={tree.path}")
    ]


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
        words += ["--baseline", run.recorded or verdict.baseline, "--candidate", verdict.target]
    else:
        words += ["--stack", verdict.target.partition(" in ")[0]]
    words += _checkouts(run, [verdict.target, *([verdict.baseline] if verdict.baseline and not run.recorded else [])])
    words += ["--start", run.start, "--engine", run.engine, *_of_every_header(run)]
    return shlex.join(words)


def _of_every_header(run: RunInfo) -> list[str]:
    """Seed and dtype of the run, where they are not the default's."""
    seed = next((h["seed"] for h in run.headers if h.get("seed")), 0)
    dtype = next((found for h in run.headers if (found := h.get("model", {}).get("dtype"))), None)
    usual = "bfloat16" if run.engine == "cuda" else "float32"
    return [
        *(["--seed", str(seed)] if seed else []),
        *(["--dtype", dtype] if dtype not in (None, usual) else []),
    ]
