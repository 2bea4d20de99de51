"""Whether the candidate is slower: verdicts with a stated error, from pairs of neighbouring blocks. Pure.

The unit of evidence is a block; requests in one block are not independent. A coin decides which stack has the first block of a pair.
If the candidate takes exp(t) times as long as the baseline, then log(candidate / baseline) - t has a symmetric distribution, because
of that coin alone: whatever the noise, its drift or its tails are. So each pair is a fair bet on a sign. A bettor whose stake is a
function of the distance and of the past multiplies his capital by 1 + stake or 1 - stake. If t is true, his capital exceeds 1/error
with probability `error` at most, at any time (Ville's inequality). All t that are not refuted in this way are a confidence sequence:
it holds at every moment, so a run may stop whenever it likes. Sources: Ville (1939); Ramdas, Ruf, Larsson, Koolen, "Admissible
anytime-valid sequential inference must rely on nonnegative martingales" (2020), section on symmetric distributions; Waudby-Smith and
Ramdas, "Estimating means of bounded random variables by betting" (2024).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from harness.records.bench import Block, Interval, Metric, Pace, Row, Side

DEFAULT_ERROR = 0.05
DEFAULT_PRECISION = 0.1
SCALES = 4.0 ** np.arange(6)
"""Slopes of the stakes, per unit of log ratio. They suit noise from 0.1 % to 100 %."""
MOST_STAKES = np.array([0.5, 0.8, 0.95, 1.0])
"""Largest stakes. A stake below 1 survives a pair in which the machine did something else."""
FARTHEST = 12.0
"""Log ratio beyond every real one."""
STEPS = 30
"""Halvings of that range: more digits than are shown."""
MOST_MORE = 512
"""Pairs that are foretold at most."""

Logs = NDArray[np.float64]


def log_capital(distances: Logs) -> float:
    """The largest logarithm of the capital so far of a bettor on positive signs. Each bettor has a slope and a largest stake; the
    capital is the mean of all bettors'."""
    stakes = MOST_STAKES[:, None, None] * np.tanh(SCALES[:, None] * distances)
    with np.errstate(divide="ignore"):
        paths = np.log1p(stakes).cumsum(axis=-1).reshape(-1, len(distances))
    return float(np.logaddexp.reduce(paths, axis=0).max() - math.log(len(paths)))


def _refuted_below(logs: Logs, error: float) -> float:
    """The supremum of the values that are refuted as too small, each with this error; -inf if there are none."""
    needed = math.log(1 / error)
    low, high = float(logs.min()) - FARTHEST, float(logs.max())
    if log_capital(logs - low) < needed:
        return -math.inf
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if log_capital(logs - middle) >= needed else (low, middle)
    return low


def bounds(logs: Logs, error: float) -> tuple[float, float]:
    """Bounds of the log ratio. Both hold at all times, except with probability `error`."""
    if len(logs) == 0:
        return -math.inf, math.inf
    return _refuted_below(logs, error / 2), -_refuted_below(-logs, error / 2)


def verdict(logs: Logs, error: float, precision: float) -> Pace:
    """The verdict on log ratios with this error, from the values that `bounds` leaves. `precision` is a ratio minus 1."""
    near, needed = math.log1p(precision), math.log(2 / error)
    if log_capital(logs + near) >= needed and log_capital(near - logs) >= needed:
        return Pace.SAME
    return (
        Pace.SLOWER
        if log_capital(logs) >= needed
        else Pace.FASTER
        if log_capital(-logs) >= needed
        else Pace.INCONCLUSIVE
    )


def more(logs: Logs, error: float, precision: float) -> int | None:
    """Further pairs until a verdict, if they repeat those so far. None if that is too far away."""

    def decided(count: int) -> bool:
        return verdict(np.resize(logs, count), error, precision) is not Pace.INCONCLUSIVE

    reached = len(logs)
    while not decided(reached):
        reached *= 2
        if reached > MOST_MORE:
            return None
    low, high = max(len(logs), reached // 2), reached
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) else (middle + 1, high)
    return high - len(logs)


def fewest_pairs(rows: int, error: float = DEFAULT_ERROR) -> int:
    """Pairs below which no row of that many can have a verdict, however clear the difference is."""
    return next(n for n in range(1, MOST_MORE) if log_capital(np.full(n, FARTHEST)) >= math.log(2 * rows / error))


def turns(seed: int, pair: int) -> tuple[Side, Side]:
    """The order of a pair's blocks: a fair coin."""
    return (
        ("baseline", "candidate") if random.Random(f"bench {seed} {pair}").random() < 0.5 else ("candidate", "baseline")
    )


