"""At which moment of a request's life a pause met it, judged by the tokens that its engine had made.

pause(abort) meets the requests that it ends, pause(keep) those that it freezes, pause(wait) those present when it was called.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from harness.checks.base import Evidence, Execution, kept
from harness.checks.matching import Row
from harness.checks.pausing import Pause, dropped, pauses

QUEUE_STEPS = 2
"""A request that got no token in this many steps of its server was waiting for its turn, not being prefilled."""


class Moment(StrEnum):
    """The state of a request when the pause met it."""

    BEFORE_FIRST_TOKEN = "before its first token"
    UNDER_WAY = "in the middle"
    LAST_TOKEN = "with one token of its budget left"
    QUEUED = "while it waited for its turn"


def caught_at(evidence: Evidence, row: Row, *moments: Moment) -> int:
    """How many times a pause met the row at one of these moments, over all its attempts."""
    prompt = row.prompt or ()
    return sum(
        not met.isdisjoint(moments)
        for execution, met in _met(evidence)
        if execution.prompt[: len(prompt)] == prompt
        and row.call.started_ns <= execution.started_ns <= row.call.ended_ns
    )


@kept
def _met(evidence: Evidence) -> list[tuple[Execution, frozenset[Moment]]]:
    """Every execution that a pause met, with its moments. Kept, since `caught_at` is called per row."""
    return [
        (execution, frozenset(_moments(evidence, execution, *met)))
        for execution in evidence.executions
        for pause in pauses(evidence)
        if (met := _by_then(evidence, pause, execution)) is not None
    ]


def _by_then(evidence: Evidence, pause: Pause, execution: Execution) -> tuple[int, int] | None:
    """(when the pause met it, how many tokens it had); None if the pause did not meet it."""
    gone_ns = dropped(evidence).get((execution.server, execution.request_id))
    ended_ns = execution.ended_ns if execution.ended_ns is not None else gone_ns
    if execution.started_ns > (pause.from_ns if pause.mode == "abort" else pause.asked_ns):
        return None
    if pause.mode == "abort":
        cut = execution.finish_reason == "abort" or (execution.finish_reason is None and gone_ns is not None)
        return (ended_ns, len(execution.tokens)) if cut and ended_ns and ended_ns <= pause.to_ns else None
    at_ns = pause.to_ns if pause.mode == "keep" else pause.asked_ns
    if ended_ns is not None and ended_ns <= at_ns:
        return None
    return at_ns, sum(made <= at_ns for made in execution.step_ns)


def _moments(evidence: Evidence, execution: Execution, at_ns: int, made: int) -> Iterator[Moment]:
    if made:
        left = (execution.sampling_params.get("max_tokens") or 0) - made
        yield Moment.LAST_TOKEN if left == 1 else Moment.UNDER_WAY
        return
    yield Moment.BEFORE_FIRST_TOKEN
    steps = _steps_of(evidence).get(execution.server, [])
    if sum(execution.started_ns < step < at_ns for step in steps) >= QUEUE_STEPS:
        yield Moment.QUEUED


@kept
def _steps_of(evidence: Evidence) -> dict[str, list[int]]:
    """server → when it made tokens for any request."""
    found: dict[str, list[int]] = {}
    for seen in evidence.trace.observations:
        if seen.kind == "step":
            found.setdefault(seen.server, []).append(seen.at_ns)
    return found
