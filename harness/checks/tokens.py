"""Greedy tokens against the oracle, and equality of two calls' tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.checks import matching, ties
from harness.checks.answers import Answer, answers, of_answers, select, trouble
from harness.checks.base import Check, Evidence, Finding, concluded, failed, passed, untestable
from harness.checks.sampling import draws_repeat
from harness.contract.faults import Fact
from harness.contract.messages import LISTS
from harness.records.differing import parting
from harness.records.reference import Query

PENALTIES = ("presence_penalty", "frequency_penalty")
RESHAPING = ("allowed_token_ids", "logit_bias", "bad_words", "min_tokens", *PENALTIES)
"""Sampling parameters under which the most probable token of the model need not be the greedy choice."""


def is_greedy(answer: Answer) -> bool:
    """True if the row was requested greedily, from the model's own distribution only."""
    return answer.params.get("temperature") == 0 and not any(answer.params.get(p) for p in RESHAPING)


def fixed_length(params: dict[str, Any]) -> int | None:
    """The required number of tokens if only max_tokens can end the output, else None."""
    endless = params.get("ignore_eos") and not params.get("stop") and not params.get("stop_token_ids")
    return params.get("max_tokens") if endless else None


def _greedy(evidence: Evidence, rows: list[Answer]) -> Finding:
    rows = [row for row in rows if is_greedy(row)]
    if not rows:
        return untestable("no greedy call was recorded")
    facts = near_ties = 0
    scores = []
    wrong: list[tuple[str, dict[str, Any]]] = []
    for row in rows:
        facts += len(row.tokens)
        length = fixed_length(row.params)
        if length is not None and len(row.tokens) != length:
            wrong.append(("greedy output has another length than max_tokens with ignore_eos", row.shown()))
        score = evidence.reference.score(row.score)
        scores.append(score)
        at = ties.parts_at(evidence, score)
        if at is not None:
            where = "at its first token" if at == 0 else "after a common start"
            shown = row.shown(position=at, rank=score.ranks[at], behind=score.gaps[at], token=row.tokens[at])
            wrong.append((f"greedy output parts from the reference's {where}", shown))
        near_ties += sum(rank > 0 for rank in score.ranks)
    if wrong:
        return concluded(facts, wrong)
    return passed(facts, margin=ties.margin(evidence, scores), near_ties=near_ties)


def greedy(*labels: str, methods: Sequence[str] = LISTS) -> Check:
    """At temperature 0 each token is the reference's most probable one (teacher-forced after a near tie)."""
    return of_answers(
        "tokens.greedy",
        fault="tokens are of another prompt, other weights or a stale cache, or tokens are doubled, dropped or cut off",
        next_step="look at `position`: if the engine made the same token, its weights or cache are wrong; if not, the "
        "result was changed on the way",
        reads=Fact.ANSWERS | Fact.POLICY | Fact.ADAPTERS,
        source="vLLM documentation, SamplingParams.temperature: zero means greedy sampling",
        rule=_greedy,
        asks=lambda _, rows: (row.score for row in rows if is_greedy(row)),
        labels=labels,
        methods=methods,
    )


def _both(facet: str, rows: dict[str, Answer]) -> dict[str, Any]:
    """A facet of two rows; tokens and texts where they part."""
    values = {label: getattr(row, facet) for label, row in rows.items()}
    return values if facet == "finish_reason" or None in values.values() else parting(**values)


