"""What pause() promises in each mode, judged by the times at which engines made tokens.

A *pause* here is the time from a pause() call's return to the start of the resume() after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from harness.checks import ties
from harness.checks.base import (
    Check,
    Evidence,
    Execution,
    Finding,
    Tap,
    concluded,
    generation,
    kept,
    passed,
    untestable,
)
from harness.checks.control_plane import binding, taken
from harness.checks.matching import WITH_ROWS, Row, assignment, queries, rows
from harness.checks.sampling import draws_repeat
from harness.checks.tokens import PENALTIES, RESHAPING
from harness.contract.faults import ROWS, Fact
from harness.records.differing import common_prefix, parting
from harness.records.recording import Call, Observation
from harness.records.reference import Query, ScoreRequest
from harness.records.verdict import Margin

GRACE_NS = 100_000_000
"""Nanoseconds (0.1 s): each server may finish one engine step within this time after pause() returned."""

PAUSE_STEPS = 10
"""A pause is long enough to judge if a running engine would have made this many steps in it."""

NOTHING_PAUSED = "no request was in flight when the pause came"
TOO_SHORT = "the pause was too short for a step to be seen in it"
IDLE_SERVER = "a server had no request that the pause could stop"
NO_PREFIX = "the tokens of an aborted request are no prefix of the uninterrupted run's"
NO_REASON = 'a request cut short by pause(abort) does not say finish reason "abort"'
NONE_ABORTED = "pause(abort) aborted none of the requests in flight"
ALL_PARTED = "all requests in flight when the pause came part where rounding decides between two tokens"
DIFFERS = "a greedy run with a pause in it differs from the run without"
GIVEN_UP = "a request that a pause held was given up before its end"
UNINTERRUPTED, PAUSED = "uninterrupted", "paused"
"""Labels of the two compared calls: the same prompts without and with a pause."""


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """One pause: `asked_ns` when pause() was called, `from_ns` when it returned, `to_ns` when resume() was called."""

    call: Call
    mode: str
    asked_ns: int
    from_ns: int
    to_ns: int


def _obeyed_ns(evidence: Evidence, pause: Call) -> int:
    """From when on a pause has to hold: its end, or if it failed at a dead server, when the living one had taken it."""
    late: list[int] = [] if pause.error is None else [seen.data["ended_ns"] for seen in taken(evidence, pause)]
    return max([pause.ended_ns, *late])


def pauses(evidence: Evidence) -> list[Pause]:
    """Every pause of the scenario that a resume ended. A pause() during a pause changes nothing. One that failed at a dead server
    lasts from when the living one had obeyed."""
    changes = sorted(
        (c for m in ("pause", "resume") for c in evidence.calls(m) if binding(evidence, c)), key=lambda c: c.started_ns
    )
    found: list[Pause] = []
    first: Call | None = None
    for call in changes:
        if call.method == "pause":
            first = first or call
        elif first is not None:
            found.append(
                Pause(
                    call=first,
                    mode=first.request.get("mode", "keep"),
                    asked_ns=first.started_ns,
                    from_ns=_obeyed_ns(evidence, first),
                    to_ns=call.started_ns,
                )
            )
            first = None
    return found


def in_flight(evidence: Evidence, at_ns: int) -> list[Execution]:
    """Executions that had made a token at that time, had not ended, and had not been dropped by their caller."""
    gone = dropped(evidence)
    return [
        e
        for e in evidence.executions
        if e.step_ns
        and e.step_ns[0] <= at_ns
        and (e.ended_ns or at_ns + 1) > at_ns
        and gone.get((e.server, e.request_id), at_ns + 1) > at_ns
    ]


@kept
def dropped(evidence: Evidence) -> dict[tuple[str, str], int]:
    """(server, request) → when its caller dropped it, for example after another row of its batch failed."""
    aborts = (seen for seen in evidence.trace.observations if seen.kind == "abort")
    return {(seen.server, request): seen.at_ns for seen in aborts for request in seen.data["request_ids"]}


@kept
def row_of(evidence: Evidence) -> dict[tuple[str, str], Row]:
    """(server, request) → the row that it served."""
    found = assignment(evidence)
    return {(e.server, e.request_id): row for row in found.rows for e in found.where(row)}


def _shown_execution(evidence: Evidence, execution: Execution) -> dict[str, Any]:
    row = row_of(evidence).get((execution.server, execution.request_id))
    found = {"server": execution.server, "tokens": len(execution.tokens), "reason": execution.finish_reason}
    return {**(row.shown if row else {}), **found}


def _busy(evidence: Evidence, pause: Pause, waiting: Sequence[Call]) -> set[str]:
    """Servers that would have made tokens in the pause: they hold a request that it froze or cut short, or run one that waited for
    its end."""
    calls = {call.id for call in waiting}
    return {
        e.server
        for e in evidence.executions
        if ((row := row_of(evidence).get((e.server, e.request_id))) is not None and row.call.id in calls)
        or (
            e.started_ns <= pause.to_ns
            and (e.ended_ns is None or e.ended_ns > (pause.asked_ns if e.finish_reason == "abort" else pause.from_ns))
        )
    }


def steps_of(evidence: Evidence) -> dict[str, list[Observation]]:
    """The steps of each server in order of time; a server without steps has no entry."""
    found: dict[str, list[Observation]] = {}
    for seen in sorted(evidence.trace.observations, key=lambda o: o.at_ns):
        if seen.kind == "step":
            found.setdefault(seen.server, []).append(seen)
    return found


def step_time_ns(evidence: Evidence) -> int:
    """The median time between tokens of one request, over all requests, as the time of an engine step."""
    gaps = sorted(b - a for e in evidence.executions for a, b in zip(e.step_ns, e.step_ns[1:], strict=False) if b > a)
    return gaps[len(gaps) // 2] if gaps else 0


def went_on(made: Sequence[Observation], stopped_ns: int) -> bool:
    """True for steps that a server may not make after it was stopped: it may finish one, within `GRACE_NS`."""
    return len(made) > 1 or any(step.at_ns > stopped_ns + GRACE_NS for step in made)


def _judge_frozen(evidence: Evidence) -> Finding:
    steps, step_time = steps_of(evidence), step_time_ns(evidence)
    facts, short = 0, 0
    most, latest_ns, running = 0, 0, math.inf
    wrong: list[tuple[str, dict[str, Any]]] = []
    busy: set[str] = set()
    for pause in pauses(evidence):
        waiting = [c for m in WITH_ROWS for c in evidence.calls(m) if c.started_ns < pause.to_ns < c.ended_ns]
        if not waiting:
            continue
        if not step_time or pause.to_ns - pause.from_ns < PAUSE_STEPS * step_time:
            short += 1
            continue
        running = min(running, (pause.to_ns - pause.from_ns) / step_time)
        busy |= _busy(evidence, pause, waiting)
        for server in evidence.header.servers:
            facts += 1
            made = [s for s in steps.get(server, ()) if pause.from_ns < s.at_ns < pause.to_ns]
            most = max(most, len(made))
            latest_ns = max([latest_ns, *(s.at_ns - pause.from_ns for s in made)])
            if went_on(made, pause.from_ns):
                shown = {
                    "call": pause.call.id,
                    "server": server,
                    "mode": pause.mode,
                    "steps while paused": len(made),
                    "last after ms": (made[-1].at_ns - pause.from_ns) / 1e6,
                }
                wrong.append((f"an engine made tokens after pause({pause.mode}) had returned", shown))
    if wrong:
        return concluded(facts, wrong)
    if not facts:
        return untestable(TOO_SHORT if short else NOTHING_PAUSED)
    if set(evidence.header.servers) - busy:
        return untestable(IDLE_SERVER)
    margin = Margin(
        unit="steps of a server while paused", measured=most, bound=1, faults={"a server goes on": math.floor(running)}
    )
    times = {"step_ms": step_time / 1e6, "latest_step_ms": latest_ns / 1e6, "grace_ms": GRACE_NS / 1e6}
    return passed(facts, margin=margin, servers=len(busy), **times)


FROZEN = Check(
    name="frozen_while_paused",
    fault="pause() returns before generation has stopped, or a server generates during the pause",
    next_step="look at what pause() waits for on the server in the evidence: it returned before the engine's last step",
    reads=Fact.PAUSES,
    falsifies=Fact.PAUSES,
    source="vLLM documentation, /pause; SkyRL API reference, pause_generation: in-flight requests are frozen",
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_frozen,
)


def _pair(evidence: Evidence) -> Iterator[tuple[Row, Row]]:
    """Pairs of rows with one prompt, from the calls labelled "uninterrupted" and "paused"."""
    found = [r for r in rows(evidence) if r.state == "returned"]
    plain = {r.prompt: r for r in found if r.call.label == UNINTERRUPTED}
    for row in found:
        if row.call.label == PAUSED and row.prompt in plain:
            yield plain[row.prompt], row


def _caught(evidence: Evidence) -> dict[tuple[int, int], list[Pause]]:
    """The pauses at which each "paused" row was in flight: (call id, row) → pauses."""
    found = assignment(evidence)
    caught: dict[tuple[int, int], list[Pause]] = {}
    for pause in pauses(evidence):
        running = {(e.server, e.request_id) for e in in_flight(evidence, pause.asked_ns)}
        for row in found.rows:
            if row.call.label == PAUSED and any((e.server, e.request_id) in running for e in found.of(row)):
                caught.setdefault((row.call.id, row.index), []).append(pause)
    return caught


def _shown(plain: Row, paused: Row) -> dict[str, Any]:
    reasons = {"uninterrupted": plain.finish_reason, "paused": paused.finish_reason}
    both = parting(uninterrupted=plain.tokens or (), paused=paused.tokens or ())
    return {**paused.shown, "finish reasons": reasons, **both}


def _different(evidence: Evidence) -> list[tuple[Row, Row]]:
    return [(a, b) for a, b in _pair(evidence) if a.tokens != b.tokens or a.finish_reason != b.finish_reason]


def _reshaped(row: Row) -> bool:
    """True if the row's greedy tokens need not be the model's own choices."""
    return any(row.params.get(name) for name in RESHAPING)


def _complete(row: Row, *, aborted: bool) -> bool:
    """True if the row has the length that its finish reason asks for. `aborted`: True if it may have been cut short."""
    if row.finish_reason == "length":
        return len(row.tokens or ()) == row.params.get("max_tokens")
    return row.finish_reason == "stop" or (aborted and row.finish_reason == "abort")


def _parts_at(plain: Row, paused: Row, *, aborted: bool = False) -> int | None:
    """The first token at which two complete rows differ: rounding may have decided there. None if one is cut off or they are equal."""
    made = [row.tokens or () for row in (plain, paused)]
    at = common_prefix(*made)
    complete = all(_complete(row, aborted=aborted) for row in (plain, paused))
    return at if complete and at < min(map(len, made)) else None


def _scores(evidence: Evidence, plain: Row, paused: Row, *, aborted: bool = False) -> list[ScoreRequest]:
    """The questions for the scores of both greedy rows, up to the token at which they part if their choice is reshaped; none if a near
    tie cannot explain their difference."""
    both = (plain, paused)
    at = _parts_at(*both, aborted=aborted)
    if at is None or not plain.prompt or any(row.params.get("temperature") != 0 for row in both):
        return []
    return [
        ScoreRequest(
            version=evidence.version_at(row.call.started_ns),
            quantization=evidence.header.topology.quantization,
            prompt=list(row.prompt or ()),
            tokens=list((row.tokens or ())[: at + 1 if _reshaped(row) else None]),
            routed=[] if _reshaped(row) else evidence.followed(row.routed),
        )
        for row in both
    ]


def _penalty(row: Row, at: int) -> float:
    """What the penalties of a row take off the logit of its token at this place (vLLM documentation, SamplingParams)."""
    tokens = row.tokens or ()
    presence, frequency = (row.params.get(name) or 0.0 for name in PENALTIES)
    times = tokens[:at].count(tokens[at])
    return float(presence * (times > 0) + frequency * times)


def _parted_at_a_tie(evidence: Evidence, plain: Row, paused: Row, *, aborted: bool = False) -> bool:
    """True if the rows differ by rounding at a near tie, and each follows the model's greedy choice to its end. If their choice is
    reshaped, only the two tokens at which they part are compared. Always False on batch-invariant engines, where both rows round
    alike."""
    if evidence.header.batch_invariant:
        return False
    scores = [evidence.reference.score(asked) for asked in _scores(evidence, plain, paused, aborted=aborted)]
    if scores and _reshaped(plain):
        one, other = (
            score.logprobs[-1] - _penalty(row, len(score.logprobs) - 1)
            for score, row in zip(scores, (plain, paused), strict=True)
        )
        return abs(one - other) < min(map(evidence.near, scores))
    return bool(scores) and all(ties.parts_at(evidence, score) is None for score in scores)


def queries_of_same(evidence: Evidence) -> Iterator[Query]:
    """The questions of `same`: for the rows, and for the scores of those that differ."""
    yield from queries(evidence)
    for plain, paused in _different(evidence):
        yield from _scores(evidence, plain, paused)


def _judge_same(evidence: Evidence) -> Finding:
    caught = _caught(evidence)
    return same(evidence, lambda row: (row.call.id, row.index) in caught, NOTHING_PAUSED)


def same(evidence: Evidence, met: Callable[[Row], bool], otherwise: str) -> Finding:
    """Judges if each "paused" row equals its "uninterrupted" one; drawn ones together (`draws_repeat`), except on repeatable engines.
    Untestable (`otherwise`) if no pause `met` a paused row. A row whose reshaped choices part at a near tie shows nothing of it."""
    pairs, different = list(_pair(evidence)), _different(evidence)
    drawn = [] if evidence.repeatable else [pair for pair in pairs if pair[0].params.get("temperature") != 0]
    margin = None
    if any(pair in different for pair in drawn):
        margin = draws_repeat([(a.tokens or (), b.tokens or ()) for a, b in drawn], evidence.noise.rms)
        if margin.measured <= margin.bound:
            different = [pair for pair in different if pair not in drawn or _parts_at(*pair) is None]
    tied = [pair for pair in different if _parted_at_a_tie(evidence, *pair)]
    # Red even if no pause is known to have caught them: an answer that a pause changed may not match its execution.
    wrong = [(DIFFERS, _shown(*pair)) for pair in different if pair not in tied]
    caught = [pair for pair in pairs if met(pair[1])]
    interrupted = sum(not (pair in tied and _reshaped(pair[0])) for pair in caught)
    if not interrupted and not wrong:
        return untestable(ALL_PARTED if caught else otherwise)
    return concluded(len(pairs), wrong, margin=margin, interrupted=interrupted)


SAME_AS_UNINTERRUPTED = Check(
    name="pause_changes_nothing",
    fault="tokens are lost, doubled or changed where a pause interrupted a request",
    next_step="look at the tokens at `first difference`: the pause fell there; see what was continued, retried or computed again",
    reads=Fact.ANSWERS | Fact.POLICY | Fact.CHANCE | Fact.PAUSES,
    source='SkyRL API reference, pause_generation: "freezing in-flight requests so they can be resumed later"',
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_same,
    queries=queries_of_same,
)


def _begins(plain: Row, paused: Row) -> bool:
    """True if the paused answer is a prefix of the uninterrupted one."""
    made = paused.tokens or ()
    return made == (plain.tokens or ())[: len(made)]


def _queries_of_aborted(evidence: Evidence) -> Iterator[Query]:
    """The questions for the rows, and for the scores of those that differ."""
    yield from queries(evidence)
    for plain, paused in _pair(evidence):
        if not _begins(plain, paused) or (paused.finish_reason != "abort" and paused.tokens != plain.tokens):
            yield from _scores(evidence, plain, paused, aborted=True)


def _judge_aborted(evidence: Evidence) -> Finding:
    pairs = {(paused.call.id, paused.index): (plain, paused) for plain, paused in _pair(evidence)}
    caught = [at for at in _caught(evidence) if at in pairs]
    wrong: list[tuple[str, dict[str, Any]]] = []
    for at, (plain, paused) in pairs.items():
        # A request may end by itself while pause() is in flight; then it is complete.
        survived = at in caught and paused.finish_reason != "abort" and paused.tokens != plain.tokens
        if not (survived or not _begins(plain, paused)) or _parted_at_a_tie(evidence, plain, paused, aborted=True):
            continue
        wrong.append((NO_REASON if _begins(plain, paused) else NO_PREFIX, _shown(plain, paused)))
    aborted = [at for at in caught if pairs[at][1].finish_reason == "abort"]
    if caught and not aborted and not any(why == NO_REASON for why, _ in wrong):
        wrong += [(NONE_ABORTED, _shown(*pairs[at])) for at in caught]
    if not caught and not wrong:
        return untestable(NOTHING_PAUSED)
    servers = {e.server for pause in pauses(evidence) for e in in_flight(evidence, pause.asked_ns)}
    if set(evidence.header.servers) - servers and not wrong:
        return untestable(IDLE_SERVER)
    return concluded(len(pairs), wrong, interrupted=len(aborted), servers=len(servers))


ABORTED = Check(
    name="abort_returns_partial",
    fault="pause(abort) loses the tokens that were made, invents some, or lets requests run on",
    next_step="look at what becomes of an aborted request between engine and caller: its tokens so far, its finish reason, or a retry",
    reads=Fact.ANSWERS | Fact.PAUSES,
    source='SkyRL #904, PauseMode.ABORT: "Clients receive partial tokens with finish_reason="abort""',
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_aborted,
    queries=_queries_of_aborted,
)


def _judge_waited(evidence: Evidence) -> Finding:
    facts = latest_ns = waited_ns = 0
    wrong: list[tuple[str, dict[str, Any]]] = []
    busy: set[str] = set()
    gone = dropped(evidence)
    for pause in (p for p in pauses(evidence) if p.mode == "wait"):
        for execution in in_flight(evidence, pause.asked_ns):
            if (execution.server, execution.request_id) in gone:
                continue
            facts += 1
            busy.add(execution.server)
            shown = _shown_execution(evidence, execution)
            if execution.ended_ns is not None:
                latest_ns = max(latest_ns, execution.ended_ns - pause.from_ns)
                waited_ns = max(waited_ns, execution.ended_ns - pause.asked_ns)
            if execution.ended_ns is None or execution.ended_ns > pause.from_ns + GRACE_NS:
                wrong.append(("pause(wait) returned before the requests in flight had finished", shown))
            elif execution.finish_reason not in {"stop", "length"}:
                wrong.append(("pause(wait) ended a request early", shown))
    if not wrong and set(evidence.header.servers) - busy:
        return untestable(IDLE_SERVER if facts else NOTHING_PAUSED)
    margin = Margin(
        unit="ms from pause()'s return to the last request's end",
        measured=latest_ns / 1e6,
        bound=GRACE_NS / 1e6,
        faults={"pause(wait) returns at once": waited_ns / 1e6},
    )
    return concluded(facts, wrong, margin=margin, waited_for=facts, servers=len(busy))


WAITED = Check(
    name="wait_lets_finish",
    fault="pause(wait) does not wait, or cuts requests short",
    next_step="look at which mode reached the engines: with `wait` they finish what they run before pause() returns",
    reads=Fact.PAUSES,
    source='vLLM documentation, /pause: "wait": wait for in-flight requests to complete',
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_waited,
)


def _judge_held(evidence: Evidence) -> Finding:
    facts = 0
    wrong: list[tuple[str, dict[str, Any]]] = []
    for pause in pauses(evidence):
        for call in (c for method in WITH_ROWS for c in evidence.calls(method)):
            if not pause.from_ns <= call.started_ns <= pause.to_ns:
                continue
            facts += 1
            shown = {"call": call.id, "method": call.method, "mode": pause.mode}
            if call.error is not None:
                shown["kind"] = call.error.kind
            if why := _not_held(call, pause):
                wrong.append((f"a request that came during pause({pause.mode}) {why}", shown))
    return concluded(facts, wrong, held=facts) if facts else untestable("no request came during a pause")


def _not_held(call: Call, pause: Pause) -> str | None:
    if call.ended_ns < pause.to_ns:
        return "ended before resume()"
    if call.error is not None:
        return "failed"
    return "came back empty" if call.method == "generate" and not all(generation(call).response_ids) else None


HELD = Check(
    name="held_until_resume",
    fault="a request that arrives during a pause is answered, refused or forgotten",
    next_step="look at where new requests wait during a pause: in the client, at the router, or in the engine's queue",
    reads=Fact.ANSWERS | Fact.PAUSES,
    falsifies=ROWS,
    source="SkyRL 0.2.0, InferenceEngineClient.pause_generation: New requests are blocked until resume",
    judge=_judge_held,
)


def _judge_kept(evidence: Evidence) -> Finding:
    gone = dropped(evidence)
    facts = 0
    wrong: list[tuple[str, dict[str, Any]]] = []
    for pause in pauses(evidence):
        if pause.mode != "keep":
            continue
        frozen = in_flight(evidence, pause.from_ns)
        facts += len(frozen)
        lost = [e for e in frozen if gone.get((e.server, e.request_id), pause.to_ns) < pause.to_ns]
        wrong += [(GIVEN_UP, _shown_execution(evidence, execution)) for execution in lost]
    return concluded(facts, wrong, frozen=facts) if facts else untestable(NOTHING_PAUSED)


KEPT = Check(
    name="kept_through_pause",
    fault="a request that pause(keep) holds is given up on its way, and computed again from its prompt or lost",
    next_step="look for a limit of time between client and engine: who gave up waiting, and who asked again",
    reads=Fact.PAUSES | Fact.ERRORS,
    source='vLLM documentation, /pause: "keep": freeze requests in the queue; they resume on /resume',
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_kept,
)
