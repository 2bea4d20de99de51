"""What became of every field of a request: it took effect, was refused by name, was dropped, changed, or broke something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Execution, Finding, Tap, concluded, kept, untestable
from harness.checks.echo import ENGINE_DEFAULTS, parameters
from harness.checks.errors import breaks, error_of
from harness.checks.matching import Row, assignment, queries, usual_prompts
from harness.contract.errors import CANCELLED
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import CHOICES
from harness.records.recording import Call
from harness.records.verdict import Effect, FieldEffect

AS_IT_IS = "as it is"
"""Label of the request to which each case adds one field."""
ALIASES = {"max_completion_tokens": ("max_tokens",), "stop_token_ids": ("stop token",), "top_logprobs": ("logprobs",)}
"""Other names under which an error may speak of a field (vLLM, ChatCompletionRequest.to_sampling_params)."""
OWN_TO_A_RESULT = frozenset({"id", "created", "request_id", "index"})


@kept
def effects(evidence: Evidence) -> list[tuple[Call, FieldEffect]]:
    """Each case with what became of its field, in order of time. Empty if no field can be judged."""
    plain = evidence.calls(label=AS_IT_IS)
    cases = [call for call in evidence.calls() if call.label is not None and ": " in call.label]
    ran = {row.call.id: (row, *found.of(row)[:1]) for found in [assignment(evidence)] for row in found.rows}
    at_engine = [part for call in plain for part in ran.get(call.id, ()) if isinstance(part, Execution)]
    if not at_engine or _error(plain[0]) is not None:
        return []
    usual = at_engine[0].sampling_params, set(_places(plain[0].result))
    late = _unanswered(cases)[1:]
    found = []
    for call in cases:
        field, _, kind = str(call.label).partition(": ")
        effect = Effect.UNTOLD if call in late else _effect(evidence, call, field, ran.get(call.id, ()), usual)
        found.append((call, FieldEffect(call=call.method, field=field, given=kind, effect=effect)))
    return found


def _unanswered(cases: Iterable[Call]) -> list[Call]:
    return [call for call in cases if call.error is not None and call.error.kind == CANCELLED]


def _judge(evidence: Evidence) -> Finding:
    found = effects(evidence)
    if not found:
        return untestable("the request without any further field failed or was not seen, or no field was asked for")
    unanswered = _unanswered(call for call, _ in found)
    wrong = []
    for call, one in found:
        if one.effect in REASONS:
            reason = HANGS if call in unanswered and len(unanswered) > 1 else REASONS[one.effect]
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


def _effect(
    evidence: Evidence, call: Call, field: str, ran: tuple[Any, ...], usual: tuple[dict[str, Any], set[str]]
) -> Effect:
    error = _error(call)
    if error is not None:
        return _of_error(field, *error)
    match ran:
        case (Row() as row, Execution() as execution):
            at_engine = execution.sampling_params
            for name, given, seen, right in parameters(evidence, row, execution):
                if name == field:
                    default = usual[0].get(field, ENGINE_DEFAULTS.get(field))
                    if right:
                        return Effect.AS_USUAL if given == default else Effect.TOOK_EFFECT
                    return Effect.DROPPED if seen == default or at_engine == usual[0] else Effect.CHANGED
            shaped = call.method in CHOICES and usual_prompts(call, evidence.reference) != [execution.prompt]
            if at_engine != usual[0] or shaped:
                return Effect.TOOK_EFFECT
        case _:
            pass
    return Effect.TOOK_EFFECT if set(_places(call.result)) != usual[1] else Effect.AS_USUAL


def _of_error(field: str, kind: str, message: str, status: int | None) -> Effect:
    if breaks(kind, message, status):
        return Effect.BROKE
    named = any(name in message.lower() for name in (field.lower(), *ALIASES.get(field, ())))
    return Effect.REFUSED if named else Effect.REFUSED_NAMELESS


def _places(value: Any, at: str = "") -> Iterator[str]:
    """Every key of a result that holds something, with the keys around it."""
    match value:
        case dict():
            for name, inner in value.items():
                if name not in OWN_TO_A_RESULT:
                    yield from _places(inner, f"{at}.{name}")
        case list():
            for inner in value[:1]:
                yield from _places(inner, f"{at}[]")
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
