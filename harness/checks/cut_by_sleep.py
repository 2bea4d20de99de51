"""Requests that sleep() met: each is cut short and says so, is answered whole, or fails by name."""

from __future__ import annotations

from harness.checks.base import EVERY, Check, Evidence, Finding, concluded, untestable
from harness.checks.errors import breaks, error_of
from harness.checks.matching import Row, queries, rows
from harness.contract.faults import ROWS, Fact


def _judge(evidence: Evidence) -> Finding:
    sleeps = evidence.succeeded("sleep")
    met = [row for row in rows(evidence) if any(row.call.started_ns < s.started_ns < row.call.ended_ns for s in sleeps)]
    if not met:
        return untestable("no request was in flight when the engines were put to sleep")
    wrong = [(reason, row.shown | {"finish_reason": row.finish_reason}) for row in met if (reason := _wrong(row))]
    cut = [row for row in met if row.finish_reason == "abort"]
    return concluded(len(met), wrong, cut=len(cut), without_tokens=sum(row.tokens == () for row in cut))


def _wrong(row: Row) -> str | None:
    kind, message, status = error_of(row.call)
    if kind is not None:
        unnamed = breaks(kind, message, status)
        return f"{row.call.method}() fails without a reason when the engines sleep" if unnamed else None
    if row.state == "lost":
        return "a request that sleep() met is neither answered nor reported as failed"
    if row.finish_reason not in ("abort", "stop", "length"):
        return "a request that sleep() met has no finish reason"
    short = row.tokens is not None and len(row.tokens) < row.params.get("max_tokens", 0)
    return "a request that sleep() cut short came back as whole" if short and row.finish_reason == "length" else None


CUT_BY_SLEEP = Check(
    name="cut_by_sleep",
    fault="a rollout that sleep() cut short looks like a whole answer, is lost, or fails without a reason",
    next_step="look at what the engine does with unfinished requests before it sleeps, and at the finish reason on the way back",
    reads=Fact.ANSWERS | Fact.ERRORS,
    falsifies=ROWS,
    errors_of=EVERY,
    source='SkyRL, AsyncVLLMInferenceEngine.sleep: "Aborting all unfinished requests"; vLLM documentation, /sleep: mode "abort"',
    judge=_judge,
    queries=queries,
)
