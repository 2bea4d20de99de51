"""Noise, bound and weakest fault of each numeric check. Pure.

Each run derives the bound of a comparison. It lies above the difference between the baseline and its twin, and is useful only
below the difference that the weakest fault makes. Faults are seeded into the recorded numbers, offline.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import msgspec

from harness.contract.faults import family
from harness.judging.facets import LOGPROBS, deterministic
from harness.judging.pairing import pair
from harness.judging.takes import widest
from harness.records.differing import common_prefix
from harness.records.recording import Call, ScenarioTrace
from harness.records.reference import Noise
from harness.records.verdict import NoiseFloor, Verdict

FLOAT32_EPSILON = 2.0**-23
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
ABOVE_THE_FLOOR = 10.0
"""Factor on the baseline's own noise: two draws of one noise rarely lie this far apart."""
ROUNDINGS = 64.0
"""Number of float32 roundings, at the scale of the largest log-probability, that a reordered sum may cost."""


@final
class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability of one token on both sides. `size` is infinite if one side has no number."""

    row: int
    position: int
    left: float | None
    right: float | None
    size: float


def deltas(left: Call, right: Call) -> tuple[int, list[Delta]]:
    """The number of compared tokens, and those that differ: over the common prefix of both calls, row by row.

    A token without a number on one side, or a number without a token, is an infinite difference. Rows for which neither
    side gave numbers do not count.
    """
    facts, found = 0, []
    ours, theirs = _logprob_rows(left), _logprob_rows(right)
    for row in range(max(len(ours), len(theirs))):
        (tokens, numbers), (other_tokens, other_numbers) = _at(ours, row), _at(theirs, row)
        if numbers is None and other_numbers is None:
            continue
        mine, other = numbers or [], other_numbers or []
        same = common_prefix(tokens, other_tokens)
        whole = same == len(tokens) == len(other_tokens)
        if whole and mine == other and len(mine) == same and None not in mine:
            facts += same
            continue
        for position in range(max(same, len(mine), len(other)) if whole else same):
            facts += 1
            a = mine[position] if position < len(mine) else None
            b = other[position] if position < len(other) else None
            size = abs(a - b) if isinstance(a, int | float) and isinstance(b, int | float) else math.inf
            if size != 0:
                found.append(Delta(row=row, position=position, left=a, right=b, size=size))
    return facts, found


_LOGPROBS = {"generate": "response_logprobs", "sample": "response_logprobs", "gym_generate": "rollout_logprobs"}
"""Method → field of its result that holds log-probabilities."""


def _logprob_rows(call: Call) -> list[tuple[list[int], list[float | None] | None]]:
    if call.method not in _LOGPROBS or call.result is None or not deterministic(call):
        return []
    rows = call.result.get("response_ids") or []
    numbers: list[Any] = call.result.get(_LOGPROBS[call.method]) or []
    return [(tokens, numbers[row] if row < len(numbers) else None) for row, tokens in enumerate(rows)]


def _at(rows: list[tuple[list[int], Any]], row: int) -> tuple[list[int], Any]:
    return rows[row] if row < len(rows) else ([], None)


def noise_floors(pairs: Iterable[tuple[ScenarioTrace, ScenarioTrace]]) -> list[NoiseFloor]:
    """The noise of the baseline over a whole run, from pairs of a trace and its twin; empty if nothing was measured.

    bound = max(10 × floor, 64 × 2⁻²³ × the largest |log-probability|). Missing numbers are left out: the checks judge them.
    Quantized engines are left out: roundings of their activations go either way, and that noise would hide faults of others.
    """
    floor, scale, facts = 0.0, 0.0, 0
    faults = dict.fromkeys(FAULTS, 0.0)
    for trace, twin in pairs:
        if trace.header.topology.quantization is not None:
            continue
        for call, again in pair(trace, twin).pairs:
            compared, differing = deltas(call, again)
            sizes = [delta.size for delta in differing if math.isfinite(delta.size)]
            facts += compared - len(differing) + len(sizes)
            floor = max([floor, *sizes])
            for _, numbers in _logprob_rows(call):
                known = [x for x in numbers or () if isinstance(x, int | float) and abs(x) <= FLOAT32_MAX]
                scale = max(scale, _largest(known))
                for name, fault in FAULTS.items():
                    faults[name] = max(faults[name], fault(known))
    if not facts:
        return []
    seeded = {name: size for name, size in faults.items() if size > 0}
    return [
        NoiseFloor(
            check=LOGPROBS,
            unit="nats",
            floor=floor,
            bound=max(ABOVE_THE_FLOOR * floor, ROUNDINGS * FLOAT32_EPSILON * scale),
            weakest_fault=min(seeded.values(), default=None),
            faults=seeded,
            facts=facts,
        )
    ]


def of_rounding(model: str, dtype: str, noise: Noise) -> NoiseFloor:
    """The effect of rounding in one model, as a line beside the checks that take their bounds from it."""
    measured = "; ".join(f"{name}: {moved.largest:.2g}" for name, moved in noise.measured.items())
    return NoiseFloor(
        check=f"rounding of {model} in {dtype}",
        unit=f"nats ({measured})",
        floor=noise.largest,
        bound=noise.near,
        facts=noise.numbers,
    )


def floors(verdicts: Iterable[Verdict]) -> list[NoiseFloor]:
    """The same for every check that gives a `Margin`, over a run. A failed verdict gives none: its error is no noise of a correct
    stack."""
    of_check: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.margin is not None:
            of_check.setdefault(family(verdict.check), []).append(verdict)
    return [_floor(check, of_check[check]) for check in sorted(of_check)]


def _floor(check: str, verdicts: Sequence[Verdict]) -> NoiseFloor:
    whole = widest([verdict.margin for verdict in verdicts if verdict.margin is not None])
    return NoiseFloor(
        check=check,
        unit=whole.unit,
        floor=whole.measured,
        bound=whole.bound,
        weakest_fault=min(whole.faults.values(), default=None),
        faults=whole.faults,
        facts=sum(verdict.facts for verdict in verdicts),
        false_alarm_rate=whole.false_alarm_rate,
        power=whole.power,
    )


def _largest(numbers: Iterable[float]) -> float:
    return max(map(abs, numbers), default=0.0)


def _shifted(numbers: list[float]) -> float:
    return _largest(map(operator.sub, numbers, numbers[1:]))


def _scaled(numbers: list[float]) -> float:
    return _largest(numbers) * (1 - 1 / 1.01)


def _rounded(numbers: list[float]) -> float:
    return _largest(map(operator.sub, numbers, _bfloat16(numbers)))


def _bfloat16(numbers: list[float]) -> Sequence[float]:
    """Each number cut to bfloat16: the upper half of its float32."""
    bits = bytearray(struct.pack(f"<{len(numbers)}f", *numbers))
    bits[0::4] = bits[1::4] = bytes(len(numbers))
    return struct.unpack(f"<{len(numbers)}f", bits)


FAULTS: dict[str, Callable[[list[float]], float]] = {
    "each off by 1e-3": lambda numbers: 1e-3 if numbers else 0.0,
    "temperature 1.01, not renormalized": _scaled,
    "shifted by one position": _shifted,
    "kept in bfloat16": _rounded,
}
"""Seeded faults: name → the largest difference that the fault makes in one row of log-probabilities."""
