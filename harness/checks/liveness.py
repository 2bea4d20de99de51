"""Every call ends, and ends well, where nothing was done that could make it fail."""

from __future__ import annotations

from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable
from harness.checks.matching import is_error, queries, rows


def _judge(evidence: Evidence) -> Finding:
    calls = evidence.calls()
    if not calls:
        return untestable("the scenario made no call")
    broken = [call for call in calls if call.error is not None]
    if broken:
        methods = ", ".join(sorted({call.method for call in broken}))
        shown = [
            {"call": c.id, "method": c.method, "kind": c.error.kind, "message": c.error.message[:300]}
            for c in broken
            if c.error is not None
        ]
        return failed(len(calls), f"a call failed: {methods}", shown)
    refused = [c for c in calls if c.result and isinstance(c.result.get("body"), dict) and is_error(c.result["body"])]
    if refused:
        methods = ", ".join(sorted({call.method for call in refused}))
        shown = [{"call": c.id, "method": c.method, "body": (c.result or {})["body"]} for c in refused]
        return failed(len(calls), f"a call was answered with an error: {methods}", shown)
    found = rows(evidence)
    unfinished = [r for r in found if r.finish_reason not in {"stop", "length"} or r.tokens == ()]
    if unfinished:
        shown = [{**r.shown, "state": r.state, "finish_reason": r.finish_reason} for r in unfinished]
        return failed(len(calls) + len(found), "a request did not come to its end", shown)
    return passed(len(calls) + len(found))


ALL_COMPLETE = Check(
    name="all_complete",
    fault="a call fails, hangs, or returns a response that was cut short",
    source="SkyRL API reference, InferenceEngineInterface; SkyRL #904",
    judge=_judge,
    queries=queries,
)
