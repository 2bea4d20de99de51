"""Requests that lose their place in an engine's KV cache to others, and are computed again: preemption.

An engine gives each running request a token in every step. A request that a step leaves out, between its first token and its last,
was preempted.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Any

from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded, kept, untestable
from harness.checks.matching import assignment
from harness.checks.pausing import PAUSED, queries_of_same, same, steps_of
from harness.contract.faults import Fact

NONE_PREEMPTED = "a server had room for all of its requests at once"


@kept
def gaps(evidence: Evidence) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """(server, request) → the times between two of its tokens in which its server made a step without it."""
    times = {server: [seen.at_ns for seen in steps] for server, steps in steps_of(evidence).items()}
    found = {}
    for execution in evidence.executions:
        made, steps = execution.step_ns, times.get(execution.server, [])
        left_out = [(a, b) for a, b in pairwise(made) if bisect_right(steps, b - 1) > bisect_right(steps, a)]
        if left_out:
            found[execution.server, execution.request_id] = left_out
    return found


def _passed_over(evidence: Evidence, one: Execution) -> list[Execution]:
    """Requests that came to the same server later, and began while this one waited for its place."""
    waits = gaps(evidence).get((one.server, one.request_id), ())
    later = (other for other in evidence.executions if other.server == one.server and other.started_ns > one.started_ns)
    return [other for other in later if other.step_ns and any(a < other.step_ns[0] < b for a, b in waits)]


def _judge(evidence: Evidence) -> Finding:
    preempted = gaps(evidence)
    wrong: list[tuple[str, dict[str, Any]]] = []
    for one in evidence.executions:
        if (one.server, one.request_id) in preempted and (before := _passed_over(evidence, one)):
            shown = {"server": one.server, "request": one.request_id, "began before it": [o.request_id for o in before]}
            wrong.append(("a request that came later began while a preempted one waited", shown))
    if not wrong and set(evidence.header.servers) - {server for server, _ in preempted}:
        return untestable(NONE_PREEMPTED)
    return concluded(len(preempted), wrong, preempted=len(preempted), times=sum(map(len, preempted.values())))


PREEMPTED = Check(
    name="preemption",
    fault="a request that loses its place in the KV cache waits behind those that came after it",
    next_step="look at which queue the engine puts a preempted request into, and at which end",
    reads=Fact.PAUSES,
    source="vLLM documentation, Optimization and Tuning, Preemption; Engine Arguments, --scheduling-policy: fcfs",
    tap=Tap.READ_EVERYWHERE,
    judge=_judge,
)


def _judge_same(evidence: Evidence) -> Finding:
    preempted, found = gaps(evidence), assignment(evidence)
    met = {
        (row.call.id, row.index)
        for row in found.rows
        if row.call.label == PAUSED and any((e.server, e.request_id) in preempted for e in found.of(row))
    }
    return same(evidence, lambda row: (row.call.id, row.index) in met, NONE_PREEMPTED)


SAME_AS_WITH_ROOM = Check(
    name="preemption_changes_nothing",
    fault="tokens are lost, doubled or changed where a request lost its place in the KV cache",
    next_step="look at the tokens at `first difference`: see what the engine forgot of the request when it computed it again",
    reads=Fact.ANSWERS | Fact.POLICY | Fact.CHANCE | Fact.PAUSES,
    source="vLLM documentation, Optimization and Tuning, Preemption: preempted requests are recomputed",
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_same,
    queries=queries_of_same,
)
