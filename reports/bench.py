"""bench.json, its page and its table in a terminal: the output of `parity bench`. Published schema: ``reports/bench.schema.json``."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Literal, final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.records.bench import Bench, Block, Metric, Pace, Row
from reports import published
from reports.html import environment
from reports.json_report import plain
from reports.text import many, one_line, seconds

FORMAT: Literal[1] = 1
"""Version of bench.json."""
WIDTH = 132
"""Columns: also where the output goes into a file."""
STYLE = {Pace.SLOWER: "bold red", Pace.FASTER: "green", Pace.SAME: "green", Pace.INCONCLUSIVE: "yellow"}
SIGN = {Pace.SLOWER: "✕", Pace.FASTER: "✓", Pace.SAME: "✓", Pace.INCONCLUSIVE: "?"}
"""One sign per verdict, so that colour is never needed."""
HOPS = {"there": "way to the engine", "engine": "engine", "back": "way back"}
FARTHEST = 4.0
"""Ratio at the ends of the page's scale."""


@final
class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one stack is slower than another: rows with verdicts, and every block that they rest on."""

    format: Literal[1] = FORMAT
    exit_status: int
    """0: nothing is slower and every row is decided; 1: something is slower; 2: the run ended early; 3: rows are inconclusive."""
    answer: str
    bench: Bench


SCHEMA = published.Schema(
    BenchReport, "bench.schema.json", "rollout-parity bench", "bench.json of one run of `parity bench`."
)


def encode(bench: Bench) -> bytes:
    """The bytes of bench.json."""
    settled = msgspec.convert(plain(msgspec.to_builtins(bench), as_number=True), Bench)
    return published.encode(BenchReport(exit_status=bench.exit_status, answer=answer(bench), bench=settled))


def write_all(bench: Bench, folder: Path) -> dict[str, Path]:
    """Write bench.json and bench.html into `folder`. Returns file name → path."""
    return published.write(folder, {"bench.json": encode(bench), "bench.html": render(bench).encode()})


# --- in words


def answer(bench: Bench) -> str:
    """ "slower in 3 of 12 rows", "not slower in any of 12 rows", or what is inconclusive."""
    if not bench.rows:
        return "nothing was measured"
    if bench.slower:
        return f"slower in {len(bench.slower)} of {many(len(bench.rows), 'row')}"
    if bench.open:
        return f"inconclusive in {len(bench.open)} of {many(len(bench.rows), 'row')}, slower in none"
    return f"not slower in any of {many(len(bench.rows), 'row')}"


def percent(value: float) -> str:
    """A ratio minus 1: "4 %", "0.3 %", "12 times" from a factor of ten on."""
    if value >= 9:
        return f"{value + 1:.0f} times"
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


def said(row: Row) -> str:
    """A verdict in words."""
    memory = row.metric.unit == "bytes"
    match row.verdict:
        case Pace.SLOWER:
            return f"{'larger' if memory else 'slower'} by at least {percent(row.bound)}"
        case Pace.FASTER:
            return f"{'smaller' if memory else 'faster'} by at least {percent(row.bound)}"
        case Pace.SAME:
            return f"no difference beyond {percent(row.bound)}"
        case Pace.INCONCLUSIVE:
            lacking = "too noisy to foretell" if row.more is None else f"about {2 * row.more} more blocks"
            return f"inconclusive: {row.reason or lacking}"


def figure(value: float, metric: Metric) -> str:
    """A value with its unit; throughput for seconds per request."""
    if metric.unit == "bytes":
        return f"{value / 2**20:.0f} MiB"
    if metric.per:
        return f"{_three(1 / value)} req/s, {_three(metric.per / value)} tok/s"
    return f"{_three(1e3 * value)} ms" if value < 1 else f"{_three(value)} s"


def _three(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def times(ratio: float | None) -> str:
    """A bound of a ratio; "…" if there is none yet."""
    return "…" if ratio is None else f"{ratio:.2f}"


def span(row: Row) -> str:
    return f"{times(row.interval.low)} – {times(row.interval.high)}"


def idle(bench: Bench) -> float | None:
    """Median of the cores that the waiting stack kept busy."""
    found = [block.idle_cores for block in bench.blocks if block.idle_cores is not None]
    return statistics.median(found) if found else None


def hops(bench: Bench) -> dict[str, dict[str, float]]:
    """Side → part of a request's way → median seconds over its blocks. Empty if a side's taps saw too little."""

    def of(blocks: list[Block]) -> dict[str, float]:
        seen = [block.hops for block in blocks if block.hops]
        return {part: statistics.median(one[part] for one in seen) for part in HOPS} if seen else {}

    sides = {side: of([b for b in bench.blocks if b.side == side]) for side in ("baseline", "candidate")}
    return sides if all(sides.values()) else {}


def notes(bench: Bench) -> list[str]:
    """What a reader of the rows has to know."""
    starts = ", ".join(f"{side} {seconds(s)}" for side, s in bench.starts_s.items())
    found = [
        f"{many(len(bench.blocks) // 2, 'pair')} of blocks in {seconds(bench.measured_s)}, order drawn with seed {bench.seed}. "
        f"All rows together are wrong with a probability of at most {percent(bench.error)}, whenever the run stops; each row has "
        "an equal share of it.",
        f"Starts: {starts}. One start of each is no evidence, so it has no verdict; nor do the rows say how two starts of one "
        "stack differ: bench it against itself.",
    ]
    if bench.start == "fork":
        found.append("Started by fork, without Ray's processes: what users get is measured with --start ray.")
    if (cores := idle(bench)) is not None:
        found.append(f"The stack that waited kept {cores:.2f} cores busy (median).")
    for why in dict.fromkeys(bench.left_out.values()):
        found.append(f"No row for {', '.join(name for name, said in bench.left_out.items() if said == why)}: {why}.")
    if bench.fault is not None:
        found.append(f"The candidate was made slow on purpose: {bench.fault}.")
    if bench.outcome != "completed":
        found.append(f"Ended early: {bench.outcome}. {bench.failure}".strip())
    return found


# --- in a terminal


def show(bench: Bench, console: Console | None = None, *, page: Path | None = None) -> None:
    """Print the table. `page` is the path that it names before the last line."""
    out = console or Console(highlight=False)
    width = min(out.width, WIDTH) if out.is_terminal else WIDTH
    out.print(Group(*_parts(bench, page)), width=width, highlight=False)
    style = "bold red" if bench.exit_status in (1, 2) else "bold green" if bench.exit_status == 0 else "bold yellow"
    out.print(
        Text(f"{one_line(bench.candidate)} against {one_line(bench.baseline)}: {answer(bench)}", style), soft_wrap=True
    )


def _parts(bench: Bench, page: Path | None) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for column in ("", bench.baseline, bench.candidate, "times", "between", "noise", "verdict"):
        table.add_column(one_line(column), overflow="fold", no_wrap=column in ("times", "between", "noise", "verdict"))
    for row in bench.rows:
        table.add_row(
            row.metric.what,
            figure(row.baseline, row.metric),
            figure(row.candidate, row.metric),
            f"{row.interval.ratio:.2f}",
            span(row),
            percent(row.noise),
            Text(said(row), style=STYLE[row.verdict]),
        )
    ways = [
        Text(f"{side}: " + ", ".join(f"{HOPS[part]} {1e3 * s:.2f} ms" for part, s in way.items()))
        for side, way in hops(bench).items()
    ]
    lines = [Text(one_line(note), style="dim") for note in notes(bench)]
    where = [Text(f"page: {page}", overflow="fold")] if page is not None else []
    return [Text(), table, Text(), *ways, *lines, *where]


# --- as a page


def render(bench: Bench) -> str:
    """The text of bench.html: one file without scripts that opens without a network."""
    made = environment()
    made.globals |= {"SIGN": SIGN, "HOPS": HOPS, "Pace": Pace, "at": at, "span": span, "times": times}
    made.filters |= {"said": said, "percent": percent, "value": figure}
    ways = hops(bench)
    return made.get_template("bench.html.j2").render(
        bench=bench,
        answer=answer(bench),
        notes=notes(bench),
        ways=ways,
        longest=max((sum(way.values()) for way in ways.values()), default=1.0),
        names={"baseline": bench.baseline, "candidate": bench.candidate},
    )


def at(ratio: float | None, end: float) -> float:
    """The place of a ratio on the page's scale, in percent; `end` for a bound that does not exist yet."""
    if ratio is None:
        return end
    return round(min(100.0, max(0.0, 50 + 50 * math.log(ratio) / math.log(FARTHEST))), 1)
