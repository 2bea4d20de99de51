"""The gap between the log-probabilities of trainer and inference at each training step, compared between two stacks. Pure.

A bound on single tokens must allow the worst rounding of any token. Means over thousands of tokens show far smaller gaps.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import msgspec

from harness.checks.logprobs import MEAN_FLOOR, TEMPERATURE, floor_of_a_mean
from harness.records.recording import ScenarioTrace
from harness.records.reference import Noise
from harness.records.verdict import Gap, Margin, Parity

CHECK = "outputs.gap"
RATIO = 0.1
"""Distance from 1 beyond which an importance ratio counts as outside."""
FALSE_ALARM = 1e-6
"""Probability that two right stacks in 16 bits are told apart. In float32 nothing is left to chance."""
CONSTANT = 2e-2
"""Nats: the smallest shift of all log-probabilities that the comparison must detect in any dtype."""
ABOVE_THE_NOISE = 3.0
"""Multiple of the difference between the baseline and its twin that does not count as a gap."""

Unit = tuple[int, tuple[int, ...]]
"""A training step and one of its prompts. All samples of a prompt are one unit: their errors are correlated."""
Pairs = list[tuple[float, float]]
"""For each token the log-probabilities of the rollout and of the trainer."""


@final
class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """The gaps of two stacks side by side."""

    status: Parity
    reason: str = ""
    facts: int = 0
    """Tokens of both sides."""
    numbers: dict[str, float] = {}
    margin: Margin | None = None


def gap_of(rollouts: Sequence[Sequence[float]], trained: Sequence[Sequence[float]], *, step: int = 0) -> Gap:
    """The gap over rows of equal lengths. Raises ValueError for unequal lengths and for rows without a token."""
    moved = [
        ours - theirs
        for row, other in zip(trained, rollouts, strict=True)
        for ours, theirs in zip(row, other, strict=True)
    ]
    if not moved:
        raise ValueError("no token has a log-probability")
    sizes = sorted(map(abs, moved))
    ratios = [math.expm1(min(by, 700.0)) for by in moved]
    return Gap(
        step=step,
        tokens=len(moved),
        mean=statistics.fmean(sizes),
        p99=sizes[math.ceil(0.99 * len(sizes)) - 1],
        largest=sizes[-1],
        outside=sum(abs(ratio) > RATIO for ratio in ratios) / len(ratios),
        k3=math.fsum(ratio - by for ratio, by in zip(ratios, moved, strict=True)) / len(moved),
    )


def by_step(trace: ScenarioTrace) -> list[Gap]:
    """The gap at each comparable step; steps count all training calls from 0."""
    return [
        gap_of(request["rollout_logprobs"], result["response_logprobs"], step=step)
        for step, request, result in _steps(trace)
    ]


def _steps(trace: ScenarioTrace) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Steps with one log-probability per token on both sides. `training.gap` is red for any other step."""
    calls = sorted((c for c in trace.own_calls if c.method == "train"), key=lambda call: call.started_ns)
    for step, call in enumerate(calls):
        if call.result is not None and matching(call.request.get("rollout_logprobs") or (), call.result):
            yield step, call.request, call.result


def matching(rollouts: Sequence[Sequence[float]], result: Mapping[str, Any]) -> bool:
    """True if there are tokens, and trainer and engines give one finite number for each."""
    trained = result["response_logprobs"]
    numbers = [x for rows in (rollouts, trained) for row in rows for x in row]
    finite = all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)
    return bool(numbers) and finite and [len(row) for row in rollouts] == [len(row) for row in trained]


