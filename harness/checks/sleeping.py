"""Requests that sleep() meets are cut short and say so, are answered whole, or fail by name. Those that come later wait."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Finding, Tap, concluded, untestable
from harness.checks.errors import breaks, error_of
from harness.checks.matching import Row, assignment, queries, rows
from harness.checks.pausing import PAUSE_STEPS, step_time_ns, steps_of, went_on
from harness.contract.faults import ROWS, Fact
from harness.contract.states import TAGS

NONE_CAME = "no request came while the engines slept"
TOO_SHORT = "the engines slept too shortly for a step to be seen"
ONE_LEFT_OUT = "a server got no request while it slept"


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


class Rest(msgspec.Struct, frozen=True):
    """A time in which something of the engines sleeps, between two calls. `awake`: what is awake already."""

    from_ns: int
    to_ns: int
    awake: tuple[str, ...]


def rests(evidence: Evidence) -> Iterator[Rest]:
    """From each sleep() to the next call that changes it, and from each wake_up() that leaves something asleep."""
    changes = sorted((c for m in ("sleep", "wake_up") for c in evidence.succeeded(m)), key=lambda c: c.started_ns)
    awake: tuple[str, ...] = TAGS
    since_ns = 0
    for call in changes:
        if awake != TAGS:
            yield Rest(since_ns, call.started_ns, awake)
        named = call.request.get("tags") or TAGS
        awake = tuple(tag for tag in TAGS if (call.method == "wake_up" if tag in named else tag in awake))
        since_ns = call.ended_ns


def _judge_still(evidence: Evidence) -> Finding:
    steps, step_time, where = steps_of(evidence), step_time_ns(evidence), assignment(evidence)
    servers: set[str] = set()
    facts, short, wrong = 0, False, []
    for rest in rests(evidence):
        met = [row for row in where.rows if row.call.started_ns < rest.to_ns and row.call.ended_ns > rest.from_ns]
        if not met:
            continue
        if not step_time or rest.to_ns - rest.from_ns < PAUSE_STEPS * step_time:
            short = True
            continue
        servers |= {execution.server for row in met for execution in where.of(row)}
        state = f"only {' and '.join(rest.awake)} were awake" if rest.awake else "it slept"
        for server in evidence.header.servers:
            facts += 1
            made = [s for s in steps.get(server, ()) if rest.from_ns < s.at_ns < rest.to_ns]
            if went_on(made, rest.from_ns):
                shown = {"server": server, "steps": len(made), "last after ms": (made[-1].at_ns - rest.from_ns) / 1e6}
                wrong.append((f"an engine made tokens while {state}", shown))
    if not wrong and (short or not facts or servers < set(evidence.header.servers)):
        return untestable(TOO_SHORT if short else ONE_LEFT_OUT if facts else NONE_CAME)
    return concluded(facts, wrong, servers=len(servers))


STILL = Check(
    name="still_while_asleep",
    fault="an engine runs requests while its weights or its cache sleep: on a GPU it reads memory that it has given away",
    next_step="look at what starts the scheduler again: wake_up() of a part has to leave it stopped",
    reads=Fact.PAUSES,
    falsifies=Fact.PAUSES,
    source="vLLM documentation, Sleep Mode: weights are woken before a weight update, the cache after it; vLLM #44483: the scheduler "
    "goes on only when all is awake",
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_still,
    queries=queries,
)
