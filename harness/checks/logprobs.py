"""Log-probabilities: finite numbers, one per token, and the oracle's."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from harness.checks.answers import Answer, of_answers
from harness.checks.base import Check, Evidence, Finding, concluded, failed, passed, untestable
from harness.checks.numbers import ABSENT, NOT_FINITE, POSITIVE, UNEVEN
from harness.checks.sampling import SUMMED, allowed, tempered
from harness.contract.faults import Fact
from harness.records.reference import WIDER, Next, NextRequest, Noise, Query, Score, ScoreRequest, UnansweredQuery
from harness.records.verdict import Margin

CONSTANT = 1e-2
TEMPERATURE = 1.01
FEWEST_ROWS, FEWEST_TOKENS = 24, 2000
MEAN_FLOOR = 1e-5
"""Error that float32 may leave in a mean (nats) or a slope (nats per nat)."""
DEVIATIONS = 5.0
"""Standard errors: one right run in two million exceeds them."""
TEMPERED_TOKENS = 4
"""Number of tokens for which the reference gives the whole distribution, to seed another temperature."""

Measure = Callable[[Iterable[float]], float]

SOURCE = "SkyRL API reference, InferenceEngineOutput.response_logprobs; vLLM documentation, SamplingParams.logprobs"


def _asked(row: Answer) -> bool:
    return row.params.get("logprobs") is not None


def _wrong_shape(row: Answer) -> str | None:
    if row.logprobs is None:
        return ABSENT
    if len(row.logprobs) != len(row.tokens):
        return UNEVEN
    for value in row.logprobs:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return NOT_FINITE
        if value > 0:
            return POSITIVE
    return None


def _numbers(_: Evidence, rows: list[Answer]) -> Finding:
    unasked = [row for row in rows if not _asked(row)]
    facts = len(unasked) + sum(len(row.tokens) for row in rows if _asked(row))
    came = [
        ("log-probabilities came that were not asked for", row.shown()) for row in unasked if row.logprobs is not None
    ]
    return concluded(facts, [*came, *_misshapen(filter(_asked, rows))])


def _misshapen(rows: Iterable[Answer]) -> list[tuple[str, dict[str, Any]]]:
    """What is wrong with the form of the rows' numbers."""
    return [(why, row.shown(logprobs=(row.logprobs or [])[:64])) for row in rows if (why := _wrong_shape(row))]


def _every_asked(_: Evidence, rows: Iterable[Answer]) -> Iterator[Query]:
    for row in filter(_asked, rows):
        yield from (row.next_after(at) for at in range(len(row.tokens)))


def _filtered(evidence: Evidence, rows: list[Answer]) -> Finding:
    import numpy as np

    asked = [row for row in rows if _asked(row)]
    wrong, facts, unclear, worst = _misshapen(asked), 0, 0, 0.0
    for row in (row for row in asked if _wrong_shape(row) is None):
        temperature = row.params.get("temperature", 1.0)
        bound = 2 * evidence.noise.near / (temperature or 1.0)
        for at, (token, got) in enumerate(zip(row.tokens, row.logprobs or (), strict=True)):
            model = np.asarray(evidence.reference.next(row.next_after(at)).logprobs)
            if only := row.params.get("allowed_token_ids"):
                others, model = model, np.full_like(model, -np.inf)
                model[only] = others[only]
            probabilities = tempered(model, temperature or 1.0)
            filters = row.params if temperature else {}
            left = allowed(probabilities, filters, summed=0.0)
            edges = [allowed(probabilities, filters, bound), allowed(probabilities, filters, summed=-SUMMED)]
            widest, narrowest = (float(probabilities[edge].sum()) for edge in edges)
            if not left[token] or math.log(widest / max(narrowest, sys.float_info.min)) > bound:
                unclear += 1  # which tokens the filter leaves depends on rounding
                continue
            facts += 1
            expected = math.log(float(probabilities[token]) / float(probabilities[left].sum()))
            worst = max(worst, abs(got - expected))
            if abs(got - expected) > bound:
                shown = row.shown(position=at, got=got, reference=expected, bound=bound)
                wrong.append(("a log-probability is not the one after temperature and filters", shown))
    if not facts and not wrong:
        return untestable("no log-probability was asked for, or each token is at its filter's edge")
    return concluded(facts, wrong, max_abs_error=worst, unclear=unclear)


