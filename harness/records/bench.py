"""What `parity bench` measures and says: blocks, rows with verdicts, the whole. Written to bench.json."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, final

import msgspec

Side = Literal["baseline", "candidate"]
Outcome = Literal["completed", "out of time", "interrupted", "failed"]


class Pace(StrEnum):
    """The verdict of a row. For memory read "larger" for slower and "smaller" for faster."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "no difference"
    """Any difference is smaller than the precision that was asked for."""
    INCONCLUSIVE = "inconclusive"


@final
class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One figure that each block has. More is worse."""

    name: str
    """Its id: "in_flight.64", "sync"."""
    what: str
    """In words, for tables."""
    unit: Literal["s", "bytes"] = "s"
    per: int = 0
    """Number of tokens that its seconds stand for, if it is about many requests: seconds per request."""


@final
class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One stack's turn: everything is measured once. The unit of evidence."""

    pair: int
    side: Side
    started_ns: int
    seconds: float
    """Wall time of the whole block."""
    values: dict[str, float]
    """Metric → its value in the metric's unit."""
    hops: dict[str, float] = {}
    """Part of a request's way → median seconds of the requests at rest."""
    idle_cores: float | None = None
    """Cores that the other stack, which waited, kept busy; None if it has no processes of its own."""


@final
class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio of two stacks, and the bounds between which it lies with the stated confidence. None: unbounded so far."""

    ratio: float
    low: float | None
    high: float | None


@final
class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric's verdict. Ratios are candidate to baseline: above 1 the candidate takes longer, or more memory."""

    metric: Metric
    pairs: int
    baseline: float
    """Median over its blocks, in the metric's unit."""
    candidate: float
    interval: Interval
    floor: Interval
    """The baseline against itself, by the same procedure. Its bounds contain 1 unless the machine breaks the test's assumption."""
    noise: float
    """Median distance of two blocks of the baseline, as a ratio minus 1."""
    verdict: Pace
    bound: float
    """By how much, as a ratio minus 1: at least that much slower or faster; or no difference beyond it. 0 if inconclusive."""
    more: int | None = None
    """Pairs of blocks that an inconclusive row lacks, if further pairs are like those so far. None: more than can be foretold."""
    reason: str = ""
    """Why it is inconclusive, if more pairs would not help."""


@final
class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of two stacks that were up at once and took turns."""

    run_id: str
    created_at: str
    command: str
    baseline: str
    candidate: str
    topology: str
    start: str
    engine: str
    model: str
    hardware: dict[str, str]
    packages: dict[str, dict[str, str]]
    """Side → package → version."""
    seed: int
    order: list[str]
    """The drawn order: one "baseline candidate" or "candidate baseline" per pair."""
    error: float
    """Probability that any row of the whole run is wrong about a difference, however early it stops."""
    precision: float
    """Differences below this ratio minus 1 are of no interest."""
    starts_s: dict[str, float]
    """Side → seconds of its one start. One start of each is no evidence: it has no verdict."""
    measured_s: float
    rows: list[Row]
    left_out: dict[str, str]
    """Metric → why it has no row."""
    blocks: list[Block]
    outcome: Outcome
    failure: str = ""
    """What ended the run early, if a stack failed."""
    fault: str | None = None
    """The slowdown that was seeded into the candidate."""

    @property
    def slower(self) -> list[Row]:
        return [row for row in self.rows if row.verdict is Pace.SLOWER]

    @property
    def open(self) -> list[Row]:
        return [row for row in self.rows if row.verdict is Pace.INCONCLUSIVE]

    @property
    def decided(self) -> bool:
        """True if every row has a verdict. False without rows."""
        return bool(self.rows) and not self.open

    @property
    def exit_status(self) -> int:
        """2: interrupted, or a stack failed; 1: something is slower; 3: nothing is, but rows are inconclusive; 0: neither."""
        if self.outcome in ("interrupted", "failed"):
            return 2
        return 1 if self.slower else 0 if self.decided else 3
