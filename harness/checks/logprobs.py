"""Log-probabilities: numbers at all, one per token, and the oracle's."""

from __future__ import annotations

import math

from harness.checks.answers import Answer, of_answers
from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable
from harness.checks.numbers import ABSENT, NOT_FINITE, POSITIVE, UNEVEN

BOUND = 1e-3
"""Nats, absolute, float32 on a CPU. Rounding makes about 1.2e-5 between vLLM and a Hugging Face forward pass; other
weights, another temperature or another token make more than 1e-2. Parity derives its own bound in the run."""

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
    facts = 0
    for row in rows:
        if not _asked(row):
            if row.call.method == "generate" and row.logprobs is not None:
                return failed(facts + 1, "log-probabilities came that were not asked for", [row.shown()])
            facts += row.call.method == "generate"
            continue
        wrong = _wrong_shape(row)
        if wrong:
            return failed(facts + 1, wrong, [row.shown(logprobs=(row.logprobs or [])[:64])])
        facts += len(row.tokens)
    return passed(facts)


def are_numbers(*labels: str) -> Check:
    """One finite number ≤ 0 per token where they were asked for, none where they were not."""
    return of_answers(
        "logprobs.numbers",
        fault="NaN, missing, doubled or shifted log-probabilities, which a comparison of the shorter side lets pass",
        source=SOURCE,
        rule=_numbers,
        labels=labels,
    )


def _reference(evidence: Evidence, rows: list[Answer]) -> Finding:
    rows = [row for row in rows if _asked(row)]
    if not rows:
        return untestable("no call asked for log-probabilities")
    facts, worst = 0, 0.0
    worst_shown: dict[str, object] = {}
    for row in rows:
        wrong = _wrong_shape(row)
        if wrong:
            return failed(facts + 1, wrong, [row.shown(logprobs=(row.logprobs or [])[:64])])
        score = evidence.reference.score(row.score)
        for at, (got, expected) in enumerate(zip(row.logprobs or (), score.logprobs, strict=True)):
            facts += 1
            if not math.isfinite(expected):
                return untestable("the reference's log-probability is not a finite number")
            if abs(got - expected) >= worst:
                worst = abs(got - expected)
                worst_shown = row.shown(position=at, got=got, reference=expected)
    if not worst <= BOUND:
        reason = "log-probabilities are further from the reference's than the bound"
        return failed(facts, reason, [worst_shown], max_abs_error=worst, bound=BOUND)
    return passed(facts, max_abs_error=worst, bound=BOUND)


def of_reference(*labels: str) -> Check:
    """Each log-probability is the reference's at temperature 1 (vLLM's default: raw ones) within `BOUND`."""
    return of_answers(
        "logprobs.reference",
        fault="log-probabilities of other weights, of another token or position, or after temperature and filters",
        source=f"{SOURCE}; vLLM documentation, ModelConfig.logprobs_mode: raw_logprobs",
        rule=_reference,
        asks=lambda _, rows: (row.score for row in rows if _asked(row)),
        labels=labels,
    )
