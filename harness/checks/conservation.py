"""Nothing lost, nothing doubled: submitted = returned + explicitly failed, and every execution belongs to one row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded
from harness.checks.matching import WITH_ROWS, Assignment, Row, assignment, queries
from harness.contract.faults import ROWS, Fact
from harness.records.differing import parting

LOST = "a submitted row is neither returned nor reported as failed"
EXTRA = "a call returned more rows than it was given"
EMPTY = "a row that no engine served came back as an empty success"
EMPTIED = "a row came back empty though its engine produced tokens"
ALTERED = "a row came back with other tokens than its engine produced"
UNSERVED = "a row came back that no engine produced"
REPEATED = "a request was executed more than once"
STRANGER = "an engine executed a prompt that nobody asked for"


def _execution(execution: Execution) -> dict[str, Any]:
    return {"server": execution.server, "prompt": list(execution.prompt[:16]), "tokens": list(execution.tokens[:16])}


def _altered(row: Row, execution: Execution) -> dict[str, Any]:
    return {**row.shown, "server": execution.server, **parting(got=row.tokens or (), engine=execution.tokens)}


def _surplus(evidence: Evidence) -> list[dict[str, Any]]:
    """Calls whose result holds more rows than were submitted."""
    asked: dict[int, int] = {}
    for row in assignment(evidence).rows:
        asked[row.call.id] = asked.get(row.call.id, 0) + 1
    found: list[dict[str, Any]] = []
    for call in (c for method in WITH_ROWS for c in evidence.calls(method) if c.error is None):
        result = call.result or {}
        returned = len(result.get("response_ids") or (result.get("body") or {}).get("choices") or ())
        if returned > asked.get(call.id, 0):
            found.append({"call": call.id, "submitted": asked.get(call.id, 0), "returned": returned})
    return found


def _empty(row: Row) -> bool:
    return row.state == "returned" and row.tokens == () and row.finish_reason != "abort"


def _judge(evidence: Evidence) -> Finding | None:
    if not any(evidence.calls(method) for method in WITH_ROWS):
        return None
    found = assignment(evidence)
    facts = len(found.rows) + len(evidence.executions)
    if facts == 0:
        return None  # an empty batch: nothing was asked for and nothing ran
    return concluded(facts, _wrong(evidence, found), aborted=len(found.aborted))


def _wrong(evidence: Evidence, found: Assignment) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything that is wrong. Of each row the fault that is nearest to the cause."""
    altered = {(row.call.id, row.index): execution for row, execution in found.altered}
    returned = [row for row in found.rows if row.state == "returned"]
    unserved = [row for row in returned if not found.of(row) and (row.call.id, row.index) not in altered]
    other = [(row, execution) for row, execution in found.altered if row.state == "returned"]
    yield from ((LOST, row.shown) for row in found.rows if row.state == "lost")
    yield from ((EXTRA, shown) for shown in _surplus(evidence))
    for row, execution in other:
        yield EMPTIED if _empty(row) and execution.tokens else ALTERED, _altered(row, execution)
    yield from ((EMPTY if _empty(row) else UNSERVED, row.shown) for row in unserved)
    yield from ((REPEATED, _execution(execution)) for execution in found.repeated)
    yield from ((STRANGER, _execution(execution)) for execution in found.strangers)


CONSERVATION = Check(
    name="conservation",
    fault="a result is lost, doubled or made up, or an error becomes an empty success",
    next_step="follow the row in the evidence from the call to its engine and back: the first layer that drops, "
    "repeats or changes it is the place",
    reads=Fact.ANSWERS | Fact.TEXT | Fact.ERRORS,
    falsifies=ROWS,
    source="SkyRL API reference, InferenceEngineInterface.generate: one output per prompt, in order",
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)
