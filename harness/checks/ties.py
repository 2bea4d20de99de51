"""Near ties: where two tokens are so nearly as probable that rounding decides, either may be the greedy one."""

from __future__ import annotations

from collections.abc import Iterable

from harness.reference import Score
from harness.verdict import Margin


def follows(rank: int, margin: float, near_tie: float) -> bool:
    """Is a token of this rank the greedy choice, or the other half of a near tie? `margin` and `near_tie` in nats."""
    return rank == 0 or (rank == 1 and margin < near_tie)


def parts_at(score: Score, near_tie: float) -> int | None:
    """Where scored tokens first part from the greedy choice, near ties aside; None: nowhere."""
    best = zip(score.ranks, score.margins, strict=True)
    near = score.near(near_tie)
    return next((at for at, (rank, size) in enumerate(best) if not follows(rank, size, near)), None)


def margin(scores: Iterable[Score], near_tie: float) -> Margin:
    """What was let pass as a near tie, and the closest decision that was none: a swap there would have been red."""
    scores = list(scores)
    bound = max((score.near(near_tie) for score in scores), default=near_tie)
    let_pass, closest = 0.0, []
    for score in scores:
        for rank, size in zip(score.ranks, score.margins, strict=True):
            if size > bound:
                closest.append(size)
            elif rank > 0:
                let_pass = max(let_pass, size)
    faults = {"the runner-up taken at the closest decision": min(closest)} if closest else {}
    return Margin(unit="nats between the first two tokens", measured=let_pass, bound=bound, faults=faults)
