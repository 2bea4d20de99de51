"""What became of every field of a request: it took effect, was refused by name, was dropped, changed, or broke something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Execution, Finding, Tap, concluded, kept, untestable
from harness.checks.echo import ENGINE_DEFAULTS, parameters
from harness.checks.errors import breaks, error_of, unanswered
from harness.checks.matching import Row, assignment, queries, usual_prompts
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import CHOICES
from harness.records.recording import Call, saying
from harness.records.verdict import Effect, FieldEffect

AS_IT_IS = "as it is"
"""Label of the request to which each case adds one field."""
AFTER_AN_ERROR = "after an error"
"""Label of good requests that let a router see that its servers live. Only the stack that had the error gets them: they have no
partner on the other one."""
PAIR = " + "
"""Between the names of two fields that one request has, and between the kinds of their values."""
ALIASES = {
    "max_completion_tokens": ("max_tokens",),
    "stop_token_ids": ("stop token",),
    "top_logprobs": ("logprobs",),
    "session_id": ("session id",),
    "logits_processors": ("logits processors",),
}
"""Other names under which an error may speak of a field (vLLM, ChatCompletionRequest.to_sampling_params; SkyRL, "Session ID must be
…")."""
OWN_TO_A_RESULT = frozenset({"id", "created", "request_id", "index"})


@kept
def effects(evidence: Evidence) -> list[tuple[Call, FieldEffect]]:
    """Each case with what became of its field, in order of time. Empty if no field can be judged."""
    plain = evidence.calls(label=AS_IT_IS)
    cases = [call for call in evidence.calls() if call.label is not None and ": " in call.label]
    ran: dict[int, list[tuple[Row, Execution]]] = {}
    for found in [assignment(evidence)]:
        for row in found.rows:
            ran.setdefault(row.call.id, []).extend((row, execution) for execution in found.of(row)[:1])
    at_engine = [execution for call in plain for _, execution in ran.get(call.id, ())]
    if not at_engine or _error(plain[0]) is not None:
        return []
    usual = at_engine[0].sampling_params, set(places(plain[0].result))
    late = {call.id for call in unanswered(cases)[1:]}
    became = []
    for call in cases:
        field, _, kind = str(call.label).partition(": ")
        effect = Effect.UNTOLD if call.id in late else _effect(evidence, call, field, ran.get(call.id, []), usual)
        became.append((call, FieldEffect(call=call.method, field=field, given=kind, effect=effect)))
    return became


NOTHING_ASKED = "the request without any further field failed or was not seen, or no field was asked for"


def _judge(evidence: Evidence) -> Finding:
    found = effects(evidence)
    if not found:
        return untestable(NOTHING_ASKED)
    hanging = unanswered(call for call, _ in found)
    wrong = []
    for call, one in found:
        if one.effect in REASONS:
            reason = HANGS if call in hanging and len(hanging) > 1 else REASONS[one.effect]
            got = " ".join(map(str, _error(call) or ()))[:300]
            shown = {"call": call.id, "field": one.field, "given": one.given, "got": got}
            wrong.append((reason.format(call=call.method, field=one.field), shown))
    return msgspec.structs.replace(concluded(len(found), wrong), effects=[one for _, one in found])


REASONS = {
    Effect.BROKE: "{call}() answers some values of {field} as a server error, without any name, or not in time",
    Effect.REFUSED_NAMELESS: "{call}() refuses some values of {field} without naming it",
}
"""Effects that are wrong → reason. What is dropped or changed on the way is `echo`'s to judge."""


HANGS = "{call}() answers no more after a value that its engine does not bear"


def _error(call: Call) -> tuple[str, str, int | None] | None:
    """Kind, message and status; None if the call succeeded."""
    kind, message, status = error_of(call)
    return None if kind is None else (kind, message, status)


WORST_FIRST = (Effect.CHANGED, Effect.DROPPED, Effect.TOOK_EFFECT, Effect.AS_USUAL)


def _effect(
    evidence: Evidence, call: Call, field: str, ran: list[tuple[Row, Execution]], usual: tuple[dict[str, Any], set[str]]
) -> Effect:
    """What became of the field; of several fields, or in several rows of a batch, the worst."""
    error, fields = _error(call), field.split(PAIR)
    if error is not None:
        return _of_error(fields, *error)
    shows = set(places(call.result)) != usual[1]
    if not ran:
        return Effect.TOOK_EFFECT if shows else Effect.AS_USUAL
    found = {effect for row, execution in ran for effect in _at_engine(evidence, row, execution, fields, usual[0])}
    found |= {Effect.TOOK_EFFECT} if shows and found <= {Effect.AS_USUAL} else set()
    return next((effect for effect in WORST_FIRST if effect in found), Effect.AS_USUAL)


def _at_engine(
    evidence: Evidence, row: Row, execution: Execution, fields: list[str], usual: dict[str, Any]
) -> Iterator[Effect]:
    """Of each field that engines know by its name, and whether the request is another one for the other fields."""
    told = 0
    for name, given, seen, right in parameters(evidence, row, execution):
        if name in fields:
            told += 1
            default = usual.get(name, ENGINE_DEFAULTS.get(name))
            if right:
                yield Effect.AS_USUAL if given == default else Effect.TOOK_EFFECT
            else:
                yield Effect.DROPPED if seen == default or execution.sampling_params == usual else Effect.CHANGED
    if told < len(fields):
        shaped = row.call.method in CHOICES and execution.prompt not in usual_prompts(row.call, evidence.reference)
        if shaped or (not told and execution.sampling_params != usual):
            yield Effect.TOOK_EFFECT


def _of_error(fields: list[str], kind: str, message: str, status: int | None) -> Effect:
    if breaks(kind, message, status):
        return Effect.BROKE
    named = any(name in message.lower() for field in fields for name in (field.lower(), *ALIASES.get(field, ())))
    return Effect.REFUSED if named else Effect.REFUSED_NAMELESS


def places(value: Any, at: str = "") -> Iterator[str]:
    """Every key of a result that holds something, with the keys around it."""
    match value:
        case dict():
            for name, inner in value.items():
                if name not in OWN_TO_A_RESULT:
                    yield from places(inner, f"{at}.{name}")
        case list():
            for inner in value[:1]:
                yield from places(inner, f"{at}[]")
        case None:
            pass
        case _:
            yield at


REQUEST_FIELDS = Check(
    name="request_fields",
    fault="a field of a request breaks the stack, or is refused with an error that does not name it",
    next_step="send the request in the evidence alone, and follow its error back: the layer that words it has to name the field",
    reads=Fact.ERRORS,
    falsifies=Fact.ERRORS | ROWS,
    errors_of=EVERY,
    source="vLLM documentation, SamplingParams and OpenAI-Compatible Server; SkyRL API reference, InferenceEngineInput",
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)


BESIDE = {
    Effect.BROKE: "{call}() breaks at {fields}, though it takes each alone: {said}",
    Effect.REFUSED_NAMELESS: "{call}() refuses {fields} without naming either, though it takes each alone: {said}",
    Effect.DROPPED: "{call}() drops one of {fields}, though it takes each alone",
    Effect.CHANGED: "{call}() changes one of {fields}, though it takes each alone",
}
"""Effects of two fields together that are wrong → reason."""


def _judge_pairs(evidence: Evidence) -> Finding:
    found = effects(evidence)
    alone = {(one.field, one.given): one.effect for _, one in found if PAIR not in one.field}
    pairs = [(call, one) for call, one in found if PAIR in one.field]
    if not pairs:
        return untestable(NOTHING_ASKED)
    hangs = {call.id for call in unanswered(call for call, _ in found)}
    wrong = []
    for call, one in pairs:
        parts = list(zip(one.field.split(PAIR), one.given.split(PAIR), strict=True))
        if one.effect in BESIDE and not {alone.get(part, Effect.UNTOLD) for part in parts} & {*BESIDE, Effect.UNTOLD}:
            shown = {"call": call.id, "given": one.given, "got": " ".join(map(str, _error(call) or ()))[:300]}
            reason = HANGS if call.id in hangs and len(hangs) > 1 else BESIDE[one.effect]
            said = saying(*_error(call) or ("",) * 2)
            wrong.append((reason.format(call=call.method, fields=" and ".join(dict(parts)), said=said), shown))
    return msgspec.structs.replace(concluded(len(pairs), wrong), effects=[one for _, one in found])


FIELD_PAIRS = Check(
    name="field_pairs",
    fault="two fields that work alone break the stack together, or one of them is lost beside the other",
    next_step="send the two fields in the evidence in one request, and follow it to the layer that reads both",
    reads=Fact.ERRORS | Fact.ANSWERS,
    falsifies=Fact.ERRORS | ROWS,
    errors_of=EVERY,
    source="vLLM documentation, SamplingParams and OpenAI-Compatible Server; SkyRL API reference, InferenceEngineInput",
    tap=Tap.READ,
    judge=_judge_pairs,
    queries=queries,
)
