"""Which routes an OpenAI address has, and how it refuses the others. A case is an http() call labelled with method and path."""

from __future__ import annotations

import http

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Finding, concluded, kept, untestable
from harness.checks.errors import error_of
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.verdict import Effect, FieldEffect
from harness.records.wire import header

NOWHERE = "/nobody-has-this-path"
ABSENT = {http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED, http.HTTPStatus.NOT_IMPLEMENTED}


@kept
def effects(evidence: Evidence) -> list[tuple[Call, FieldEffect]]:
    """Each case with what became of it, in order of time."""
    asked = [call for call in evidence.trace.own_calls if call.method == "http"]
    cases = [call for call in asked if call.label == "{method} {path}".format(**call.request)]
    return [
        (call, FieldEffect(call="http", field=call.request["path"], given=call.request["method"], effect=_effect(call)))
        for call in cases
    ]


def _effect(call: Call) -> Effect:
    kind, _, status = error_of(call)
    if status in ABSENT:
        return Effect.NO_ROUTE
    broke = kind is not None and (status is None or status >= http.HTTPStatus.INTERNAL_SERVER_ERROR)
    return Effect.BROKE if broke else Effect.AS_USUAL


def _judge(evidence: Evidence) -> Finding:
    found = effects(evidence)
    if not found:
        return untestable("no route was asked for")
    wrong = []
    for call, one in found:
        if (reason := _wrong(call, one.effect)) is not None:
            got = " ".join(map(str, error_of(call)))[:300]
            wrong.append((f"{one.given} {reason}", {"call": call.id, "path": one.field, "got": got}))
    return msgspec.structs.replace(concluded(len(found), wrong), effects=[one for _, one in found])


def _wrong(call: Call, effect: Effect) -> str | None:
    result = call.result or {}
    if effect is Effect.BROKE:
        return "is a server error at some routes, or not answered"
    if effect is Effect.AS_USUAL and call.request["path"] == NOWHERE and call.request["method"] != "OPTIONS":
        return "is answered at a path that no server has"
    silent = result.get("status") == http.HTTPStatus.METHOD_NOT_ALLOWED and not header(result["headers"], "allow")
    return "is refused at some routes by 405 without the methods that they have" if silent else None


HTTP_ROUTES = Check(
    name="http_routes",
    fault="a client that tries a route takes its absence for a broken server, or for an answer",
    next_step="send the request to a server itself: if it is refused well there, the router or the endpoint in front changes it",
    reads=Fact.ERRORS,
    errors_of=EVERY,
    source="RFC 9110, 15.5.5 and 15.5.6: 404 Not Found, 405 Method Not Allowed; vLLM documentation, OpenAI-Compatible Server",
    judge=_judge,
)
