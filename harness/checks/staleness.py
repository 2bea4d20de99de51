"""Which policy version an answer was made by: the one that was synced, and no other, its KV cache included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable
from harness.checks.matching import Row, rows
from harness.reference import ScoreRequest, UnansweredQuery

BLOCK = 128
"""Tokens of a prefix-cache block on a CPU, the largest that vLLM uses: a longer prompt is cached on any engine."""

NEAR_TIE = 1e-3
"""Nats. Where the reference's own margin is below this, either token may come first in float32 (CPU noise is 1e-5)."""

NOT_ASKED = "the reference was not asked for the scores of an answer"
NO_GREEDY = "no greedy answer was made under one policy version"


def _greedy(evidence: Evidence) -> list[tuple[Row, int]]:
    """Greedy rows of generate() that no sync overlaps, each with the version that answered."""
    syncs = evidence.calls("sync_weights")
    found = []
    for row in rows(evidence):
        call = row.call
        if call.method != "generate" or row.state != "returned" or row.prompt is None or not row.tokens:
            continue
        if row.params.get("temperature") != 0:
            continue
        if any(s.started_ns < call.ended_ns and s.ended_ns > call.started_ns for s in syncs):
            continue
        found.append((row, evidence.version_at(call.started_ns)))
    return found


def _others(evidence: Evidence, version: int) -> list[int]:
    versions = {0, *(call.request["version"] for call in evidence.calls("sync_weights"))}
    return sorted(versions - {version})


def _queries(evidence: Evidence) -> Iterator[ScoreRequest]:
    """First each answer under its own version; then, for those that do not follow it, under all others."""
    answers = _greedy(evidence)
    for row, version in answers:
        yield _score_of(evidence, row, version)
    for row, version in answers:
        if _first_doubt(evidence, row, version) is not None:  # UnansweredQuery in the first round: the next one knows
            for other in _others(evidence, version):
                yield _score_of(evidence, row, other)


def _score_of(evidence: Evidence, row: Row, version: int) -> ScoreRequest:
    return ScoreRequest(
        version=version,
        adapter=evidence.adapter_at(row.call),
        quantization=evidence.header.topology.quantization,
        prompt=list(row.prompt or ()),
        tokens=list(row.tokens or ()),
    )


def _first_doubt(evidence: Evidence, row: Row, version: int) -> int | None:
    """Where the answer first parts from that version's greedy choice; None if it follows it to the end."""
    score = evidence.reference.score(_score_of(evidence, row, version))
    best = zip(score.ranks, score.margins, strict=True)
    return next((at for at, (rank, margin) in enumerate(best) if rank > 0 and margin > NEAR_TIE), None)


def _follow(evidence: Evidence, answers: list[tuple[Row, int]], neither: str) -> Finding:
    """Does each answer follow its version? An answer that follows an older one was made by stale weights."""
    if not answers:
        return untestable(NO_GREEDY)
    reasons, shown = set(), []
    facts = 0
    try:
        for row, version in answers:
            facts += len(row.tokens or ())
            at = _first_doubt(evidence, row, version)
            if at is None:
                continue
            old = [v for v in _others(evidence, version) if _first_doubt(evidence, row, v) is None]
            reasons.add("an answer was made by a policy version that had been replaced" if old else neither)
            shown.append({**row.shown, "version": version, "follows versions": old, "parts at token": at})
    except UnansweredQuery:
        return untestable(NOT_ASKED)
    return failed(facts, "; ".join(sorted(reasons)), shown) if shown else passed(facts)


def _judge_current(evidence: Evidence) -> Finding:
    return _follow(evidence, _greedy(evidence), "an answer follows no policy version")


CURRENT_POLICY = Check(
    name="current_policy",
    fault="a server answers with the weights from before the sync",
    source="SkyRL #1014, tasks 1 to 3: weight sync; the answer must be the synced policy's",
    judge=_judge_current,
    queries=_queries,
)


def _judge_fresh_cache(evidence: Evidence) -> Finding:
    """Only answers to prompts of more than a block that were answered under another version before."""
    seen: dict[tuple[int, ...], set[int]] = defaultdict(set)
    again = []
    for row, version in sorted(_greedy(evidence), key=lambda found: found[0].call.started_ns):
        if row.prompt is None or len(row.prompt) <= BLOCK:
            continue
        if seen[row.prompt] - {version}:
            again.append((row, version))
        seen[row.prompt].add(version)
    if not again:
        return untestable("no prompt longer than a prefix-cache block was answered before and after a sync")
    return _follow(evidence, again, "an answer after a sync mixes policy versions: its prefix cache is stale")


FRESH_CACHE = Check(
    name="fresh_prefix_cache",
    fault="after a sync and a cache reset, attention still reads keys and values of the old policy",
    source="SkyRL API reference, reset_prefix_cache; SkyRL's trainers reset it with every sync",
    judge=_judge_fresh_cache,
    queries=_queries,
)


def _by_prompt(evidence: Evidence) -> dict[tuple[int, ...], list[tuple[Row, int]]]:
    found: dict[tuple[int, ...], list[tuple[Row, int]]] = defaultdict(list)
    for row, version in _greedy(evidence):
        found[row.prompt or ()].append((row, version))
    return found


def _judge_same_output(evidence: Evidence) -> Finding:
    facts = 0
    for answers in _by_prompt(evidence).values():
        first: dict[int, Row] = {}
        for row, version in answers:
            before = first.setdefault(version, row)
            if before is row:
                continue
            facts += 1
            if before.tokens != row.tokens or before.finish_reason != row.finish_reason:
                shown = {
                    **row.shown,
                    "version": version,
                    "before": list(before.tokens or ())[:16],
                    "after": list(row.tokens or ())[:16],
                }
                return failed(facts, "a policy version answers otherwise the second time", [shown])
    return passed(facts) if facts else untestable("no prompt was answered twice by the same version")


SAME_VERSION_SAME_OUTPUT = Check(
    name="same_version_same_output",
    fault="a sync of the weights that are there, or a sleep, changes what the engines answer",
    source="architecture, idempotent sync and cold equality",
    judge=_judge_same_output,
)


def _judge_forced(evidence: Evidence) -> Finding:
    pairs: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for answers in _by_prompt(evidence).values():
        by_version = {version: row for row, version in answers}
        for one in sorted(by_version):
            for other in sorted(by_version):
                if one < other:
                    pairs[one, other].append(by_version[one].tokens != by_version[other].tokens)
    unmoved = [{"versions": list(pair), "prompts": len(moved)} for pair, moved in pairs.items() if not any(moved)]
    if unmoved:
        return failed(len(pairs), "syncing another version does not change the answers", unmoved)
    return passed(len(pairs)) if pairs else untestable("no prompt was answered under two policy versions")


FORCED_EFFECT = Check(
    name="forced_effect",
    fault="a sync reports success and has no effect",
    source="architecture, forced effect: a weight version made large enough must change the output",
    judge=_judge_forced,
)
