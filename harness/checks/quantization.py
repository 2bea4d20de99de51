"""Whether the requested quantization is in effect, and its error. An engine that keeps full precision answers well, but with other
weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from harness.checks.answers import Answer, of_answers
from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable
from harness.checks.logprobs import DEVIATIONS
from harness.contract.faults import Fact
from harness.records.reference import ScoreRequest
from harness.records.verdict import Margin

TELLING = 4
"""An answer counts only if the reference's log-probabilities with and without quantization are this many times the bound apart."""


NOT_IN_EFFECT = "log-probabilities are those of full precision: the quantization is not in effect"
CANNOT_TELL = "no answer can tell whether its weights were quantized"
HALF = 0.5
"""Share of the reference's quantization error. If chance alone may show this share, the check is untestable."""


def _full(answer: Answer) -> ScoreRequest:
    return msgspec.structs.replace(answer.score, quantization=None)


def _apart(some: list[float], others: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(some, others, strict=True)]


def _rule(evidence: Evidence, answers: list[Answer]) -> Finding:
    if evidence.header.topology.quantization is None:
        return untestable("the stack was not asked to quantize")
    if not evidence.exact:
        return _over_many(evidence, answers)
    bound = evidence.noise.near
    facts, nearest, unquantized = 0, float("inf"), []
    errors: list[float] = []
    expected: list[float] = []
    for answer in answers:
        got = answer.logprobs or []
        if len(got) != len(answer.tokens) or not all(isinstance(x, int | float) for x in got):
            continue
        full, quantized = evidence.reference.score(_full(answer)), evidence.reference.score(answer.score)
        errors += _apart(got, full.logprobs)
        expected += _apart(quantized.logprobs, full.logprobs)
        if max(_apart(full.logprobs, quantized.logprobs), default=0.0) < TELLING * bound:
            continue
        facts += 1
        distance = max(_apart(got, full.logprobs))
        nearest = min(nearest, distance)
        if distance <= bound:
            unquantized.append(answer.shown(logprobs=got[:8], full_precision=full.logprobs[:8]))
    if unquantized:
        return failed(facts, NOT_IN_EFFECT, unquantized, distance=nearest, bound=bound)
    if not facts:
        return untestable(CANNOT_TELL)
    margin = Margin(unit="answers of full precision", measured=0, bound=0, faults={"no quantization": facts})
    return passed(
        facts,
        margin=margin,
        distance=nearest,
        bound=bound,
        mean_quantization_error=statistics.fmean(errors),
        max_quantization_error=max(errors),
        mean_error_of_reference=statistics.fmean(expected),
        max_error_of_reference=max(expected),
    )


def _over_many(evidence: Evidence, answers: list[Answer]) -> Finding:
    """The same in 16 bits, whose noise hides the quantization of a single answer.

    Judged by the share of the reference's quantization error that all log-probabilities show together. Full precision shows none,
    except by chance. A right engine shows less than all: noise turns some roundings to 8 bits the other way."""
    rows: list[tuple[list[float], list[float]]] = []
    for answer in answers:
        got = answer.logprobs or []
        if len(got) != len(answer.tokens) or not all(isinstance(x, int | float) for x in got):
            continue
        full, quantized = (evidence.reference.score(asked).logprobs for asked in (_full(answer), answer.score))
        errors = [x - y for x, y in zip(got, full, strict=True)]
        rows.append((errors, [x - y for x, y in zip(quantized, full, strict=True)]))
    share, error = _share(rows)
    facts = sum(len(errors) for errors, _ in rows)
    figures = {"share of the quantization error": share, "standard error": error}
    chance = DEVIATIONS * error
    if not chance < HALF:
        return untestable(CANNOT_TELL)
    if share <= chance:
        return failed(facts, NOT_IN_EFFECT, [], **figures)
    margin = Margin(
        unit="of the quantization error missing",
        measured=max(0.0, 1 - share),
        bound=1 - chance,
        faults={"no quantization": 1.0},
    )
    return passed(facts, margin=margin, **figures)


def _share(rows: Sequence[tuple[list[float], list[float]]]) -> tuple[float, float]:
    """The slope of all errors over the expected ones, and its standard error, from (errors, expected errors) of each row. Errors
    within a row are correlated, so rows are the unit. The standard error is infinite if it cannot be computed."""
    weight = math.fsum(x * x for _, expected in rows for x in expected)
    if len(rows) < 2 or not weight:
        return 0.0, math.inf
    share = math.fsum(e * x for errors, expected in rows for e, x in zip(errors, expected, strict=True)) / weight
    left = [math.fsum((e - share * x) * x for e, x in zip(errors, expected, strict=True)) for errors, expected in rows]
    return share, math.sqrt(math.fsum(x * x for x in left) * len(rows) / (len(rows) - 1)) / weight


def quantization_effect(*labels: str) -> Check:
    """Log-probabilities are not those of the same weights in full precision.

    The finding shows, in nats, the mean and largest teacher-forced distance from full precision: the engines'
    (`…_quantization_error`) and the quantizing reference's (`…_error_of_reference`). A comparison shows both stacks'."""
    return of_answers(
        "quantization_effect",
        fault="the engines ignore the requested quantization and answer in full precision",
        next_step="look at what each sync stores: tensors in the engine's quantized form, or full precision that is used as it came",
        reads=Fact.ANSWERS | Fact.POLICY,
        source="SkyRL #1014, task 12: FlashRL, int8 and fp8; architecture, forced effect",
        rule=_rule,
        asks=lambda _, answers: (query for answer in answers for query in (answer.score, _full(answer))),
        labels=labels,
    )
