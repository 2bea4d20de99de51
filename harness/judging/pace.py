"""Whether the candidate is several times slower than the baseline, from the times in the recordings. Pure.

Like calls of one run are compared, paired as outputs are (`harness/judging/pairing.py`), each by its seconds per generated token.
The median of many ratios hides a few per cent, but shows a factor of ten.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable
from typing import final

import msgspec

from harness.contract.errors import Blame
from harness.contract.messages import CHOICES, LISTS
from harness.judging.judge import NEXT_STEP
from harness.judging.pairing import compared, identity
from harness.records.recording import Call, ScenarioTrace
from harness.records.verdict import Margin, Parity, Verdict

CHECK = "pace"
SCENARIO = "run.pace"
FAR = 5.0
"""Allowed ratio of the candidate's time to the baseline's: two stacks on one busy machine differ by less than 2."""
LEAST_TOKENS = 8
"""Calls with fewer generated tokens are left out: most of their time is not generation."""
LEAST_PAIRS = 10
TENFOLD = {"ten times slower than the baseline": 10.0}


@final
class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Ratio of one side's time to the other's: the median over `pairs` pairs of calls; 0 if there are none."""

    pairs: int
    ratio: float

    @property
    def enough(self) -> bool:
        return self.pairs >= LEAST_PAIRS

    @property
    def spread(self) -> float:
        """How many times as long one side takes as the other, whichever it is; 1 if nothing was compared."""
        return max(self.ratio, 1 / self.ratio) if self.ratio else 1.0

    def far(self, bound: float = FAR) -> bool:
        """True if the ratio exceeds `bound` over enough pairs."""
        return self.enough and self.ratio > bound


def seconds_per_token(call: Call) -> float | None:
    """Wall time of a call per generated token; None if it generated fewer than `LEAST_TOKENS`."""
    made = _tokens(call)
    return (call.ended_ns - call.started_ns) / 1e9 / made if made >= LEAST_TOKENS else None


def _tokens(call: Call) -> int:
    result = call.result or {}
    if call.method in LISTS:
        return sum(len(row) for row in result.get("response_ids") or ())
    if call.method in CHOICES:
        usage = (result.get("body") or {}).get("usage") or {}
        made = usage.get("completion_tokens")
        return made if isinstance(made, int) else 0
    return 0


Timings = dict[str, list[float | None]]
"""Digest of a request → seconds per token of each call with it, in order. Small enough to send between processes."""


def timings(traces: Iterable[ScenarioTrace]) -> Timings:
    """The times of all calls of these scenarios."""
    found: Timings = {}
    for trace in traces:
        for call in compared(trace):
            asked = (trace.scenario, *identity(call, trace))
            key = hashlib.sha256(repr(asked).encode()).hexdigest()[:16]
            found.setdefault(key, []).append(seconds_per_token(call))
    return found


def between(control: Timings, subject: Timings) -> Pace:
    """The ratio of `subject`'s time per token to `control`'s, over their like calls."""
    like = (zip(usual, subject.get(key, ()), strict=False) for key, usual in control.items())  # no partner, no ratio
    return over((ours, theirs) for pairs in like for ours, theirs in pairs if ours and theirs is not None)


def over(pairs: Iterable[tuple[float, float]]) -> Pace:
    """The median ratio of the second time to the first, which is not 0."""
    ratios = [theirs / ours for ours, theirs in pairs]
    return Pace(pairs=len(ratios), ratio=statistics.median(ratios) if ratios else 0.0)


def ratio(control: Iterable[ScenarioTrace], subject: Iterable[ScenarioTrace]) -> Pace:
    """The same, for recorded scenarios."""
    return between(timings(control), timings(subject))


def verdict(pace: Pace, twin: Pace, *, baseline: str, candidate: str, topology: str, wave: int) -> Verdict:
    """The candidate's pace against the baseline's; `twin` is the baseline's second take against its first.

    Regression above `FAR`, or above the ratio between the baseline and its twin if that is more.
    """
    bound = max(FAR, twin.spread if twin.enough else 1.0)
    status, reason, blame = Parity.PARITY, "", None
    if not pace.enough:
        status, blame = Parity.UNTESTABLE, Blame.HARNESS
        reason = f"fewer than {LEAST_PAIRS} pairs of calls with {LEAST_TOKENS} tokens or more"
    elif pace.far(bound):
        status, blame = Parity.REGRESSION, Blame.STACK
        reason = "a token takes the candidate several times as long as the baseline"
    elif bound >= min(TENFOLD.values()):
        status, blame = Parity.UNTESTABLE, Blame.ENVIRONMENT
        reason = "the baseline differs from its own twin so much that a tenfold slowdown would not be seen"
    margin = Margin(unit="times as long for a token", measured=pace.ratio, bound=bound, faults=TENFOLD)
    return Verdict(
        scenario=SCENARIO,
        wave=wave,
        task=0,
        promise="a token takes the candidate no several times as long as the baseline",
        topology=topology,
        check=CHECK,
        target=candidate,
        baseline=baseline,
        status=status,
        blame=blame,
        reason=reason,
        facts=pace.pairs,
        numbers={"times as long": pace.ratio, "twin": twin.ratio, "bound": bound},
        margin=margin if status == Parity.PARITY else None,
        fault="a stack answers rightly, but ten times slower",
        source="SkyRL #1014: the HTTP stack replaces the legacy one",
        next_step=NEXT_STEP[blame] if blame else "",
    )
