"""Calls that must fail: with an error that says what was wrong, never a hang, an empty success or half a result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.checks.answers import select, short, trouble, unexpected
from harness.checks.base import Check, Evidence, Finding, concluded, together, untestable
from harness.checks.matching import error_in, is_error
from harness.contract.errors import CANCELLED, Blame
from harness.contract.faults import Fact
from harness.contract.messages import CHOICES
from harness.records.recording import Call, saying

NAMELESS = {"Exception", "BaseException", "Error", "HTTPError", ""}
"""Kinds of exception that name no cause."""
BAD_REQUEST = 400
COLUMNS = ("response_ids", "responses", "stop_reasons", "response_logprobs")
LATE, DEAD = "CallTimedOut", "StackDied"


def names_error(label: str, *says: str) -> Check:
    """Each call labelled `label` fails, in time, with an error that mentions one of the words `says` (any case).

    An exception and a returned error body count alike; `returns_error` requires the body.
    """

    def judge(evidence: Evidence) -> Finding:
        calls = [c for c in evidence.calls() if c.label == label]
        if not calls:
            return untestable(f"no call labelled {label} was recorded")
        ours = [c for c in calls if c.error is not None and c.error.blame != Blame.STACK]
        wrong = [(why, _shown(call)) for call in calls if call not in ours and (why := _wrong(call, says))]
        found = [concluded(len(calls) - len(ours), wrong)]
        return together([*found, *map(unexpected, ours)])

    return Check(
        name=f"errors.named:{label}",
        fault="bad input is accepted, returns nothing, hangs, kills a server, or fails without a reason",
        next_step="find where the server's own error becomes the caller's: its status and message have to survive the "
        "router and the client",
        reads=Fact.ERRORS,
        falsifies=Fact.ERRORS | Fact.ANSWERS | Fact.TEXT,
        errors_of=label,
        source="SkyRL #1014: errors of both stacks; vLLM documentation, OpenAI-Compatible Server",
        judge=judge,
    )


def answered_or_named(label: str, *says: str) -> Check:
    """Each call labelled `label` is answered whole, or fails as `names_error` requires: what a stack may refuse."""

    def judge(evidence: Evidence) -> Finding:
        calls = [c for c in evidence.calls() if c.label == label]
        if not calls:
            return untestable(f"no call labelled {label} was recorded")
        refused = [c for c in calls if error_of(c)[0] is not None]
        ours = [c for c in refused if c.error is not None and c.error.blame != Blame.STACK]
        wrong = [(why, _shown(call)) for call in refused if call not in ours and (why := _wrong(call, says))]
        served = [call for call in calls if call not in refused]
        halves = trouble(served, (), CHOICES) if served else None
        found = [concluded(len(calls) - len(ours), wrong, refused=len(refused)), *map(unexpected, ours)]
        return together([*found, *([halves] if halves else [])])

    return Check(
        name=f"errors.refused:{label}",
        fault="what a stack does not offer is answered by half, ignored in a way that loses rows, or fails without a reason",
        next_step="find where the request is refused: the error has to say what is not offered, with a status below 500",
        reads=Fact.ERRORS | Fact.ANSWERS,
        falsifies=Fact.ERRORS | Fact.ANSWERS | Fact.TEXT,
        errors_of=label,
        source="SkyRL #1014: errors of both stacks; vLLM documentation, OpenAI-Compatible Server",
        judge=judge,
    )


def _wrong(call: Call, says: tuple[str, ...]) -> str | None:
    kind, message, status = error_of(call)
    if kind is None:
        rows = (call.result or {}).get("response_ids")
        empty = isinstance(rows, list) and not any(rows)
        return f"{call.method}() {'returned an empty success' if empty else 'succeeded'} instead of failing"
    mute = bool(says) and not any(word.lower() in message.lower() for word in says)
    faults = {
        f"{call.method}() did not end": kind == LATE,
        f"{call.method}() took the stack down": kind == DEAD,
        f"{call.method}() failed with an error that has no name or no message": kind in NAMELESS or not message.strip(),
        f"{call.method}() answered the caller's mistake as a server error": status is not None and status >= 500,
        f"{call.method}() failed with an error that does not say what was wrong: {saying(kind, message, status)}": mute,
    }
    return next((reason for reason, present in faults.items() if present), None)


def error_of(call: Call) -> tuple[str | None, str, int | None]:
    """Kind, message and status of the call's error; kind is None if it succeeded."""
    if call.error is not None:
        return call.error.kind, call.error.message, call.error.status
    if call.method == "http":  # not an OpenAI route: `Evidence.calls` turns those into OpenAI calls
        status = int((call.result or {}).get("status", 0))
        return (f"HTTP{status}", (call.result or {})["body"], status) if status >= BAD_REQUEST else (None, "", None)
    body = (call.result or {}).get("body")
    if isinstance(body, dict) and is_error(body):
        return error_in(body)
    return None, "", None


