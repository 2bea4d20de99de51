"""The OpenAI address as a user's client sees it: status and body of errors agree, streams end, log-probabilities are the model's."""

from __future__ import annotations

import http
import math
from collections.abc import Iterator
from typing import Any

from harness.checks.answers import Answer, choices, of_answers
from harness.checks.base import Check, Evidence, Finding, concluded, passed, untestable
from harness.checks.logprobs import Distances, farthest, seeded
from harness.checks.matching import is_error
from harness.contract.faults import Fact
from harness.contract.messages import CHOICES
from harness.records.reference import Query
from harness.records.wire import DONE, ROUTES, as_openai, body_of, events, streams

SOURCE = "vLLM documentation, OpenAI-Compatible Server; OpenAI API reference"
CLIENT_ERROR = 400


def _raw(evidence: Evidence) -> list[Any]:
    """Answered http() calls, not converted to OpenAI calls."""
    found = [call for call in evidence.trace.own_calls if call.method == "http" and call.result is not None]
    return sorted(found, key=lambda call: call.started_ns)


def _judge_status(evidence: Evidence) -> Finding:
    calls = [call for call in _raw(evidence) if call.request["path"] in ROUTES]
    if not calls:
        return untestable("no http() call was answered")
    wrong = []
    for call in calls:
        if (why := _status(call)) is not None:
            shown = {"call": call.id, "path": call.request["path"], "status": call.result["status"]}
            wrong.append((why, {**shown, "body": call.result["body"][:600]}))
    errors = sum(call.result["status"] >= CLIENT_ERROR for call in calls)
    return concluded(len(calls), wrong, answers=len(calls) - errors, errors=errors)


def _status(call: Any) -> str | None:
    """What is wrong with an answer's status, given its body; None if nothing is."""
    status, body = call.result["status"], body_of(call.result["body"])
    if streams(call.result):
        return "a stream came with the status of an error" if status >= CLIENT_ERROR else None
    if status < CLIENT_ERROR:
        if not body:
            return "an answer of status 200 has no body that an OpenAI client can read"
        return "an error came with the status of a success" if is_error(body) else None
    if not is_error(body):
        return "an error came without an OpenAI error body"
    return _error_fields(body["error"] if isinstance(body.get("error"), dict) else body, status)


def _error_fields(error: dict[str, Any], status: int) -> str | None:
    """What is wrong with the fields of an error body (vLLM, ErrorInfo); None if nothing is."""
    if error.get("code") != status:
        return "an error body names another code than its status"
    lacking = [name for name in ("message", "type") if not (isinstance(error.get(name), str) and error[name].strip())]
    if lacking:
        return f"an error body has no {lacking[0]}"
    if not isinstance(error.get("param"), str | None):
        return "the param of an error body is no text"
    return (
        "an error body's type names another status than its code"
        if _named(error["type"]) not in (None, status)
        else None
    )


def _named(kind: str) -> int | None:
    """The status that an error's type names: "Bad Request" and vLLM's "BadRequestError" name 400. None for other types."""
    return _STATUSES.get(_letters(kind))


def _letters(phrase: str) -> str:
    return "".join(filter(str.isalpha, phrase.lower())).removesuffix("error")


_STATUSES = {_letters(status.phrase): status.value for status in http.HTTPStatus if status >= CLIENT_ERROR}


STATUS = Check(
    name="wire.status",
    fault="a client takes an error for an answer, or cannot name it",
    next_step="send the request to a server itself: if status and body agree there, the router or the client changed one of them",
    reads=Fact.ERRORS,
    falsifies=Fact.ERRORS | Fact.ANSWERS,
    source=SOURCE,
    judge=_judge_status,
)


def _judge_stream(evidence: Evidence) -> Finding:
    asked = [call for call in _raw(evidence) if body_of(call.request["body"]).get("stream") is True]
    if not asked:
        return untestable("no http() call asked for a stream")
    facts, wrong = 0, []
    for call in asked:
        why, count = _stream(call)
        facts += count
        if why is not None:
            shown = {"call": call.id, "status": call.result["status"], "end": call.result["body"][-600:]}
            wrong.append((why, shown))
    return concluded(facts, wrong, streams=len(asked))


