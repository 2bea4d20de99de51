"""The weights as a history: syncs write versions, tokens read them. Is there an order of events that explains every token?

The engines' own greedy tokens are judged, whichever call asked for them. The oracle says which versions explain them, on which keys
and values; `harness.checks.register` says whether these versions fit the syncs, along each server and each session. A sync that
failed has an unknown outcome. `every_parameter` judges digests; here they show which version a server held at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import msgspec

from harness.checks import ties
from harness.checks.answers import nothing_to_judge
from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded, kept, untestable
from harness.checks.matching import WITH_ROWS, Row, queries
from harness.checks.pausing import pauses, row_of
from harness.checks.register import NOT_YET, REPLACED, WENT_BACK, Read, Write, Writes, unexplained
from harness.checks.staleness import (
    BLOCK,
    NOT_ASKED,
    NOT_HIT,
    NOT_TOLD,
    asked_again,
    cached_tokens,
    greedy_answers,
    overlap,
)
from harness.checks.tokens import RESHAPING
from harness.checks.weights import about_versions, moved_before, shown_whole
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.reference import Query, Score, ScoreRequest, UnansweredQuery

RULES = (
    *RESHAPING,
    "structured_outputs",
    "guided_decoding",
    "logits_processors",
)
"""Parameters as an engine takes them under which a greedy token need not be the model's own choice."""
BY = {why: f"an engine made tokens with a version that {why}" for why in (REPLACED, NOT_YET, WENT_BACK)}
NO_VERSION = "an engine made tokens that no version of the weights explains"
OLD_KEYS = "an engine read keys and values that are older than its cache may be"
READ_ANEW = "an engine read a frozen request anew, where its cache was to be kept"
NOT_FROZEN = "an engine made tokens during a sync, for requests that a pause was to freeze"
NO_GREEDY = "no engine made greedy tokens"
NO_CHANGE = "nothing was answered after a call that could leave old weights"
SILENT = "a server answered nothing after the weights had changed"
NONE_WAITED = "no request that a sync overlaps was worked on by a new version alone"
NONE_FROZEN = "no request was frozen through a sync with its cache kept"
ALIKE = "no answer shows which weights and which cache made it: all would have given the same tokens"
MOST_PATHS = 8
"""Most ways in which syncs may have met a request that are followed at once. More are left open."""

Cache = tuple[tuple[int, int], ...]
"""As `ScoreRequest.cached`."""


class Path(NamedTuple):
    """One way in which syncs may have met a request: the last write that it read, and what its cache holds."""

    write: int
    cache: Cache


class Span(NamedTuple):
    """Consecutive tokens of an execution that the same writes may have made. `dropped`: number of times that running requests
    lost their keys and values before; None: at an unknown moment."""

    start: int
    stop: int
    from_ns: int
    to_ns: int
    first: int
    last: int
    dropped: int | None


class Left(NamedTuple):
    """What an execution may have left in its server's prefix cache, if it is of several versions."""

    execution: Execution
    adapter: int | None
    salt: str | None
    caches: tuple[Cache, ...]
    """Of the tokens that it read, from the first on."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Judged tokens of one execution. `right`: the questions to the oracle of which one must agree, by the write that they are
    about. `suspects`: what else may have made them, by what is wrong then."""

    execution: Execution
    row: Row | None
    span: Span
    right: dict[Path, ScoreRequest]
    suspects: dict[str, list[ScoreRequest]]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found out about a recording."""

    pieces: list[Piece]
    reads: list[Read]
    scores: list[Score]
    wrong: list[tuple[str, dict[str, Any]]]
    open: int
    """Pieces that no version explains, where a sync of unknown outcome, or one that they overlap, may have left anything."""


@kept
def writes_of(evidence: Evidence) -> Writes:
    """The clean room's version 0, and every sync."""
    began = Write(version=0, from_ns=0, to_ns=0)
    syncs = evidence.calls("sync_weights")
    return Writes([began, *(Write(c.request["version"], c.started_ns, None if c.error else c.ended_ns) for c in syncs)])


