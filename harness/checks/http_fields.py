"""What became of headers, query parameters and fields of bodies that an address takes beside the OpenAI requests' own fields.

A case is an http() call labelled "/pause mode: keep": what is asked ("/pause"), the field, and what its value stands for. It is
compared with the call labelled "/pause as it is"."""

from __future__ import annotations

import http
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Finding, Tap, concluded, kept, untestable
from harness.checks.echo import CONTROL_OPS
from harness.checks.errors import breaks
from harness.checks.matching import assignment, queries
from harness.checks.request_fields import AS_IT_IS, places
from harness.contract.faults import Fact
from harness.records.recording import Call, saying
from harness.records.verdict import Effect, FieldEffect
from harness.records.wire import REQUEST_ID, ROUTES, SESSION, body_of, header, streams

UNKNOWN = "no_such_field"
"""A field that no address has. An address may ignore it (HTTP: RFC 9110, 6.3; OpenAI-compatible servers of vLLM do)."""
ABSENT = {http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED, http.HTTPStatus.NOT_IMPLEMENTED}
SAY_WHY = {
    http.HTTPStatus.NOT_ACCEPTABLE,
    http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
}
SAY_WHY |= {http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE}
"""Statuses that name what is wrong with a request's headers by themselves."""
ALIASES = {"encoding": ("json", "utf"), "content-encoding": ("json", "utf"), "content-type": ("json",)}
"""Other words of an error that name the matter: the body cannot be read as JSON."""
TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})
"""Texts of a query that mean True (pydantic documentation, Booleans)."""
ROUTE_OPS = {f"/{CONTROL_OPS[name].removesuffix('_generation')}": op for name, op in CONTROL_OPS.items()}
"""Route of a server → the engine's operation (vLLM documentation, `/pause`, `/sleep`)."""


@kept
def effects(evidence: Evidence) -> list[tuple[Call, FieldEffect]]:
    """Each case with what became of its field, in order of time. Empty if nothing can be judged."""
    asked = [call for call in evidence.trace.own_calls if call.method == "http" and call.label]
    usual = {_route(call): call for call in asked if call.label == f"{_route(call)} {AS_IT_IS}" and _status(call) < 300}
    found = []
    for call in asked:
        what, _, kind = str(call.label).partition(": ")
        if kind and _route(call) in usual:
            field = what.removeprefix(_route(call)).strip()
            effect = _effect(evidence, call, field, usual[_route(call)])
            found.append((call, FieldEffect(call=_route(call), field=field, given=kind, effect=effect)))
    return found


def _route(call: Call) -> str:
    path: str = call.request["path"]
    return urlsplit(path).path


def _status(call: Call) -> int:
    return int((call.result or {}).get("status", 0))


def _said(call: Call) -> str:
    return call.error.message if call.error is not None else str((call.result or {}).get("body", ""))


def _effect(evidence: Evidence, call: Call, field: str, usual: Call) -> Effect:
    status, text = _status(call), _said(call)
    if call.error is not None or status >= http.HTTPStatus.BAD_REQUEST:
        return _of_error(call, field, status, text)
    if field == SESSION:
        return _of_session(evidence, call)
    if field == REQUEST_ID:
        return _of_id(header(call.request["headers"], REQUEST_ID), text)
    return _at_engine(evidence, call, field, usual) if _route(call) in ROUTE_OPS else _of_answer(call, usual)


def _of_error(call: Call, field: str, status: int, text: str) -> Effect:
    named = any(word in text.lower() for word in (field.lower(), *ALIASES.get(field, ())))
    if status in ABSENT and not named:
        return Effect.NO_ROUTE
    if call.error is not None or breaks(f"HTTP{status}", text or f"HTTP{status}", status):
        return Effect.BROKE
    return Effect.REFUSED if named or status in SAY_WHY else Effect.REFUSED_NAMELESS


