"""Calls that met a broken hop: each ends once, named or answered. No engine runs a request twice, and the next call is unharmed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from harness.checks.base import Check, Evidence, Finding, Tap, concluded, untestable
from harness.checks.echo import CONTROL_OPS
from harness.checks.errors import DEAD, LATE, NAMELESS, error_of
from harness.checks.matching import rows
from harness.contract.faults import Fact
from harness.contract.messages import BROKEN_HOP_SAYS, HopFault
from harness.records.recording import Call, saying

BROKEN, AFTER = "broken", "after"
"""Labels of requests that meet the fault, and of plain ones after it."""
MAY_REPEAT = {408, 429}
"""A client may send such a request again: RFC 9110, 15.5.9, says so of 408, and RFC 6585, 4, of 429 (Retry-After)."""
REFUSED = range(400, 500)
A_SERVER = re.compile(r"https?://|\b\d+(?:\.\d+){3}:\d+|(server|engine)[-_ ]?\d|\[\d+\]", re.IGNORECASE)
"""How an error says which server it is about."""

SAYS = {"vllm", "sentence"}
"""Bodies of errors in vLLM's own forms (vllm/entrypoints/openai and, for /pause, vllm/entrypoints/serve/rlhf)."""

OPS = {**CONTROL_OPS, "load_lora_adapter": "add_lora"}
"""Control call → operation of an engine."""

Wrong = tuple[str, dict[str, Any]]


def _faults(evidence: Evidence) -> Iterator[tuple[HopFault, list[Call], list[Call], int]]:
    """Each fault, the calls that began while it was there, those after it and before the next one, and how often it struck."""
    breaks = [*evidence.calls("break_hop"), None]
    for now, then, following in zip(breaks, breaks[1:], [*breaks[2:], None], strict=False):
        if now is None or then is None or now.request.get("fault") is None:
            continue
        calls = [call for call in evidence.calls() if call.method != "break_hop"]
        until = following.started_ns if following is not None else calls[-1].started_ns + 1
        met = [call for call in calls if now.ended_ns <= call.started_ns < then.started_ns]
        later = [call for call in calls if then.ended_ns <= call.started_ns < until]
        yield HopFault(**now.request["fault"]), met, later, int((then.result or {}).get("struck", 0))


def _named(fault: HopFault) -> str:
    kept = f"{fault.status} ({fault.body})" if fault.connection == "kept" else fault.form or fault.connection
    return f"{kept} {fault.moment} the engine, hop to the {fault.hop}"


def _runs(evidence: Evidence, call: Call) -> int:
    """How often engines ran the prompts of a call, or anything during it if its tokens are unknown."""
    prompts = {row.prompt for row in rows(evidence) if row.call is call and row.prompt is not None}
    own = [e for e in evidence.executions if call.started_ns <= e.started_ns]
    return sum(e.prompt in prompts if prompts else e.started_ns <= call.ended_ns for e in own)


def _failed(fault: HopFault, kind: str | None, message: str, status: int | None) -> Iterator[str]:
    """What is wrong with the end of any call."""
    if kind is None:
        return
    kept = fault.connection == "kept"
    named = status == fault.status or str(fault.status) in message or BROKEN_HOP_SAYS in message
    if kind in {LATE, DEAD}:
        yield "did not end in time"
    elif kind in NAMELESS or not message.strip():
        yield "failed without a named cause"
    elif fault.connection == "whole":
        yield f"failed although its answer was whole: {saying(kind, message, status)}"
    elif kept and not named:
        yield f"failed with another cause than its own: {saying(kind, message, status)}"


def _wrong(evidence: Evidence, call: Call, fault: HopFault) -> str | None:
    kind, message, status = error_of(call)
    runs = _runs(evidence, call)
    final = fault.connection == "kept" and fault.status in REFUSED and fault.status not in MAY_REPEAT
    faults = {
        "succeeded although no engine ran it": kind is None and runs == 0,
        "was computed again although its answer came": fault.connection == "whole" and runs > 1,
        "was computed again after it had hung": fault.connection == "hanging" and runs > 1,
        "was computed again after its answer was replaced": fault.moment == "after" and runs > 1,
        "was sent again although it was refused": final and runs > (fault.moment == "after"),
    }
    return next(
        (said for said, present in faults.items() if present), next(_failed(fault, kind, message, status), None)
    )


