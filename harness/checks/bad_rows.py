"""A batch with one bad row is refused by name, and harms no other request."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Finding, Tap, concluded, kept, untestable
from harness.checks.errors import breaks, error_of
from harness.contract.faults import ROWS, Fact
from harness.records.recording import Call, saying
from harness.records.verdict import Effect, FieldEffect

ROW, OTHERS = "row", "others"
"""A call labelled "row: empty" is a batch with such a row; one labelled "others" is in flight beside it, or comes after it."""
NAMES = ("prompt", "token", "row", "input", "length")
"""Words by which an error may speak of a row."""


@kept
def effects(evidence: Evidence) -> list[tuple[Call, FieldEffect]]:
    """Each batch with what became of it."""
    found = []
    for call in evidence.calls():
        field, _, kind = (call.label or "").partition(": ")
        if field == ROW:
            found.append((call, FieldEffect(call=call.method, field=ROW, given=kind, effect=_effect(*error_of(call)))))
    return found


def _effect(kind: str | None, message: str, status: int | None) -> Effect:
    if kind is None:
        return Effect.DROPPED
    if breaks(kind, message, status):
        return Effect.BROKE
    return Effect.REFUSED if any(word in message.lower() for word in NAMES) else Effect.REFUSED_NAMELESS


REASONS = {
    Effect.DROPPED: "{call}() answers a batch with a bad row ({given})",
    Effect.BROKE: "{call}() breaks at a batch with a bad row ({given}): {said}",
    Effect.REFUSED_NAMELESS: "{call}() does not say what is wrong with a bad row ({given}): {said}",
}


def _judge(evidence: Evidence) -> Finding:
    found, others = effects(evidence), evidence.calls(label=OTHERS)
    if not found or not others:
        return untestable("no batch with a bad row was asked for, or nothing beside it")
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call, one in found:
        if one.effect in REASONS:
            kind, message, status = error_of(call)
            said = saying(kind or "", message, status)
            shown = {"call": call.id, "got": message[:300]}
            wrong.append((REASONS[one.effect].format(call=one.call, given=one.given, said=said), shown))
    for call in others:
        kind, message, status = error_of(call)
        if kind is not None:
            said = saying(kind, message, status)
            wrong.append((f"{call.method}() fails beside or after a batch with a bad row: {said}", {"call": call.id}))
    told = [seen for seen in evidence.trace.observations if seen.kind == "abort"]
    aborted = {(seen.server, request) for seen in told for request in seen.data["request_ids"]}
    for ran in evidence.executions:
        if ran.ended_ns is None and (ran.server, ran.request_id) not in aborted:
            shown = {"call": None, "server": ran.server, "prompt": list(ran.prompt)}
            wrong.append(("an engine's frontend keeps a row of a batch that was refused", shown))
    finding = concluded(len(found) + len(others), wrong)
    return msgspec.structs.replace(finding, effects=[one for _, one in found])


BAD_ROWS = Check(
    name="bad_rows",
    fault="a bad row of a batch is answered, breaks the stack, is refused without a word about it, or takes other requests along",
    next_step="send the batch in the evidence alone: the layer that refuses its row has to name it, and to leave other requests alone",
    reads=Fact.ERRORS,
    falsifies=Fact.ERRORS | ROWS,
    errors_of=EVERY,
    tap=Tap.READ,
    source="SkyRL API reference, InferenceEngineInterface; vLLM documentation, LLM.generate: a prompt has tokens of the vocabulary",
    judge=_judge,
)
