"""The headers of what the stacks' addresses answer, side by side. Pure.

Two answers are compared if their statuses are the same: what came instead of an answer differs in more than its headers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.judging.causes import Why
from harness.judging.facets import NOT_THERE
from harness.judging.sides import Facet
from harness.records.recording import Call, ScenarioTrace
from harness.records.wire import REQUEST_ID

HEADERS = "outputs.headers"
_OF_A_MESSAGE = {"date", "content-length", REQUEST_ID}
"""Headers whose value is another one in each message (RFC 9110, Date and Content-Length): only their presence is compared."""


def compare(baseline: ScenarioTrace, candidate: ScenarioTrace, pairs: Iterable[tuple[Call, Call]]) -> dict[str, Facet]:
    """Every header of every pair of answers; nothing if there is none."""
    facet = Facet()
    ours, theirs = _answers(baseline), _answers(candidate)
    for left, right in pairs:
        mine, other = ours.get(left.id), theirs.get(right.id)
        if mine is None or other is None or mine["status"] != other["status"]:
            continue
        a, b = _headers(mine), _headers(other)
        for name in sorted({*a, *b}):
            sides = a.get(name, NOT_THERE), b.get(name, NOT_THERE)
            facet.compare(name, sides, (f"{Why.HEADER}:{name}",), noisy=False, call=left)
    return {HEADERS: facet} if facet.facts else {}


def _answers(trace: ScenarioTrace) -> dict[int, dict[str, Any]]:
    return {call.id: call.result for call in trace.own_calls if call.method == "http" and call.result is not None}


def _headers(result: dict[str, Any]) -> dict[str, str]:
    """Name → value. The order of a list does not count."""
    named = ((name.lower(), value) for name, value in result["headers"].items())
    return {
        name: "any" if name in _OF_A_MESSAGE else ", ".join(sorted(part.strip().lower() for part in value.split(",")))
        for name, value in named
    }
