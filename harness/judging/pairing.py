"""Pairs the calls of two recordings: same method, label and request, in order. Pure.

Two sides are never zipped to the shorter one: calls without a partner are returned as such.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import final

import msgspec

from harness.checks.request_fields import AFTER_AN_ERROR
from harness.contract.messages import CHOICES, FIRST_TRAINED, METHODS
from harness.records.recording import Call, ScenarioTrace
from harness.records.wire import as_openai

_encoder = msgspec.json.Encoder(order="deterministic")


@final
class Pairing(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of two traces, paired in the order of the left one, and those without a partner."""

    pairs: list[tuple[Call, Call]]
    left_only: list[Call]
    right_only: list[Call]

    def partner_of(self) -> dict[int, Call]:
        """Id of the left call → its right call."""
        return {left.id: right for left, right in self.pairs}


def compared(trace: ScenarioTrace) -> list[Call]:
    """The scenario's own calls that are compared, in order of their start. What one stack alone is asked has no partner."""
    asked = (call for call in trace.own_calls if not METHODS[call.method].polled and call.label != AFTER_AN_ERROR)
    own = map(as_openai, asked)
    return sorted(own, key=lambda call: (call.started_ns, call.id))


def pair(left: ScenarioTrace, right: ScenarioTrace) -> Pairing:
    """Pair the compared calls of two traces of one scenario."""
    waiting: dict[tuple[str, str | None, bytes], list[Call]] = defaultdict(list)
    for call in compared(right):
        waiting[identity(call, right)].append(call)
    for calls in waiting.values():
        calls.reverse()
    pairs: list[tuple[Call, Call]] = []
    left_only: list[Call] = []
    for call in compared(left):
        partners = waiting.get(identity(call, left))
        if partners:
            pairs.append((call, partners.pop()))
        else:
            left_only.append(call)
    return Pairing(pairs=pairs, left_only=left_only, right_only=_flat(waiting.values()))


def _flat(groups: Iterable[list[Call]]) -> list[Call]:
    return [call for group in groups for call in reversed(group)]


def identity(call: Call, trace: ScenarioTrace) -> tuple[str, str | None, bytes]:
    """Method, label and request of a call. Model names are left out: two machines keep the same model (the header has its hash)
    in different folders. So are training requests and trained versions, which follow from a side's own outputs."""
    if call.method == "train" or (call.method == "sync_weights" and call.request["version"] >= FIRST_TRAINED):
        return call.method, call.label, b'"trained"'
    if call.method == "trained":  # the rollouts that a step consumes depend on which ended first
        return call.method, call.label, _encoder.encode(call.request["global_step"])
    request = _encoder.encode(call.request)
    if call.method in CHOICES and (name := trace.header.model.get("name")):
        request = re.sub(rb'"(?:[^"]*/)?' + re.escape(name.encode()) + b'"', b'"<model>"', request)
    return call.method, call.label, request
