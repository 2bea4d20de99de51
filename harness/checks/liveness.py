"""Every call ends, and succeeds unless the scenario did something that could make it fail."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from harness.checks.base import EVERY, Check, Evidence, Finding, concluded, untestable
from harness.checks.errors import DEAD, LATE, NAMELESS
from harness.checks.matching import WITH_ROWS, Row, is_error, queries, rows, said_by
from harness.contract.errors import CANCELLED
from harness.contract.faults import ROWS, Fact
from harness.records.recording import Call


def _judge(evidence: Evidence) -> Finding:
    calls = evidence.calls()
    if not calls:
        return untestable("the scenario made no call")
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in calls:
        body = (call.result or {}).get("body")
        if call.error is not None:
            shown = {"call": call.id, "kind": call.error.kind, "message": call.error.message[:300]}
            wrong.append((f"{call.method}() failed with {call.error.said}", shown))
        elif isinstance(body, dict) and is_error(body):
            wrong.append((f"{call.method}() was answered with {said_by(body)}", {"call": call.id, "body": body}))
    broken = {shown["call"] for _, shown in wrong}
    found = [row for row in rows(evidence) if row.call.id not in broken]
    wrong += [
        ("a request did not come to its end", {**row.shown, "state": row.state, "finish_reason": row.finish_reason})
        for row in found
        if row.finish_reason not in {"stop", "length"} or row.tokens == ()
    ]
    return concluded(len(calls) + len(found), wrong)


ALL_COMPLETE = Check(
    name="all_complete",
    fault="a call fails, hangs, or returns a response that was cut short",
    next_step="read the error in the evidence, then the stack's log at that time (logs/ in the run's folder)",
    reads=Fact.ANSWERS | Fact.TEXT | Fact.PAUSES,
    falsifies=Fact.ANSWERS | Fact.TEXT | Fact.LOGPROBS,
    source="SkyRL API reference, InferenceEngineInterface; SkyRL #904",
    judge=_judge,
    queries=queries,
)


GAVE_UP = frozenset({LATE, CANCELLED, "ScenarioTimedOut"})
"""Error kinds of a call that the harness stopped waiting for."""


def _pending_at_a_death(evidence: Evidence) -> bool:
    kills = evidence.succeeded("kill_server")
    asked = [call for method in WITH_ROWS for call in evidence.calls(method)]
    return any(call.started_ns < kill.ended_ns and call.ended_ns > kill.started_ns for kill in kills for call in asked)


def _judge_ends(evidence: Evidence) -> Finding:
    if not _pending_at_a_death(evidence):
        return untestable("no call was pending when a server died")
    wrong: list[tuple[str, dict[str, Any]]] = []
    calls, found = evidence.calls(), rows(evidence)
    for call in calls:
        why = bad_error(call)
        if why is not None:
            assert call.error is not None
            shown = {"call": call.id, "kind": call.error.kind, "message": call.error.message[:300]}
            wrong.append((f"{call.method}() {why}", shown))
    cut = [c for c in evidence.calls("pause") if c.request.get("mode") == "abort"]
    for row in found:
        aborted = row.finish_reason == "abort" and any(
            row.call.started_ns < c.started_ns < row.call.ended_ns for c in cut
        )
        if not aborted and (why := _hollow(row)):
            wrong.append((why, {**row.shown, "finish_reason": row.finish_reason}))
    facts = len(calls) + len(found)
    return concluded(facts, wrong, errors=sum(call.error is not None for call in calls))


GONE = (
    "connect",
    "server",
    "actor",
    "engine",
    "worker",
    "dead",
    "died",
    "unavailable",
    "refused",
    "reset",
    "closed",
    "eof",
)
"""Words of an error that says that the other side is gone. A status but 500 says so too, or what the caller did wrong."""
EMPTY_WORDS = re.compile(r"internal server error|object has no attribute '\w+'|url='[^']*'")
"""Parts of an error, in lower case, that hold such words and say nothing: 500's own phrase, an attribute's name, an address."""


def bad_error(call: Call) -> str | None:
    """What is wrong with a call's error; None if the call succeeded, or its error says that a server or the way to it is gone."""
    if call.error is None:
        return None
    if call.error.kind in GAVE_UP:
        return "did not end"
    if call.error.kind == DEAD:
        return "ended only because the whole stack was given up"
    if call.error.kind in NAMELESS or not call.error.message.strip():
        return "failed with an error that has no name or no message"
    tells = says_gone(call.error.kind, call.error.message, call.error.status)
    return None if tells else f"failed with an error that does not say that a server is gone: {call.error.said}"


def says_gone(kind: str, message: str, status: int | None) -> bool:
    """True if an error says that a server or the way to it is gone."""
    said = EMPTY_WORDS.sub("", f"{kind} {message}".lower())
    return status not in (None, HTTPStatus.INTERNAL_SERVER_ERROR) or any(word in said for word in GONE)


def _hollow(row: Row) -> str | None:
    if row.state == "lost":
        return "a request is neither answered nor reported as failed"
    whole = row.tokens != () and row.finish_reason in {"stop", "length"}
    return None if whole or row.state == "failed" else "a request that was cut short came back as a success"


EVERY_CALL_ENDS = Check(
    name="every_call_ends",
    fault="a call waits forever for a dead server, comes back as if nothing had happened, or fails for a reason that tells nothing",
    next_step="look at what tells pending calls that a server is gone: the router, the client's connection, or only a timeout",
    reads=Fact.ANSWERS | Fact.ERRORS,
    falsifies=ROWS,
    errors_of=EVERY,
    source="architecture, liveness: with one server dead every pending call ends, well or with a named error",
    judge=_judge_ends,
    queries=queries,
)
