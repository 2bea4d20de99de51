"""How a stack begins if it cannot, and how it ends: a named error in time, and nothing is left."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.checks.base import EVERY, Check, Evidence, Finding, concluded, request, untestable
from harness.contract.errors import Blame
from harness.contract.faults import Fact
from harness.contract.messages import OtherStackRequest, OtherStackResult, Remnant
from harness.records.recording import Call


def _lives(evidence: Evidence) -> list[tuple[Call, OtherStackRequest, OtherStackResult]]:
    return [
        (call, request(call, OtherStackRequest), msgspec.convert(call.result, OtherStackResult))
        for call in evidence.succeeded("other_stack")
    ]


def _left(call: Call, when: str, left: list[Remnant], case: str = "") -> list[tuple[str, dict[str, Any]]]:
    """A reason and its evidence for each kind of what is left."""
    return [
        (f"{when}: {kind}{case}", {"call": call.id, "left": [one.what for one in left if one.kind == kind]})
        for kind in sorted({one.kind for one in left})
    ]


def _judge_starts(evidence: Evidence) -> Finding:
    wrong: list[tuple[str, dict[str, Any]]] = []
    asked = [(call, about, found) for call, about, found in _lives(evidence) if about.wrong is not None]
    for call, about, found in asked:
        case = f"({about.wrong})"
        shown = {"call": call.id, "said": found.error, "took_s": round(found.took_s, 1)}
        if not found.in_time:
            wrong.append((f"a start that cannot succeed does not end in time {case}", shown))
        elif found.error is None:
            wrong.append((f"a stack starts that cannot {case}", shown))
        elif not all(name in found.error for name in found.names):
            wrong.append((f"the error of a start does not name its cause {case}", shown | {"cause": found.names}))
        wrong += _left(call, "a start that failed leaves", found.left, f" {case}")
        wrong += _left(call, "after its process, it leaves", found.outlived, f" {case}")
    return concluded(len(asked), wrong)


FAILED_START = Check(
    name="failed_start",
    fault="a stack that cannot start waits without an end, fails without the path or option that is wrong, or leaves processes",
    next_step="look at where the engine's own error is lost on its way to the caller, and at who ends what had begun already",
    reads=Fact.ERRORS,
    errors_of=EVERY,
    source='SkyRL, VLLMServerActor.start: "Blocks until server is healthy"; VLLMRouter.start: "If the router process crashes before '
    'becoming healthy"',
    judge=_judge_starts,
)


def _judge_ends(evidence: Evidence) -> Finding:
    ended = [(call, about, found) for call, about, found in _lives(evidence) if about.wrong is None]
    for _, _, found in ended:
        if found.error is not None or not found.in_time:
            return untestable(f"no other stack comes up that could end: {found.error or 'not in time'}", Blame.STACK)
        if not found.ran:
            return untestable("the other stack has nothing of its own that could outlive it")
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call, about, found in ended:
        if found.end_error is not None:
            wrong.append((f"the end of a stack fails: {found.end_error}", {"call": call.id}))
        how = "was killed" if about.then == "killed" else "ended"
        wrong += _left(call, "a stack that was ended leaves", found.left)
        wrong += _left(call, f"a stack whose process {how} leaves", found.outlived)
    return concluded(len(ended), wrong)


STACK_ENDS = Check(
    name="stack_ends",
    fault="engines, servers, a router or their addresses outlive the stack, or the process that owned it",
    next_step="look at who ends each process, and at what happens if that one is killed first",
    reads=Fact.ERRORS,
    errors_of=EVERY,
    source='SkyRL, ServerActorPool.shutdown: "Shutdown all actors and kill them to release GPU memory"; VLLMRouter.shutdown: '
    '"Terminate the router process"',
    judge=_judge_ends,
)
