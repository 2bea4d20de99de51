"""Measures the cost of judging and comparing: CPU seconds, the ratio to decoding the same recordings, and peak memory.

    python -m benchmarks.judge [--full] [--json PATH] [--profile]

Recordings are made up (`tests/recordings.py`): greedy batches with log-probabilities, sessions, and all observations of the engine
taps. Each measurement runs in its own process. `--full` adds a million events; `--profile` prints where the time of comparing
100 thousand goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.contract.topology import Topology
from harness.records.index import index
from harness.records.recording import Footer, read
from harness.running import run as running
from harness.running.run import RunFolder
from tests import recordings

SHAPE = {"calls": 8, "rows": 8, "tokens": 24}
EVENTS_A_SCENARIO = sum(1 for _ in recordings.events(**SHAPE))
OLD, NEW = "stack:old", "stack:new"


def make(folder: Path, events: int) -> None:
    """One run of about `events` events in many scenarios: the baseline with its twin, and the candidate."""
    names = [f"module.test_{number}" for number in range(max(1, events // EVENTS_A_SCENARIO // 3))]
    with RunFolder.create(folder) as run:
        recordings.write(run.recording(OLD, Topology()), OLD, names, takes=2, **SHAPE)
        recordings.write(run.recording(NEW, Topology()), NEW, names, **SHAPE)
        recordings.book(run.reference)
        run.write_info(recordings.info())
        (run.path / "ledger.toml").write_text("")


def work(what: str, folder: Path) -> dict[str, float]:
    """Run one measured task in this process."""
    run = RunFolder.existing(folder)
    names = {name for path in run.recorded() for name in index(path).scenarios}
    declared = {name: recordings.declared(name) for name in names}
    running.declared = lambda: declared  # type: ignore[assignment]
    if what == "judge":
        run.write_info(recordings.info(baseline=None, candidate=None))
    else:
        run.write_info(recordings.info())
    idle = peak_mib()
    started, counted = time.process_time(), 0
    if what == "decode":
        for path in run.recorded():
            for line in read(path):
                counted += isinstance(line, Footer) and line.events
    else:
        judgement = running.judge_run(folder, ledger=folder / "ledger.toml")
        assert judgement.exit_status == 0, [v for v in judgement.verdicts if v.red][:3]
        counted = len(judgement.verdicts)
    return {"seconds": time.process_time() - started, "peak_mib": peak_mib(), "idle_mib": idle, "counted": counted}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(what: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.judge", "--work", what, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--full", action="store_true", help="a million events as well")
    options.add_argument("--json", type=Path, help="also write the numbers here")
    options.add_argument("--profile", action="store_true", help="where the time goes, at 100 thousand events")
    options.add_argument("--work", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.work:
        print(json.dumps(work(chosen.work[0], Path(chosen.work[1]))))  # noqa: T201 - the answer to the parent
        return
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for events in (10_000, 100_000, *([1_000_000] if chosen.full else [])):
            folder = Path(scratch) / str(events)
            make(folder, events)
            results.extend(rows(folder))
        if chosen.profile:
            profile(Path(scratch) / "100000")
    table(results)
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


def rows(folder: Path) -> list[dict[str, float | str]]:
    size = sum(path.stat().st_size for path in RunFolder.existing(folder).recorded()) / 2**20
    decode = measured("decode", folder)
    found = []
    for what, one in (
        ("decode", decode),
        ("judge", measured("judge", folder)),
        ("judge and compare", measured("compare", folder)),
    ):
        found.append(
            {
                "what": what,
                "events": int(decode["counted"]),
                "mib": round(size, 1),
                "seconds": round(one["seconds"], 3),
                "ratio_to_decoding": round(one["seconds"] / decode["seconds"], 2),
                "peak_mib": round(one["peak_mib"], 1),
                "above_idle_mib": round(one["peak_mib"] - one["idle_mib"], 1),
            }
        )
    return found


def table(results: list[dict[str, float | str]]) -> None:
    columns = list(results[0])
    lines = [columns, *([str(row[c]) for c in columns] for row in results)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))  # noqa: T201 - the result


def profile(folder: Path) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(work, "compare", folder)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
