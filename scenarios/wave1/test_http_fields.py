"""Headers, encodings and query parameters: of the OpenAI address, and of the servers' own, as their openapi.json lists them."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any
from urllib.parse import urlencode

from fixtures.prompts import Prompts
from fixtures.request_fields import VALID, Case, in_pairs, of_its_type, of_other_types
from harness.checks.http_fields import HTTP_FIELDS
from harness.checks.http_metrics import HTTP_METRICS
from harness.checks.http_metrics import PATH as METRICS
from harness.checks.http_routes import HTTP_ROUTES, NOWHERE
from harness.checks.http_tokens import HTTP_TOKENS, TOKEN_STREAM
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.request_fields import AS_IT_IS
from harness.checks.sampling import independent
from harness.checks.stopping import ends_as_asked
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.contract.messages import HttpRequest
from harness.driving.stack import Stack
from harness.records.wire import REQUEST_ID, SESSION, TOKENS
from harness.suite.scenario import scenario, variants
from scenarios.requests import ANSWER, SPREAD

COMPLETIONS = "/v1/completions"
PLAIN = "plain"
JSON = {"content-type": "application/json"}
TURNS = 12
"""Requests of one session: a router that ignores it keeps them on one of two servers once in 2,000 times."""
SESSIONS = {
    "a name": "conversation",
    "digits": "12345",
    "a UUID": "0b7f8a56-6f0c-4c6e-9d0e-0c1f0c8a0a11",
    "with spaces": "my conversation",
    "with punctuation": "a,b;c=d/e",
    "long": "s" * 500,
    "beyond ASCII": "Gespräch",
}
HEADERS: dict[str, dict[str, dict[str, str]]] = {
    "content-type": {
        "with a charset": {"content-type": "application/json; charset=utf-8"},
        "in upper case": {"content-type": "APPLICATION/JSON"},
        "plain text": {"content-type": "text/plain"},
        "a form": {"content-type": "application/x-www-form-urlencoded"},
        "unknown": {"content-type": "application/no-such-type"},
        "empty": {"content-type": ""},
        "left out": {},
    },
    "accept": {
        "anything": {"accept": "*/*"},
        "JSON": {"accept": "application/json"},
        "events": {"accept": "text/event-stream"},
        "XML": {"accept": "application/xml"},
    },
    "accept-encoding": {kind: {"accept-encoding": kind} for kind in ("identity", "gzip", "deflate", "br")},
    REQUEST_ID: {
        "a name": {REQUEST_ID: "my-request"},
        "a UUID": {REQUEST_ID: "0b7f8a56-6f0c-4c6e-9d0e-0c1f0c8a0a12"},
        "with spaces": {REQUEST_ID: "my request"},
        "long": {REQUEST_ID: "r" * 500},
        "empty": {REQUEST_ID: ""},
    },
    "authorization": {"a token that nobody asked for": {"authorization": "Bearer nothing"}},
    "x-no-such-header": {"unknown header": {"x-no-such-header": "1"}, "huge": {"x-no-such-header": "x" * 2**13}},
}
"""Header → kind → the headers of the request."""
BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "content-encoding": {
        "identity": {"headers": {"content-encoding": "identity"}},
        "gzip": {"headers": {"content-encoding": "gzip"}, "encoding": "gzip"},
        "deflate": {"headers": {"content-encoding": "deflate"}, "encoding": "deflate"},
        "unknown": {"headers": {"content-encoding": "no-such-encoding"}},
        "gzip, and no header says so": {"encoding": "gzip"},
    },
    "encoding": {name: {"encoding": name} for name in ("utf-8-sig", "utf-16", "latin-1")},
}
"""Field → kind → what is other about the request."""


@scenario(
    task=0,
    promise="every header and encoding of a request means what HTTP says, or is refused by an error that names it",
    needs={Capability.HTTP_ENDPOINT},
    checks=[HTTP_FIELDS],
    deadline_s=120,
    bulk=True,
)
async def test_headers(stack: Stack, prompts: Prompts) -> None:
    """RFC 9110, 8.3, 8.4, 12.5; SkyRL #899, X-Session-ID; vLLM documentation, Extra HTTP Headers. The prompts have letters beyond
    ASCII, so that an encoding shows."""

    async def send(label: str, **other: Any) -> None:
        body = {"model": stack.model_name, "prompt": f"{prompts.texts(1)[0]} é", "max_tokens": 3, "temperature": 0.0}
        request = {"headers": {}, "body": json.dumps(body, ensure_ascii=False), **other}
        request["headers"] = {**JSON, **request["headers"]} if "content-type" not in label else request["headers"]
        await stack.attempt(stack.http(HttpRequest(path=COMPLETIONS, **request), label=f"{COMPLETIONS} {label}"))

    await send(AS_IT_IS)
    cases = [
        (f"{field}: {kind}", {"headers": headers}) for field, of in HEADERS.items() for kind, headers in of.items()
    ]
    cases += [(f"{field}: {kind}", other) for field, of in BODIES.items() for kind, other in of.items()]
    cases += [
        (f"{SESSION}: {kind}{said}", {"headers": {name: value.encode().decode("latin-1")}})
        for kind, value in SESSIONS.items()
        for name, said in ((SESSION, ""), ("X-SESSION-ID", ", header in upper case"))
    ]
    for label, other in stack.within_budget(cases):
        async with asyncio.TaskGroup() as turns:
            for _ in range(TURNS if label.startswith(SESSION) else 1):
                turns.create_task(send(label, **other))


METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
PATHS = (
    COMPLETIONS,
    "/v1/chat/completions",
    "/v1/models",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/audio/transcriptions",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/",
    NOWHERE,
)
"""Routes of OpenAI-compatible servers, and a path that none has."""


@scenario(
    task=0,
    promise="the OpenAI address refuses a route or method that it lacks by 404 or 405",
    needs={Capability.HTTP_ENDPOINT},
    checks=[HTTP_ROUTES],
)
async def test_routes(stack: Stack, prompts: Prompts) -> None:
    """RFC 9110, 15.5.5 and 15.5.6; vLLM documentation, OpenAI-Compatible Server, Supported APIs."""
    for path, method in stack.within_budget(itertools.product(PATHS, METHODS)):
        body = {"headers": JSON, "body": "{}"} if method in ("POST", "PUT") else {}
        request = HttpRequest(method=method, path=path, **body)  # type: ignore[arg-type]
        await stack.attempt(stack.http(request, label=f"{method} {path}"))
    await stack.generate(prompts.unique(SPREAD), **ANSWER)


@scenario(
    task=0,
    promise="each server tells at its own address how many requests it runs and how many tokens it has made",
    needs={Capability.SERVER_ADDRESSES},
    checks=[HTTP_METRICS],
)
async def test_metrics(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Production Metrics."""
    await stack.generate(prompts.unique(SPREAD), **ANSWER)
    for server in stack.servers:
        await stack.attempt(stack.http(HttpRequest(method="GET", path=METRICS, server=server)))