def _judge(evidence: Evidence) -> Finding:
    found = [one for one in _faults(evidence) if one[0].call == "request"]
    met = [(call, fault) for fault, calls, _, _ in found for call in calls if call.label == BROKEN]
    if not met:
        return untestable("no call met a broken hop")
    if idle := [_named(fault) for fault, _, _, struck in found if not struck]:
        return untestable(f"faults without effect: {'; '.join(idle)}")
    wrong: list[Wrong] = [
        (f"{call.method}() {said}", {"call": call.id, "fault": _named(fault), "runs": _runs(evidence, call)})
        for call, fault in met
        if (said := _wrong(evidence, call, fault))
    ]
    after = evidence.calls(label=AFTER)
    wrong += [
        (f"{call.method}() failed after the hop was whole again: {said}", {"call": call.id})
        for call, said in _harmed(after)
    ]
    hung = [(call.ended_ns - call.started_ns) / 1e9 for call, fault in met if fault.connection == "hanging"]
    return concluded(len(met) + len(after), wrong, longest_hang_s=max(hung, default=0.0))


def _harmed(calls: list[Call]) -> Iterator[tuple[Call, str]]:
    for call in calls:
        kind, message, status = error_of(call)
        if kind is not None:
            yield call, saying(kind, message, status)


BROKEN_HOPS = Check(
    name="broken_hops",
    fault="an error of a hop is swallowed, loses its cause, or sends a request again that was refused or has run; or a legal form of "
    "a message is not read",
    next_step="find the hop's answer in the client's and the router's code: which of them repeats, and what it passes on",
    reads=Fact.ERRORS,
    falsifies=Fact.ERRORS | Fact.ANSWERS | Fact.TEXT,
    tap=Tap.READ,
    errors_of=BROKEN,
    source="SkyRL #904; SkyRL 0.2.0, RemoteInferenceClient._post: client errors are raised immediately; retry on transient "
    "connection errors; RFC 9112, 3.2.2 and 7.1; RFC 9110, 5.1 and 5.2",
    judge=_judge,
)


def _reached(evidence: Evidence, call: Call) -> set[str]:
    """Servers that a control call reached before the next one of its method: it may fail at one while others still work on it."""
    later = [other.started_ns for other in evidence.calls(call.method) if other.started_ns > call.started_ns]
    seen = evidence.controls(OPS[call.method])
    until = min(later, default=None)
    return {c.server for c in seen if call.started_ns <= c.at_ns and (until is None or c.at_ns < until)}


def _control_wrong(evidence: Evidence, call: Call, fault: HopFault) -> Iterator[Wrong]:
    kind, message, status = error_of(call)
    servers = set(evidence.header.servers)
    here = _reached(evidence, call) if call.method in OPS else servers  # what only reads changes nothing at any
    shown = {"call": call.id, "fault": _named(fault), "reached": sorted(here), "message": message[:300]}
    for said in _failed(fault, kind, message, status):
        yield f"{call.method}() {said}", shown
    if kind is not None and fault.connection == "kept" and fault.body in SAYS and BROKEN_HOP_SAYS not in message:
        yield f"{call.method}() failed without what vLLM said in its answer ({fault.body})", shown
    if kind is None and here != servers:
        yield f"{call.method}() succeeded and did not reach every server", shown
    if kind is not None and here and here != servers and not A_SERVER.search(message):
        yield f"{call.method}() failed at one of several servers and does not say at which", shown


def _judge_control(evidence: Evidence) -> Finding:
    wrong: list[Wrong] = []
    facts, idle = 0, []
    for fault, calls, later, struck in _faults(evidence):
        if fault.call == "request":
            continue
        met = [call for call in calls if call.method == fault.call]
        facts += len(met) + len(later)
        idle += [] if struck and met else [f"{fault.call}: {_named(fault)}"]
        for call in met:
            wrong += _control_wrong(evidence, call, fault)
        for call, said in _harmed(later):
            wrong.append((f"{call.method}() failed after {fault.call} had met a broken hop: {said}", {"call": call.id}))
    if not facts:
        return untestable("no control call met a broken hop")
    return untestable(f"faults without effect: {'; '.join(idle)}") if idle else concluded(facts, wrong)


BROKEN_CONTROL = Check(
    name="broken_control",
    fault="a control call that fails at one of several servers is reported as done, does not say where, or harms the next call",
    next_step="find how the client gathers the servers' answers: which errors it keeps, and what it says of the server",
    reads=Fact.ERRORS | Fact.PAUSES | Fact.POLICY,
    falsifies=Fact.ERRORS | Fact.PAUSES | Fact.POLICY,
    tap=Tap.READ_EVERYWHERE,
    errors_of="",
    source='architecture, uniform fleet: "after a control call that failed …, all servers are in the same state"; SkyRL #904, '
    '"Control plane (fan-out)"',
    judge=_judge_control,
)