def _cleared(evidence: Evidence) -> list[Call]:
    """Calls that emptied the prefix cache."""
    by_workers = (call for call in evidence.calls("sync_weights") if call.request.get("training"))
    found = [*evidence.calls("reset_prefix_cache"), *evidence.calls("sleep"), *_clearing_pauses(evidence), *by_workers]
    return [call for call in found if call.error is None]


def _clearing_pauses(evidence: Evidence) -> list[Call]:
    return [call for call in evidence.calls("pause") if call.request.get("clear_cache") and call.error is None]


Judged = tuple[Execution, Row | None, int | None]
"""A greedy request of an engine, its row, and the version of its adapter."""


def _judged(evidence: Evidence) -> Iterator[Judged]:
    """The engines' greedy requests, each with its row and the version of its adapter. A request without a row, whose adapter is
    unknown, is left out if there are adapters."""
    adapters = [*evidence.calls("load_lora_adapter"), *evidence.calls("unload_lora_adapter")]
    for execution in evidence.executions:
        params = execution.sampling_params
        plain = params.get("temperature") == 0 and not any(params.get(name) for name in RULES)
        if not plain or params.get("repetition_penalty", 1) != 1 or not execution.tokens or not execution.prompt:
            continue
        row = row_of(evidence).get((execution.server, execution.request_id))
        if not adapters:
            yield execution, row, None
        elif row is not None and not any(overlap(change, row.call) for change in adapters):
            yield execution, row, evidence.adapter_at(row.call)


def _spans(evidence: Evidence, execution: Execution) -> list[Span]:
    """The tokens of an execution by the writes that may have made them.

    A token that was seen after a pause was made after it; the first one may have been begun before, unless its request came during
    the pause. A pause that clears the cache does so after the last token before it.
    """
    writes, made, held = writes_of(evidence), execution.step_ns, pauses(evidence)
    resets = [
        c for c in evidence.calls("reset_prefix_cache") if c.request.get("reset_running_requests") and not c.error
    ]
    keep = [c for c in _clearing_pauses(evidence) if c.request.get("mode", "keep") == "keep"]
    since = max([execution.started_ns, *(p.to_ns for p in held if p.from_ns <= execution.started_ns <= p.to_ns)])
    each = []
    for number, seen in enumerate(made):
        if number:
            since = max([since, *(p.to_ns for p in held if p.to_ns <= seen)])
        unsure = any(c.started_ns < seen and c.ended_ns > max(since, made[0]) for c in resets)
        times = sum(made[0] <= call.ended_ns <= since for call in (*resets, *keep))
        each.append((since, seen, *writes.window(since, seen), None if unsure else times))
        since = seen
    spans, start = [], 0
    for (first, last, dropped), group in groupby(each, lambda one: one[2:]):
        tokens = list(group)
        spans.append(Span(start, start + len(tokens), tokens[0][0], tokens[-1][1], first, last, dropped))
        start += len(tokens)
    return spans


def _salted_since(evidence: Evidence, row: Row | None) -> int:
    """When the salt of the row's call was first used; 0 without one. No block of before is shared (vLLM, cache_salt)."""
    salt = _salt(row)
    if salt is None:
        return 0
    return min(c.started_ns for c in evidence.calls("generate") if c.request.get("cache_salt") == salt)


def _salt(row: Row | None) -> str | None:
    return None if row is None else row.call.request.get("cache_salt")


def _begun_on(
    evidence: Evidence, execution: Execution, row: Row | None, span: Span, left: Iterable[Left]
) -> tuple[list[Cache], list[Cache]]:
    """What the prefix cache may have held of the prompt: (allowed, older than it may be). It is of one version, or as earlier
    requests `left` it: a turn of a conversation finds the turns before it, of which each may have been read by another version.
    """
    writes = writes_of(evidence)
    told = cached_tokens(evidence).get((execution.server, execution.request_id))
    number = (len(execution.prompt) - 1) // BLOCK * BLOCK if told is None else told
    cleared = [call.started_ns for call in _cleared(evidence) if call.ended_ns <= execution.started_ns]
    oldest, _ = writes.window(max([_salted_since(evidence, row), *cleared]), execution.started_ns)
    by = [((number, write.version),) for write in writes.all[: span.last + 1] if number]
    now = writes.all[span.last].version
    allowed = [cache for cache in by[oldest:] if cache[0][1] != now]
    since = max(cleared, default=0)
    begin = execution.prompt[:number]
    mixed = [
        cache
        for one in left
        if since <= one.execution.started_ns and (*one.execution.prompt, *one.execution.tokens)[:number] == begin
        for cache in map(partial(_first, number), one.caches)
        if len(cache) > 1 and sum(count for count, _ in cache) == number
    ]
    return list(dict.fromkeys([(), *allowed, *mixed])), list(dict.fromkeys(by[:oldest]))


