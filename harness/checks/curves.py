"""Compares the candidate's evaluation curve with the baseline's, by the marks that a training run leaves in its recording. Pure.

The mean reward over all evaluations is compared: a single step of a small run says little. The difference between the baseline
and its twin is noise.
"""

from __future__ import annotations

import statistics
from typing import Any, final

import msgspec

from harness.records.recording import ScenarioTrace
from harness.records.verdict import Margin, Parity

CHECK = "outputs.evaluation"
EVALUATION = "evaluation"
LEAST = 0.05
"""Mean reward, as a fraction, by which the candidate may always fall short of the baseline."""
ABOVE_THE_NOISE = 3.0
"""Multiple of the difference between the baseline and its twin by which the candidate may fall short."""


@final
class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Two curves side by side."""

    status: Parity
    reason: str
    facts: int
    numbers: dict[str, float]
    margin: Margin
    shown: dict[str, Any]


def rewards(trace: ScenarioTrace) -> list[float]:
    """The evaluation reward by step; empty for a scenario that evaluates nothing."""
    marks = sorted((m for m in trace.own_marks if m.name == EVALUATION), key=lambda mark: mark.step)
    return [mark.numbers["reward"] for mark in marks]


def compare(baseline: ScenarioTrace, candidate: ScenarioTrace, twin: ScenarioTrace | None) -> Curves | None:
    """None if neither side evaluates. Regression if the candidate's mean falls short of the baseline's by more than the bound."""
    ours, theirs = rewards(baseline), rewards(candidate)
    if not ours and not theirs:
        return None
    again = rewards(twin) if twin is not None else []
    shown = {"baseline": ours, "candidate": theirs, "baseline's twin": again}
    if len(ours) != len(theirs) or not ours:
        margin = Margin(unit="mean reward", measured=0.0, bound=LEAST)
        reason = "the two sides were not evaluated equally often"
        return Curves(status=Parity.UNTESTABLE, reason=reason, facts=0, numbers={}, margin=margin, shown=shown)
    mean, other = statistics.fmean(ours), statistics.fmean(theirs)
    noise = abs(mean - statistics.fmean(again)) if again else 0.0
    bound = max(LEAST, ABOVE_THE_NOISE * noise)
    margin = Margin(
        unit="mean reward",
        measured=max(0.0, mean - other),
        bound=bound,
        faults={"a policy that learns nothing": mean - ours[0]},
    )
    numbers = {"baseline": mean, "candidate": other, "twin noise": noise, "bound": bound}
    status, reason = Parity.PARITY, ""
    if mean - other > bound:
        status, reason = Parity.REGRESSION, "the candidate's evaluation reward falls short of the baseline's"
    elif mean - ours[0] <= bound:
        status, reason = Parity.UNTESTABLE, "the baseline learns so little that no shortfall would be seen"
    return Curves(status=status, reason=reason, facts=len(ours), numbers=numbers, margin=margin, shown=shown)