def compare(
    baseline: ScenarioTrace, candidate: ScenarioTrace, twin: ScenarioTrace | None, noise: Noise, *, exact: bool
) -> Compared:
    """Compares the gaps of two stacks. If they differ by more than a bound, the stack with the larger gap is wrong.

    Three figures are compared, prompt by prompt: mean absolute difference, mean difference, and the slope of the difference over
    the log-probability, which shows another temperature. Bound of each:

        max(floor + error, 3 × the difference between the baseline and its twin)

    The floor is the difference allowed between right stacks: `MEAN_FLOOR` plus the root mean square of the measured `noise` for the
    mean absolute difference, or half its square for the other two (the Kullback-Leibler divergence of a sample's own noise). The
    error is the t-quantile of `FALSE_ALARM` times the standard error over prompts. It is 0 if `exact`: float32.
    """
    from scipy import stats  # type: ignore[import-untyped]  # slow to import, and scipy ships no types

    ours, theirs, again = sides = [_units(trace) for trace in (baseline, candidate, twin or baseline)]
    if not ours.keys() == theirs.keys() == again.keys():
        return Compared(status=Parity.UNTESTABLE, reason="the two sides did not train on the same prompts")
    if len(ours) < 2:
        return Compared(status=Parity.UNTESTABLE, reason="a gap is compared over two prompts at least")
    baselines, candidates, twins = (_figures(side) for side in sides)
    rounding = floor_of_a_mean(noise)
    floors = {"mean absolute difference": MEAN_FLOOR + noise.rms, "mean difference": rounding, "slope": rounding}
    quantile = 0.0 if exact else float(stats.t.isf(FALSE_ALARM / 2 / len(floors), len(ours) - 1))
    measured: dict[str, float] = {}
    bounds: dict[str, float] = {}
    for name, floor in floors.items():
        apart = [x - y for x, y in zip(candidates[name], baselines[name], strict=True)]
        usual = abs(statistics.fmean(twins[name]) - statistics.fmean(baselines[name]))
        error = quantile * statistics.stdev(apart) / math.sqrt(len(apart))
        measured[name], bounds[name] = abs(statistics.fmean(apart)), max(floor + error, ABOVE_THE_NOISE * usual)
    relative = {name: measured[name] / bounds[name] for name in floors}
    worst = max(relative, key=relative.__getitem__)
    gaps = {"baseline": statistics.fmean(baselines[worst]), "candidate": statistics.fmean(candidates[worst])}
    status, reason = Parity.PARITY, ""
    margin = Margin(
        unit="of the bound of a mean or the slope",
        measured=relative[worst],
        bound=1.0,
        faults={
            fault: (size - measured[name]) / bounds[name]
            for fault, (name, size) in _faults(theirs, exact=exact).items()
        },
        false_alarm_rate=None if exact else FALSE_ALARM,
    )
    if relative[worst] > 1:
        candidates_own = abs(gaps["candidate"]) >= abs(gaps["baseline"])
        status = Parity.REGRESSION if candidates_own else Parity.BASELINE_DEFECT
        wrong, right = ("candidate", "baseline") if candidates_own else ("baseline", "candidate")
        reason = f"the {wrong}'s rollouts are further from the trainer than the {right}'s: {worst}"
    elif margin.weakest is not None and margin.faults[margin.weakest] <= margin.bound:
        status, reason = Parity.UNTESTABLE, f"the bound hides a seeded fault: {margin.weakest}"
    return Compared(
        status=status,
        reason=reason,
        facts=sum(map(len, (*ours.values(), *theirs.values()))),
        numbers={f"{name}, apart": measured[name] for name in floors}
        | {f"{name}, bound": bounds[name] for name in floors}
        | {f"{side} {worst}": gap for side, gap in gaps.items()},
        margin=margin if status == Parity.PARITY else None,
    )


def _units(trace: ScenarioTrace) -> dict[Unit, Pairs]:
    found: dict[Unit, Pairs] = {}
    for step, request, result in _steps(trace):
        rows = zip(request["prompt_token_ids"], request["rollout_logprobs"], result["response_logprobs"], strict=True)
        for prompt, rollout, trained in rows:
            found.setdefault((step, tuple(prompt)), []).extend(zip(rollout, trained, strict=True))
    return dict(sorted((unit, pairs) for unit, pairs in found.items() if pairs))


def _figures(units: Mapping[Unit, Pairs]) -> dict[str, list[float]]:
    """Figure → its share in each unit; the mean of the shares is the figure."""
    center = statistics.fmean(trained for pairs in units.values() for _, trained in pairs)
    spread = math.fsum((trained - center) ** 2 for pairs in units.values() for _, trained in pairs) or math.inf
    differences = [[trained - rollout for rollout, trained in pairs] for pairs in units.values()]
    return {
        "mean absolute difference": [statistics.fmean(map(abs, unit)) for unit in differences],
        "mean difference": [statistics.fmean(unit) for unit in differences],
        "slope": [
            len(units) * math.fsum((trained - center) * (trained - rollout) for rollout, trained in pairs) / spread
            for pairs in units.values()
        ],
    }


def _faults(units: Mapping[Unit, Pairs], *, exact: bool) -> dict[str, tuple[str, float]]:
    """Seeded fault → (the figure that shows it, how far it moves that figure). 16 bits hide one more rounding."""
    found = {
        f"each off by {CONSTANT:g}": ("mean difference", CONSTANT),
        f"of temperature {TEMPERATURE:g}": ("slope", 1 - 1 / TEMPERATURE),
    }
    if exact:
        rounded = [abs(rollout - _float16(rollout)) for pairs in units.values() for rollout, _ in pairs]
        found["rounded to float16"] = ("mean absolute difference", statistics.fmean(rounded))
    return found


def _float16(number: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", max(number, -65504.0)))[0])
