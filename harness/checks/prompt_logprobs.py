"""Log-probabilities of a prompt's own tokens, which sample() returns beside its samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from harness.checks.answers import Answer, of_answers
from harness.checks.base import Evidence, Finding, concluded, untestable
from harness.checks.logprobs import Distances, farthest, seeded
from harness.contract.faults import Fact
from harness.records.reference import NextRequest, Query, ScoreRequest

UNASKED = "log-probabilities of the prompt came that were not asked for"
ABSENT = "log-probabilities of the prompt were asked for and none came"
UNEVEN = "there is not one log-probability for each prompt token after the first"
FAR = "log-probabilities of the prompt are further from the reference's than the bound"
NOT_TOP = "the most probable tokens of a prompt's position are not the reference's, in its order"


def _score(answer: Answer) -> ScoreRequest:
    return msgspec.structs.replace(answer.score, prompt=answer.prompt[:1], tokens=answer.prompt[1:], routed=[])


def _nexts(answer: Answer) -> list[NextRequest]:
    """The whole distribution at each position after the first. Empty if the call did not ask for the most probable tokens."""
    first = answer.next_after(0)
    positions = range(1, len(answer.prompt)) if answer.call.request["topk_prompt_logprobs"] else ()
    return [msgspec.structs.replace(first, prompt=answer.prompt[:at]) for at in positions]


def _asking(rows: list[Answer]) -> list[Answer]:
    """The first sample of each call that asked: the prompt's numbers belong to the call."""
    return [row for row in rows if row.index == 0 and row.call.request["prompt_logprobs"]]


def _numbers(answer: Answer) -> list[float] | None:
    """None unless there is a number for each prompt token, and none for the first."""
    first, *later = (answer.call.result or {}).get("prompt_logprobs") or [math.nan]
    good = first is None and len(later) == len(answer.prompt) - 1
    good = good and all(isinstance(x, int | float) and math.isfinite(x) for x in later)
    return later if good else None


def _misranked(evidence: Evidence, answer: Answer) -> list[dict[str, Any]]:
    """Positions whose most probable tokens are not the reference's, nearer ties aside."""
    most: int = answer.call.request["topk_prompt_logprobs"]
    first, *later = (answer.call.result or {}).get("topk_prompt_logprobs") or [[]]
    if first is not None or len(later) != len(answer.prompt) - 1:
        return [answer.shown(position=0, got=first)]
    near, wrong = evidence.noise.near, []
    for at, (question, got) in enumerate(zip(_nexts(answer), later, strict=True), start=1):
        right = evidence.reference.next(question).logprobs
        least = sorted(right, reverse=True)[most - 1]
        good = len(got or ()) == len({token for token, _ in got or ()}) == most
        good = good and all(abs(right[token] - x) <= near and x >= least - near for token, x in got)
        if not good or any(a < b for (_, a), (_, b) in pairwise(got)):
            wrong.append(answer.shown(position=at, got=got))
    return wrong


def _rule(evidence: Evidence, rows: list[Answer]) -> Finding:
    asking, facts, distances = _asking(rows), 0, Distances(evidence)
    if not asking:
        return untestable("no call asked for log-probabilities of its prompt")
    unasked = [row for row in rows if row.index == 0 and not row.call.request["prompt_logprobs"]]
    wrong = [(UNASKED, row.shown()) for row in unasked if (row.call.result or {}).get("prompt_logprobs") is not None]
    faults: dict[str, float] = {}
    for row in asking:
        numbers, most = _numbers(row), row.call.request["topk_prompt_logprobs"]
        if numbers is None:
            came = (row.call.result or {}).get("prompt_logprobs")
            wrong.append((ABSENT if came is None else UNEVEN, row.shown(prompt_logprobs=came)))
            continue
        score = evidence.reference.score(_score(row))
        off, at = farthest(numbers, score.logprobs)
        facts += len(numbers)
        for name, size in seeded(numbers, exact=evidence.exact).items():
            faults[name] = max(faults.get(name, 0.0), size)
        if distances.beyond(score, off):
            wrong.append((FAR, row.shown(position=at + 1, got=numbers[at], reference=score.logprobs[at])))
        if most:
            facts += len(numbers) * most
            wrong += [(NOT_TOP, shown) for shown in _misranked(evidence, row)]
    margin = None if wrong else distances.margin(faults)
    return concluded(facts + len(unasked), wrong, margin=margin, max_abs_error=distances.worst)


def _queries(_: Evidence, rows: list[Answer]) -> Iterator[Query]:
    for row in _asking(rows):
        yield _score(row)
        yield from _nexts(row)


OF_PROMPTS = of_answers(
    "logprobs.prompt",
    fault="log-probabilities of the prompt are of another position, cut off, unsorted, missing, or not asked for",
    next_step="look at where the client pairs the engine's prompt_logprobs with the prompt: the first token has none",
    reads=Fact.ANSWERS | Fact.LOGPROBS | Fact.POLICY,
    falsifies=Fact.LOGPROBS,
    source="SkyRL, RemoteInferenceClient.sample: include_prompt_logprobs, topk_prompt_logprobs; vLLM documentation, "
    "SamplingParams.prompt_logprobs",
    rule=_rule,
    asks=_queries,
    methods=("sample",),
)
