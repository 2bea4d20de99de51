"""The miniature's OpenAI address: turns HTTP requests into the client's calls, with vLLM's errors and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from backends.miniature.client import Client, error_body
from backends.miniature.engine import BadRequest, EngineDead
from harness.contract.messages import HttpRequest, HttpResponse
from harness.records.wire import DONE, SESSION, header

NEEDS = {"/v1/completions": ("model", "prompt"), "/v1/chat/completions": ("model", "messages")}
"""Route → required fields of a body."""


class Endpoint:
    """Each method is a step that a fault may break."""

    def __init__(self) -> None:
        self.fired = 0
        self.client: Client

    async def http(self, request: HttpRequest) -> HttpResponse:
        """Answer one request; a bad one gets an error."""
        if request.path not in NEEDS or request.method != "POST":
            return self.json(404, {"detail": "Not Found"})
        body = self.read(request)
        if body is None:
            return self.refused(error_body("the body is not a JSON object", 400))
        lacking = [name for name in NEEDS[request.path] if not body.get(name)]
        if lacking:
            return self.refused(error_body(f"the field {lacking[0]} is required", 400))
        stream = bool(body.pop("stream", False))
        with_usage = bool((body.pop("stream_options", None) or {}).get("include_usage"))
        answer = await self.answer(request.path, body)
        if answer.get("error"):
            return self.refused(answer)
        if stream:
            events = [json.dumps(chunk) for chunk in self.chunks(answer, with_usage)]
            return self.stream([*events, DONE])
        return self.json(200, answer)

    def read(self, request: HttpRequest) -> dict[str, Any] | None:
        """The body with the session from the header; None if it is not a JSON object."""
        try:
            body = json.loads(request.body)
        except ValueError:
            return None
        session = self.session(request)
        if isinstance(body, dict) and session is not None:
            body["session_id"] = session
        if isinstance(body, dict):
            body = self.client.identified(body, request.headers)
        return body if isinstance(body, dict) else None

    def session(self, request: HttpRequest) -> str | None:
        return header(request.headers, SESSION)

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The client's answer: a body, or an error body."""
        call = self.client.completion if path == "/v1/completions" else self.client.chat_completion
        try:
            return await call(body)
        except BadRequest as e:
            return error_body(str(e), 400)
        except EngineDead as e:
            return error_body(str(e), 503)

    def refused(self, body: dict[str, Any]) -> HttpResponse:
        """An error with its own status."""
        return self.json(body["error"]["code"], body)

    def json(self, status: int, body: dict[str, Any]) -> HttpResponse:
        return HttpResponse(status=status, headers={"content-type": "application/json"}, body=json.dumps(body))

    def stream(self, events: list[str]) -> HttpResponse:
        text = "".join(f"data: {event}\n\n" for event in events)
        return HttpResponse(status=200, headers={"content-type": "text/event-stream; charset=utf-8"}, body=text)

    def chunks(self, answer: dict[str, Any], with_usage: bool) -> Iterator[dict[str, Any]]:
        """A body as vLLM streams it, here in two pieces per choice. The last has the finish reason; usage follows if requested."""
        chat = answer["object"] == "chat.completion"
        about = {name: answer[name] for name in ("id", "created", "model")}
        about["object"] = "chat.completion.chunk" if chat else "text_completion"
        for choice in answer["choices"]:
            text = choice["message"]["content"] if chat else choice["text"]
            tokens = choice.get("token_ids")
            for last in (False, True):
                part = text[len(text) // 2 :] if last else text[: len(text) // 2]
                piece: dict[str, Any] = {"index": choice["index"], "finish_reason": None}
                piece |= {"delta": {"content": part}} if chat else {"text": part}
                if tokens is not None:
                    piece["token_ids"] = tokens[len(tokens) // 2 :] if last else tokens[: len(tokens) // 2]
                if last:
                    piece["finish_reason"] = choice["finish_reason"]
                yield {**about, "choices": [piece]}
        if with_usage:
            yield {**about, "choices": [], "usage": answer["usage"]}
