"""Control calls reach every server once, and what the stack says of itself is so."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable
from harness.checks.echo import CONTROL_OPS, reached
from harness.checks.instruments import BLIND, SILENT, silent_servers, tap_works


def _judge_fan_out(evidence: Evidence) -> Finding:
    if not tap_works(evidence):
        return untestable(BLIND)
    if silent := silent_servers(evidence):
        return untestable(SILENT, evidence=[{"servers": silent}])
    calls = [c for method in CONTROL_OPS for c in evidence.calls(method) if c.error is None]
    if not calls:
        return untestable("no control call succeeded")
    reasons: list[tuple[str, dict[str, Any]]] = []
    for call in calls:
        seen = Counter(control.server for control in reached(evidence, call))
        shown = {
            "call": call.id,
            "method": call.method,
            "times by server": {s: seen[s] for s in evidence.header.servers},
        }
        if any(seen[server] == 0 for server in evidence.header.servers):
            reasons.append((f"{call.method}() did not reach every server", shown))
        elif any(times > 1 for times in seen.values()):
            reasons.append((f"{call.method}() reached a server more than once", shown))
    facts = len(calls) * len(evidence.header.servers)
    if reasons:
        return failed(facts, "; ".join(sorted({reason for reason, _ in reasons})), [shown for _, shown in reasons])
    return passed(facts)


FAN_OUT = Check(
    name="fan_out",
    fault="a control call reaches only some servers, or one of them twice",
    source='SkyRL #904, "Control plane (fan-out)"; SkyRL #899, "Control plane fan-out … hit all servers"',
    judge=_judge_fan_out,
)


def _judge_healthy(evidence: Evidence) -> Finding:
    answers = [call for call in evidence.calls("health") if call.result is not None]
    if not answers:
        return untestable("health() gave no answer")
    sick = [{"call": call.id, "result": call.result} for call in answers if call.result != {"healthy": True}]
    return failed(len(answers), "health() is not true while servers work", sick) if sick else passed(len(answers))


HEALTHY = Check(
    name="healthy",
    fault="a stack that serves requests says that it does not",
    source="SkyRL #899, review of /health: true if at least one engine is healthy",
    judge=_judge_healthy,
)


def _judge_world_size(evidence: Evidence) -> Finding:
    answers = [call for call in evidence.calls("world_size") if call.result is not None]
    if not answers:
        return untestable("world_size() gave no answer")
    expected = evidence.header.topology.world_size
    wrong = [
        {"result": call.result, "expected": expected} for call in answers if call.result != {"world_size": expected}
    ]
    if wrong:
        return failed(len(answers), "world_size() is not the number of inference workers", wrong)
    return passed(len(answers))


WORLD_SIZE = Check(
    name="world_size",
    fault="a server or a parallel rank is not counted, and the weight-sync group is built too small",
    source="SkyRL #1014, task 8: get_world_size() = servers × TP; SkyRL #904",
    judge=_judge_world_size,
)


def _judge_pause_states(evidence: Evidence) -> Finding:
    answers = [call for call in evidence.calls("is_paused") if call.result is not None]
    if not answers:
        return untestable("is_paused() gave no answer")
    facts, states = 0, set()
    for call in answers:
        changes = [c for m in ("pause", "resume") for c in evidence.calls(m) if c.error is None]
        before = [c for c in sorted(changes, key=lambda c: c.ended_ns) if c.ended_ns <= call.started_ns]
        expected = bool(before) and before[-1].method == "pause"
        assert call.result is not None
        servers: dict[str, bool] = call.result["servers"]
        facts += len(servers)
        shown = [{"call": call.id, "result": servers, "expected": expected}]
        if len(servers) != len(evidence.header.servers):
            return failed(facts or 1, "is_paused() does not name every server", shown)
        if any(state is not expected for state in servers.values()):
            return failed(facts, f"is_paused() says otherwise after {'pause' if expected else 'resume'}()", shown)
        states.add(expected)
    if states != {True, False}:
        return untestable("is_paused() was not asked both paused and running")
    return passed(facts)


PAUSE_STATES = Check(
    name="pause_states",
    fault="is_paused() leaves a server out, or shows a state that is not so",
    source="SkyRL #899, review of /is_paused: a mapping from server to is_paused state of each engine",
    judge=_judge_pause_states,
)


def _judge_no_sleep(evidence: Evidence) -> Finding:
    if not tap_works(evidence):
        return untestable(BLIND)
    if silent := silent_servers(evidence):
        return untestable(SILENT, evidence=[{"servers": silent}])
    slept = [c for op in ("sleep", "wake_up") for c in evidence.controls(op) if c.at_ns >= evidence.began_ns]
    facts = len(evidence.header.servers)
    if slept:
        shown = [{"server": control.server, "op": control.data["op"]} for control in slept]
        return failed(facts, "an engine with its own accelerators was put to sleep or woken", shown)
    return passed(facts)


NO_SLEEP = Check(
    name="no_sleep",
    fault="disaggregated engines are put to sleep around a sync",
    source='SkyRL #1014, task 2: "No sleep/wake needed (separate GPUs)"',
    judge=_judge_no_sleep,
)
