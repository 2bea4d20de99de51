"""Requests that met a broken hop: each ends once, named or answered, and no engine runs one twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from harness.checks.base import Check, Evidence, Finding, Tap, concluded, untestable
from harness.checks.errors import DEAD, LATE, NAMELESS, error_of
from harness.contract.faults import Fact
from harness.contract.messages import BROKEN_HOP_SAYS
from harness.records.recording import Call, saying

BROKEN, AFTER = "broken", "after"
"""Labels of the call that meets the fault, and of plain ones after it."""
MAY_REPEAT = {408, 429}
"""A client may send such a request again: RFC 9110, 15.5.9, says so of 408, and RFC 6585, 4, of 429 (Retry-After)."""
REFUSED = range(400, 500)


def _met(evidence: Evidence) -> Iterator[tuple[Call, dict[str, Any], int]]:
    """Each broken call, the fault, and how often the fault struck."""
    breaks = evidence.calls("break_hop")
    for now, then in pairwise(breaks):
        fault = now.request.get("fault")
        for call in evidence.calls(label=BROKEN):
            if fault is not None and now.ended_ns <= call.started_ns < then.started_ns:
                yield call, fault, int((then.result or {}).get("struck", 0))


def _named(fault: dict[str, Any]) -> str:
    what = f"{fault['status']} ({fault['body']})" if fault["connection"] == "kept" else fault["connection"]
    return f"{what} {fault['moment']} the engine, hop to the {fault['hop']}"


def _runs(evidence: Evidence, call: Call) -> int:
    return sum(call.started_ns <= execution.started_ns <= call.ended_ns for execution in evidence.executions)


def _wrong(evidence: Evidence, call: Call, fault: dict[str, Any]) -> str | None:
    kind, message, status = error_of(call)
    kept, runs = fault["connection"] == "kept", _runs(evidence, call)
    expected = fault["status"]
    final = kept and expected in REFUSED and expected not in MAY_REPEAT
    named = status == expected or str(expected) in message or BROKEN_HOP_SAYS in message
    faults = {
        "did not end in time": kind in {LATE, DEAD},
        "succeeded although no engine ran it": kind is None and runs == 0,
        "was computed again after its answer was replaced": fault["moment"] == "after" and runs > 1,
        "was sent again although it was refused": final and runs > (fault["moment"] == "after"),
        "failed without a named cause": kind is not None and (kind in NAMELESS or not message.strip()),
        f"failed with another cause than its own: {saying(kind or '', message, status)}": kind is not None
        and kept
        and not named,
    }
    return next((said for said, present in faults.items() if present), None)


def _judge(evidence: Evidence) -> Finding:
    met = list(_met(evidence))
    if not met:
        return untestable("no call met a broken hop")
    idle = [_named(fault) for _, fault, struck in met if not struck]
    if idle:
        return untestable(f"faults without effect: {'; '.join(idle)}")
    wrong = [
        (f"{call.method}() {said}", {"call": call.id, "fault": _named(fault), "runs": _runs(evidence, call)})
        for call, fault, _ in met
        if (said := _wrong(evidence, call, fault))
    ]
    after = evidence.calls(label=AFTER)
    harmed = [(call, error_of(call)) for call in after]
    wrong += [
        (f"{call.method}() failed after the hop was whole again: {saying(kind, message, status)}", {"call": call.id})
        for call, (kind, message, status) in harmed
        if kind is not None
    ]
    return concluded(len(met) + len(after), wrong)


BROKEN_HOPS = Check(
    name="broken_hops",
    fault="an error of a hop is swallowed, loses its cause, or sends a request again that was refused or has run",
    next_step="find the hop's answer in the client's and the router's code: which of them repeats, and what it passes on",
    reads=Fact.ERRORS,
    falsifies=Fact.ERRORS | Fact.ANSWERS | Fact.TEXT,
    tap=Tap.READ,
    errors_of=BROKEN,
    source="SkyRL #904; SkyRL 0.2.0, RemoteInferenceClient._post: client errors are raised immediately; retry on transient "
    "connection errors",
    judge=_judge,
)
