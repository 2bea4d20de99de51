"""One session's heavy load and the light load of others: who waits for whom."""

from __future__ import annotations

from typing import Any

from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded, passed, untestable
from harness.checks.matching import assignment, queries
from harness.contract.faults import Fact

HEAVY, LIGHT = "heavy", "light"
"""Labels of the calls."""
NO_LIGHT = "no light request ran on a server without the heavy load"
OVER = "the heavy load was over before the light requests were sent"
STARVED = "a request waited until another session's load on another server had ended"


def _judge(evidence: Evidence) -> Finding:
    found = assignment(evidence)
    loads: dict[str | None, list[tuple[Any, list[Execution]]]] = {HEAVY: [], LIGHT: []}
    for row in found.rows:
        if row.call.label in loads:
            loads[row.call.label].append((row, list(found.where(row))))
    ends = sorted(e.ended_ns for _, ran in loads[HEAVY] for e in ran if e.ended_ns is not None)
    busy = {e.server for _, ran in loads[HEAVY] for e in ran}
    elsewhere = [(row, ran) for row, ran in loads[LIGHT] if ran and not busy & {e.server for e in ran}]
    if not elsewhere or not ends:
        return untestable(NO_LIGHT)
    if max(row.call.started_ns for row, _ in elsewhere) >= ends[len(ends) // 2]:
        return untestable(OVER)
    wrong = [(STARVED, row.shown) for row, ran in elsewhere if min(e.started_ns for e in ran) >= ends[-1]]
    if wrong:
        return concluded(len(elsewhere), wrong)
    first = min(row.call.ended_ns for row, _ in elsewhere)
    return passed(len(elsewhere), heavy_share_before_light=sum(end < first for end in ends) / len(ends))


NOT_STARVED = Check(
    name="not_starved",
    fault="while a large batch of one session runs, requests of other sessions wait for its end, although their server is idle",
    next_step="look at what the client holds while a batch runs: a lock, or its whole pool of connections",
    reads=Fact.ROUTES,
    source='SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE: "the rest queue locally and proceed as slots free up"',
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)