@scenario(
    task=0,
    promise="a server that is asked by token ids names each of the most probable tokens by its own id",
    needs={Capability.SERVER_ADDRESSES},
    checks=[HTTP_TOKENS, greedy(), ALL_COMPLETE],
)
async def test_alternatives_by_token_id(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /inference/v1/generate; OpenAI API reference, chat completions: top_logprobs."""
    for server in stack.servers:
        for prompt in prompts.unique(2):
            await stack.http(by_tokens(stack, server, prompt, {**ANSWER, "logprobs": 3}))


def by_tokens(stack: Stack, server: str, prompt: list[int], params: dict[str, Any], **more: Any) -> HttpRequest:
    """A prompt of token ids for a server's own address."""
    body = {"model": stack.model_name, "token_ids": prompt, "sampling_params": params, **more}
    return HttpRequest(path=TOKENS, headers=JSON, body=json.dumps(body), server=server)


@scenario(
    task=0,
    promise="a server that is asked for several answers by token ids gives all of them, wherever each ends",
    needs={Capability.SERVER_ADDRESSES},
    checks=[independent(), ends_as_asked(causes=["stop token"]), ALL_COMPLETE],
)
async def test_several_answers_by_token_id(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.n: "Number of outputs to return for the given prompt request." """
    ends = stack.vocabulary.scattered(range(100, 140))
    for server in stack.servers:
        for prompt in prompts.unique(2):
            params = {"n": 4, "temperature": 1.0, "max_tokens": 48, "stop_token_ids": ends}
            await stack.http(by_tokens(stack, server, prompt, params))


@scenario(
    task=0,
    promise="a server that is asked by token ids for a stream answers in events",
    needs={Capability.SERVER_ADDRESSES},
    checks=[TOKEN_STREAM, greedy(), ALL_COMPLETE],
)
async def test_a_stream_by_token_id(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /inference/v1/generate: the field stream of its GenerateRequest."""
    for server in stack.servers:
        for prompt in prompts.unique(2):
            await stack.http(by_tokens(stack, server, prompt, ANSWER, stream=True))


@scenario(
    task=0,
    promise="what a request asks for changes nothing for another in its batch, whatever field it has",
    needs={Capability.SERVER_ADDRESSES},
    checks=[HTTP_TOKENS, greedy(PLAIN)],
    deadline_s=120,
    bulk=True,
)
async def test_alternatives_beside_every_field(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams and /inference/v1/generate. Each field of a request, beside a plain request. All are greedy:
    vLLM's CPU sampler heeds no seed in a batch with a greedy request."""
    schema, server = (await stack.request_schemas())["generate"], stack.servers[0]
    for case in stack.within_budget(in_pairs(schema, frozenset({"temperature"}), 1)[0]):
        own = prompts.of(case.label)
        beside = {"max_tokens": 24, "temperature": 0, **case.values}
        async with asyncio.TaskGroup() as callers:
            asked = by_tokens(stack, server, own.one(), {**ANSWER, "logprobs": 3})
            callers.create_task(stack.http(asked, label=PLAIN))
            callers.create_task(
                stack.attempt(stack.http(by_tokens(stack, server, own.one(), beside), label=case.label))
            )


UNDECLARED: dict[str, dict[str, Any]] = {
    "/reset_prefix_cache": {"reset_running_requests": {"type": "boolean"}},
    "/sleep": {"level": {"type": "integer"}, "mode": {"enum": ["abort", "wait", "keep"]}},
    "/wake_up": {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}},
}
"""Parameters that a server reads and its openapi.json does not always list (vLLM documentation, Sleep Mode and
`/reset_prefix_cache`)."""
BEFORE, AFTER = {"/wake_up": "/sleep"}, {"/pause": "/resume", "/sleep": "/wake_up", "/wake_up": "/wake_up"}
"""Route → what is asked before and after each of its cases, so that each finds the server in the same state."""
SERVERS = {Capability.SERVER_ADDRESSES}


@variants(
    {
        "test_tokenize": {"paths": ("/tokenize",), "base": {"prompt": "a plain text"}},
        "test_detokenize": {"paths": ("/detokenize",), "base": {"tokens": [3, 4, 5]}},
        "test_pause_and_resume": {"paths": ("/pause", "/resume")},
        "test_reset_prefix_cache": {"paths": ("/reset_prefix_cache",)},
        "test_sleep_and_wake_up": {
            "paths": ("/sleep", "/wake_up"),
            "topologies": ("colocated",),
            "needs": {*SERVERS, Capability.SLEEP, Capability.WEIGHT_SYNC},
        },
    },
    task=0,
    promise="every parameter of a server's own route takes effect at its engine, or is refused by an error that names it",
    checks=[HTTP_FIELDS],
    deadline_s=120,
    bulk=True,
    base={},
    needs=SERVERS,
)
async def every_parameter(stack: Stack, prompts: Prompts, *, paths: tuple[str, ...], base: dict[str, Any]) -> None:  # noqa: ARG001
    """The server's own openapi.json; vLLM documentation, OpenAI-Compatible Server (Tokenizer API), `/pause`, Sleep Mode."""
    server = stack.servers[0]

    async def post(path: str, label: str | None = None, query: str = "", **fields: Any) -> None:
        body = {**base, **fields}
        about = {"headers": JSON, "body": json.dumps(body)} if body else {}
        request = HttpRequest(path=f"{path}{query}", server=server, **about)  # type: ignore[arg-type]
        await stack.attempt(stack.http(request, label=label and f"{path} {label}"))

    described = json.loads((await stack.http(HttpRequest(method="GET", path="/openapi.json", server=server))).body)
    for path in paths:
        query, body = parameters(described, path, base)
        cases = [(case, True) for case in every_case(query, stack.times(VALID)) if as_query(case.values)]
        cases += [(case, False) for case in every_case(body, stack.times(VALID))]
        for case, in_query in [(None, False), *stack.within_budget(cases)]:
            if path in BEFORE:
                await post(BEFORE[path])
            if case is None:
                await post(path, AS_IT_IS)
            elif in_query:
                await post(path, case.label, f"?{as_query(case.values)}")
            else:
                await post(path, case.label, **case.values)
            if path in AFTER:
                await post(AFTER[path])
    if "/sleep" in paths:
        await stack.sync_weights(1)  # an engine may have discarded its weights


def every_case(schema: dict[str, Any], drawn: int) -> list[Case]:
    """Cases for the schema's properties, and a field that it lacks; none for a schema without properties."""
    return [*of_its_type(schema, drawn=drawn), *of_other_types(schema)] if schema["properties"] else []


def parameters(described: dict[str, Any], path: str, base: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of a route's query and of its body, by an openapi.json. Of several bodies the one that has the `base` fields."""
    known = described.get("components", {}).get("schemas", {})
    operation = described["paths"].get(path, {}).get("post", {})
    query = {one["name"]: one["schema"] for one in operation.get("parameters", ()) if one["in"] == "query"}
    schema = operation.get("requestBody", {}).get("content", {}).get(JSON["content-type"], {}).get("schema", {})
    options = [known[one["$ref"].rpartition("/")[2]] if "$ref" in one else one for one in schema.get("anyOf", [schema])]
    fields = [one.get("properties", {}) for one in options if base.keys() <= one.get("properties", {}).keys()]
    body = fields[0] if fields and base else {}
    return {"properties": query | UNDECLARED.get(path, {}), "$defs": known}, {"properties": body, "$defs": known}


def as_query(values: dict[str, Any]) -> str:
    """As a query writes them: booleans in lower case, a list as several parameters, an object as JSON."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    return urlencode({k: [*map(text, v)] if isinstance(v, list) else text(v) for k, v in values.items()}, doseq=True)
