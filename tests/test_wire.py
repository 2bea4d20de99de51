"""http() calls are read as completions: bodies, streams, errors, sessions."""

from __future__ import annotations

import json
from typing import Any

from harness.checks.wire import STATUS, STREAMS
from harness.contract.capability import Capability
from harness.contract.messages import HttpRequest, HttpResponse, capabilities_of
from harness.records.recording import Call
from harness.records.wire import TOKENS, as_openai, streamed
from tests import traces

JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream; charset=utf-8"}
BODY = {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}], "object": "text_completion"}


def call(body: Any, answer: str, status: int = 200, **about: Any) -> Call:
    """A /v1/completions call with this body, answered with this text."""
    request = HttpRequest(path="/v1/completions", headers=about.pop("sent", JSON), body=json.dumps(body))
    result = HttpResponse(status=status, headers=about.pop("headers", JSON), body=answer)
    return traces.call("http", request, result, **about)


def events(*chunks: dict[str, Any], done: bool = True) -> str:
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + ("data: [DONE]\n\n" if done else "")


def chunk(text: str, reason: str | None = None, tokens: list[int] | None = None) -> dict[str, Any]:
    piece = {"index": 0, "text": text, "finish_reason": reason, "token_ids": tokens}
    return {"id": "1", "created": 1, "model": "m", "object": "text_completion", "choices": [piece]}


STREAM = events(chunk("a", tokens=[1]), chunk("b", "stop", [2, 3]))


def test_a_request_to_an_openai_route_is_that_call():
    read = as_openai(call({"prompt": [1]}, json.dumps(BODY), sent={**JSON, "X-Session-ID": "7"}))
    assert read.method == "completion"
    assert read.request == {"body": {"prompt": [1]}, "headers": {"x-session-id": "7"}}
    assert read.result == {"body": BODY}


def test_other_routes_stay_what_they_are():
    other = traces.call("http", HttpRequest(path="/v1/nothing"), HttpResponse(status=404))
    assert as_openai(other) is other


def test_a_request_by_token_ids_is_generate():
    said = {"content": [{"token": "token_id:7", "logprob": -0.5}]}
    choice = {"index": 0, "token_ids": [7], "finish_reason": "length", "logprobs": said}
    body = json.dumps({"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}})
    answer = HttpResponse(status=200, body=json.dumps({"choices": [choice]}))
    read = as_openai(traces.call("http", HttpRequest(path=TOKENS, body=body), answer))
    assert (read.method, read.request["prompt_token_ids"]) == ("generate", [[1, 2]])
    assert (read.result["response_ids"], read.result["response_logprobs"]) == ([[7]], [[-0.5]])
    refused = traces.call("http", HttpRequest(path=TOKENS, body=body), HttpResponse(status=404))
    assert as_openai(refused) is refused


def test_an_error_without_a_body_is_named_by_its_status():
    read = as_openai(call({}, "Bad Gateway", 502))
    assert (read.error.kind, read.error.status) == ("HTTP502", 502)


def test_chunks_are_put_together():
    (choice,) = streamed(STREAM)["choices"]
    assert choice == {"index": 0, "text": "ab", "token_ids": [1, 2, 3], "finish_reason": "stop"}


def test_deltas_and_log_probabilities_are_put_together():
    def piece(text: str, number: float) -> dict[str, Any]:
        return {"index": 0, "delta": {"content": text}, "logprobs": {"content": [{"logprob": number}]}}

    found = streamed(
        events(*({"object": "chat.completion.chunk", "choices": [piece(*p)]} for p in (("a", -1), ("b", -2))))
    )
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"]["content"] == "ab"
    assert found["choices"][0]["logprobs"] == {"content": [{"logprob": -1}, {"logprob": -2}]}


def test_pieces_of_a_call_are_put_together():
    def piece(**call: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **call}]}}]}

    begun = piece(id="call_1", type="function", function={"name": "now", "arguments": ""})
    found = streamed(events(begun, *(piece(function={"arguments": part}) for part in ('{"at', '": 1}'))))
    (called,) = found["choices"][0]["message"]["tool_calls"]
    assert called == {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"at": 1}'}}


def test_status_and_body_agree():
    error = {"error": {"message": "no", "type": "NotFoundError", "code": 404}}
    assert traces.judge(STATUS, call({}, json.dumps(BODY)), call({}, json.dumps(error), 404)).status == "pass"
    for answer, status in ((json.dumps(error), 200), (json.dumps(error), 500), ("", 200), ("gone", 502)):
        assert traces.judge(STATUS, call({}, answer, status)).status == "fail"


def test_the_fields_of_an_error_agree():
    error = {"message": "no", "type": "NotFoundError", "param": "model", "code": 404}
    for good in ({"type": "Not Found"}, {"type": "invalid_request_error"}, {"param": None}):
        assert traces.judge(STATUS, call({}, json.dumps({"error": error | good}), 404)).status == "pass"
    for bad, reason in (
        ({"type": "BadRequestError"}, "an error body's type names another status than its code"),
        ({"type": None}, "an error body has no type"),
        ({"message": " "}, "an error body has no message"),
        ({"param": 3}, "the param of an error body is no text"),
        ({"code": "404"}, "an error body names another code than its status"),
    ):
        assert traces.judge(STATUS, call({}, json.dumps({"error": error | bad}), 404)).reason == reason


def test_every_answer_is_judged():
    error = {"error": {"message": "no", "type": "NotFoundError", "code": 404}}
    wrong = [call({}, json.dumps(error)), call({}, "", 404), call({"stream": True}, STREAM, 500, headers=SSE)]
    found = traces.judge(STATUS, *wrong, call({}, json.dumps(BODY)))
    assert found.reasons == [
        "a stream came with the status of an error",
        "an error came with the status of a success",
        "an error came without an OpenAI error body",
    ]
    assert (found.facts, {of for of, _ in found.concerns}) == (4, {one.id for one in wrong})
    assert found.numbers == {"answers": 2, "errors": 2}
    asked = {"stream": True}
    found = traces.judge(STREAMS, call(asked, json.dumps(BODY)), call(asked, STREAM[:-8], headers=SSE))
    assert (found.numbers, len(found.reasons)) == ({"streams": 2}, 2)


def test_a_stream_ends_as_streams_do():
    asked = {"stream": True}
    assert traces.judge(STREAMS, call(asked, STREAM, headers=SSE)).status == "pass"
    unfinished = events(chunk("a"))
    broken_off = events(chunk("a", "stop"), done=False)
    for answer in (unfinished, broken_off, ""):
        assert traces.judge(STREAMS, call(asked, answer, headers=SSE)).status == "fail"
    assert traces.judge(STREAMS, call(asked, json.dumps(BODY))).status == "fail"


def test_what_a_body_needs():
    def needs(body: str) -> frozenset[Capability]:
        return capabilities_of("http", {"path": "/v1/completions", "body": body})

    plain = {Capability.HTTP_ENDPOINT}
    assert needs('{"n": 1}') == needs("{half") == needs("[]") == plain
    assert needs('{"n": 2}') == plain | {Capability.HTTP_CHOICES}
    assert needs('{"stream": true}') == plain | {Capability.HTTP_STREAMING}
