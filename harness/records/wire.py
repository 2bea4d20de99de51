"""Reads http() calls as completion() and chat_completion() calls over the stack's OpenAI address. Pure.

Checks and comparisons treat both alike: the same promises hold for a body sent as bytes. Server-sent events are joined to
the one body that they stand for (vLLM documentation, OpenAI-Compatible Server: streaming).
"""

from __future__ import annotations

import http
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from harness.contract.messages import GenerateRequest, Generation, SampleRequest
from harness.records.recording import Call, CallError

ROUTES = {"/v1/completions": "completion", "/v1/chat/completions": "chat_completion"}
"""Route of the OpenAI address → call of the contract."""
TOKENS = "/inference/v1/generate"
"""The route that answers token ids with token ids (vLLM documentation, /inference/v1/generate). It has no texts (`token_name`)."""
SESSION = "x-session-id"
"""The header that names a request's session (SkyRL #1014, task 6)."""
REQUEST_ID = "x-request-id"
"""The header that gives a request its id (vLLM documentation, Extra HTTP Headers)."""
DONE = "[DONE]"
"""The last event of a stream."""


def body_of(text: str) -> dict[str, Any]:
    """A JSON object, empty for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def token_name(token: object) -> str:
    """How vLLM names a token where there is no text."""
    return f"token_id:{token}"


def header(headers: Mapping[str, str], name: str) -> str | None:
    """A header's value; None if it is missing. The case of its name does not matter."""
    return next((value for key, value in headers.items() if key.lower() == name), None)


def as_openai(call: Call) -> Call:
    """An http() call to an OpenAI route as the completion() or chat_completion() that it stands for, one to `TOKENS` as generate() or
    sample(); other calls unchanged.

    For a status of 400 or more the result is the error body. Without one, the call gets a `CallError` named by the status.
    """
    method = ROUTES.get(call.request["path"]) if call.method == "http" and call.request["method"] == "POST" else None
    if call.method == "http" and call.request["path"] == TOKENS and call.result is not None:
        return _by_tokens(call)
    if method is None:
        return call
    given = {name: header(call.request["headers"], name) for name in (SESSION, REQUEST_ID)}
    headers = {name: value for name, value in given.items() if value is not None}
    request = {"body": body_of(call.request["body"]), "headers": headers}
    read = msgspec.structs.replace(call, method=method, request=request, result=None)
    if call.result is None:
        return read
    status, text = call.result["status"], call.result["body"]
    body = streamed(text) if streams(call.result) else body_of(text)
    if status >= http.HTTPStatus.BAD_REQUEST and not body.get("error"):
        error = CallError(kind=f"HTTP{status}", message=text[:2000] or reason(status), status=status)
        return msgspec.structs.replace(read, error=error)
    return msgspec.structs.replace(read, result={"body": body})


def _by_tokens(call: Call) -> Call:
    """A call of `TOKENS` as the generate() of one prompt, or as the sample() of several answers. Unchanged if it was refused."""
    assert call.result is not None
    given = body_of(call.request["body"])
    choices = (streamed if streams(call.result) else body_of)(call.result["body"]).get("choices")
    if not choices:
        return call
    said = [[place["logprob"] for place in (one.get("logprobs") or {}).get("content") or ()] for one in choices]
    prompt, params = given["token_ids"], {name: one for name, one in given["sampling_params"].items() if name != "n"}
    count = given["sampling_params"].get("n", 1)
    request: GenerateRequest | SampleRequest
    if count == 1:
        method, request = "generate", GenerateRequest(prompt_token_ids=[prompt], sampling_params=params)
    else:
        request = SampleRequest(prompt_token_ids=prompt, num_samples=count, sampling_params=params)
        method = "sample"
    result = Generation(
        response_ids=[choice["token_ids"] for choice in choices],
        responses=None,
        stop_reasons=[choice["finish_reason"] for choice in choices],
        response_logprobs=[one or None for one in said] if any(said) else None,
    )
    plain = {"request": msgspec.to_builtins(request), "result": msgspec.to_builtins(result)}
    return msgspec.structs.replace(call, method=method, **plain)


def reason(status: int) -> str:
    """The reason phrase of an HTTP status."""
    return http.HTTPStatus(status).phrase if status in set(http.HTTPStatus) else "unknown status"


def streams(result: dict[str, Any]) -> bool:
    """True if the answer came as server-sent events."""
    return (header(result["headers"], "content-type") or "").startswith("text/event-stream")


def events(text: str) -> Iterator[str]:
    """The data of each event, in order."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        if lines:
            yield "\n".join(lines)


def streamed(text: str) -> dict[str, Any]:
    """The body that a stream of chunks stands for, or the error that ended it early. Empty without chunks."""
    chunks = [body_of(data) for data in events(text) if data != DONE]
    if not chunks:
        return {}
    broken = next((chunk for chunk in chunks if chunk.get("error")), None)
    if broken is not None:
        return broken
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk.get("choices") or ():
            _add(choices.setdefault(piece.get("index", 0), {"index": piece.get("index", 0)}), piece)
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    return {
        **{name: chunks[0].get(name) for name in ("id", "created", "model")},
        "object": str(chunks[0].get("object")).removesuffix(".chunk"),
        "choices": [choices[index] for index in sorted(choices)],
        "usage": usage,
    }


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Append one chunk's piece of a choice to `choice`."""
    if "delta" in piece:
        message = choice.setdefault("message", {"role": "assistant", "content": ""})
        message["content"] += piece["delta"].get("content") or ""
        for call in piece["delta"].get("tool_calls") or ():
            _add_call(message.setdefault("tool_calls", []), call)
    else:
        choice["text"] = choice.get("text", "") + (piece.get("text") or "")
    if piece.get("token_ids") is not None:
        choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
    for name, values in (piece.get("logprobs") or {}).items():
        kept = choice.setdefault("logprobs", {})
        kept[name] = (kept.get(name) or []) + values if isinstance(values, list) else kept.get(name)
    choice["finish_reason"] = piece.get("finish_reason") or choice.get("finish_reason")


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    """Append one chunk's piece of a call of a tool. `index` says of which one; id, type and name come once, arguments in parts."""
    at = piece.get("index") or 0
    while len(calls) <= at:
        calls.append({"function": {"arguments": ""}})
    function = piece.get("function") or {}
    calls[at] |= {name: piece[name] for name in ("id", "type") if piece.get(name)}
    calls[at]["function"] |= {"name": function["name"]} if function.get("name") else {}
    calls[at]["function"]["arguments"] += function.get("arguments") or ""
