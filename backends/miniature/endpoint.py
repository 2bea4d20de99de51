"""The miniature's OpenAI address: turns HTTP requests into the client's calls, with vLLM's errors and streams."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from backends.miniature import parameters
from backends.miniature.client import Client, error_body
from backends.miniature.engine import BadRequest, Engine, EngineDead, Output
from harness.contract.messages import SEVERAL_TEXTS, HttpRequest, HttpResponse, Scalar
from harness.records.wire import DONE, SESSION, TOKENS, header, token_name

JSON = "application/json"
Json = dict[str, Any]
TOKEN = parameters.TOKENS["items"]
SERVER_ROUTES: dict[str, tuple[str, dict[str, Json], Json]] = {
    "/pause": (
        "pause_generation",
        {"mode": {"enum": ["abort", "wait", "keep"]}, "clear_cache": {"type": "boolean"}},
        {},
    ),
    "/resume": ("resume_generation", {}, {}),
    "/reset_prefix_cache": ("reset_prefix_cache", {"reset_running_requests": {"type": "boolean"}}, {}),
    "/sleep": ("sleep", {"level": {"enum": ["1", "2"]}}, {}),
    "/wake_up": (
        "wake_up",
        {"tags": {"type": "array", "items": {"type": "string"}, "enum": ["weights", "kv_cache"]}},
        {},
    ),
    "/tokenize": ("", {}, {"prompt": {"type": "string"}, "return_token_strs": {"type": ["boolean", "null"]}}),
    "/detokenize": ("", {}, {"tokens": {"type": "array", "items": TOKEN}}),
}
"""Route of a server's own address → the engine's operation, its query's parameters and its body's fields (vLLM documentation,
`/pause`, `/reset_prefix_cache`, Tokenizer API)."""
SERVED: dict[str, Scalar] = {"enable_auto_tool_choice": False, "response_role": "assistant"}
"""What the address is served with unless it is told otherwise."""
DEFAULTS: Json = {"level": "1", "tags": None, "mode": "abort", "clear_cache": True, "reset_running_requests": False}
NEEDS = {"/v1/completions": ("model", "prompt"), "/v1/chat/completions": ("model", "messages")}
"""Route → required fields of a body."""


class Endpoint:
    """Each method is a step that a fault may break."""

    def __init__(self) -> None:
        self.fired = 0
        self.client: Client

    def beside(self, other: Client) -> None:
        """Another client gets an address of its own. This one stays its client's."""

    def arguments(self, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """What it would be served with: it has all of these options (SkyRL #322, #358). Without any, what it is served with."""
        return {name: self.several(name, value) for name, value in (options or SERVED).items()}

    def several(self, name: str, value: Any) -> Any:
        """A text for an option that holds several is a list of one."""
        return [value] if name in SEVERAL_TEXTS and isinstance(value, str) else value

    async def http(self, request: HttpRequest) -> HttpResponse:
        """Answer one request; a bad one gets an error."""
        if request.path not in NEEDS or request.method != "POST":
            return self.absent()
        if said := self.unsupported(request):
            return self.json(415, {"detail": said})
        return await self.posted(request)

    def absent(self) -> HttpResponse:
        """The answer to a request for a route that the address lacks."""
        return self.json(404, {"detail": "Not Found"})

    async def configured(self, request: HttpRequest) -> HttpResponse:
        """Answer one request to host and port of the configuration: the address is there."""
        return await self.http(request)

    async def posted(self, request: HttpRequest) -> HttpResponse:
        """Answer a request with a body in a form that the address reads."""
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

    async def at_server(self, engine: Engine, request: HttpRequest) -> HttpResponse:
        """Answer one request to a server's own address."""
        route = urlsplit(request.path)
        if (request.method, route.path) == ("GET", "/openapi.json"):
            return self.json(200, described())
        if (request.method, route.path) == ("GET", "/metrics"):
            return self.metrics(engine)
        if (request.method, route.path) == ("POST", TOKENS):
            return await self.tokens(engine, json.loads(request.body))
        if route.path not in SERVER_ROUTES or request.method != "POST":
            return self.json(404, {"detail": "Not Found"})
        op, query, fields = SERVER_ROUTES[route.path]
        given = parse_qs(route.query, keep_blank_values=True) if op else json.loads(request.body or "{}")
        read = {
            name: self.parameter(name, given[name], one) for name, one in (query or fields).items() if name in given
        }
        if refused := [said for said, _ in read.values() if said] + [
            f"{name}: unknown" for name in given if name not in read
        ]:
            return self.json(422, {"detail": refused})
        values = {name: value for name, (_, value) in read.items()}
        return await self.run(engine, op, {name: DEFAULTS[name] for name in query} | values, route.path)

    def metrics(self, engine: Engine) -> HttpResponse:
        """Three series of a server (vLLM documentation, Production Metrics)."""
        counted = {
            "vllm:num_requests_running": len(engine.running),
            "vllm:num_requests_waiting": len(engine.waiting),
            "vllm:generation_tokens_total": engine.made,
        }
        text = "".join(f'{series}{{engine="0"}} {float(value)}\n' for series, value in counted.items())
        return HttpResponse(status=200, headers={"content-type": "text/plain; version=0.0.4"}, body=text)

    async def tokens(self, engine: Engine, body: Json) -> HttpResponse:
        """Token ids for token ids (vLLM documentation, /inference/v1/generate), with the most probable ones of each place."""
        params = {name: value for name, value in body["sampling_params"].items() if name != "n"}
        count = body["sampling_params"].get("n", 1)
        made = await asyncio.gather(*(engine.generate(body["token_ids"], params) for _ in range(count)))
        choices = self.kept([self.choice(engine, index, one, params) for index, one in enumerate(made)])
        if self.events_wanted(body):
            return self.stream([*(json.dumps({"choices": [one]}) for one in choices), DONE])
        return self.json(200, {"request_id": "1", "choices": choices})

    def events_wanted(self, body: Json) -> bool:
        return bool(body.get("stream"))

    def kept(self, choices: list[Json]) -> list[Json]:
        """The choices that an answer has: all."""
        return choices

    def choice(self, engine: Engine, index: int, made: Output, params: Json) -> Json:
        """One answer, with log-probabilities if they were asked for."""
        about = {"index": index, "token_ids": made.tokens, "finish_reason": made.reason}
        if params.get("logprobs") is None:
            return about
        rows = engine.prompt_rows([*made.prompt, *made.tokens])[len(made.prompt) - 1 :]
        tops = [self.client.most_probable(row, params["logprobs"]) for row in rows]
        content = [
            {"token": token_name(token), "logprob": logprob, "top_logprobs": self.alternatives(token, top)}
            for token, logprob, top in zip(made.tokens, made.logprobs or (), tops, strict=False)
        ]
        return {**about, "logprobs": {"content": content}}

    def alternatives(self, _chosen: int, top: list[tuple[int, float]]) -> list[Json]:
        """The most probable tokens of a place by their own names."""
        return [{"token": token_name(token), "logprob": logprob} for token, logprob in top]

    def parameter(self, name: str, given: Any, schema: Json) -> tuple[str, Any]:
        """Why it is refused (empty if it is not), and its value. A query holds texts."""
        kinds = schema.get("type", "")
        if given is None:
            return ("" if "null" in kinds else f"{name}: null"), given
        if kinds == "boolean":
            given = {"true": True, "false": False}.get(given[-1], given[-1])
        elif "enum" in schema and kinds != "array":
            given = given[-1]
        each = given if kinds == "array" and isinstance(given, list) else [given]
        options = schema.get("enum", each)
        if any(one not in options for one in each):
            return f"{name}: one of {options}", given
        return parameters.wrong_type(
            name, given, {"type": "string"} if "enum" in schema and kinds != "array" else schema
        ) or "", given

    async def run(self, engine: Engine, op: str, values: Json, path: str) -> HttpResponse:
        """The engine's operation, or what its tokenizer says."""
        if op:
            await engine.control(op, **values | ({"level": int(values["level"])} if "level" in values else {}))
            return self.json(200, {"status": "ok"})
        if path == "/detokenize":
            return self.json(200, {"prompt": self.client.detokenize([values.get("tokens", [])])[0]})
        tokens = self.client.tokenize([values.get("prompt", "")])[0]
        strings = {"token_strs": [str(token) for token in tokens]} if values.get("return_token_strs") else {}
        return self.json(200, {"tokens": tokens, "count": len(tokens)} | strings)

    def unsupported(self, request: HttpRequest) -> str | None:
        """The header that names a form which the address does not read (RFC 9110, 15.5.16); None if there is none."""
        kind = (header(request.headers, "content-type") or JSON).partition(";")[0].strip().lower()
        if kind != JSON:
            return f"content-type: {kind} is not {JSON}"
        packed = header(request.headers, "content-encoding") or "identity"
        return None if packed in ("identity", "gzip", "deflate") else f"content-encoding: {packed} is unknown"

    def read(self, request: HttpRequest) -> dict[str, Any] | None:
        """The body with the session from the header; None if it is not a JSON object."""
        text = self.body(request)
        try:
            body = json.loads(text or "")
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

    def body(self, request: HttpRequest) -> str | None:
        """The body as text, decompressed as its header says; None if it is not UTF-8."""
        packed, content = header(request.headers, "content-encoding"), request.content
        content = gzip.decompress(content) if packed == "gzip" else content
        content = zlib.decompress(content) if packed == "deflate" else content
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError:
            return None

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
            called = choice["message"].get("tool_calls") if chat else None
            text = choice["message"]["content"] if chat else choice["text"]
            text = called[0]["function"]["arguments"] if called else text
            tokens = choice.get("token_ids")
            for last in (False, True):
                part = text[len(text) // 2 :] if last else text[: len(text) // 2]
                piece: dict[str, Any] = {"index": choice["index"], "finish_reason": None}
                piece |= {"delta": self.delta(called, part)} if chat else {"text": part}
                if tokens is not None:
                    piece["token_ids"] = tokens[len(tokens) // 2 :] if last else tokens[: len(tokens) // 2]
                if last:
                    piece["finish_reason"] = self.finish(choice)
                yield {**about, "choices": [piece]}
        if with_usage:
            yield {**about, "choices": [], "usage": answer["usage"]}

    def finish(self, choice: Json) -> str:
        """Why a streamed choice ended."""
        return str(choice["finish_reason"])

    def delta(self, called: list[Json] | None, part: str) -> Json:
        """A piece of a message's content, or of the arguments of the function that it calls."""
        if not called:
            return {"content": part}
        return {"tool_calls": [{**called[0], "index": 0, "function": {**called[0]["function"], "arguments": part}}]}


def described() -> Json:
    """The server's own description (OpenAPI 3.1)."""
    paths: Json = {}
    for path, (_, query, fields) in SERVER_ROUTES.items():
        parameters_of = [{"name": name, "in": "query", "schema": one} for name, one in query.items()]
        schema = {"type": "object", "properties": fields}
        body = {"requestBody": {"content": {JSON: {"schema": schema}}}} if fields else {}
        paths[path] = {"post": {"parameters": parameters_of, **body}}
    return {"openapi": "3.1.0", "paths": paths}