def after_filters(*labels: str) -> Check:
    """Log-probabilities are those of the distribution that tokens are drawn from: after allowed tokens, temperature and filters."""
    return of_answers(
        "logprobs.filtered",
        fault="an engine that is configured to give log-probabilities after temperature and filters gives others",
        next_step="look at whether the option logprobs_mode reaches the engines, and at what the client does with each number",
        reads=Fact.ANSWERS | Fact.LOGPROBS,
        falsifies=Fact.LOGPROBS,
        source="vLLM documentation, ModelConfig.logprobs_mode: processed_logprobs",
        rule=_filtered,
        asks=_every_asked,
        labels=labels,
    )


def are_numbers(*labels: str) -> Check:
    """One finite number ≤ 0 per token if the call asked for log-probabilities, none if it did not."""
    return of_answers(
        "logprobs.numbers",
        fault="log-probabilities are NaN, missing, doubled or shifted, and a comparison of the shorter side lets them pass",
        next_step="look at where the client takes the numbers out of the engine's answer: one for each token, of the sampled token",
        reads=Fact.ANSWERS | Fact.LOGPROBS,
        falsifies=Fact.LOGPROBS,
        source=SOURCE,
        rule=_numbers,
        labels=labels,
    )


def _reference(evidence: Evidence, rows: list[Answer]) -> Finding:
    asked = [row for row in rows if _asked(row)]
    if not asked:
        return untestable("no call asked for log-probabilities")
    misshapen = _misshapen(asked)
    rows = [row for row in asked if _wrong_shape(row) is None]
    errors = list[float]()
    most, beyond = evidence.noise.near, -math.inf
    exact, rounded = evidence.exact, evidence.header.topology.quantization is not None
    seeded: dict[str, list[float]] = {}
    worst_shown: dict[str, Any] = {}
    scored: list[tuple[Answer, Score, list[float]]] = []
    for row in rows:
        score = evidence.reference.score(row.score)
        if not all(map(math.isfinite, score.logprobs)):
            return untestable("the reference's log-probability is not a finite number")
        apart = [abs(got - expected) for got, expected in zip(row.logprobs or (), score.logprobs, strict=True)]
        scored.append((row, score, apart))
    facts = sum(len(apart) for _, _, apart in scored)
    told = [one for one in scored if rounded or not evidence.explained(one[1], max(one[2], default=0.0))]
    for row, score, apart in told or scored:
        errors += apart
        allowed = evidence.noise.near if told and not rounded else evidence.near(score)
        most = max(most, allowed)
        for name, sizes in _seeded(row.logprobs or [], score.logprobs, constant=exact):
            seeded.setdefault(name, []).extend(sizes)
        for at, error in enumerate(apart):
            if error - allowed >= beyond:
                beyond = error - allowed
                worst_shown = row.shown(position=at, got=(row.logprobs or [])[at], reference=score.logprobs[at])
    worst = max(errors, default=0.0)
    measure: Measure = _quarter if rounded else max
    bound = WIDER * evidence.noise.quarter if rounded and not exact else evidence.noise.near if told else most
    measured = measure(errors) if errors else 0.0
    numbers = {"max_abs_error": worst, "bound": bound} | (
        {"quartile_abs_error": measured, "bound_where_roundings_part": most} if rounded else {}
    )
    far = [] if beyond <= 0 and measured <= bound else [worst_shown]
    if misshapen or far:
        reason = "log-probabilities are further from the reference's than the bound"
        wrong = [*misshapen, *((reason, shown) for shown in far)]
        return concluded(facts + len(misshapen), wrong, margin=None, **numbers)
    faults = {name: measure(sizes) for name, sizes in seeded.items()}
    faults |= _asked_faults(evidence, rows[0], measure, temperature=exact and not rounded)
    margin = Margin(unit="nats", measured=measured, bound=bound, faults=faults)
    return passed(facts, margin=margin, **numbers)


