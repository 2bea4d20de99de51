"""Near ties: if two tokens are so nearly equally probable that rounding decides, either may be the greedy one."""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Evidence
from harness.records.reference import Score
from harness.records.verdict import Margin


def parts_at(evidence: Evidence, score: Score) -> int | None:
    """Where scored tokens first differ from the greedy choice by more than a near tie; None if nowhere."""
    near = evidence.near(score)
    return next((at for at, gap in enumerate(score.gaps) if gap > 0 and gap >= near), None)


def margin(evidence: Evidence, scores: Iterable[Score]) -> Margin:
    """The largest gap accepted as a near tie, and the closest decision above the bound: a swap there would be red."""
    scores = list(scores)
    bound = max((evidence.near(score) for score in scores), default=evidence.noise.near)
    let_pass, closest = 0.0, []
    for score in scores:
        for gap, size in zip(score.gaps, score.margins, strict=True):
            if size > bound:
                closest.append(size)
            let_pass = max(let_pass, gap)
    faults = {"the runner-up taken at the closest decision": min(closest)} if closest else {}
    return Margin(unit="nats between the first two tokens", measured=let_pass, bound=bound, faults=faults)
