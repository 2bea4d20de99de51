"""A sync that the trainer gave up in the middle: it fails in time with a named error, and later calls succeed."""

from __future__ import annotations

from typing import Any

from harness.checks.base import EVERY, Check, Evidence, Finding, concluded, untestable
from harness.checks.liveness import GAVE_UP
from harness.checks.matching import queries, rows
from harness.contract.faults import Fact
from harness.records.recording import Call

DONE = "a sync that the trainer gave up is reported as done"
ENDLESS = "a sync that the trainer gave up does not end"
OTHERWISE = "a sync that the trainer was to give up failed before, for another reason"
PLANNED = "TrainerFailed"
"""The error of a sync that the trainer gave up on request (harness/contract/messages.py, SyncWeightsRequest)."""
ENDED_BY_A_LIMIT = {*GAVE_UP, "TimeoutError"}
"""Errors of a call that only a time limit of the harness or the adapter ended."""


def given_up(call: Call) -> bool:
    """True if the trainer was asked to fail in the middle of this sync."""
    return call.method == "sync_weights" and call.request.get("fail_after_chunks") is not None


def unfit(call: Call) -> bool:
    """True if the trainer sent in this sync what the engines' model does not have. `errors.named` judges its error."""
    return call.method == "sync_weights" and call.request.get("unfit") in ("name", "shape")


def as_planned(call: Call) -> bool:
    """True if the call failed because the trainer was asked to."""
    return call.error is not None and call.error.kind == PLANNED


def _judge(evidence: Evidence) -> Finding:
    calls = evidence.calls()
    broken = [call for call in calls if given_up(call) or unfit(call)]
    if not broken or broken[-1] is calls[-1]:
        return untestable("no sync was given up in the middle, or nothing came after it")
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in calls:
        shown = {"call": call.id, "method": call.method, "version": call.request.get("version")}
        if call.error is not None:
            shown |= {"kind": call.error.kind, "message": call.error.message[:300]}
        if given_up(call):
            if call.error is None:
                wrong.append((DONE, shown))
            elif call.error.kind in ENDED_BY_A_LIMIT:
                wrong.append((ENDLESS, shown))
            elif not as_planned(call):
                wrong.append((OTHERWISE, shown))
        elif call.error is not None and not unfit(call):
            wrong.append((f"after a sync that failed, {call.method}() fails as well", shown))
    found = rows(evidence)
    cut = [row for row in found if row.finish_reason not in {"stop", "length"} or row.tokens == ()]
    wrong += [("a request did not come to its end after a sync that failed", row.shown) for row in cut]
    return concluded(len(calls) + len(found), wrong, interrupted=len(broken))


FAILED_SYNC = Check(
    name="failed_sync",
    fault="a failed sync is reported as done or never ends, or the stack accepts no sync after it",
    next_step="look at what the stack undoes after a sync that failed: pause, locks, and the transfer's group of processes",
    reads=Fact.ANSWERS | Fact.PAUSES,
    errors_of=EVERY,
    source="architecture, idempotent sync: a failed sync followed by a good one is a good one",
    judge=_judge,
    queries=queries,
)
