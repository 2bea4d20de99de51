"""Results in the order of their prompts, each with its own caller. Judged by the engines' executions, seen out of band."""

from __future__ import annotations

from itertools import pairwise

from harness.checks.answers import Answer, of_answers
from harness.checks.base import Check, Evidence, Execution, Finding, concluded, passed, untestable
from harness.contract.faults import ROWS

SOURCE = 'SkyRL API reference, GeneratorInterface.generate: "Returns outputs in the same order as the input batch."'


def in_order(*labels: str, ragged: bool = False, concurrent: bool = False) -> Check:
    """Each result is an engine's answer to the prompt in its place.

    `ragged` requires that rows of a call finish out of order, `concurrent` that calls overlap in time. Otherwise the promise is
    untestable.
    """

    def rule(evidence: Evidence, rows: list[Answer]) -> Finding:
        runs: dict[tuple[int, ...], list[Execution]] = {}
        for execution in evidence.executions:
            runs.setdefault(execution.prompt, []).append(execution)
        seen = [row for row in rows if tuple(row.prompt) in runs]
        if not seen:
            return untestable("no execution of these prompts was observed")
        misplaced = [row for row in seen if not any(_made(row, e) for e in runs[tuple(row.prompt)])]
        if misplaced:
            return concluded(len(seen), [(_why(row, rows, runs), row.shown()) for row in misplaced])
        untold = _untold(rows, runs)
        if untold:
            return untestable(untold)
        untried = _untried(rows, runs, ragged=ragged, concurrent=concurrent)
        if untried:
            return untestable(f"{untried}: the promise was not put to the test")
        return passed(len(rows))

    return of_answers(
        "ordering",
        fault="results are swapped within a batch, dropped, or returned to another caller",
        next_step="look at where the results of several servers or requests are put together again: each has to go "
        "back to its own row and caller",
        source=SOURCE,
        rule=rule,
        falsifies=ROWS,
        labels=labels,
    )


def _made(row: Answer, execution: Execution) -> bool:
    made = list(execution.tokens)
    # vLLM's frontend finds stop strings, so the engine may run a step further.
    ran_on = bool(row.params.get("stop")) and row.finish_reason == "stop" and made[: len(row.tokens)] == row.tokens
    # A client may continue what pause(abort) cut short; `continuation` judges how.
    went_on = execution.finish_reason == "abort" and made != [] and row.tokens[: len(made)] == made
    return made == row.tokens or ran_on or went_on


def _why(row: Answer, rows: list[Answer], runs: dict[tuple[int, ...], list[Execution]]) -> str:
    owners = [o for o in rows if o.tokens != [] and any(_made(row, e) for e in runs.get(tuple(o.prompt), ()))]
    if any(owner.call.id == row.call.id for owner in owners):
        return "results are not in the order of their prompts"
    if owners:
        return "a result belongs to another caller"
    return "a result is not what the engine made of its prompt"


def _untold(rows: list[Answer], runs: dict[tuple[int, ...], list[Execution]]) -> str | None:
    if any(tuple(row.prompt) not in runs for row in rows):
        return "the executions of some prompts were not observed"
    if len(rows) > 1 and len({tuple(row.tokens) for row in rows}) < len(rows) / 2:
        return "most outputs are the same: their order cannot be told"
    return None


def _untried(
    rows: list[Answer], runs: dict[tuple[int, ...], list[Execution]], *, ragged: bool, concurrent: bool
) -> str | None:
    if ragged and not _finished_out_of_order(rows, runs):
        return "rows finished in the order of their prompts"
    if concurrent and not _overlapped(rows):
        return "the callers did not overlap in time"
    return None


def _finished_out_of_order(rows: list[Answer], runs: dict[tuple[int, ...], list[Execution]]) -> bool:
    ends: dict[int, list[int]] = {}
    for row in rows:
        ends.setdefault(row.call.id, []).append(max(e.ended_ns or 0 for e in runs[tuple(row.prompt)]))
    return any(later < earlier for call in ends.values() for earlier, later in pairwise(call))


def _overlapped(rows: list[Answer]) -> bool:
    calls = sorted({row.call.id: row.call for row in rows}.values(), key=lambda c: c.started_ns)
    return len(calls) > 1 and all(later.started_ns < earlier.ended_ns for earlier, later in pairwise(calls))
