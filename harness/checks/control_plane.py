"""Control calls reach every server once, and the stack reports its own state correctly."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness.checks.base import Check, Evidence, Finding, Tap, concluded, untestable
from harness.checks.echo import CONTROL_OPS, reached
from harness.contract.faults import Fact
from harness.records.recording import Call, Observation


def _judge_fan_out(evidence: Evidence) -> Finding:
    calls = [c for method in CONTROL_OPS for c in evidence.calls(method) if binding(evidence, c)]
    if not calls:
        return untestable("no control call succeeded")
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in calls:
        seen = Counter(control.server for control in taken(evidence, call))
        living = [server for server in evidence.header.servers if server not in dead_at(evidence, call.started_ns)]
        shown = {
            "call": call.id,
            "method": call.method,
            "times by server": {s: seen[s] for s in evidence.header.servers},
        }
        if any(seen[server] == 0 for server in living):
            every = "every server" if living == evidence.header.servers else "the living server"
            wrong.append((f"{call.method}() did not reach {every}", shown))
        elif call.error is None and any(times > 1 for times in seen.values()):
            wrong.append((f"{call.method}() reached a server more than once", shown))
    servers = len(evidence.header.servers)
    return concluded(len(calls) * servers, wrong, calls=len(calls), servers=servers)


FAN_OUT = Check(
    name="fan_out",
    fault="a control call reaches only some servers, or one of them twice",
    next_step="look at `times by server` in the evidence, and at how the client sends this call to the server with 0 or with several",
    reads=Fact.PAUSES,
    falsifies=Fact.PAUSES | Fact.POLICY | Fact.ADAPTERS,
    source='SkyRL #904, "Control plane (fan-out)"; SkyRL #899, "Control plane fan-out … hit all servers"',
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_fan_out,
)


def dead_at(evidence: Evidence, at_ns: int) -> set[str]:
    """The servers killed up to that time."""
    kills = [call for call in evidence.calls("kill_server") if call.error is None and call.ended_ns <= at_ns]
    return {call.request["server"] for call in kills}


LATE_NS = 100_000_000
"""Nanoseconds (0.1 s) in which a living server takes a control call that failed at a dead one: its caller knows before."""


def binding(evidence: Evidence, call: Call) -> bool:
    """True if the living servers have to obey a control call: it succeeded, or failed with a server dead, and there was time."""
    if call.error is None:
        return True
    in_time = any(other.ended_ns > call.ended_ns + LATE_NS for other in evidence.calls())
    return bool(dead_at(evidence, call.started_ns)) and in_time


def taken(evidence: Evidence, call: Call) -> list[Observation]:
    """What engines took of a control call. Of one that failed: up to the next of its kind, unless that came at once."""
    if call.error is None:
        return reached(evidence, call)
    later = (one.started_ns for one in evidence.calls(call.method) if one.started_ns > call.ended_ns + LATE_NS)
    until = min(later, default=None)
    seen = evidence.controls(CONTROL_OPS[call.method])
    return [one for one in seen if call.started_ns <= one.at_ns and (until is None or one.at_ns < until)]


def _all_dead(evidence: Evidence, call: Call) -> bool:
    return dead_at(evidence, call.started_ns) >= set(evidence.header.servers)


def _judge_healthy(evidence: Evidence) -> Finding:
    answers = [c for c in evidence.calls("health") if c.result is not None and not _all_dead(evidence, c)]
    if not answers:
        return untestable("health() gave no answer while a server worked")
    sick = [{"call": call.id, "result": call.result} for call in answers if call.result != {"healthy": True}]
    return concluded(len(answers), [("health() is not true while servers work", shown) for shown in sick])


HEALTHY = Check(
    name="healthy",
    fault="a stack that serves requests reports itself unhealthy",
    next_step="ask each server's own /health: if all say 200, the stack's summary of them is wrong",
    reads=Fact.ERRORS,
    source="SkyRL #899, review of /health: true if at least one engine is healthy",
    judge=_judge_healthy,
)


def _judge_health_follows(evidence: Evidence) -> Finding:
    """Judges only the last answer in each state: a stack may need a moment to notice a dead server."""
    last: dict[int, Call] = {}
    for call in evidence.calls("health"):
        last[len(dead_at(evidence, call.started_ns))] = call
    everyone = len(evidence.header.servers)
    if everyone not in last or not any(0 < dead < everyone for dead in last):
        return untestable("health() was not asked both with some servers dead and with all of them")
    wrong = []
    for dead, call in last.items():
        state = {"servers dead": dead, "of": everyone}
        shown = {"call": call.id, **state, "result": call.result, "error": _error(call)}
        if dead < everyone and call.result != {"healthy": True}:
            wrong.append(("health() is not true while a server works", shown))
        if dead == everyone and call.error is None and call.result != {"healthy": False}:
            wrong.append(("health() is true though every server is dead", shown))
    return concluded(len(last), wrong)


def _error(call: Call) -> str | None:
    return None if call.error is None else f"{call.error.kind}: {call.error.message[:200]}"


HEALTH_FOLLOWS_SERVERS = Check(
    name="health_follows_servers",
    fault="health() is true whatever the servers do, or false as soon as one of them is dead",
    next_step="look at what health() asks: the servers at that moment, or an earlier answer of theirs",
    reads=Fact.ERRORS,
    source='SkyRL #899, review of /health: "if at least one engine exists that is healthy it should return true"',
    judge=_judge_health_follows,
)


GOOD = "good"
"""Label of http() calls that nothing is wrong with, each followed by health()."""
UNAVAILABLE = 503


def _judge_health_of_the_address(evidence: Evidence) -> Finding:
    """Judges each health() by the request just before it. Other errors than a 503 say nothing of the servers."""
    told = 0
    wrong = []
    before: Call | None = None
    for call in sorted(evidence.trace.own_calls, key=lambda call: call.started_ns):
        if call.method == "http" and call.label == GOOD:
            before = call
        elif call.method == "health" and before is not None and before.result is not None and call.result is not None:
            told += 1
            if before.result["status"] == UNAVAILABLE and call.result == {"healthy": True}:
                shown = {"call": call.id, "request": before.id, "said": before.result["body"][:200]}
                wrong.append(("health() is true while the address answers good requests by 503", shown))
    return concluded(told, wrong) if told else untestable("health() was not asked after an answered request")


HEALTH_OF_THE_ADDRESS = Check(
    name="health_of_the_address",
    fault="an address turns every request away, and tells a load balancer that it is healthy",
    next_step="compare what chooses a server for a request with what /health asks: both have to know the servers that are shut off",
    reads=Fact.ERRORS,
    source="SkyRL #899, review of /health; RFC 9110, 15.6.4: 503",
    judge=_judge_health_of_the_address,
)


def _judge_world_size(evidence: Evidence) -> Finding:
    answers = [call for call in evidence.calls("world_size") if call.result is not None]
    if not answers:
        return untestable("world_size() gave no answer")
    expected = evidence.header.topology.world_size
    wrong = [
        (
            "world_size() is not the number of inference workers",
            {"call": c.id, "result": c.result, "expected": expected},
        )
        for c in answers
        if c.result != {"world_size": expected}
    ]
    return concluded(len(answers), wrong, servers=len(evidence.header.servers))


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
    facts, states = 0, Counter[bool]()
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in answers:
        changes = [c for m in ("pause", "resume") for c in evidence.calls(m) if c.error is None]
        before = [c for c in sorted(changes, key=lambda c: c.ended_ns) if c.ended_ns <= call.started_ns]
        expected = bool(before) and before[-1].method == "pause"
        assert call.result is not None
        servers: dict[str, bool] = call.result["servers"]
        facts += len(evidence.header.servers)
        states[expected] += 1
        shown = {"call": call.id, "result": servers, "expected": expected}
        if len(servers) != len(evidence.header.servers):
            wrong.append(("is_paused() does not name every server", shown))
        elif any(state is not expected for state in servers.values()):
            wrong.append((f"is_paused() says otherwise after {'pause' if expected else 'resume'}()", shown))
    if not wrong and len(states) < 2:
        return untestable("is_paused() was not asked both paused and running")
    return concluded(facts, wrong, asked_paused=states[True], asked_running=states[False])


PAUSE_STATES = Check(
    name="pause_states",
    fault="is_paused() leaves out a server, or shows a wrong state",
    next_step="look at where is_paused() reads its answer: every engine's own state, or a flag of the client",
    reads=Fact.PAUSES,
    source="SkyRL #899, review of /is_paused: a mapping from server to is_paused state of each engine",
    judge=_judge_pause_states,
)


def _judge_no_sleep(evidence: Evidence) -> Finding:
    slept = [c for op in ("sleep", "wake_up") for c in evidence.controls(op) if c.at_ns >= evidence.began_ns]
    syncs = evidence.succeeded("sync_weights")
    wrong = [
        (
            "an engine with its own accelerators was put to sleep or woken",
            {"server": control.server, "op": control.data["op"]},
        )
        for control in slept
    ]
    if not syncs and not wrong:
        return untestable("no weights were synced")
    return concluded(len(evidence.header.servers) * max(1, len(syncs)), wrong, syncs=len(syncs))


NO_SLEEP = Check(
    name="no_sleep",
    fault="disaggregated engines are put to sleep around a sync",
    source='SkyRL #1014, task 2: "No sleep/wake needed (separate GPUs)"',
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_no_sleep,
)
