"""OpenAI-style bodies: envelope, choices, usage. Tokens and texts of choices: see `tokens`, `text`, `stopping`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from harness.checks import matching
from harness.checks.answers import answered, answers, choices, select, trouble
from harness.checks.base import Check, Evidence, Finding, concluded, together
from harness.contract.faults import NOTHING, ROWS, Fact
from harness.records.recording import Call
from harness.records.reference import Query
from harness.records.wire import REQUEST_ID, body_of, header

Method = Literal["completion", "chat_completion"]
OBJECT: dict[str, str] = {"completion": "text_completion", "chat_completion": "chat.completion"}
SOURCE = "SkyRL API reference, InferenceEngineInterface.{}; vLLM documentation, OpenAI-Compatible Server"


def envelope(method: Method, *labels: str) -> Check:
    """object, id, created and model of each body, and the fields of each choice."""

    def judge(evidence: Evidence) -> Finding:
        calls = select(evidence, labels, (method,))
        found, facts, wrong = trouble(calls, labels, (method,)), 0, []
        for call in answered(calls):
            body = (call.result or {})["body"]
            asked = call.request["body"]
            fields = {
                "object": body.get("object") == OBJECT[method],
                "model": body.get("model") == asked.get("model"),
                "id": isinstance(body.get("id"), str) and bool(body["id"]),
                "created": isinstance(body.get("created"), int),
                **_choice_fields(method, call),
            }
            facts += len(fields)
            wrong += [
                (f"{method}() has a wrong or missing {name}", _shown(call)) for name, good in fields.items() if not good
            ]
        return together([*([found] if found else []), concluded(facts, wrong)])

    return _check(
        f"{method}.envelope",
        method,
        labels,
        judge,
        "a body that an OpenAI client cannot read, or of another model",
        falsifies=ROWS,
    )


def _choice_fields(method: Method, call: Call) -> dict[str, bool]:
    found = choices(call)
    # SkyRL API reference, InferenceEngineClient.completion: output["choices"][i] is of request["prompt"][i].
    index = {"choices.index": [c.get("index") for c in found] == list(range(len(found)))}
    # vLLM's return_token_ids, where it was set: "includes token IDs in the response".
    ids = (
        {"choices.token_ids": all(c.get("token_ids") for c in found)}
        if call.request["body"].get("return_token_ids")
        else {}
    )
    if method == "completion":
        return index | ids | {"choices.text": all(isinstance(c.get("text"), str) for c in found)}
    messages = [c.get("message") or {} for c in found]
    return (
        index
        | ids
        | {
            "choices.message.role": all(m.get("role") == "assistant" for m in messages),
            "choices.message.content": all(isinstance(m.get("content"), str) for m in messages),
        }
    )


def usage(method: Method, *labels: str) -> Check:
    """prompt_tokens, completion_tokens and total_tokens count what went in and came out, over all choices."""

    def judge(evidence: Evidence) -> Finding:
        calls = select(evidence, labels, (method,))
        found, wrong = trouble(calls, labels, (method,)), list[tuple[str, dict[str, Any]]]()
        for call in answered(calls):
            rows = answers(evidence, [call])
            copies = int(call.request["body"].get("n") or 1)
            prompt, completion = sum(len(r.prompt) for r in rows) // copies, sum(len(r.tokens) for r in rows)
            expected = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            got = (call.result or {})["body"].get("usage")
            shown = _shown(call) | {"usage": got, "counted": expected}
            if not isinstance(got, dict):
                wrong.append((f"{method}() has no usage", shown))
                continue
            bad = (name for name, count in expected.items() if got.get(name) != count)
            wrong += [(f"usage of {method}() miscounts {name}", shown) for name in bad]
        return together([*([found] if found else []), concluded(3 * len(calls), wrong)])

    return _check(
        f"{method}.usage", method, labels, judge, "usage of one sub-request only, or counted twice, or missing"
    )


def _request_ids(evidence: Evidence) -> Finding:
    calls = [call for call in select(evidence, (), ("chat_completion",)) if header(call.request["headers"], REQUEST_ID)]
    found, wrong = trouble(calls, (), ("chat_completion",)), list[tuple[str, dict[str, Any]]]()
    for call in answered(calls):
        given, got = header(call.request["headers"], REQUEST_ID), (call.result or {})["body"].get("id")
        if not str(got).endswith(str(given)):
            wrong.append(
                ("chat_completion() lost the request's id, which a header names", _shown(call) | {"id": given})
            )
    return together([*([found] if found else []), concluded(len(calls), wrong)])


REQUEST_IDS = Check(
    name="request_ids",
    fault="headers of a chat are lost on their way to the engine",
    next_step="find the hop that replaces the headers, or that changes their case and looks them up by the old one",
    source="vLLM documentation, OpenAI-Compatible Server, Extra HTTP Headers: X-Request-Id; SkyRL API reference, "
    'InferenceEngineInterface.chat_completion: "Accepts a JSON payload: {"json": <request-body>, "headers": <headers-dict>}"',
    reads=Fact.ANSWERS,
    judge=_request_ids,
)
"""The id of an answer ends in the id that the header X-Request-Id gave to its request."""


def _fields(call: Call) -> list[str]:
    """The names of the fields of the JSON object that the call asks for; empty if it asks for none."""
    asked = call.request["sampling_params"] if call.method == "generate" else call.request["body"]
    match asked.get("response_format") or asked.get("structured_outputs"):
        case {"json_schema": {"schema": {"properties": dict(fields)}}} | {"json": {"properties": dict(fields)}}:
            return [*fields]
        case _:
            return []


def _texts(evidence: Evidence, call: Call) -> list[str | None]:
    """The texts of a call's answers, without the end of sequence that a stack may decode."""
    if call.method == "generate":
        end = evidence.header.vocabulary.named.get("eos_token", "")
        return [text.removesuffix(end) for text in (call.result or {}).get("responses") or ()]
    return [c["text"] if "text" in c else (c.get("message") or {}).get("content") for c in choices(call)]


