"""Greedy answers under one policy version: a sync moves them, and the same version gives them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from harness.checks import ties
from harness.checks.answers import nothing_to_judge
from harness.checks.base import Check, Evidence, Finding, concluded, kept, untestable
from harness.checks.matching import Row, assignment, queries, rows
from harness.checks.tokens import RESHAPING
from harness.checks.weights import MOVES_PARAMETERS
from harness.contract.faults import Fact
from harness.records.differing import parting
from harness.records.recording import Call
from harness.records.reference import Query, Score, ScoreRequest, UnansweredQuery

BLOCK = 128
"""Tokens of a prefix-cache block on a CPU, the largest that vLLM uses: a longer prompt is cached on any engine."""

NOT_HIT = "no engine's prefix cache held a prompt that was answered again"
NOT_TOLD = "no engine says how many tokens of a prompt its prefix cache held"
NOTHING_BETWEEN = "nothing that could change an answer happened between two answers of a version"
CHANGES_ANSWERS = (*MOVES_PARAMETERS, "write_lora_adapter", "unload_lora_adapter", "reset_prefix_cache")
"""Calls that may change the engines' answers, on purpose or not."""
NOT_ASKED = "the reference was not asked for the scores of an answer"
NO_GREEDY = "no greedy answer was made under one policy version"


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """A greedy row of generate() and its weights: policy version, and version of the adapter if any."""

    row: Row
    version: int
    adapter: int | None


def greedy_answers(evidence: Evidence) -> list[Answered]:
    """Returned greedy rows of generate() that use only the model's own distribution. Neither a sync nor a change of their
    adapter overlaps them, and their adapter is loaded: `errors.named` judges answers under another name."""
    syncs = evidence.calls("sync_weights")
    found = []
    for row in rows(evidence):
        call = row.call
        if call.method != "generate" or row.state != "returned" or row.prompt is None or not row.tokens:
            continue
        if row.params.get("temperature") != 0 or any(row.params.get(name) for name in RESHAPING):
            continue
        if any(overlap(change, call) for change in (*syncs, *_changes_of_its_adapter(evidence, call))):
            continue
        version, adapter = evidence.version_at(call.started_ns), evidence.adapter_at(call)
        if adapter is None and call.request.get("lora_adapter") is not None:
            continue
        found.append(Answered(row=row, version=version, adapter=adapter))
    return found


def overlap(one: Call, other: Call) -> bool:
    """True if the two calls overlap in time."""
    return one.started_ns < other.ended_ns and one.ended_ns > other.started_ns


def _changes_of_its_adapter(evidence: Evidence, call: Call) -> list[Call]:
    name = call.request.get("lora_adapter")
    if name is None:
        return []
    changes = (*evidence.calls("load_lora_adapter"), *evidence.calls("unload_lora_adapter"))
    return [change for change in changes if change.request["name"] == name]


Others = Callable[[Evidence, Answered], list[Answered]]
"""Other weights that may have made an answer by mistake."""


def questions(evidence: Evidence, answers: Sequence[Answered], others: Others) -> Iterator[ScoreRequest]:
    """First each answer under its own weights; then, for those that do not follow them, under all others."""
    for answer in answers:
        yield score_of(evidence, answer)
    for answer in answers:
        if first_doubt(evidence, answer) is not None:  # UnansweredQuery in the first round: the next one has the answer
            for other in others(evidence, answer):
                yield score_of(evidence, other)


def score_of(evidence: Evidence, answer: Answered) -> ScoreRequest:
    """The question for the scores of an answer under its weights."""
    return ScoreRequest(
        version=answer.version,
        adapter=answer.adapter,
        quantization=evidence.header.topology.quantization,
        prompt=list(answer.row.prompt or ()),
        tokens=list(answer.row.tokens or ()),
        routed=evidence.followed(answer.row.routed),
    )


def first_doubt(evidence: Evidence, answer: Answered) -> int | None:
    """Where the answer first differs from the greedy choice of its weights; None if it follows it to the end."""
    return ties.parts_at(evidence, evidence.reference.score(score_of(evidence, answer)))