def unanswered(calls: Iterable[Call]) -> list[Call]:
    """Those that the scenario gave up waiting for."""
    return [call for call in calls if call.error is not None and call.error.kind == CANCELLED]


def breaks(kind: str, message: str, status: int | None) -> bool:
    """True if an error is a server error, names nothing, or stands for an answer that did not come in time."""
    return kind in {*NAMELESS, LATE, CANCELLED} or not message.strip() or (status is not None and status >= 500)


def returns_error(label: str) -> Check:
    """A failed call of an OpenAI method returns an ErrorResponse: {"error": {"message", "type", "code"}}.

    `names_error` judges whether the code blames the right side."""

    def judge(evidence: Evidence) -> Finding:
        calls = select(evidence, (label,), ("completion", "chat_completion"))
        if not calls:
            return untestable(f"no call labelled {label} was recorded")
        return concluded(len(calls), [(why, _shown(call)) for call in calls if (why := _wrong_response(call))])

    return Check(
        name=f"errors.returned:{label}",
        fault="an exception where a dict was promised, half a result beside the error, an error without its fields",
        next_step="look at what the client does with a status of 400 or more: the server's body has to be returned as it came",
        reads=Fact.ERRORS,
        falsifies=Fact.ERRORS | Fact.ANSWERS | Fact.TEXT,
        errors_of=label,
        source='SkyRL API reference, InferenceEngineInterface.completion: "Returns a plain dict, either a '
        'CompletionResponse or an ErrorResponse."',
        judge=judge,
    )


def _wrong_response(call: Call) -> str | None:
    if call.error is not None:
        return f"{call.method}() raised an exception instead of returning an ErrorResponse: {call.error.said}"
    error = ((call.result or {}).get("body") or {}).get("error")
    if not isinstance(error, dict):
        return f"{call.method}() did not return an ErrorResponse"
    good = isinstance(error.get("message"), str) and isinstance(error.get("type"), str)
    good = good and isinstance(error.get("code"), int) and 400 <= error["code"] < 600
    return None if good else f"the ErrorResponse of {call.method}() lacks a field"


def nothing_for_nothing(label: str) -> Check:
    """A call for no rows returns no rows or fails with a named error."""

    def judge(evidence: Evidence) -> Finding:
        calls = select(evidence, (label,), ("generate", "sample", "completion"))
        if not calls:
            return untestable(f"no call labelled {label} was recorded")
        full = [call for call in calls if error_of(call)[0] is not None or _rows(call)]
        return concluded(len(calls), [(why, _shown(call)) for call in full if (why := _wrong(call, ()))])

    return Check(
        name=f"errors.empty:{label}",
        fault="a call for no rows hangs, fails without a name, or returns results",
        reads=Fact.ERRORS,
        falsifies=Fact.ERRORS | Fact.ANSWERS | Fact.TEXT,
        errors_of=label,
        source="SkyRL API reference, InferenceEngineInterface: generate, sample, completion",
        judge=judge,
    )


def _rows(call: Call) -> bool:
    """True if its result has something of a row."""
    result = call.result or {}
    return any(result.get(column) for column in COLUMNS) or bool((result.get("body") or {}).get("choices"))


def _shown(call: Call) -> dict[str, Any]:
    error = call.error
    got: Any = call.result if error is None else {"kind": error.kind, "message": error.message, "status": error.status}
    return {**call.named, "method": call.method, "request": short(call.request), "got": got}
