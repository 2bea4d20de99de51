"""A caller that is gone: its request ends at the engine, and is not sent again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from harness.checks.base import EVERY, Check, Evidence, Execution, Finding, Tap, concluded, untestable
from harness.checks.matching import Row, assignment, queries
from harness.contract.errors import CANCELLED
from harness.contract.faults import ROWS, Fact

STOPS_S = 2.0
"""Time (seconds) in which an engine learns that the caller is gone, through every hop."""
QUEUED = "queued"
"""Label of a request that waits, in the client or at an engine, when its caller goes: it never runs."""
FAILED = "failed"
"""Label of a batch that fails by one of its rows: nobody waits for the others."""
LEFT = 50
"""Tokens that a request lacks at least when its caller goes: with fewer it may end by itself meanwhile."""


def _judge(evidence: Evidence) -> Finding:
    rows = [row for row in assignment(evidence).rows if _gone(row)]
    caught = [(row, _alive(row, evidence.executions)) for row in rows]
    early = [
        (row, alive)
        for row, alive in caught
        if any(_left(row, one) >= LEFT for one in alive) or (row.call.label == QUEUED and not _made(row, evidence))
    ]
    if not early:
        return untestable("no engine worked on a request whose caller went away, or it was nearly at its end")
    wrong = [(reason, row.shown | shown) for row, alive in early for reason, shown in _wrong(row, alive)]
    return concluded(len(early), wrong)


def _gone(row: Row) -> bool:
    gone = row.call.error is not None and (row.call.error.kind == CANCELLED or row.call.label == FAILED)
    return gone and row.prompt is not None


def _alive(row: Row, executions: Iterable[Execution]) -> list[Execution]:
    """The executions of this row, or of others of the same prompt, that had not ended when its caller went away."""
    gone_ns = row.call.ended_ns
    return [one for one in executions if one.prompt == row.prompt and (one.ended_ns is None or one.ended_ns > gone_ns)]


def _made(row: Row, evidence: Evidence) -> int:
    """Tokens that engines made for it before its caller went away."""
    return sum(_until(row, one) for one in evidence.executions if one.prompt == row.prompt)


def _until(row: Row, execution: Execution) -> int:
    """Tokens that the caller's going found there."""
    return sum(at_ns <= row.call.ended_ns for at_ns in execution.step_ns)


def _left(row: Row, execution: Execution) -> int:
    return int(execution.sampling_params.get("max_tokens", 0)) - _until(row, execution)


def _wrong(row: Row, alive: list[Execution]) -> Iterator[tuple[str, dict[str, Any]]]:
    method, gone_ns = row.call.method, row.call.ended_ns
    nobody = "for a batch that had failed" if row.call.label == FAILED else "without its caller"
    for one in alive:
        shown = {"server": one.server, "tokens then": _until(row, one), "tokens in the end": len(one.tokens)}
        if row.call.label == QUEUED and one.step_ns and one.step_ns[-1] > gone_ns + STOPS_S * 1e9:
            yield f"{method}() was computed although its caller had gone while it waited", shown
        elif one.started_ns > gone_ns and row.call.label != FAILED:  # a row of the batch may have been on its way
            yield f"{method}() was sent to an engine after its caller had gone", shown
        elif one.finish_reason == "length" and _left(row, one) >= LEFT:
            yield f"{method}() ran to its end {nobody}", shown
        elif one.step_ns and one.step_ns[-1] > gone_ns + STOPS_S * 1e9:
            yield f"{method}() ran on for more than {STOPS_S:.0f} s {nobody}", shown


CANCELLATION = Check(
    name="cancellation",
    fault="an engine goes on with a request that nobody waits for, or gets it once more",
    next_step="follow the request from the caller to its engine: the hop that still waits for the answer has to end it",
    reads=Fact.ANSWERS,
    falsifies=ROWS,
    errors_of=EVERY,
    source="vLLM documentation, with_cancellation and AsyncLLM.generate: a client that disconnects ends its request",
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)
