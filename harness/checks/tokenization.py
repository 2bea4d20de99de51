"""tokenize() and detokenize() against the oracle's tokenizer, and their round trip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.checks.answers import select, unexpected
from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.reference import DecodeRequest, EncodeRequest, Query, RenderRequest

SOURCE = 'SkyRL #904, "Data plane": tokenize(), detokenize()'


def _calls(evidence: Evidence, method: str) -> list[Call] | Finding:
    calls = select(evidence, (), (method,))
    if not calls:
        return untestable(f"no call of {method} was recorded")
    return next((unexpected(call) for call in calls if call.error is not None), calls)


def _adds(evidence: Evidence, calls: list[Call]) -> bool:
    """False if texts were asked for with special tokens and without, and it makes no difference to any of them."""
    asked = {special: [c for c in calls if c.request["add_special_tokens"] is special] for special in (True, False)}
    if not all(asked.values()):
        return True
    encode = evidence.reference.encode
    both = {text for call in asked[True] for text in call.request["texts"]}
    both &= {text for call in asked[False] for text in call.request["texts"]}
    return any(encode(text, add_special_tokens=True) != encode(text, add_special_tokens=False) for text in both)


def _encoded(evidence: Evidence) -> Finding:
    calls = _calls(evidence, "tokenize")
    if isinstance(calls, Finding):
        return calls
    if not _adds(evidence, calls):
        return untestable("the model's tokenizer adds no special token to any of the texts")
    facts, wrong = 0, list[tuple[str, dict[str, Any]]]()
    for call in calls:
        texts, special = call.request["texts"], call.request["add_special_tokens"]
        got = (call.result or {}).get("token_ids")
        facts += len(texts)
        if not isinstance(got, list) or len(got) != len(texts):
            wrong.append(
                ("tokenize() did not return one list a text", {"call": call.id, "texts": texts[:3], "got": got})
            )
            continue
        for row, (text, ids) in enumerate(zip(texts, got, strict=True)):
            expected = evidence.reference.encode(text, add_special_tokens=special)
            if ids != expected:
                both = {"add_special_tokens": special, "got": ids, "reference": expected}
                shown = {"call": call.id, "row": row, "text": text, **both}
                wrong.append(("tokenize() gives other tokens than the model's tokenizer", shown))
    return concluded(facts, wrong)


def _ask_encoded(evidence: Evidence) -> Iterator[Query]:
    for call in evidence.calls("tokenize"):
        for text in call.request["texts"]:
            yield EncodeRequest(text=text, add_special_tokens=call.request["add_special_tokens"])


def _decoded(evidence: Evidence) -> Finding:
    calls = _calls(evidence, "detokenize")
    if isinstance(calls, Finding):
        return calls
    facts, wrong = 0, list[tuple[str, dict[str, Any]]]()
    for call in calls:
        rows, got = call.request["token_ids"], (call.result or {}).get("texts")
        facts += len(rows)
        if not isinstance(got, list) or len(got) != len(rows):
            wrong.append(
                ("detokenize() did not return one text a row", {"call": call.id, "token_ids": rows[:3], "got": got})
            )
            continue
        for row, (ids, text) in enumerate(zip(rows, got, strict=True)):
            expected = evidence.reference.decode(ids, skip_special_tokens=False)
            if text != expected:
                shown = {"call": call.id, "row": row, "token_ids": ids, "got": text, "reference": expected}
                wrong.append(("detokenize() gives another text than the model's tokenizer", shown))
    return concluded(facts, wrong)


def _ask_decoded(evidence: Evidence) -> Iterator[Query]:
    for call in evidence.calls("detokenize"):
        for ids in call.request["token_ids"]:
            yield DecodeRequest(tokens=ids, skip_special_tokens=False)


def _rendered(evidence: Evidence) -> Finding:
    calls = _calls(evidence, "render_chat")
    if isinstance(calls, Finding):
        return calls
    wrong = list[tuple[str, dict[str, Any]]]()
    for call in calls:
        got, expected = (call.result or {}).get("token_ids"), evidence.reference.render(call.request["messages"])
        if got != expected:
            shown = {"call": call.id, "messages": call.request["messages"], "got": got, "reference": expected}
            wrong.append(("render_chat() gives another prompt than the model's chat template", shown))
    return concluded(len(calls), wrong)


def _ask_rendered(evidence: Evidence) -> Iterator[Query]:
    for call in evidence.calls("render_chat"):
        yield RenderRequest(messages=call.request["messages"])


def _round_trip(evidence: Evidence) -> Finding:
    there, back = _calls(evidence, "tokenize"), _calls(evidence, "detokenize")
    if isinstance(there, Finding):
        return there
    if isinstance(back, Finding):
        return back
    facts, wrong = 0, []
    for one in there:
        for other in back:
            if other.request["token_ids"] != (one.result or {}).get("token_ids"):
                continue
            texts, returned = one.request["texts"], (other.result or {}).get("texts")
            facts += len(texts)
            if returned != texts:
                shown = {"call": other.id, "texts": texts, "got": returned}
                wrong.append(("texts do not survive tokenize() and detokenize()", shown))
    return concluded(facts, wrong) if facts else untestable("no tokenized texts were detokenized")


ENCODED = Check(
    name="tokenize",
    fault="another tokenizer, special tokens added or left out, texts mixed up or dropped",
    next_step="compare the tokenizer and the options of the stack's own tokenize() with the checkpoint's",
    reads=Fact.TOKENIZER,
    falsifies=Fact.TOKENIZER,
    source=SOURCE,
    judge=_encoded,
    queries=_ask_encoded,
)
DECODED = Check(
    name="detokenize",
    fault="another tokenizer, special tokens dropped, rows mixed up or dropped",
    next_step="compare the tokenizer and the options of the stack's own detokenize() with the checkpoint's",
    reads=Fact.TOKENIZER,
    falsifies=Fact.TOKENIZER,
    source=SOURCE,
    judge=_decoded,
    queries=_ask_decoded,
)
ROUND_TRIP = Check(
    name="tokenize.round_trip",
    fault="a text comes back changed: white space, unicode or special tokens are lost on the way",
    reads=Fact.TOKENIZER,
    source=SOURCE,
    judge=_round_trip,
)
RENDERED = Check(
    name="chat_rendered",
    fault="a conversation's prompt lacks a message or the begun answer, or another template renders it",
    next_step="compare the chat template and the options of the stack's own rendering with the checkpoint's",
    reads=Fact.TOKENIZER,
    source="SkyRL, RemoteInferenceClient.render_chat_completion; vLLM documentation, /v1/chat/completions/render",
    judge=_rendered,
    queries=_ask_rendered,
)
