"""After a sync frozen requests continue with the new weights, on the keys and values that the old weights left."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from harness.checks import ties
from harness.checks.base import Check, Evidence, Execution, Finding, concluded, passed, untestable
from harness.checks.matching import Row, queries
from harness.checks.staleness import overlapped, read_anew
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.reference import Query, Score, ScoreRequest

NONE_FROZEN = "no request was frozen through a sync with its cache kept"
ALIKE = "no answer shows which weights and which cache made it: all would have given the same tokens"
OLD_WEIGHTS = "a frozen request goes on with the weights from before the sync"
READ_ANEW = "a frozen request is read anew after a sync, where its cache was to be kept"
NOT_FROZEN = "a request that was to be frozen made tokens during a sync"
NEITHER = "what a frozen request goes on with is not the new weights on the cache that it had"


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that an engine made for a request between two syncs, as three questions: `score` for the right weights and cache,
    `stale` for the weights from before the sync, `anew` for an empty cache."""

    row: Row
    score: ScoreRequest
    stale: ScoreRequest
    anew: ScoreRequest


def _syncs(evidence: Evidence) -> list[Call]:
    return [call for call in evidence.calls("sync_weights") if call.error is None]


def _within(execution: Execution, syncs: list[Call]) -> list[int]:
    """Times at which this execution made tokens in the middle of a sync, under unknown weights."""
    return [at for at in execution.step_ns if any(sync.started_ns <= at <= sync.ended_ns for sync in syncs)]


def _rests(evidence: Evidence) -> list[Rest]:
    syncs, anew_ns = _syncs(evidence), read_anew(evidence)
    return [
        rest for row, execution in overlapped(evidence) for rest in _rests_of(evidence, row, execution, syncs, anew_ns)
    ]


def _rests_of(
    evidence: Evidence, row: Row, execution: Execution, syncs: list[Call], anew_ns: list[int]
) -> Iterator[Rest]:
    """The rests of one execution, as long as its cache was kept. A frozen engine has read all tokens but the newest."""
    made = execution.step_ns
    if not made or _within(execution, syncs):
        return
    ends = sorted({sum(at < sync.started_ns for at in made) for sync in syncs} | {len(made)})
    cached: tuple[tuple[int, int], ...] = ()
    read, version = 0, evidence.version_at(made[0])
    for start, stop in itertools.pairwise(ends):
        if start == 0:
            continue  # the new version made all of it, which `whole_version` judges
        if any(made[0] <= at <= made[start] for at in anew_ns):
            return
        before, version = version, evidence.version_at(made[start])
        upto = len(execution.prompt) + start - 1
        earlier, cached = cached, (*cached, (upto - read, before))
        read = upto
        asked = ScoreRequest(
            version=version,
            quantization=evidence.header.topology.quantization,
            prompt=[*execution.prompt, *execution.tokens[:start]],
            tokens=list(execution.tokens[start:stop]),
        )
        yield Rest(
            row=row,
            score=msgspec.structs.replace(asked, cached=cached),
            stale=msgspec.structs.replace(asked, version=before, cached=earlier),
            anew=asked,
        )


def _queries(evidence: Evidence) -> Iterator[Query]:
    yield from queries(evidence)
    for rest in _rests(evidence):
        yield from (rest.score, rest.stale, rest.anew)


def _judge(evidence: Evidence) -> Finding:
    rests, syncs = _rests(evidence), _syncs(evidence)
    scores: list[Score] = []
    wrong = [
        (NOT_FROZEN, {**row.shown, "tokens during a sync": len(melted)})
        for row, execution in overlapped(evidence)
        if (melted := _within(execution, syncs))
    ]
    if not rests and not wrong:
        return untestable(NONE_FROZEN)
    told = {OLD_WEIGHTS: 0, READ_ANEW: 0}
    for rest in rests:
        score = evidence.reference.score(rest.score)
        others = {OLD_WEIGHTS: rest.stale, READ_ANEW: rest.anew}
        followed = [
            why for why, asked in others.items() if ties.parts_at(evidence, evidence.reference.score(asked)) is None
        ]
        at = ties.parts_at(evidence, score)
        scores.append(score)
        if at is not None:
            shown = {**rest.row.shown, "version": rest.score.version, "cached": rest.score.cached, "parts at token": at}
            wrong.append((followed[0] if followed else NEITHER, shown))
        for why in told.keys() - set(followed):
            told[why] += 1
    facts = sum(len(rest.score.tokens) for rest in rests)
    if wrong:
        return concluded(facts, wrong)
    if not all(told.values()):
        return untestable(ALIKE)
    frozen = len({(rest.row.call.id, rest.row.index) for rest in rests})
    return passed(facts, margin=ties.margin(evidence, scores), interrupted=frozen, syncs=len(syncs))


KEPT_CACHE = Check(
    name="kept_cache",
    fault="frozen requests continue with the weights from before a sync, or their cache is dropped and read again",
    next_step="look at whether pause or resume clears the prefix cache, and at which weights made the blocks that were kept",
    reads=Fact.ANSWERS | Fact.POLICY | Fact.PAUSES,
    source='SkyRL 0.2.0, RemoteInferenceClient.pause, KEEP: "They resume where they left off on /resume. KV cache is preserved."',
    judge=_judge,
    queries=_queries,
)
