"""The pictures of a run's report: selects scenarios and gathers their data. Reads recordings, one scenario at a time.

Drawing takes about an eighth of a second per scenario, so only informative ones are drawn: those with changes of weights, pauses
or memory, with marks, with several sessions, or with a red verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

import msgspec
from markupsafe import Markup

from harness.checks.base import Evidence
from harness.contract.errors import RecordingError, UsageError
from harness.records.book import Book
from harness.records.index import Index, indices
from harness.records.run_folder import RunFolder
from harness.records.verdict import GapCurve, Judgement
from reports import drawing
from reports.text import shortened
from reports.timeline import Sessions, Timeline, sessions, timeline, training

SESSIONS = 40
"""Most sessions in a heat map."""
MOST = 200
"""Most pictures in one report."""


@final
class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions × servers of one or several stacks in one table."""

    targets: list[tuple[str, list[str]]]
    """Each stack with its servers."""
    rows: list[tuple[str, list[tuple[int, float]]]]
    """Each session with one pair per column: the number of requests, and its share of the largest number."""
    totals: list[int]
    """Sum of each column, hidden sessions included."""
    hidden: int
    """Number of sessions that are not shown."""


@final
class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """All pictures of one scenario in one topology."""

    scenario: str
    topology: str
    why: list[str]
    """Reasons for the picture: "red", "weights", "pauses", …"""
    timeline: Markup
    training: Markup | None = None
    heat: Heat | None = None

    @property
    def anchor(self) -> str:
        return anchor(self.scenario, self.topology)


@final
class Pictures(msgspec.Struct, frozen=True, kw_only=True):
    """The pictures of a report, and the number of scenarios without one."""

    shown: list[Picture] = []
    left_out: int = 0
    """Number of recorded scenarios without a picture."""
    problem: str = ""
    """The error that prevented all pictures, if any."""

    def find(self, scenario: str, topology: str) -> str | None:
        """The anchor of a scenario's picture; None without one."""
        return next((p.anchor for p in self.shown if (p.scenario, p.topology) == (scenario, topology)), None)


def anchor(scenario: str, topology: str) -> str:
    """A stable anchor of a picture in a document, and the prefix of the ids in it."""
    return f"t-{hashlib.sha256(f'{scenario}@{topology}'.encode()).hexdigest()[:10]}"


def gather(judgement: Judgement, run_dir: Path, *, everything: bool = False) -> Pictures:
    """Draw the run in `run_dir`: the first take of each scenario on each stack. No pictures without recordings.

    `everything` draws all scenarios.
    """
    run = RunFolder(run_dir)
    try:
        found = indices(run.recorded())
        models = {one.header.model_sha256 for one in found}
        return _drawn(judgement, found, {sha256: Book.of(sha256, run.path) for sha256 in models}, everything)
    except (RecordingError, UsageError) as e:
        return Pictures(problem=str(e))


def _drawn(judgement: Judgement, found: Sequence[Index], books: Mapping[str, Book], everything: bool) -> Pictures:
    """`books`: hash of a model → the oracle's answers about it."""
    red = {(v.scenario, v.topology) for v in judgement.verdicts if v.red}
    gaps = {(gap.scenario, gap.topology, gap.target): gap for gap in judgement.gaps}
    shown: list[Picture] = []
    left_out = 0
    for topology, here in _by_topology(judgement, found):
        for name in dict.fromkeys(name for one in here for name in one.scenarios):
            sides = [Evidence(one.trace(name), books[one.header.model_sha256]) for one in here if 1 in one.takes(name)]
            lines = [timeline(side) for side in sides]
            seen = [sessions(side) for side in sides]
            why = [*(["red"] if (name, topology) in red else []), *_why(lines, seen)]
            if len(shown) >= MOST or not (why or everything):
                left_out += 1
            else:
                trained = [gaps.get((name, topology, line.target)) for line in lines]
                shown.append(_picture(name, topology, why, lines, seen, gaps=trained))
    return Pictures(shown=shown, left_out=left_out)


def _by_topology(judgement: Judgement, found: Sequence[Index]) -> Iterator[tuple[str, list[Index]]]:
    """Recordings by topology, the baseline's first."""
    first = [judgement.run.baseline, judgement.run.candidate]
    for topology in dict.fromkeys(one.header.topology.name for one in found):
        here = [one for one in found if one.header.topology.name == topology]
        yield topology, sorted(here, key=lambda one: [one.header.target != target for target in first])


def _why(lines: Sequence[Timeline], seen: Sequence[Sessions | None]) -> list[str]:
    """What a picture would show; empty if the verdicts say as much."""
    kinds = {bar.kind for line in lines for bar in line.controls}
    told = (
        ("weights", "weights" in kinds),
        ("training", "training" in kinds),
        ("pauses", "pause" in kinds),
        ("sleep", "memory" in kinds),
        ("marks", any(line.marks for line in lines)),
        ("sessions", any(one is not None and len(one.counts) > 1 for one in seen)),
    )
    return [word for word, applies in told if applies]


def _picture(
    name: str,
    topology: str,
    why: list[str],
    lines: Sequence[Timeline],
    seen: Sequence[Sessions | None],
    *,
    gaps: Sequence[GapCurve | None],
) -> Picture:
    at = anchor(name, topology)
    trained = [run for line, gap in zip(lines, gaps, strict=True) if (run := training(line, gap)) is not None]
    return Picture(
        scenario=name,
        topology=topology,
        why=why,
        timeline=Markup(drawing.timelines(lines, at)),
        training=Markup(drawing.curves(trained, f"{at}-c")) if trained else None,
        heat=heat_map([(line.target, one) for line, one in zip(lines, seen, strict=True) if one is not None]),
    )


def heat_map(of: Sequence[tuple[str, Sessions]]) -> Heat | None:
    """One table for all stacks; None if no session was seen."""
    if not of:
        return None
    names = list(dict.fromkeys(name for _, one in of for name in one.counts))
    largest = max((n for _, one in of for row in one.counts.values() for n in row), default=0) or 1
    rows = [
        (shortened(name, 48), [(n, n / largest) for _, one in of for n in one.counts.get(name, [0] * len(one.servers))])
        for name in names[:SESSIONS]
    ]
    return Heat(
        targets=[(target, one.servers) for target, one in of],
        rows=rows,
        totals=[sum(row[at] for row in one.counts.values()) for _, one in of for at in range(len(one.servers))],
        hidden=max(len(names) - SESSIONS, 0),
    )