def follow(
    evidence: Evidence, answers: Sequence[Answered], others: Others, *, replaced: str, neither: str, **numbers: float
) -> Finding:
    """Judges if each answer follows its weights. The reason is `replaced` if it follows others instead, else `neither`. `numbers`
    say what put the promise to the test."""
    if not answers:
        return untestable(NO_GREEDY)
    wrong: list[tuple[str, dict[str, Any]]] = []
    scores: list[Score] = []
    facts = 0
    try:
        for answer in answers:
            facts += len(answer.row.tokens or ())
            scores.append(evidence.reference.score(score_of(evidence, answer)))
            at = ties.parts_at(evidence, scores[-1])
            if at is None:
                continue
            old = [other for other in others(evidence, answer) if first_doubt(evidence, other) is None]
            shown = {**_shown(answer), "follows": [_weights(other) for other in old], "parts at token": at}
            wrong.append((replaced if old else neither, shown))
    except UnansweredQuery:
        return untestable(NOT_ASKED)
    return concluded(facts, wrong, margin=ties.margin(evidence, scores), **numbers)


def _shown(answer: Answered) -> dict[str, Any]:
    return {**answer.row.shown, **_weights(answer)}


def _weights(answer: Answered) -> dict[str, int]:
    adapter = {} if answer.adapter is None else {"adapter": answer.adapter}
    return {"version": answer.version, **adapter}


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a prompt longer than a cache block that other weights answered before. `hit`: True if an engine that took it up had
    served that earlier prompt from its prefix cache, so that the cache held it."""

    answer: Answered
    hit: bool


def asked_again(
    evidence: Evidence,
    answers: Sequence[Answered],
    prompt: Callable[[Answered], Any],
    weights: Callable[[Answered], Any],
) -> list[Again]:
    """Of `answers`, in order, those whose `prompt` other `weights` answered before."""
    seen: dict[Any, set[Any]] = defaultdict(set)
    held: dict[Any, set[tuple[str, Any]]] = defaultdict(set)
    found = []
    for answer in answers:
        asked, by = prompt(answer), weights(answer)
        if len(answer.row.prompt or ()) <= BLOCK:
            continue
        executions = assignment(evidence).where(answer.row)
        if seen[asked] - {by}:
            here = {e.server for e in executions}
            found.append(Again(answer=answer, hit=any(at in here and other != by for at, other in held[asked])))
        seen[asked].add(by)
        held[asked] |= {(e.server, by) for e in executions if cached_tokens(evidence).get((e.server, e.request_id))}
    return found


def after_hits(evidence: Evidence, again: Sequence[Again], others: Others, *, replaced: str, neither: str) -> Finding:
    """`follow`, and untestable if no engine's cache held a prompt that other weights answered later: nothing could be stale."""
    hits = sum(one.hit for one in again)
    answers = [one.answer for one in again]
    found = follow(evidence, answers, others, replaced=replaced, neither=neither, cache_hits=hits)
    if found.status != "pass" or hits:
        return found
    return untestable(NOT_HIT if cached_tokens(evidence) else NOT_TOLD)


@kept
def cached_tokens(evidence: Evidence) -> dict[tuple[str, str], int]:
    """(server, request) → prompt tokens that the engine took from its prefix cache, as it counts them itself. Requests of which the
    tap could not read the number are left out."""
    ended = (seen for seen in evidence.trace.observations if seen.kind == "finish")
    told = ((seen.server, seen.data["request_id"], seen.data.get("cached_tokens")) for seen in ended)
    return {(server, request): tokens for server, request, tokens in told if tokens is not None}


def _by_prompt(evidence: Evidence) -> dict[tuple[Any, ...], list[Answered]]:
    """Answers by prompt and adapter: within a group only the policy version differs."""
    found: dict[tuple[Any, ...], list[Answered]] = defaultdict(list)
    for answer in greedy_answers(evidence):
        if answer.row.finish_reason != "abort":  # an abort comes after a random number of tokens
            found[answer.row.prompt, answer.adapter].append(answer)
    return found


