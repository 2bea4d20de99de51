"""What a server refuses, a caller is told.

Belongs to every scenario. A server that answers a request with a client error says that the request itself is wrong (RFC 9110,
15.5): a stack that goes on as if nothing had happened asks for something that its servers do not have, and nobody learns of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from harness.checks.base import Check, Evidence, Finding, concluded
from harness.checks.matching import is_error
from harness.contract.faults import Fact
from harness.contract.messages import METHODS, Plane
from harness.records.recording import Call, Observation

LATER = frozenset({408, 425, 429})
"""Client errors that ask the client to come again: request timeout, too early, too many requests."""


def _refusals(evidence: Evidence) -> list[Observation]:
    """The scenario's answers of servers that say that a request is wrong."""
    seen = (one for one in evidence.trace.observations if one.kind == "refusal" and one.at_ns >= evidence.began_ns)
    return [one for one in seen if 400 <= one.data["status"] < 500 and one.data["status"] not in LATER]


def _tells(call: Call) -> bool:
    """True if the call's caller has learnt of a refusal, or asked for it: an instrument tries routes on purpose."""
    if METHODS[call.method].plane is Plane.OUT_OF_BAND or call.error is not None:
        return True
    answer = call.result or {}
    body = answer.get("body")
    return int(answer.get("status") or 0) >= 400 or (isinstance(body, dict) and is_error(body))


def _judge(evidence: Evidence) -> Finding | None:
    refused = _refusals(evidence)
    if not refused:
        return None
    return concluded(len(refused), _untold(evidence, refused))


def _untold(evidence: Evidence, refused: list[Observation]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Refusals of which no caller learnt. A call of several rows, and a control call to several servers, ends with the first that
    is refused: what is refused in the same way after such a call is another part of it, as long as it has one left or no other call
    is at work."""
    calls = evidence.trace.own_calls

    def parts(call: Call) -> int:
        control = METHODS[call.method].plane is Plane.CONTROL
        return len(evidence.header.servers) if control else len(call.request.get("prompt_token_ids") or ())

    left: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
    """What was refused → calls that told of it → their parts that may still be refused."""
    for one in sorted(refused, key=lambda seen: seen.at_ns):
        alike = left[tuple(sorted(one.data.items()))]
        at = [call for call in calls if call.started_ns <= one.at_ns <= call.ended_ns]
        telling = [call for call in at if _tells(call)]
        alike |= {call.id: parts(call) for call in telling if call.id not in alike}
        whose = next((number for number in alike if alike[number]), None)
        if whose is not None:
            alike[whose] -= 1
        if telling or whose is not None or (alike and not at):
            continue
        asked = f"{one.data['method']} {one.data['path']}"
        shown: dict[str, Any] = {"server": one.server, "asked": asked, "status": one.data["status"]}
        shown |= {"call": at[0].id} if len(at) == 1 else {"during": sorted({call.method for call in at})}
        yield f"a server refused {asked} with {one.data['status']}, and no caller was told", shown


REFUSALS = Check(
    name="refusals",
    fault="a server refuses what the stack asks of it, and the stack goes on as if it had been done",
    next_step="find who sends this request in the stack's code: it asks for something that this server does not offer",
    reads=Fact.ERRORS,
    source="RFC 9110, 15.5: a client error says that the request is wrong; asking again changes nothing",
    silent=True,
    judge=_judge,
)
