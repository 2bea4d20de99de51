"""Shows where a run's time went, and the harness's own share of driving.

    python -m benchmarks.run RUN_FOLDER [--json PATH]

Stages come from run.json, the rest from the recordings alone. A scenario's wall time lies between its start and its end. Time in
which at least one call through the contract is pending, including the clean room's calls, is the stack's. The remaining time is the
harness's: recording, reading the taps, watching for a condition, killing hung processes. A scenario that did not complete mostly
waited for something that never came, so a separate row leaves such scenarios out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import final

import msgspec

from harness.contract.errors import HarnessError
from harness.records.recording import Call, Header, ScenarioEnd, ScenarioStart, read
from harness.records.run_folder import RunFolder

NS_A_SECOND = 1e9
SLOWEST = 5


@final
class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """One take of one scenario on one stack. Times are in seconds."""

    target: str
    topology: str
    scenario: str
    take: int
    wall_s: float
    pending_s: float
    """Length of the union of the intervals in which a call was pending."""
    completed: bool
    """True if it was driven to its end."""

    @property
    def own_s(self) -> float:
        """Time of the harness itself."""
        return self.wall_s - self.pending_s


@final
class Row(msgspec.Struct, frozen=True, kw_only=True):
    """All takes on one stack in one topology, or on all stacks: target "all", or "all, to their end"."""

    target: str
    topology: str
    takes: int
    wall_s: float
    pending_s: float
    own_s: float
    own_of_driving: float
    own_of_run: float
    """Share of the sum of the run's stages."""


@final
class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The result of this benchmark, as --json writes it."""

    run_id: str
    engine: str
    start: str
    stages_s: dict[str, float]
    rows: list[Row]
    slowest: list[Drive]
    """Takes with the most time of the harness itself."""


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals. Time that two calls share counts once."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def drives(recording: Path) -> list[Drive]:
    """Every take of a whole recording. Raises `RecordingError` for an incomplete recording."""
    found: list[Drive] = []
    target, topology = "", ""
    start: ScenarioStart | None = None
    calls: list[tuple[int, int]] = []
    for line in read(recording):
        match line:
            case Header():
                target, topology = line.target, line.topology.name
            case ScenarioStart():
                start, calls = line, []
            case Call():
                calls.append((line.started_ns, line.ended_ns))
            case ScenarioEnd() if start is not None:
                inside = [(max(a, start.at_ns), min(b, line.at_ns)) for a, b in calls]
                found.append(
                    Drive(
                        target=target,
                        topology=topology,
                        scenario=line.scenario,
                        take=line.take,
                        wall_s=(line.at_ns - start.at_ns) / NS_A_SECOND,
                        pending_s=union_ns((a, b) for a, b in inside if a < b) / NS_A_SECOND,
                        completed=line.outcome == "completed",
                    )
                )
                start = None
    return found


def costs(folder: Path) -> Costs:
    """Read a finished run. Raises UsageError for a folder without a run, `RecordingError` for a cut-off recording."""
    run = RunFolder.existing(folder)
    info = run.info()
    run_s = sum(info.seconds.values())
    groups = [drives(path) for path in run.recorded()]
    every = [drive for group in groups for drive in group]
    rows = [_row(group, group[0].target, group[0].topology, run_s) for group in groups if group]
    rows.append(_row(every, "all", "all", run_s))
    rows.append(_row([drive for drive in every if drive.completed], "all, to their end", "all", run_s))
    return Costs(
        run_id=info.run_id,
        engine=info.engine,
        start=info.start,
        stages_s=info.seconds,
        rows=rows,
        slowest=sorted(every, key=lambda drive: -drive.own_s)[:SLOWEST],
    )


def _row(group: list[Drive], target: str, topology: str, run_s: float) -> Row:
    wall, pending = sum(d.wall_s for d in group), sum(d.pending_s for d in group)
    return Row(
        target=target,
        topology=topology,
        takes=len(group),
        wall_s=wall,
        pending_s=pending,
        own_s=wall - pending,
        own_of_driving=(wall - pending) / wall if wall else 0.0,
        own_of_run=(wall - pending) / run_s if run_s else 0.0,
    )


def show(found: Costs) -> str:
    """Tables of stages, stacks and takes."""
    run_s = sum(found.stages_s.values())
    parts = [f"run {found.run_id}: --start {found.start}, --engine {found.engine}, {run_s:.0f} s in all"]
    parts.append(
        _table(
            ["stage", "seconds", "of run"],
            [[name, f"{s:.1f}", f"{s / run_s:.1%}" if run_s else "-"] for name, s in found.stages_s.items()],
        )
    )
    parts.append(
        _table(
            ["stack", "topology", "takes", "driving s", "calls pending s", "harness s", "of driving", "of run"],
            [
                [
                    row.target, row.topology, str(row.takes), f"{row.wall_s:.1f}", f"{row.pending_s:.1f}",
                    f"{row.own_s:.2f}", f"{row.own_of_driving:.2%}", f"{row.own_of_run:.2%}",
                ]
                for row in found.rows
            ],
        )
    )  # fmt: skip
    parts.append(
        _table(
            ["most of the harness's own", "stack", "topology", "take", "harness s", "driving s"],
            [
                [d.scenario, d.target, d.topology, str(d.take), f"{d.own_s:.2f}", f"{d.wall_s:.2f}"]
                for d in found.slowest
            ],
        )
    )
    return "\n\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="the folder of a finished run")
    options.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers here")
    chosen = options.parse_args()
    try:
        found = costs(chosen.folder)
    except HarnessError as error:
        sys.exit(f"benchmarks.run: {error}")
    print(show(found))  # noqa: T201 - the result
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


if __name__ == "__main__":
    main()