def _same_version(evidence: Evidence) -> Iterator[tuple[Answered, Answered]]:
    """Each answer beside the first one of the same prompt, adapter and version."""
    for answers in _by_prompt(evidence).values():
        first: dict[int, Answered] = {}
        for answer in answers:
            if (before := first.setdefault(answer.version, answer)) is not answer:
                yield before, answer


def _otherwise(before: Answered, after: Answered) -> bool:
    return before.row.tokens != after.row.tokens or before.row.finish_reason != after.row.finish_reason


def _may_part(evidence: Evidence, before: Answered, after: Answered) -> bool:
    """True if rounding may part two answers of equal length; never on repeatable engines."""
    return (
        not evidence.repeatable
        and before.row.finish_reason == after.row.finish_reason
        and len(before.row.tokens or ()) == len(after.row.tokens or ())
    )


def _ask_same_output(evidence: Evidence) -> Iterator[Query]:
    yield from queries(evidence)
    for pair in _same_version(evidence):
        if _otherwise(*pair) and _may_part(evidence, *pair):
            yield from (score_of(evidence, answer) for answer in pair)


def _judge_same_output(evidence: Evidence) -> Finding:
    facts = 0
    wrong: list[tuple[str, dict[str, Any]]] = []
    parted: list[Score] = []
    changes = [c for method in CHANGES_ANSWERS for c in evidence.calls(method) if c.error is None]
    between: set[int] = set()
    for before, after in _same_version(evidence):
        facts += 1
        between |= {c.id for c in changes if before.row.call.started_ns < c.started_ns < after.row.call.ended_ns}
        if not _otherwise(before, after):
            continue
        if _may_part(evidence, before, after):
            scores = [evidence.reference.score(score_of(evidence, answer)) for answer in (before, after)]
            if all(ties.parts_at(evidence, score) is None for score in scores):
                parted += scores
                continue
        both = parting(before=before.row.tokens or (), after=after.row.tokens or ())
        wrong.append(("a policy version answers otherwise the second time", {**_shown(after), **both}))
    if not facts:
        why = "no prompt was answered twice by the same version"
        return nothing_to_judge(evidence, why, ("generate", "sync_weights"))
    if not between and not wrong:
        return untestable(NOTHING_BETWEEN)
    margin = ties.margin(evidence, parted) if parted else None
    return concluded(facts, wrong, margin=margin, changes_between=len(between))


SAME_VERSION_SAME_OUTPUT = Check(
    name="same_version_same_output",
    fault="a sync of the current weights, or a sleep, changes the engines' answers",
    next_step="look at what came between the two answers in the evidence: a sync, another adapter, or a cache that was not reset",
    reads=Fact.ANSWERS | Fact.POLICY | Fact.ADAPTERS,
    source="architecture, idempotent sync and cold equality",
    judge=_judge_same_output,
    queries=_ask_same_output,
)


def _judge_forced(evidence: Evidence) -> Finding:
    pairs: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for answers in _by_prompt(evidence).values():
        by_version = {answer.version: answer.row for answer in answers}
        for one in sorted(by_version):
            for other in sorted(by_version):
                if one < other:
                    pairs[one, other].append(by_version[one].tokens != by_version[other].tokens)
    wrong = [
        ("syncing another version does not change the answers", {"versions": list(pair), "prompts": len(moved)})
        for pair, moved in pairs.items()
        if not any(moved)
    ]
    if not pairs:
        return untestable("no prompt was answered under two policy versions")
    return concluded(len(pairs), wrong, versions=len({version for pair in pairs for version in pair}))


FORCED_EFFECT = Check(
    name="forced_effect",
    fault="a sync reports success and has no effect",
    next_step="look at whether the engine loads what the sync sends: the outputs do not change with the version",
    reads=Fact.POLICY,
    source="architecture, forced effect: a weight version made large enough must change the output",
    judge=_judge_forced,
)