def _of_id(given: str | None, text: str) -> Effect:
    """A request's id comes back in the answer's own (vLLM documentation, Extra HTTP Headers)."""
    if not given:
        return Effect.AS_USUAL
    return Effect.TOOK_EFFECT if given in text else Effect.DROPPED


def _of_answer(call: Call, usual: Call) -> Effect:
    return Effect.AS_USUAL if _shape(call) == _shape(usual) else Effect.TOOK_EFFECT


def _shape(call: Call) -> Any:
    """What tells two answers apart: of requests, whose answers differ anyway, the keys; of others all that they say."""
    text = _said(call)
    if _route(call) in ROUTES:
        return streams(call.result or {}), set(places(body_of(text)))
    return body_of(text) or text


def _of_session(evidence: Evidence, call: Call) -> Effect:
    """Whether all requests with this session ran on one server."""
    alike = {one.id for one in evidence.calls(label=call.label)}
    found = assignment(evidence)
    ran = [execution.server for row in found.rows if row.call.id in alike for execution in found.where(row)]
    return Effect.TOOK_EFFECT if len(set(ran)) == 1 else Effect.DROPPED


def _at_engine(evidence: Evidence, call: Call, field: str, usual: Call) -> Effect:
    seen, plain = (_arguments(evidence, one) for one in (call, usual))
    if seen is None:
        return Effect.DROPPED
    if field == UNKNOWN:
        return Effect.AS_USUAL if seen == plain else Effect.CHANGED
    given, at_engine = parse_qs(urlsplit(call.request["path"]).query).get(field, []), seen.get(field)
    if _meant(given, at_engine):
        return Effect.AS_USUAL if seen == plain else Effect.TOOK_EFFECT
    return Effect.DROPPED if seen == plain else Effect.CHANGED


def _arguments(evidence: Evidence, call: Call) -> dict[str, Any] | None:
    """The arguments with which the call reached its server's engine; None if it did not."""
    for seen in evidence.controls(ROUTE_OPS[_route(call)]):
        if call.started_ns <= seen.at_ns <= call.ended_ns and seen.server == call.request["server"]:
            arguments: dict[str, Any] = seen.data["arguments"]
            return arguments
    return None


def _meant(given: list[str], at_engine: Any) -> bool:
    """True if the engine's value is what the query says."""
    if isinstance(at_engine, bool):
        return bool(given) and (given[-1].lower() in TRUE) == at_engine
    return given == list(map(str, at_engine if isinstance(at_engine, list) else [at_engine]))


REASONS = {
    Effect.BROKE: "{call} answers some values of {field} as a server error, or not at all",
    Effect.REFUSED_NAMELESS: "{call} refuses some values of {field} without naming it",
    Effect.DROPPED: "{call} ignores some values of {field}",
    Effect.CHANGED: "{call} makes something else of some values of {field}",
}
"""Effects that are wrong → reason."""


def _judge(evidence: Evidence) -> Finding:
    found = effects(evidence)
    if not found:
        return untestable("the request without any further field failed, or no field was asked for")
    wrong = [
        (
            REASONS[one.effect].format(call=one.call, field=one.field),
            {"call": call.id, "given": one.given, "got": saying(str(_status(call)), _said(call)[:300])},
        )
        for call, one in found
        if one.effect in REASONS
    ]
    return msgspec.structs.replace(concluded(len(found), wrong), effects=[one for _, one in found])


HTTP_FIELDS = Check(
    name="http_fields",
    fault="a header, a query parameter or a field of a body is ignored, changed, refused without its name, or breaks the address",
    next_step="send the request in the evidence by curl, and follow it to the handler that reads the field",
    reads=Fact.ERRORS | Fact.ROUTES,
    falsifies=Fact.ERRORS,
    errors_of=EVERY,
    source="vLLM documentation, OpenAI-Compatible Server and its openapi.json; SkyRL #899, X-Session-ID; RFC 9110, 8 and 15.5",
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)
