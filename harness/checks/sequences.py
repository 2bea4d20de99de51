"""Sequences of calls: each call that the contract allows succeeds, and requests wait or end as the state says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Finding, Tap, concluded, kept, untestable
from harness.checks.control_plane import dead_at
from harness.checks.failed_sync import as_planned, given_up
from harness.checks.liveness import bad_error, says_gone
from harness.checks.matching import WITH_ROWS, error_in, is_error, queries, rows, said_by
from harness.checks.pausing import GRACE_NS, Pause, pauses
from harness.contract import states
from harness.contract.errors import CANCELLED
from harness.contract.faults import ROWS, Fact
from harness.contract.states import FIRST, Pending, State, Step
from harness.records.recording import Call
from harness.records.verdict import Visit

_HOW: dict[str, Callable[[dict[str, Any]], str]] = {
    "pause": lambda asked: str(asked["mode"]),
    "sleep": lambda asked: str(asked["level"]),
    "wake_up": lambda asked: " ".join(asked["tags"] or ()),
    "sync_weights": lambda asked: (
        states.GIVEN_UP if asked.get("fail_after_chunks") is not None else str(asked["chunks"])
    ),
    "reset_prefix_cache": lambda asked: "running" if asked["reset_running_requests"] else "",
}


def step_of(call: Call) -> Step | None:
    """The step that a call is; None for calls of no sequence, such as those of instruments."""
    step = Step(call.method, _HOW[call.method](call.request) if call.method in _HOW else "")
    return step if step in states.STEPS else None


@kept
def states_of(evidence: Evidence) -> list[tuple[Call, Step, State]]:
    """Every call of a sequence with the state that it met, by the recorded times alone."""
    calls = [(call, step) for call in evidence.calls() if (step := step_of(call)) is not None]
    found, state = [], FIRST
    open_calls: list[tuple[Call, Pending]] = []
    for call, step in calls:
        kinds = dict(zip((id(one) for one, _ in open_calls), state.pending, strict=True))
        open_calls = [(one, kinds[id(one)]) for one, _ in open_calls if one.ended_ns > call.started_ns]
        state = msgspec.structs.replace(state, pending=tuple(kind for _, kind in open_calls))
        found.append((call, step, state))
        if call.method in WITH_ROWS:
            state = states.after(state, Step("send", call.method))
            open_calls.append((call, state.pending[-1]))
        else:
            before = len(state.pending)
            state = states.after(state, step)
            if len(state.pending) < before:  # pause(wait) returned: what was in flight has ended
                open_calls = [(one, kind) for one, kind in open_calls if kind != "in flight"]
            open_calls = [(one, kind) for (one, _), kind in zip(open_calls, state.pending, strict=True)]
    return found


def visits(evidence: Evidence) -> list[Visit]:
    """What was called in which state, and in which one callers gave up."""
    met = states_of(evidence)
    seen = {(str(step), str(state), state.requests) for _, step, state in met}
    for call, _, _ in met:
        if call.error is not None and call.error.kind == CANCELLED:
            last, how, state = max(
                (one for one in met if one[0].started_ns < call.ended_ns), key=lambda one: one[0].started_ns
            )
            state = states.after(state, Step("send", how.do) if last.method in WITH_ROWS else how)
            seen.add(("cancel", str(state), state.requests))
    return [Visit(step=step, state=state, requests=requests) for step, state, requests in sorted(seen)]


def _failed(call: Call) -> str | None:
    body = (call.result or {}).get("body")
    if call.error is not None:
        return None if call.error.kind == CANCELLED else call.error.said
    return said_by(body) if isinstance(body, dict) and is_error(body) else None


def _blamed(evidence: Evidence, call: Call) -> str | None:
    """What is wrong with a failure, beside that it is one; None for a failure that a server's death excuses. A call that asks every
    server may fail by an error that says that one is gone, and so may a request that met the dying server."""
    kill = next((kill for kill in evidence.succeeded("kill_server") if kill.started_ns < call.ended_ns), None)
    if kill is None:
        return ""
    body = (call.result or {}).get("body")
    if (bad_error(call) is not None) if call.error else not says_gone(*error_in(body or {})):
        return " by an error that does not say that a server is gone"
    if call.method in states.TO_ALL:
        return None
    if call.started_ns > kill.ended_ns:
        return ", though another server lives"
    ran: dict[tuple[int, ...] | None, set[str]] = {row.prompt: set() for row in rows(evidence) if row.call is call}
    for execution in evidence.executions:
        ran.get(execution.prompt, set()).add(execution.server)
    harmed = not all(ran.values()) or any(kill.request["server"] in servers for servers in ran.values())
    return None if harmed else ", though no server that it ran on died"


def _wrong(evidence: Evidence) -> Iterator[tuple[str, dict[str, Any]]]:
    broken = set()
    for call, step, state in states_of(evidence):
        if given_up(call) and call.error is None:
            yield f"a sync that the trainer gave up is reported as done while {state}", {"call": call.id}
        elif (said := _failed(call)) is not None and not (given_up(call) and as_planned(call)):
            broken.add(call.id)
            if (why := _blamed(evidence, call)) is not None:
                shown = {"call": call.id, "state": str(state), "requests": state.requests, "said": said[:300]}
                yield f"{step} failed while {state}{why}", shown
    aborts = [call for call in evidence.calls("pause") if call.request["mode"] == "abort"]
    for row in rows(evidence):
        if row.call.id in broken or row.call.error is not None:
            continue
        may = {"stop", "length"}
        if any(row.call.started_ns < pause.ended_ns and pause.started_ns < row.call.ended_ns for pause in aborts):
            may.add("abort")
        if row.finish_reason not in may or (row.tokens == () and row.finish_reason != "abort"):
            yield "a request was cut short", {**row.shown, "finish_reason": row.finish_reason}
    yield from _misreported(evidence)
    for pause in pauses(evidence):
        yield from _ran_on(evidence, pause)


def _misreported(evidence: Evidence) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the stack says of its own state, and is not so."""
    for call, _, state in states_of(evidence):
        if call.method == "is_paused" and call.result is not None and not state.asleep:
            dead = dead_at(evidence, call.started_ns)
            answers = {server: said for server, said in call.result["servers"].items() if server not in dead}
            if set(answers.values()) != {state.paused is not None}:
                yield (
                    f"is_paused() says otherwise {_when(evidence, call.started_ns)}",
                    {"call": call.id, "said": answers},
                )
        elif call.method == "health" and (call.result or {}).get("healthy") is False:
            yield f"health() is not true while {state}", {"call": call.id, "result": call.result}


