"""Measures how often `parity bench` is wrong, and how many blocks a verdict takes.

    python -m benchmarks.bench [--runs N] [--only blocks|itself|slowdowns] [--json PATH]

First on made-up blocks: noise of a block × true ratio. Then on the miniature, on a simulated machine that others use too: each seeded
slowdown, and a stack against itself. There every row is judged after each pair, and no row stops early for being equal, so that a
false alarm has every chance.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.contract.clock import SimulatedLoop
from harness.contract.topology import topology
from harness.judging import speed
from harness.machine.progress import silent
from harness.machine.targets import known
from harness.records.bench import Bench, Pace
from harness.running.bench import Order, bench
from harness.running.session import Options
from reports.bench import answer

ROWS = 12
"""Rows that share the error, as on a real stack."""
MOST_PAIRS = 150
MOST_TURNS = 30
"""Pairs of a run with a slowdown."""
NOISES = (0.02, 0.05, 0.1, 0.2)
"""Standard deviation of a block's logarithm."""
RATIOS = (1.0, 1.1, 1.3)
STRETCHES_S = (0.05, 2.0)
"""Lengths of the stretches in which a busy machine keeps its pace (seconds)."""
BUSY = 0.15
"""Standard deviation of the logarithm of the pace, for each kind of stretch."""
SPIKES = 0.02
"""Share of short stretches in which everything takes three times as long."""
USUAL = "timed"
"""The miniature on which control calls take time."""


def busy(seed: int, seconds: float) -> float:
    """How many times as long everything takes at a moment, on a machine that others use too; at least 1."""
    return math.prod(stretch(seed, length, int(seconds / length)) for length in STRETCHES_S)


@cache
def stretch(seed: int, length: float, number: int) -> float:
    """The pace in one stretch."""
    chance = random.Random(f"{seed} {length} {number}")
    pace = math.exp(abs(chance.gauss(0, BUSY)))
    return 3.0 * pace if length == STRETCHES_S[0] and chance.random() < SPIKES else pace


def noisy(seed: int) -> Callable[[], SimulatedLoop]:
    """The loop of a busy machine."""
    return partial(SimulatedLoop, partial(busy, seed))


def turns_on_the_miniature(seed: int, *, slowdown: str | None = None, **more: Any) -> Bench:
    """One run on the miniature, on a busy machine."""
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        options = Options(
            baseline="miniature", candidate="miniature", engine="cpu", run_dir=Path(folder) / "run", record=False
        )
        order = Order(
            options=options,
            topology=topology("colocated"),
            in_flight=(1, 8, 64),
            tokens=4,
            seed=seed,
            slowdown=slowdown,
            usual=USUAL,
            simulated=noisy(seed),
            **more,
        )
        return bench(order, silent, lambda _line: None)[0]


def on_blocks(noise: float, ratio: float, runs: int, most: int = MOST_PAIRS) -> dict[str, Any]:
    """One row of twelve on made-up blocks: pairs until a verdict, and how many runs end with each."""
    error, fewest = speed.DEFAULT_ERROR / ROWS, speed.fewest_pairs(ROWS)
    lengths, said = [], []
    for seed in range(runs):
        chance = np.random.default_rng([seed, int(1000 * noise), int(1000 * ratio)])
        logs = math.log(ratio) + chance.normal(0, noise * math.sqrt(2), most)
        length, verdict = most, Pace.INCONCLUSIVE
        for pairs in range(fewest, most + 1):
            verdict = speed.verdict(logs[:pairs], error, speed.DEFAULT_PRECISION)
            if verdict is not Pace.INCONCLUSIVE:
                length = pairs
                break
        lengths.append(length)
        said.append(verdict)
    return {
        "noise of a block": f"{noise:.0%}",
        "true ratio": ratio,
        "pairs, median": int(np.median(lengths)),
        "pairs, 95 %": int(np.quantile(lengths, 0.95)),
        **{str(pace): said.count(pace) for pace in Pace},
    }


def told(what: str, runs: int, run: Callable[[int], Bench]) -> list[Bench]:
    """Runs with the seeds from 0 on, each with a line of progress."""
    made = []
    for seed in range(runs):
        made.append(run(seed))
        print(f"{what}: run {seed + 1} of {runs}, {answer(made[-1])}", file=sys.stderr, flush=True)  # noqa: T201
    return made


def on_slowdowns(runs: int) -> list[dict[str, Any]]:
    """Each slowdown on a busy machine: runs in which one of its rows, or every one, is slower; the least ratio of these rows."""
    found = []
    for name, rows in known("miniature").slower().items():
        made = told(name, runs, partial(turns_on_the_miniature, slowdown=name, most_pairs=MOST_TURNS))
        seen = [rows & {row.metric.name for row in one.slower} for one in made]
        least = min(row.interval.ratio for one in made for row in one.rows if row.metric.name in rows)
        pairs = int(np.median([len(one.blocks) // 2 for one in made]))
        found.append(
            {
                "slowdown": name,
                "rows": len(rows),
                "least ratio": round(least, 2),
                "pairs": pairs,
                "runs": runs,
                "caught": sum(map(bool, seen)),
                "in every row": seen.count(rows),
            }
        )
    return found


def on_itself(runs: int) -> dict[str, Any]:
    """A stack against itself on a busy machine: runs with an alarm."""
    made = told("itself", runs, lambda seed: turns_on_the_miniature(10_000 + seed, most_pairs=20, precision=1e-6))
    alarms = [row.metric.name for one in made for row in one.rows if row.verdict in (Pace.SLOWER, Pace.FASTER)]
    wrong = sum(any(row.verdict in (Pace.SLOWER, Pace.FASTER) for row in one.rows) for one in made)
    noise = [row.noise for one in made for row in one.rows if row.metric.name in ("rest", "in_flight.64")]
    return {
        "runs": runs,
        "rows": len(made[0].rows),
        "pairs": 20,
        "noise of two blocks": f"{np.median(noise):.0%}",
        "runs with an alarm": wrong,
        "alarms": ", ".join(alarms) or "none",
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


KINDS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "blocks": lambda runs: [on_blocks(noise, ratio, runs) for noise in NOISES for ratio in RATIOS],
    "itself": lambda runs: [on_itself(runs)],
    "slowdowns": on_slowdowns,
}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--runs", type=int, default=50, help="runs of each kind (default 50)")
    options.add_argument("--only", choices=KINDS, action="append", help="only this part (repeatable)")
    options.add_argument("--json", type=Path, help="also write the numbers here")
    chosen = options.parse_args()
    results = {}
    for kind in chosen.only or KINDS:
        results[kind] = KINDS[kind](chosen.runs)
        print(table(results[kind]), end="\n\n", flush=True)  # noqa: T201 - the result
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
