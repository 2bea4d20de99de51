"""Calls that must fail: with an error that says what was wrong, never a hang, an empty success or half a result."""

from __future__ import annotations

from typing import Any

from harness.checks.answers import select, short
from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable
from harness.checks.matching import is_error
from harness.contract.errors import Blame
from harness.contract.faults import Fact
from harness.records.recording import Call

NAMELESS = {"Exception", "BaseException", "Error", "HTTPError", ""}
"""Kinds of exception that name no cause."""
BAD_REQUEST = 400
LATE, DEAD = "CallTimedOut", "StackDied"


def names_error(label: str, *says: str) -> Check:
    """Each call labelled `label` fails, in time, with an error that mentions one of the words `says` (any case).

    An exception and a returned error body count alike; `returns_error` requires the body.
    """

    def judge(evidence: Evidence) -> Finding:
        calls = [c for c in evidence.calls() if c.label == label]
        if not calls:
            return untestable(f"no call labelled {label} was recorded")
        for number, call in enumerate(calls, start=1):
            if call.error is not None and call.error.blame != Blame.STACK:
                blame = Blame(call.error.blame)
                return untestable(f"{call.method}() failed with {call.error.kind}", blame, [_shown(call)])
            wrong = _wrong(call, says)
            if wrong:
                return failed(number, wrong, [_shown(call)])
        return passed(len(calls))

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


def _wrong(call: Call, says: tuple[str, ...]) -> str | None:
    kind, message, status = _error(call)
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
        f"{call.method}() failed with {kind}, which does not say what was wrong": mute,
    }
    return next((reason for reason, present in faults.items() if present), None)


def _error(call: Call) -> tuple[str | None, str, int | None]:
    """Kind, message and status of the call's error; kind is None if it succeeded."""
    if call.error is not None:
        return call.error.kind, call.error.message, call.error.status
    if call.method == "http":  # not an OpenAI route: `Evidence.calls` turns those into OpenAI calls
        status = int((call.result or {}).get("status", 0))
        return (f"HTTP{status}", (call.result or {})["body"], status) if status >= BAD_REQUEST else (None, "", None)
    body = (call.result or {}).get("body")
    if isinstance(body, dict) and is_error(body):
        error = body["error"] if isinstance(body.get("error"), dict) else body
        code = error.get("code")
        return str(error.get("type") or ""), str(error.get("message") or ""), code if isinstance(code, int) else None
    return None, "", None


def returns_error(label: str) -> Check:
    """A failed call of an OpenAI method returns an ErrorResponse: {"error": {"message", "type", "code"}}.

    `names_error` judges whether the code blames the right side."""

    def judge(evidence: Evidence) -> Finding:
        calls = select(evidence, (label,), ("completion", "chat_completion"))
        if not calls:
            return untestable(f"no call labelled {label} was recorded")
        for number, call in enumerate(calls, start=1):
            if call.error is not None:
                reason = f"{call.method}() raised {call.error.kind} instead of returning an ErrorResponse"
                return failed(number, reason, [_shown(call)])
            error = ((call.result or {}).get("body") or {}).get("error")
            if not isinstance(error, dict):
                return failed(number, f"{call.method}() did not return an ErrorResponse", [_shown(call)])
            good = isinstance(error.get("message"), str) and isinstance(error.get("type"), str)
            if not good or not isinstance(error.get("code"), int) or not 400 <= error["code"] < 600:
                return failed(number, f"the ErrorResponse of {call.method}() lacks a field", [_shown(call)])
        return passed(len(calls))

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


def nothing_for_nothing(label: str) -> Check:
    """A call for no rows returns no rows or fails with a named error."""

    def judge(evidence: Evidence) -> Finding:
        calls = select(evidence, (label,), ("generate",))
        if not calls:
            return untestable(f"no call labelled {label} was recorded")
        for number, call in enumerate(calls, start=1):
            wrong = _wrong(call, ())
            rows = [
                (call.result or {}).get(f) for f in ("response_ids", "responses", "stop_reasons", "response_logprobs")
            ]
            if wrong and (call.error is not None or any(rows)):
                return failed(number, wrong, [_shown(call)])
        return passed(len(calls))

    return Check(
        name=f"errors.empty:{label}",
        fault="an empty batch hangs, fails without a name, or returns results",
        reads=Fact.ERRORS,
        falsifies=Fact.ERRORS | Fact.ANSWERS | Fact.TEXT,
        errors_of=label,
        source="SkyRL API reference, InferenceEngineInterface.generate",
        judge=judge,
    )


def _shown(call: Call) -> dict[str, Any]:
    error = call.error
    got: Any = call.result if error is None else {"kind": error.kind, "message": error.message, "status": error.status}
    return {"call": call.label or call.id, "method": call.method, "request": short(call.request), "got": got}
