"""The arguments of a call in every form: it is as usual, or refused by name. The caller's own objects stay as they are."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Execution, Finding, Tap, concluded, kept, untestable
from harness.checks.echo import CONTROL_OPS, reached
from harness.checks.errors import breaks, error_of, unanswered
from harness.checks.matching import assignment, queries
from harness.contract.faults import ROWS, Fact
from harness.records.argument_forms import ADMITTED, AS_IT_IS
from harness.records.recording import Call
from harness.records.verdict import Effect, FieldEffect


@kept
def effects(evidence: Evidence) -> list[tuple[Call, FieldEffect]]:
    """Each call whose arguments got another form, with what became of it, in order of time. Empty if no form can be judged."""
    found = assignment(evidence)
    meant: dict[int, Any] = {row.call.id: _meant(found.of(row)[0]) for row in found.rows if found.of(row)}
    for call in (call for method in CONTROL_OPS for call in evidence.calls(method)):
        seen = sorted((one.server, str(one.data["arguments"])) for one in reached(evidence, call))
        meant |= {call.id: seen} if seen else {}
    plain = [call for call in evidence.calls(label=AS_IT_IS) if call.error is None and call.id in meant]
    usual = {call.method: meant[call.id] for call in plain}
    late = unanswered(call for call in evidence.calls() if _formed(call))[1:]
    return [
        (call, _effect(call, asked, same=meant.get(call.id) == usual[call.method], untold=call in late))
        for call in evidence.calls()
        if call.method in usual
        for asked in _formed(call)
    ]


def _formed(call: Call) -> list[str]:
    """The form that an argument of this call really got. A call that nobody waited for any longer did not tell it."""
    if call.label is not None and ": " in call.label and unanswered([call]):
        return [call.label]
    return [raw.formed for raw in call.raw or () if raw.formed is not None and raw.formed == call.label]


def _effect(call: Call, asked: str, *, same: bool, untold: bool) -> FieldEffect:
    place, _, form = asked.rpartition(": ")
    kind, message, status = error_of(call)
    if untold:
        effect = Effect.UNTOLD
    elif kind is None:
        effect = Effect.AS_USUAL if same else Effect.CHANGED
    elif breaks(kind, message, status):
        effect = Effect.BROKE
    else:
        effect = Effect.REFUSED_NAMELESS if form in ADMITTED else Effect.REFUSED
    return FieldEffect(call=call.method, field=place, given=form, effect=effect)


def _meant(execution: Execution) -> tuple[Any, ...]:
    """What a request is beside its prompt, by which it was found: the server of its session, its parameters."""
    return execution.server, execution.sampling_params


REASONS = {
    Effect.CHANGED: "{call}() means something else with {field} given {given}",
    Effect.BROKE: "{call}() answers {field} given {given} as a server error, without any name, or not in time",
    Effect.REFUSED_NAMELESS: "{call}() refuses {field} given {given}, which its annotation admits",
}
HANGS = "{call}() answers no more after {field} given {given}"


def _judge(evidence: Evidence) -> Finding:
    found = effects(evidence)
    if not found:
        return untestable("the call with usual arguments failed, was not seen at an engine, or no form was asked for")
    hanging = unanswered(call for call, _ in found)
    wrong = []
    for call, one in found:
        if one.effect in REASONS:
            reason = HANGS if call in hanging and len(hanging) > 1 else REASONS[one.effect]
            reason = reason.format(call=one.call, field=one.field, given=one.given)
            wrong.append((reason, {"call": call.id, "got": " ".join(map(str, error_of(call)))[:300]}))
    return msgspec.structs.replace(concluded(len(found), wrong), effects=[one for _, one in found])


CALL_FORMS = Check(
    name="call_forms",
    fault="a call means something else, or fails without a name, if its arguments are of another type with the same content",
    next_step="make the call in the evidence alone: a client that passes arguments on has to take the form, or refuse it by name",
    reads=Fact.ERRORS,
    falsifies=Fact.ERRORS | ROWS,
    errors_of=EVERY,
    source="SkyRL API reference, InferenceEngineInterface: the types of the arguments",
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)


def _judge_kept(evidence: Evidence) -> Finding:
    asked = [call for call in evidence.calls(label=AS_IT_IS) if call.raw]
    if not asked:
        return untestable("nobody looked at the arguments of a call")
    wrong = [
        (f"{call.method}() changes its caller's {name}", {"call": call.id, "method": raw.method, "argument": name})
        for call in asked
        for raw in call.raw or ()
        for name in raw.changed
    ]
    return concluded(sum(len(raw.arguments) for call in asked for raw in call.raw or ()), wrong)


KEPT_ARGUMENTS = Check(
    name="kept_arguments",
    fault="a call changes the objects that its caller gave: given again, they are another request",
    next_step="copy the argument in the client before a part of it is taken out",
    source="SkyRL API reference, InferenceEngineInterface: the arguments are a request, which a caller may keep and send again",
    judge=_judge_kept,
)