def _schema_order(evidence: Evidence) -> Finding:
    methods = ("generate", "completion", "chat_completion")
    calls = [call for call in select(evidence, (), methods) if _fields(call)]
    found, facts, wrong = trouble(calls, (), methods), 0, list[tuple[str, dict[str, Any]]]()
    for call in answered(calls):
        asked = _fields(call)
        for text in _texts(evidence, call):
            facts += 1
            try:
                got = [*json.loads(str(text))]
            except (TypeError, ValueError):
                wrong.append((f"{call.method}() gave no JSON object for a schema", _shown(call) | {"text": text}))
                continue
            if got != asked:
                said = (
                    "in another order than those of its schema" if sorted(got) == sorted(asked) else "not its schema's"
                )
                wrong.append((f"the fields of an answer of {call.method}() are {said}", _shown(call) | {"fields": got}))
    return together([*([found] if found else []), concluded(facts, wrong)])


SCHEMA_ORDER = Check(
    name="schema_order",
    fault="the schema of a structured answer is sorted or changed on its way to the engine",
    next_step="find the hop that reads the body into a map without an order, and writes it anew",
    source="OpenAI documentation, Structured Outputs, Key ordering: "
    '"outputs will be produced in the same order as the ordering of keys in the schema"',
    reads=Fact.ANSWERS | Fact.TEXT,
    judge=_schema_order,
    queries=matching.queries,
)
"""The fields of a structured answer are those of its schema, in its order. A reason before its verdict makes another answer."""


CUT = "cut"
"""Label of the chats whose call of a tool is longer than max_tokens."""


def _cut_call(choice: dict[str, Any]) -> str | None:
    """What is wrong with an answer that has to hold a part of a call; None if nothing is."""
    said, ended = choice.get("message") or {}, choice.get("finish_reason")
    if ended != "length":
        return f"a call of a tool that max_tokens cut ended with {ended}"
    made = [one.get("function") or {} for one in said.get("tool_calls") or ()]
    left = [said.get("content"), *(one.get("name") or one.get("arguments") for one in made)]
    return None if any(left) else "what the model wrote of a call before max_tokens is lost"


def _whole_call(choice: dict[str, Any], tools: list[dict[str, Any]]) -> str | None:
    """What is wrong with an answer that has to be the call of one of these tools; None if nothing is."""
    said, ended = choice.get("message") or {}, choice.get("finish_reason")
    if ended not in ("tool_calls", "stop"):
        return f"a call of a tool ended with {ended}"
    if not said.get("tool_calls"):
        return "a model that had to call a tool called none"
    if not all(isinstance(one.get("id"), str) and one["id"] for one in said["tool_calls"]):
        return "a call of a tool has no id"
    made = [one.get("function") or {} for one in said["tool_calls"]]
    offered = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    if any(one.get("name") not in offered for one in made):
        return "a tool was called that the chat does not offer"
    if any({*body_of(one.get("arguments") or "")} != {*offered[one["name"]]["properties"]} for one in made):
        return "the arguments of a call are no JSON object of the tool's parameters"
    return None


def _tool_calls(evidence: Evidence) -> Finding:
    calls = [c for c in select(evidence, (), ("chat_completion",)) if c.request["body"].get("tool_choice")]
    found, facts, wrong = trouble(calls, (), ("chat_completion",)), 0, list[tuple[str, dict[str, Any]]]()
    for call in answered(calls):
        for choice in choices(call):
            facts += 1
            why = _cut_call(choice) if call.label == CUT else _whole_call(choice, call.request["body"]["tools"])
            if why is not None:
                wrong.append((why, _shown(call)))
    return together([*([found] if found else []), concluded(facts, wrong)])


TOOL_CALLS = Check(
    name="tool_calls",
    fault="a model that has to call a tool answers otherwise, or what it wrote of a call is lost",
    next_step="compare the text that the engine wrote with the answer: the parser of the server's chats made one of the other",
    source='OpenAI API reference, chat completions, tool_choice: "required means the model must call one or more tools"; '
    'finish_reason: "length if the maximum number of tokens specified in the request was reached"; vLLM documentation, Tool Calling',
    reads=Fact.ANSWERS | Fact.TEXT,
    judge=_tool_calls,
    queries=matching.queries,
)
"""The arguments of a call are those of its tool. Of a call that `CUT` names, the answer has what was written of it."""


def _check(
    name: str, method: Method, labels: tuple[str, ...], judge: Any, fault: str, *, falsifies: Fact = NOTHING
) -> Check:
    def queries(evidence: Evidence) -> Iterator[Query]:
        return matching.queries(evidence)

    full_name = f"{name}:{'+'.join(labels)}" if labels else name
    return Check(
        name=full_name,
        fault=fault,
        next_step="send the request in the evidence to a server itself: if its answer is right, the router or the client changes it",
        source=SOURCE.format(method),
        reads=Fact.ANSWERS,
        falsifies=falsifies,
        judge=judge,
        queries=queries,
    )


def _shown(call: Call) -> dict[str, Any]:
    asked, got = call.request.get("body", call.request), call.result or {}
    return {**call.named, "request": asked, "response": got.get("body", got)}