def _first(number: int, cache: Cache) -> Cache:
    """The part of a cache that holds the first `number` tokens."""
    found, rest = [], number
    for count, version in cache:
        if rest:
            found.append((min(count, rest), version))
            rest -= found[-1][0]
    return tuple(found)


Look = Callable[[Piece], list[Path]]
"""Says which paths explain a piece. Raises UnansweredQuery if the oracle was not asked."""


def _follow(evidence: Evidence, judged: Judged, look: Look, left: list[Left]) -> None:
    """Looks at each piece of an execution in order, up to one that nothing explains, or whose cache is unknown. Adds to `left` what
    the execution leaves in the cache, if several versions read it."""
    execution, row, adapter = judged
    writes, tokens = writes_of(evidence), list(execution.tokens)
    whole = row is not None and row.tokens == execution.tokens
    routed = evidence.followed(row.routed) if row is not None and whole else []
    spans = _spans(evidence, execution)
    alike = [
        one
        for one in left
        if one.execution.server == execution.server and (one.adapter, one.salt) == (adapter, _salt(row))
    ]
    begun, older = _begun_on(evidence, execution, row, spans[0], alike)
    paths, dropped = [Path(spans[0].first, cache) for cache in begun], 0
    for span in spans:
        if span.dropped is None or not 0 < len(paths) <= MOST_PATHS:
            return
        context = [*execution.prompt, *tokens[: span.start]]

        def asked(version: int, cache: Cache, span: Span = span, context: list[int] = context) -> ScoreRequest:
            return ScoreRequest(
                version=version,
                adapter=adapter,
                quantization=evidence.header.topology.quantization,
                prompt=context,
                tokens=tokens[span.start : span.stop],
                cached=() if all(by == version for _, by in cache) else cache,
                routed=routed[: len(execution.prompt) + span.stop - 1],
            )

        if span.dropped > dropped:
            dropped, older = span.dropped, [path.cache for path in paths]
            paths = [path._replace(cache=()) for path in paths]
        paths = list(dict.fromkeys(paths))
        numbers = range(span.first, span.last + 1)
        versions = {writes.all[number].version: None for number in numbers}
        caches = dict.fromkeys(path.cache for path in paths)
        piece = Piece(
            execution=execution,
            row=row,
            span=span,
            right={
                Path(number, path.cache): asked(writes.all[number].version, path.cache)
                for path in paths
                for number in numbers
                if number >= path.write
            },
            suspects={
                REPLACED: [asked(v, cache) for v in writes.places if v not in versions for cache in caches],
                READ_ANEW: [asked(v, ()) for v in versions if any(caches)],
                OLD_KEYS: [asked(v, cache) for v in versions for cache in older],
            },
        )
        read = len(context) + span.stop - span.start - 1
        paths = [_after(writes, path, read) for path in look(piece)]
        older = []
    if mixed := tuple(dict.fromkeys(path.cache for path in paths if len(path.cache) > 1)):
        left.append(Left(execution, adapter, _salt(row), mixed))


def _after(writes: Writes, path: Path, read: int) -> Path:
    """The path when the request has read so many tokens in all, the last of them with the weights of its write."""
    version, held = writes.all[path.write].version, list(path.cache)
    number = read - sum(count for count, _ in held)
    if held and held[-1][1] == version:
        number += held.pop()[0]
    return path._replace(cache=(*held, (number, version)))


def _explains(evidence: Evidence, question: ScoreRequest) -> bool:
    return ties.parts_at(evidence, evidence.reference.score(question)) is None


def _explaining(evidence: Evidence, piece: Piece) -> list[Path]:
    return [path for path, question in piece.right.items() if _explains(evidence, question)]


def _doubted(piece: Piece, explaining: Sequence[Path]) -> bool:
    """True if one write alone may have made the piece, and does not explain it."""
    return not explaining and piece.span.first == piece.span.last


