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
    """The largest gap accepted as a near tie, and the closest decision at which another token would be red. What only an answer's
    own rounding explains is right, and left out."""
    bound, let_pass, closest = evidence.noise.near, 0.0, list[float]()
    for score in scores:
        near = evidence.near(score)
        closest += [size for size in score.margins if size > near]
        let_pass = max([let_pass, *(gap for gap in score.gaps if gap <= bound)])
    faults = {"the runner-up taken at the closest decision": min(closest)} if closest else {}
    return Margin(unit="nats between the first two tokens", measured=let_pass, bound=bound, faults=faults)