def whole_pairs(blocks: Sequence[Block]) -> list[dict[Side, Block]]:
    """The pairs with both blocks measured, in order."""
    found: dict[int, dict[Side, Block]] = {}
    for block in blocks:
        found.setdefault(block.pair, {})[block.side] = block
    return [pair for _, pair in sorted(found.items()) if len(pair) == 2]


def measured(metrics: Sequence[Metric], pairs: Sequence[Mapping[Side, Block]]) -> tuple[list[Metric], dict[str, str]]:
    """The metrics that every block has, and why others have no row."""
    kept, left_out = [], {}
    for metric in metrics:
        sides = {side: [pair[side].values.get(metric.name) for pair in pairs] for side in get_args(Side)}
        lacking = [side for side, values in sides.items() if None in values]
        if len(lacking) == len(sides):
            left_out[metric.name] = "neither stack has it"
        elif lacking:
            left_out[metric.name] = f"the {lacking[0]} does not have it"
        elif any(value is not None and value <= 0 for values in sides.values() for value in values):
            left_out[metric.name] = "it took no time"
        else:
            kept.append(metric)
    return kept, left_out


def rows(
    metrics: Sequence[Metric],
    blocks: Sequence[Block],
    *,
    seed: int,
    error: float = DEFAULT_ERROR,
    precision: float = DEFAULT_PRECISION,
) -> tuple[list[Row], dict[str, str]]:
    """One row per metric, and why others have none.

    `error` is that of all rows together: each gets its equal share (Bonferroni), which holds however rows depend on each other.
    """
    pairs = whole_pairs(blocks)
    kept, left_out = measured(metrics, pairs)
    share = error / max(1, len(kept))
    return [_row(metric, pairs, seed, share, precision) for metric in kept] if pairs else [], left_out


def paces(
    metrics: Sequence[Metric],
    blocks: Sequence[Block],
    *,
    error: float = DEFAULT_ERROR,
    precision: float = DEFAULT_PRECISION,
) -> list[Pace]:
    """The verdicts of these rows alone, which take a hundredth of the time."""
    pairs = whole_pairs(blocks)
    kept, _ = measured(metrics, pairs)
    return [verdict(_logs(metric, pairs), error / len(kept), precision) for metric in kept] if pairs else []


def _logs(metric: Metric, pairs: Sequence[Mapping[Side, Block]]) -> Logs:
    return np.log([pair["candidate"].values[metric.name] / pair["baseline"].values[metric.name] for pair in pairs])


def _row(metric: Metric, pairs: Sequence[Mapping[Side, Block]], seed: int, error: float, precision: float) -> Row:
    ours, theirs = ([pair[side].values[metric.name] for pair in pairs] for side in ("baseline", "candidate"))
    logs, itself = _logs(metric, pairs), _against_itself(ours, f"{seed} {metric.name}")
    low, high = bounds(logs, error)
    floor = bounds(itself, error)
    said, reason, lacking = verdict(logs, error, precision), "", None
    if floor[0] > 0 or floor[1] < 0:
        said, reason = Pace.INCONCLUSIVE, "the baseline differs from itself"
    elif said is Pace.INCONCLUSIVE:
        lacking = more(logs, error, precision)
    return Row(
        metric=metric,
        pairs=len(pairs),
        baseline=float(np.median(ours)),
        candidate=float(np.median(theirs)),
        interval=_interval(logs, low, high),
        floor=_interval(itself, *floor),
        noise=math.expm1(float(np.median(np.abs(itself)))) if len(itself) else 0.0,
        verdict=said,
        bound=_by(said, low, high),
        more=lacking,
        reason=reason,
    )


def _against_itself(values: Sequence[float], seed: str) -> Logs:
    """Log ratios of the baseline's blocks of two neighbouring pairs. A coin says which of the two is the baseline."""
    coins = random.Random(seed)
    neighbours = zip(values[::2], values[1::2], strict=False)  # the last of an odd number has none
    return np.array([coins.choice((1, -1)) * math.log(b / a) for a, b in neighbours])


def _interval(logs: Logs, low: float, high: float) -> Interval:
    """Bounds as ratios."""
    return Interval(
        ratio=math.exp(float(np.median(logs))) if len(logs) else 1.0,
        low=math.exp(low) if math.isfinite(low) else None,
        high=math.exp(high) if math.isfinite(high) else None,
    )


def _by(said: Pace, low: float, high: float) -> float:
    match said:
        case Pace.SLOWER:
            return math.expm1(low)
        case Pace.FASTER:
            return math.expm1(-high)
        case Pace.SAME:
            return math.expm1(max(-low, high))
        case Pace.INCONCLUSIVE:
            return 0.0