@kept
def history(evidence: Evidence) -> History:
    """Raises UnansweredQuery until the oracle has answered all that it is asked."""
    writes = writes_of(evidence)
    reads, wrong = list(_digests_read(evidence)), list(_melted(evidence))
    pieces: list[Piece] = []
    scores: list[Score] = []
    left_open: list[Piece] = []

    def look(piece: Piece) -> list[Path]:
        found = _explaining(evidence, piece)
        pieces.append(piece)
        versions = {writes.all[path.write].version for path in found}
        scores.extend(evidence.reference.score(piece.right[path]) for path in found[:1])
        if _doubted(piece, found):
            told = {why: [q for q in asked if _explains(evidence, q)] for why, asked in piece.suspects.items()}
            versions = {question.version for question in told[REPLACED]}
            if not versions:
                why = OLD_KEYS if told[OLD_KEYS] else READ_ANEW if told[READ_ANEW] else NO_VERSION
                wrong.append((why, _shown(evidence, piece)))
        elif not found:
            left_open.append(piece)
        if versions:
            shown = {**_shown(evidence, piece), "follows": sorted(versions)}
            reads.append(Read(_lines(piece), piece.span.from_ns, piece.span.to_ns, frozenset(versions), shown))
        return found

    left: list[Left] = []
    for judged in _judged(evidence):
        _follow(evidence, judged, look, left)
    wrong += [(BY[why], read.about) for read, why in unexplained(writes, reads)]
    return History(pieces=pieces, reads=reads, scores=scores, wrong=wrong, open=len(left_open))


def _lines(piece: Piece) -> tuple[Any, ...]:
    session = None if piece.row is None else piece.row.session
    return (piece.execution.server,) if session is None else (piece.execution.server, ("session", session))


def _shown(evidence: Evidence, piece: Piece) -> dict[str, Any]:
    row = {} if piece.row is None else piece.row.shown
    (asked, *_) = piece.right.values()
    by = {"version": asked.version, "cached": asked.cached}
    at = ties.parts_at(evidence, evidence.reference.score(asked))
    return {
        **row,
        "server": piece.execution.server,
        **by,
        "parts at token": None if at is None else piece.span.start + at,
    }


def _digests_read(evidence: Evidence) -> Iterator[Read]:
    """What servers held by their digests, where that fits the syncs."""
    writes = writes_of(evidence)
    for call, server, versions in shown_whole(evidence, writes.places):
        read = Read((server,), call.started_ns, call.ended_ns, versions, {"call": call.id, "server": server})
        if versions and not unexplained(writes, [read]):
            yield read


def _melted(evidence: Evidence) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tokens in the middle of a sync within a pause(keep), of requests that had made some before."""
    held = [p for p in pauses(evidence) if p.mode == "keep"]
    syncs = [
        c
        for c in evidence.calls("sync_weights")
        if any(p.from_ns <= c.started_ns and c.ended_ns <= p.to_ns for p in held)
    ]
    for execution, row, _ in _judged(evidence):
        made = execution.step_ns
        late = sum(made[0] < sync.started_ns <= at <= sync.ended_ns for at in made for sync in syncs)
        if late:
            yield (
                NOT_FROZEN,
                {**({} if row is None else row.shown), "server": execution.server, "tokens during a sync": late},
            )


# --- what the promise was put to the test by --------------------------------------------------------------------------

Condition = Callable[[Evidence, History], tuple[str | None, dict[str, float]]]
"""(why the recording does not test the promise, or None; figures)."""


def answered(evidence: Evidence, found: History) -> tuple[str | None, dict[str, float]]:
    """Every server answered after a call that could leave old weights."""
    after = [p for p in found.pieces if p.row is not None and p.span.start == 0 and moved_before(evidence, p.row.call)]
    servers = {piece.execution.server for piece in after}
    missing = set(evidence.header.servers) - servers
    return (SILENT if after else NO_CHANGE) if missing else None, {
        "answers_after_a_change": len(after),
        "servers": len(servers),
    }


def waited(evidence: Evidence, found: History) -> tuple[str | None, dict[str, float]]:
    """A new version alone made tokens for a request that a sync overlaps."""
    syncs = evidence.calls("sync_weights")
    alone = [
        piece
        for piece in found.pieces
        if 0 < piece.span.first == piece.span.last
        and not any(question.cached for question in piece.right.values())
        and piece.row is not None
        and any(overlap(sync, piece.row.call) for sync in syncs)
    ]
    return None if alone else NONE_WAITED, {"by_a_new_version": len(alone)}


def frozen(evidence: Evidence, found: History) -> tuple[str | None, dict[str, float]]:
    """Requests went on after a sync on keys and values of before, and their tokens tell other weights and an emptied cache apart."""
    rests = [piece for piece in found.pieces if piece.span.start and any(path.cache for path in piece.right)]
    told = all(
        any(not any(_explains(evidence, q) for q in piece.suspects[why]) for piece in rests)
        for why in (REPLACED, READ_ANEW)
    )
    numbers = {"interrupted": float(len({(p.execution.server, p.execution.request_id) for p in rests}))}
    return NONE_FROZEN if not rests else None if told else ALIKE, numbers


def cached(evidence: Evidence, _: History) -> tuple[str | None, dict[str, float]]:
    """Prompts were answered again after a sync whose earlier keys and values an engine's cache had held."""
    again = asked_again(evidence, greedy_answers(evidence), lambda a: (a.row.prompt, a.adapter), lambda a: a.version)
    hits = sum(one.hit for one in again)
    return None if hits else NOT_HIT if cached_tokens(evidence) else NOT_TOLD, {"cache_hits": hits}