def _quarter(errors: Iterable[float]) -> float:
    """The lower quartile of the errors. Roundings that go either way move only some answers, so a fault of all answers shows here
    as sharply as in full precision."""
    ordered = sorted(errors)
    return ordered[len(ordered) // 4]


def _seeded(numbers: list[float], expected: list[float], *, constant: bool) -> Iterator[tuple[str, list[float]]]:
    """Each fault that can be seeded in the numbers alone, and how far from the reference's it puts each of them. `constant`: False
    if the dtype's noise hides a small constant in few numbers; the mean over many shows it (`logprobs.mean`)."""
    damaged = {"shifted by one position": numbers[1:]}
    if constant:
        damaged[f"each off by {CONSTANT:g}"] = [x - CONSTANT for x in numbers]
    for name, those in damaged.items():
        if those:
            yield name, [abs(got - right) for got, right in zip(those, expected, strict=False)]


def farthest(got: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """The largest distance between two numbers at the same place, and that place; (0, 0) without numbers. NaN is infinitely far.
    Raises ValueError for unequal lengths."""
    apart = [abs(ours - theirs) for ours, theirs in zip(got, expected, strict=True)]
    apart = [math.inf if math.isnan(by) else by for by in apart]
    largest = max(apart, default=0.0)
    return largest, apart.index(largest) if apart else 0


class Distances:
    """How far the answers of one check lie from the reference, in nats.

    An answer that is off by more than the noise, and by no more than its own rounding, is right. It says nothing of what the check
    can detect, so it counts neither as measured nor for the bound. If all answers are such, the bound is theirs.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._told: list[tuple[float, float]] = []
        self._explained: list[tuple[float, float]] = []

    def beyond(self, score: Score, off: float) -> bool:
        """Add an answer that is off by `off` nats. True if neither the noise nor its own rounding explains that."""
        explained = self._evidence.explained(score, off)
        bound = self._evidence.near(score) if explained else self._evidence.noise.near
        (self._explained if explained else self._told).append((off, bound))
        return not off <= bound

    @property
    def worst(self) -> float:
        """The largest distance."""
        return max((off for off, _ in self._told or self._explained), default=0.0)

    @property
    def bound(self) -> float:
        return max((bound for _, bound in self._told or self._explained), default=self._evidence.noise.near)

    def margin(self, faults: dict[str, float]) -> Margin:
        return Margin(unit="nats", measured=self.worst, bound=self.bound, faults=faults)


def seeded(numbers: Sequence[float], *, exact: bool) -> dict[str, float]:
    """Fault of log-probabilities alone → the most that it moves one of them. `exact`: also small faults, which the noise of shorter
    dtypes hides."""
    shifted = {"shifted by one": max((abs(a - b) for a, b in pairwise(numbers)), default=0.0)}
    return shifted | ({"each off": CONSTANT} if exact and numbers else {})


def _distributions(row: Answer) -> list[NextRequest]:
    """The questions for the whole distributions of the row's first tokens."""
    return [row.next_after(at) for at in range(min(len(row.tokens), TEMPERED_TOKENS))]


def _others(evidence: Evidence, row: Answer) -> list[ScoreRequest]:
    """The row's tokens under one other policy version; empty if the scenario has no other."""
    versions = {0, *(call.request["version"] for call in evidence.calls("sync_weights"))} - {row.version}
    return [msgspec.structs.replace(row.score, version=version) for version in sorted(versions)[:1]]


def _asked_faults(evidence: Evidence, row: Answer, measure: Measure, *, temperature: bool) -> dict[str, float]:
    """Faults that need more answers of the reference: another temperature, another policy version. Seeded if it gave them.

    Another temperature is computed for few tokens, which show only the largest error, and only of exact numbers.
    """
    found: dict[str, float] = {}
    numbers = [float(x) for x in row.logprobs or ()]
    expected = evidence.reference.score(row.score).logprobs
    try:
        nexts = [evidence.reference.next(question) for question in _distributions(row)]
        moved = [_moved(one, token) for one, token in zip(nexts, row.tokens, strict=False)]
        if temperature:
            found[f"of temperature {TEMPERATURE:g}"] = max(
                abs(got + by - right) for got, by, right in zip(numbers, moved, expected, strict=False)
            )
        for other in _others(evidence, row):
            scored = evidence.reference.score(other).logprobs
            found["of another policy version"] = measure(abs(x - y) for x, y in zip(scored, expected, strict=True))
    except UnansweredQuery:
        pass  # an older recording, made before these questions were asked
    return found


def _moved(one: Next, token: int) -> float:
    """How far `TEMPERATURE` moves a token's log-probability."""
    return math.log(tempered(one.logprobs, TEMPERATURE)[token]) - one.logprobs[token]


def _queries(evidence: Evidence, rows: list[Answer]) -> Iterator[Query]:
    rows = [row for row in rows if _asked(row)]
    yield from (row.score for row in rows)
    for row in rows[:1]:
        yield from _distributions(row)
        yield from _others(evidence, row)


def of_reference(*labels: str) -> Check:
    """Each log-probability is within rounding of the reference's at temperature 1 (vLLM's default: raw ones).

    With quantized weights at least a quarter of them must be, and each must lie within `Evidence.near`."""
    return of_answers(
        "logprobs.reference",
        fault="log-probabilities are of other weights, of another token or position, or after temperature and filters",
        next_step="look at `position` in the evidence: numbers are shifted by a token, of other weights, or taken "
        "before or after the temperature",
        reads=Fact.ANSWERS | Fact.LOGPROBS | Fact.POLICY | Fact.ADAPTERS,
        source=f"{SOURCE}; vLLM documentation, ModelConfig.logprobs_mode: raw_logprobs",
        rule=_reference,
        asks=_queries,
        labels=labels,
    )


def floor_of_a_mean(noise: Noise) -> float:
    """How far, in nats, the mean of right errors may be from 0. Sampling by the engine's own probabilities adds half the square of
    the noise (a Kullback-Leibler divergence)."""
    return MEAN_FLOOR + noise.rms**2 / 2


def _many(evidence: Evidence, rows: list[Answer]) -> Finding:
    """Judges mean and slope of the errors. Errors within a row are correlated, so the standard error is taken over rows."""
    errors: list[list[float]] = []
    numbers: list[list[float]] = []
    if misshapen := _misshapen(rows):
        return concluded(len(rows), misshapen)
    for row in rows:
        expected = evidence.reference.score(row.score).logprobs
        errors.append([got - right for got, right in zip(row.logprobs or (), expected, strict=True)])
        numbers.append(list(expected))
    tokens = sum(map(len, errors))
    if len(rows) < FEWEST_ROWS or tokens < FEWEST_TOKENS:
        return untestable(
            f"a mean needs {FEWEST_ROWS} rows and {FEWEST_TOKENS} tokens, there are {len(rows)} and {tokens}"
        )
    center = statistics.fmean(x for row in numbers for x in row)
    spread = math.fsum((x - center) ** 2 for row in numbers for x in row)
    means = [statistics.fmean(row) for row in errors]
    slopes = [
        len(rows) * math.fsum((x - center) * e for x, e in zip(row, off, strict=True)) / spread
        for row, off in zip(numbers, errors, strict=True)
    ]
    floor = floor_of_a_mean(evidence.noise)
    found = {"mean": means, "slope": slopes}
    measured = {name: abs(statistics.fmean(each)) for name, each in found.items()}
    bound = {name: floor + DEVIATIONS * statistics.stdev(each) / math.sqrt(len(each)) for name, each in found.items()}
    figures = {f"{name} error": measured[name] for name in found} | {f"{name} bound": bound[name] for name in found}
    beyond = [name for name in found if measured[name] > bound[name]]
    if beyond:
        reason = f"log-probabilities are off in the {' and '.join(beyond)} over many tokens"
        return failed(tokens, reason, [], **figures)
    relative = max(measured[name] / bound[name] for name in found)
    faults = {
        f"each off by {CONSTANT:g}": (CONSTANT - measured["mean"]) / bound["mean"],
        f"of temperature {TEMPERATURE:g}": (1 - 1 / TEMPERATURE - measured["slope"]) / bound["slope"],
    }
    margin = Margin(unit="of the bound of the mean or the slope", measured=relative, bound=1.0, faults=faults)
    return passed(tokens, margin=margin, **figures)


def over_many(*labels: str) -> Check:
    """Over thousands of sampled tokens the errors cancel: their mean is 0, and they do not grow with the log-probability.

    The bound of the mean is far below the bound of one number: `DEVIATIONS` standard errors above `floor_of_a_mean`.
    """
    return of_answers(
        "logprobs.mean",
        fault="log-probabilities are off by a small constant or a hundredth in temperature, hidden by the noise of single numbers",
        reads=Fact.ANSWERS | Fact.LOGPROBS,
        source=SOURCE,
        rule=_many,
        asks=lambda _, rows: (row.score for row in rows),
        labels=labels,
    )


UNLIKELY = -1000.0
"""A log-probability below it is of a token that no sampler would choose by itself (nats)."""


def _extremes(_: Evidence, rows: list[Answer]) -> Finding:
    values = [value for row in rows for value in row.logprobs or ()]
    far = [value for value in values if isinstance(value, int | float) and value < UNLIKELY]
    if not far:
        return untestable("no answer has a very unlikely token")
    value, count = Counter(far).most_common(1)[0]
    alike = f"the log-probabilities of very unlikely tokens are alike: {value:g}"
    return failed(len(far), alike, [{"tokens": count, "of": len(far)}]) if 2 * count > len(far) else passed(len(far))


def extremes(label: str) -> Check:
    """The log-probabilities of very unlikely tokens are their own, however small, and not one floor."""
    return of_answers(
        "logprobs.extremes",
        fault="very small log-probabilities are cut at a floor: ratios and KL of a policy that diverges look harmless",
        next_step="look for a maximum with a constant where the engine's numbers become an answer",
        reads=Fact.ANSWERS | Fact.LOGPROBS,
        falsifies=Fact.LOGPROBS,
        source=SOURCE,
        rule=_extremes,
        labels=(label,),
    )