def _stream(call: Any) -> tuple[str | None, int]:
    if not streams(call.result):
        return "a stream was asked for and none came", 1
    data = list(events(call.result["body"]))
    if not data or data[-1] != DONE:
        return "a stream does not end with [DONE]", 1
    if any(not body_of(one) for one in data[:-1]):
        return "an event of a stream is not a JSON object", len(data)
    ended = [choice.get("finish_reason") for choice in ((as_openai(call).result or {})["body"].get("choices") or ())]
    if not ended or not all(ended):
        return "a choice of a stream has no finish reason", len(data)
    return None, len(data)


STREAMS = Check(
    name="wire.streams",
    fault="a stream breaks off, never ends, or is no stream",
    next_step="look at the end of the stream in the evidence, and at who closed it: the server, the router or the client",
    source=f"{SOURCE}: streaming",
    reads=Fact.ERRORS,  # a request that fails has no stream
    falsifies=Fact.ANSWERS | Fact.TEXT,
    judge=_judge_stream,
)


def _numbers(choice: dict[str, Any]) -> list[Any] | None:
    """The log-probabilities of a choice's own tokens: completions list them, chats have one object per token."""
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        return None
    content = found.get("content")
    if isinstance(content, list):
        return [entry.get("logprob") for entry in content]
    listed = found.get("token_logprobs")
    return listed if isinstance(listed, list) else None


def _asks_logprobs(row: Answer) -> bool:
    wanted = row.params.get("logprobs")
    return wanted is not None and wanted is not False


def _logprobs(evidence: Evidence, rows: list[Answer]) -> Finding:
    asked = [row for row in rows if _asks_logprobs(row)]
    if not asked:
        return untestable("no body asked for log-probabilities")
    distances, faults = Distances(evidence), dict[str, float]()
    wrong: list[tuple[str, dict[str, Any]]] = []
    for row in asked:
        got = _numbers(choices(row.call)[row.index])
        if got is None or len(got) != len(row.tokens):
            wrong.append(("a choice has not one log-probability per token", row.shown(logprobs=got)))
            continue
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in got):
            wrong.append(("a log-probability is not a finite number", row.shown(logprobs=got)))
            continue
        score = evidence.reference.score(row.score)
        for name, size in seeded(score.logprobs, exact=evidence.exact).items():
            faults[name] = max(faults.get(name, 0.0), size)
        off, at = farthest(got, score.logprobs)
        if distances.beyond(score, off):
            why = "log-probabilities are further from the reference's than the bound"
            wrong.append((why, row.shown(position=at, got=got[at], reference=score.logprobs[at])))
    facts = sum(max(1, len(row.tokens)) for row in asked)
    numbers = {"max_abs_error": distances.worst, "bound": distances.bound}
    return concluded(facts, wrong, margin=distances.margin(faults), **numbers, choices=len(asked))


def _logprob_queries(_: Evidence, rows: list[Answer]) -> Iterator[Query]:
    yield from (row.score for row in rows if _asks_logprobs(row))


LOGPROBS = of_answers(
    "wire.logprobs",
    fault="log-probabilities of an OpenAI body are missing, shifted, or of other weights",
    reads=Fact.ANSWERS | Fact.LOGPROBS | Fact.POLICY,
    source=f"{SOURCE}: logprobs",
    rule=_logprobs,
    asks=_logprob_queries,
    methods=CHOICES,
)


def answered(*labels: str) -> Check:
    """Every call with one of `labels` was answered well, such as those after or beside errors."""

    def rule(_: Evidence, rows: list[Answer]) -> Finding:
        return passed(len(rows))

    return of_answers(
        "wire.answered",
        fault="after an error, or beside one, good requests fail",
        reads=Fact.ANSWERS | Fact.ROUTES | Fact.ERRORS,
        source=SOURCE,
        rule=rule,
        labels=labels,
        methods=CHOICES,
    )