def explained(*conditions: Condition) -> Check:
    """An order of events explains every greedy token. `conditions`: what has to have happened, so that the promise was tested."""

    def judge(evidence: Evidence) -> Finding:
        try:
            found = history(evidence)
            tested = [condition(evidence, found) for condition in conditions]
        except UnansweredQuery:
            return untestable(NOT_ASKED)
        facts = sum(piece.span.stop - piece.span.start for piece in found.pieces)
        if not facts:
            return nothing_to_judge(evidence, NO_GREEDY, (*WITH_ROWS, "sync_weights"))
        missing = [why for why, _ in tested if why is not None]
        if missing and not found.wrong:
            return untestable(missing[0])
        numbers = {name: number for _, figures in tested for name, number in figures.items()}
        return concluded(
            facts,
            found.wrong,
            margin=ties.margin(evidence, found.scores),
            reads=len(found.reads),
            open=found.open,
            **numbers,
        )

    def asks(evidence: Evidence) -> Iterator[Query]:
        yield from queries(evidence)
        if evidence.calls("digests"):
            yield from about_versions(evidence, writes_of(evidence).places)
        yield from _questions(evidence, frozen in conditions)

    return Check(
        name="weight_history",
        fault="a server answers with weights from before a sync, with half of it, or on keys and values that it should have dropped",
        next_step="look at the version that the tokens follow, and at whether the sync or the reset of the cache had reached the "
        "server before they were made",
        reads=Fact.ANSWERS | Fact.POLICY | Fact.PAUSES,
        falsifies=Fact.POLICY,
        tap=Tap.READ,
        source='SkyRL #1014, tasks 1 to 5 and 13: weight sync, also "during pause"; SkyRL 0.2.0, RemoteInferenceClient.pause, KEEP: '
        '"KV cache is preserved"; SkyRL API reference, reset_prefix_cache',
        judge=judge,
        queries=asks,
    )


def _questions(evidence: Evidence, told_apart: bool) -> Iterator[Query]:
    """In rounds: each piece needs the answers about the one before it. Suspects are asked about in doubt, or to be told apart."""
    left: list[Left] = []
    for judged in _judged(evidence):
        asked: list[ScoreRequest] = []

        def look(piece: Piece, asked: list[ScoreRequest] = asked) -> list[Path]:
            asked += piece.right.values()
            if told_apart and piece.span.start:
                asked += chain.from_iterable(piece.suspects.values())
            found = _explaining(evidence, piece)
            if _doubted(piece, found):
                asked += chain.from_iterable(piece.suspects.values())
            return found

        with suppress(UnansweredQuery):
            _follow(evidence, judged, look, left)
        yield from asked


EXPLAINED = explained(answered)
