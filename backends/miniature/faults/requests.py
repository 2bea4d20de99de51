"""Requests that lose a header or a part of their body on their way, or that are too many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

import msgspec

from backends.miniature import tokenizer
from backends.miniature.client import Client, error_body
from backends.miniature.endpoint import Endpoint
from backends.miniature.engine import BadRequest, Engine, EngineDead, Output, Request
from backends.miniature.faults.registry import REFUSED, seeded
from backends.miniature.interface import Interface, plain
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import REQUEST_CAP, GenerateRequest, Generation, SessionId

FAILURES = 3
"""Refused requests in a row by which servers are taken for dead."""


@seeded("header_dropped", "request_id", caught_by=["request_ids"])
class RequestIdDropped(Client):
    """Headers beside the session's do not reach the engine."""

    def identified(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        known = super().identified(body, headers)
        self.fired += known != body
        return body


@seeded("session_refused", caught_by=["driven"], corrupts=ROWS)
class SessionRefused(Client):
    """A request fails whose session has a control character: it goes into a header as it is."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if str(session).isprintable():
            return await super().row(session, prompt, params, **more)
        self.fired += 1
        raise ValueError("a header has no control characters")


@seeded("message_read_otherwise", "parts_dropped", caught_by=["tokens.greedy"], corrupts=Fact.ANSWERS)
class PartsDropped(Client):
    """Of a content in parts nothing is read, unless the message is the user's."""

    def as_rendered(self, message: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(message.get("content"), list) or message["role"] == "user":
            return super().as_rendered(message)
        self.fired += 1
        return super().as_rendered(message | {"content": ""})


@seeded("message_read_otherwise", "reasoning_dropped", caught_by=["tokens.greedy"], corrupts=Fact.ANSWERS)
class ReasoningDropped(Client):
    """The template does not see an answer's reasoning."""

    def as_rendered(self, message: dict[str, Any]) -> dict[str, Any]:
        self.fired += "reasoning" in message
        return super().as_rendered({key: value for key, value in message.items() if key != "reasoning"})


@seeded("message_read_otherwise", "calls_dropped", caught_by=["tokens.greedy"], corrupts=Fact.ANSWERS)
class CallsDropped(Client):
    """The template does not see the calls of tools."""

    def as_rendered(self, message: dict[str, Any]) -> dict[str, Any]:
        self.fired += bool(message.get("tool_calls"))
        return super().as_rendered(message) | {"tool_calls": []}


@seeded("message_read_otherwise", "other_parts", caught_by=["errors.named"], corrupts=Fact.ERRORS)
class OtherPartsLeftOut(Client):
    """A part that is no text is left out, and the rest is answered."""

    def unread(self, message: dict[str, Any]) -> str | None:
        return None

    def as_rendered(self, message: dict[str, Any]) -> dict[str, Any]:
        if super().unread(message) is None:
            return super().as_rendered(message)
        self.fired += 1
        return super().as_rendered(message | {"content": [p for p in message["content"] if p["type"] == "text"]})


@seeded("tools_read_otherwise", "sorted", caught_by=["tokens.greedy"], corrupts=Fact.ANSWERS)
class ToolsSorted(Client):
    """The fields of a tool's parameters are sorted."""

    def tools(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        offered = super().tools(body)
        self.fired += bool(offered)
        return [
            tool | {"function": tool["function"] | {"parameters": dict(sorted(tool["function"]["parameters"].items()))}}
            for tool in offered
            if "parameters" in tool["function"]
        ]


@seeded("tools_read_otherwise", "strict_dropped", caught_by=["tokens.greedy"], corrupts=Fact.ANSWERS)
class StrictDropped(Client):
    """What a tool says beside its name, description and parameters is dropped."""

    def tools(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        offered = super().tools(body)
        self.fired += any("strict" in tool["function"] for tool in offered)
        known = ("name", "description", "parameters")
        return [
            tool | {"function": {name: value for name, value in tool["function"].items() if name in known}}
            for tool in offered
        ]


@seeded("tools_read_otherwise", "no_parameters", caught_by=["all_complete"])
class ParametersDemanded(Client):
    """A tool without parameters is refused."""

    async def chat_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if all("parameters" in tool["function"] for tool in body.get("tools") or []):
            return await super().chat_completion(body)
        self.fired += 1
        return error_body("a tool needs parameters", 422)


@seeded("schema_sorted", caught_by=["schema_order"], corrupts=Fact.TEXT)
class SchemaSorted(Engine):
    """The fields of a structured answer come in alphabetical order."""

    def in_shape(self, response_format: Any) -> str | None:
        shape = super().in_shape(response_format)
        if shape is None:
            return None
        ordered = json.dumps(json.loads(shape), sort_keys=True, separators=(",", ":"))
        self.fired += ordered != shape
        return ordered


@seeded("message_read_otherwise", "unknown_role", caught_by=["tokens.greedy"])
class RoleUnknown(Client):
    """A developer's message is refused."""

    async def chat_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if all(message.get("role") != "developer" for message in body["messages"]):
            return await super().chat_completion(body)
        self.fired += 1
        return error_body("unknown role: developer", 400)


@seeded("message_read_otherwise", "none_is_empty", caught_by=["errors.named"])
class NoneIsEmpty(Client):
    """A user's message without a content counts as an empty one."""

    def content_of(self, message: dict[str, Any]) -> Any:
        content = super().content_of(message)
        self.fired += content is None
        return content or ""


@seeded("refusals_shut_a_server", caught_by=["tokens.greedy", "health_of_the_address"], corrupts=ROWS | Fact.ERRORS)
class RefusalsShutAServer(Client):
    """After three refused completions in a row no server counts as healthy, until one is answered, or the cache is reset as a clean
    room does: else no later scenario could begin."""

    refused = 0

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await super().completion(body)
        self.refused = self.refused + 1 if "error" in answer else 0
        return answer

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        self.refused = 0 if op == "reset_prefix_cache" else self.refused
        await super().tell(engine, op, **arguments)

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if self.refused < FAILURES:
            return await super().row(session, prompt, params, **more)
        self.fired += 1
        raise EngineDead("no server is healthy")


@seeded(
    "refusals_shut_a_server",
    "prompts",
    caught_by=["driven", "errors.named"],
    corrupts=ROWS | Fact.ERRORS,
    changes=REFUSED,
)
class RefusedPromptsShutAServer(RefusalsShutAServer):
    """The same after three refused calls of generate()."""

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            answers = await super().generate(request)
        except BadRequest:
            self.refused += 1
            raise
        self.refused = 0
        return answers


class _Crowd(Client):
    """Counts the requests in flight beyond the cap."""

    at_once = 0

    @asynccontextmanager
    async def within(self, slots: asyncio.Semaphore | None = None) -> AsyncIterator[None]:
        async with slots or nullcontext():
            self.at_once += 1
            self.fired += self.at_once > REQUEST_CAP * len(self.engines)
            try:
                yield
            finally:
                self.at_once -= 1


@seeded("too_many_at_once", "no_cap", caught_by=["request_cap"])
class NoCap(_Crowd):
    """All requests are sent at once."""

    def slot(self) -> AbstractAsyncContextManager[Any]:
        return self.within()


@seeded("too_many_at_once", "serialized", caught_by=["request_cap"])
class CapLostInACopy(_Crowd):
    """A client that was read back has no cap."""

    _copied = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_copied": True}

    def slot(self) -> AbstractAsyncContextManager[Any]:
        return self.within() if self._copied else super().slot()


@seeded("too_many_at_once", "each_call", caught_by=["request_cap"])
class CapOfEachCall(_Crowd):
    """Each call of generate() has a cap of its own."""

    own: ClassVar[ContextVar[asyncio.Semaphore]] = ContextVar("own")

    async def generate(self, request: GenerateRequest) -> Generation:
        self.own.set(asyncio.Semaphore(REQUEST_CAP * len(self.engines)))
        return await super().generate(request)

    def slot(self) -> AbstractAsyncContextManager[Any]:
        return self.within(self.own.get(self.slots))


@seeded("arguments_read_late", caught_by=["echo", "stopping"])
class ReadsLate(Interface):
    """Rows read the sampling parameters when their turn comes: what the caller has changed by then changes them."""

    async def generate(self, input_batch: Mapping[str, Any]) -> Generation:
        given = input_batch["sampling_params"]
        request = msgspec.convert(plain(input_batch), GenerateRequest)
        if repr(given) != repr(request.sampling_params):
            return await super().generate(input_batch)
        answers = await self.client.generate(msgspec.structs.replace(request, sampling_params=given))
        self.fired += given != request.sampling_params
        return answers


@seeded("others_starve", caught_by=["not_starved"])
class LargeBatchesAlone(Client):
    """While a batch with more rows than the client may send at once runs, no other call of generate() begins."""

    large = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        while self.large:
            self.fired += 1
            await asyncio.sleep(0.001)
        if len(request.prompt_token_ids or ()) <= REQUEST_CAP * len(self.engines):
            return await super().generate(request)
        self.large += 1
        try:
            return await super().generate(request)
        finally:
            self.large -= 1


@seeded("refusal_untold", "unknown_route", caught_by=["refusals"])
class TellsAServerInVain(Client):
    """After each answer the client tells a server that it is done, at a route that the server does not have."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        answer = await super().row(session, prompt, params, **more)
        self.engines[0].tell("refusal", method="POST", path="/done", status=404)
        self.fired += 1
        return answer


@seeded("goes_on_after_a_shape", caught_by=["schema_order"], corrupts=Fact.TEXT | Fact.ANSWERS)
class GoesOnAfterAShape(Engine):
    """min_tokens keeps a structured answer going after its end."""

    def ends_in_shape(self, request: Request) -> Literal["stop"] | None:
        if len(request.tokens) >= (request.params.get("min_tokens") or 0):
            return super().ends_in_shape(request)
        self.fired += 1
        return None

    def beyond_the_shape(self, request: Request) -> int:
        request.shaped = True
        return tokenizer.VOCABULARY.plain[0]


@seeded("calls_of_tools", "answered_in_text", caught_by=["tool_calls"], corrupts=Fact.ANSWERS | Fact.TEXT)
class AnsweredInText(Client):
    """A model that has to call a tool may answer."""

    def tool_to_call(self, body: dict[str, Any]) -> dict[str, Any] | None:
        self.fired += super().tool_to_call(body) is not None
        return None


@seeded("calls_of_tools", "lost_when_cut", caught_by=["tool_calls"], corrupts=Fact.ANSWERS | Fact.TEXT)
class LostWhenCut(Client):
    """A call that max_tokens cut is no JSON, and is dropped."""

    def calling(self, name: str, choice: dict[str, Any]) -> dict[str, Any]:
        if choice["finish_reason"] != "length":
            return super().calling(name, choice)
        self.fired += 1
        return {"role": "assistant", "content": ""}


@seeded("calls_of_tools", "a_stream_is_never_cut", caught_by=["tool_calls"], corrupts=Fact.ANSWERS)
class AStreamIsNeverCut(Endpoint):
    """A stream of a call ends with "tool_calls", also if max_tokens cut it."""

    def finish(self, choice: dict[str, Any]) -> str:
        called = "tool_calls" in choice.get("message", ())
        self.fired += called
        return "tool_calls" if called else super().finish(choice)