def _when(evidence: Evidence, at_ns: int) -> str:
    """In which pause that is, and whether wake_up() came within it before."""
    pause = next((one for one in pauses(evidence) if one.from_ns <= at_ns <= one.to_ns), None)
    if pause is None:
        return "while no pause lasts"
    woken = any(pause.from_ns <= call.started_ns < at_ns for call in evidence.calls("wake_up"))
    return f"during pause({pause.mode}), and {'wake_up' if woken else 'nothing'} came before"


def _ran_on(evidence: Evidence, pause: Pause) -> Iterator[tuple[str, dict[str, Any]]]:
    """Steps of engines during a pause. wake_up() within it may have ended it."""
    since = pause.from_ns + GRACE_NS
    for server in evidence.header.servers:
        made = [
            seen.at_ns
            for seen in evidence.trace.observations
            if seen.kind == "step" and seen.server == server and since < seen.at_ns < pause.to_ns
        ]
        if made:
            shown = {"call": pause.call.id, "server": server, "steps while paused": len(made)}
            yield f"an engine made tokens {_when(evidence, made[0])}", shown


def _judge(evidence: Evidence) -> Finding:
    found = states_of(evidence)
    if not found:
        return untestable("no step of a sequence was recorded")
    finding = concluded(len(found) + len(rows(evidence)), list(_wrong(evidence)))
    return msgspec.structs.replace(finding, visits=visits(evidence))


AS_THE_STATE_SAYS = Check(
    name="as_the_state_says",
    fault="a call that the contract allows fails after an unusual order of calls, another call ends a pause, or a server's death "
    "harms what the living server does",
    next_step="read the state in the evidence, and the calls before it in the scenario's timeline",
    reads=Fact.ANSWERS | Fact.ERRORS | Fact.PAUSES,
    falsifies=ROWS | Fact.PAUSES,
    errors_of=EVERY,
    source="harness/contract/states.py; SkyRL 0.2.0, InferenceEngineClient.pause_generation: until resume_generation; vLLM, /pause; "
    "SkyRL #904 and #899: a server's death",
    tap=Tap.READ_EVERYWHERE,
    judge=_judge,
    queries=queries,
)