def same_output(first: str, second: str) -> Check:
    """Call(s) `second` returned the rows of call(s) `first` again, to the token, with the same end and text."""

    def told(facet: str, one: Answer, other: Answer) -> list[tuple[str, dict[str, Any]]]:
        """What is wrong with two rows, once of each: one of them is at fault, and nobody knows which."""
        both = _both(facet, {first: one, second: other})
        return [(f"{facet} differ between {first} and {second}", row.shown(**both)) for row in (one, other)]

    def judge(evidence: Evidence) -> Finding:
        pairs = _pairs(evidence, first, second)
        if isinstance(pairs, Finding):
            return pairs
        wrong = [
            piece
            for pair in pairs
            if (facet := _first_other(*pair)) is not None and not _rounding_parts(evidence, *pair)
            for piece in told(facet, *pair)
        ]
        if wrong:
            return concluded(3 * len(pairs), wrong)
        drawn = [pair for pair in pairs if not is_greedy(pair[0])]
        parted = [pair for pair in drawn if pair[0].tokens != pair[1].tokens]
        if not parted:
            return passed(3 * len(pairs))
        # A temperature divides logits, and with them their noise.
        coldest = min(one.params.get("temperature", 1.0) for one, _ in drawn)
        margin = draws_repeat([(one.tokens, other.tokens) for one, other in drawn], evidence.noise.rms / coldest)
        if margin.measured > margin.bound:
            return concluded(len(pairs), [piece for pair in parted for piece in told("tokens", *pair)])
        return passed(3 * len(pairs), margin=margin)

    return Check(
        name=f"tokens.same:{first}={second}",
        fault="an output depends on its place in a batch, on the load, or on earlier requests",
        next_step="look at `first difference`, and at what ran beside each of the two calls: batch, load, cache, retries",
        reads=Fact.ANSWERS | Fact.TEXT | Fact.CHANCE,
        source="vLLM documentation, SamplingParams.seed",
        judge=judge,
        queries=lambda evidence: _queries_of_same(evidence, first, second),
    )


def _first_other(one: Answer, other: Answer) -> str | None:
    """The first facet in which two rows differ; None if they are the same."""
    return next((f for f in ("tokens", "finish_reason", "text") if getattr(one, f) != getattr(other, f)), None)


def _rounding_parts(evidence: Evidence, one: Answer, other: Answer) -> bool:
    """True if two rows may differ by rounding: greedy ones if both follow the model, except near ties; sampled ones always, since
    `draws_repeat` judges them together. Always False on repeatable engines."""
    if evidence.repeatable or one.tokens == other.tokens:
        return False
    if not is_greedy(one):
        return True
    scores = [evidence.reference.score(row.score) for row in (one, other)]
    return len(one.tokens) == len(other.tokens) and all(ties.parts_at(evidence, score) is None for score in scores)


def _queries_of_same(evidence: Evidence, first: str, second: str) -> Iterator[Query]:
    yield from matching.queries(evidence)
    if evidence.repeatable:
        return
    pairs = _pairs(evidence, first, second)
    if not isinstance(pairs, Finding):
        yield from (row.score for pair in pairs if is_greedy(pair[0]) for row in pair)


def different_output(first: str, second: str) -> Check:
    """At least half of the rows that calls `first` and `second` share differ."""

    def judge(evidence: Evidence) -> Finding:
        pairs = _pairs(evidence, first, second)
        if isinstance(pairs, Finding):
            return pairs
        same = [(one, other) for one, other in pairs if one.tokens == other.tokens]
        if 2 * len(same) > len(pairs):
            return failed(len(pairs), f"outputs of {first} and {second} are the same", [same[0][0].shown()])
        return passed(len(pairs), same=len(same))

    return Check(
        name=f"tokens.differ:{first}!={second}",
        fault="a seed is ignored, or a fixed one is used in its place",
        reads=Fact.ANSWERS | Fact.CHANCE,
        source="vLLM documentation, SamplingParams.seed",
        judge=judge,
        queries=matching.queries,
    )


def _pairs(evidence: Evidence, first: str, second: str) -> list[tuple[Answer, Answer]] | Finding:
    """Rows of `first` with those of `second` that have the same prompt. Each row of `first` must have one."""
    found: list[list[Answer]] = []
    for label in (first, second):
        calls = select(evidence, (label,), ("generate", "sample"))
        wrong = trouble(calls, (label,), ("generate", "sample"))
        if wrong is not None:
            return wrong
        found.append(answers(evidence, calls))
    return _by_prompt(found[0], found[1], first, second)


def _by_prompt(
    ones: Sequence[Answer], others: Sequence[Answer], first: str, second: str
) -> list[tuple[Answer, Answer]] | Finding:
    by_prompt: dict[tuple[int, ...], list[Answer]] = {}
    for other in others:
        by_prompt.setdefault(tuple(other.prompt), []).append(other)
    pairs = [(one, other) for one in ones for other in by_prompt.get(tuple(one.prompt), ())]
    if {id(one) for one, _ in pairs} != {id(one) for one in ones}:
        return untestable(f"a prompt of {first} was not asked again in {second}")
    return pairs
