"""Measures how long it takes to explain a history of the weights: seconds and their growth with the number of reads.

    python -m benchmarks.history [--json PATH]

Histories are made up: four servers, a sync of one of eight versions for every hundred reads, some of unknown outcome, sessions that
move between servers. Every read fits, so that none ends the search early. Times are processor seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

from harness.checks.register import Read, Write, Writes, unexplained

SIZES = (10_000, 100_000, 1_000_000)
SERVERS, VERSIONS, READS_A_SYNC = 4, 8, 100
STEP = 10
SEEN = [frozenset({version}) for version in range(VERSIONS)]


def made(reads: int) -> tuple[Writes, list[Read]]:
    """A right history: a sync takes effect in its middle, everywhere; one of unknown outcome has no effect."""
    dice, writes, found = random.Random(0), [Write(0, 0, 0)], []
    now, version = STEP, 0
    for number in range(reads):
        now += STEP
        if number % READS_A_SYNC == 0:
            new, known = dice.randrange(VERSIONS), dice.random() < 0.9
            writes.append(Write(new, now, now + 4 if known else None))
            version, now = new if known else version, now + STEP
        lines = (number % SERVERS, ("session", dice.randrange(reads // 50)))
        found.append(Read(lines, now - dice.randrange(4), now + dice.randrange(4), SEEN[version]))
    return Writes(writes), found


def measured(reads: int) -> float:
    """Seconds for a history of this number of reads."""
    writes, history = made(reads)
    began = time.process_time()
    assert unexplained(writes, history) == []
    return time.process_time() - began


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--json", type=Path, help="also write the numbers here")
    chosen = options.parse_args()
    results = [{"reads": reads, "seconds": round(measured(reads), 3)} for reads in SIZES]
    for row in results:
        each = row["seconds"] / (row["reads"] * math.log2(row["reads"])) * 1e9
        row["ns_per_n_log_n"] = round(each, 1)
        print(f"{row['reads']:>9} reads  {row['seconds']:>7.2f} s  {row['ns_per_n_log_n']:>6.1f} ns per n log n")  # noqa: T201 - the result
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
