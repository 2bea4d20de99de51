"""Fully asynchronous training: rollouts begin no earlier than the staleness manager's capacity rule allows.

The rule bounds the number of all rollouts begun so far, finished or in flight: at most (max_staleness_steps + the current global
step) × mini_batch_size. By the documentation, a single long rollout may be older than `max_staleness_steps` when it is used; the
check shows its age and does not judge it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from harness.checks.base import Check, Evidence, Finding, concluded, passed, request, untestable
from harness.contract.messages import RolloutRequest, StalenessRequest, TrainedRequest
from harness.records.recording import Call

NO_MANAGER = "no staleness manager was started"
NEVER_FULL = "training was never behind: no rollout had to wait for it"
UNUSED = "no training step used a rollout"
TOO_EARLY = "a rollout was begun that training had no room for"
TOO_MANY = "more rollouts were under way than there are workers"
TWICE = "a rollout was used twice, or used and never begun"
LOST = "a rollout that came back was never used"


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one staleness manager, in order of time."""

    limits: StalenessRequest
    slots: list[Call]
    accepted: list[Call]
    steps: list[Call]

    def step_at(self, at_ns: int) -> int:
        """The global step at that time. A trained() call counts from its start, since it may take effect any time later."""
        told = [request(step, TrainedRequest).global_step for step in self.steps if step.started_ns <= at_ns]
        return max([1, *told])

    def begun(self, at_ns: int) -> int:
        return sum(slot.ended_ns <= at_ns for slot in self.slots)

    def ahead(self, at_ns: int) -> int:
        """The most rollouts that may have begun at that time."""
        return (self.limits.max_staleness_steps + self.step_at(at_ns)) * self.limits.mini_batch_size

    def running(self, at_ns: int) -> int:
        return self.begun(at_ns) - sum(call.started_ns <= at_ns for call in self.accepted)


def rollouts(evidence: Evidence) -> Rollouts | None:
    """None if the scenario started no manager."""
    started = evidence.succeeded("start_staleness_manager")
    if not started:
        return None
    return Rollouts(
        limits=request(started[-1], StalenessRequest),
        slots=sorted((c for c in evidence.calls("acquire_slot") if c.error is None), key=lambda c: c.ended_ns),
        accepted=evidence.succeeded("accept_rollout"),
        steps=evidence.succeeded("trained"),
    )


def _ages(found: Rollouts) -> dict[str, int]:
    """rollout → training steps between its start and its use."""
    begun = {request(slot, RolloutRequest).rollout: found.step_at(slot.ended_ns) for slot in found.slots}
    return {
        name: request(step, TrainedRequest).global_step - 1 - begun[name]
        for step in found.steps
        for name in request(step, TrainedRequest).consumed
        if name in begun
    }


def _judge(evidence: Evidence) -> Finding:
    found = rollouts(evidence)
    if found is None:
        return untestable(NO_MANAGER)
    facts, wrong = 0, []
    for slot in found.slots:
        at = slot.ended_ns
        shown: dict[str, Any] = {"call": slot.id, "rollout": slot.request["rollout"], "step": found.step_at(at)}
        facts += 2
        if found.begun(at) > found.ahead(at):
            wrong.append((TOO_EARLY, {**shown, "begun": found.begun(at), "at most": found.ahead(at)}))
        if found.running(at) > found.limits.max_concurrent:
            wrong.append((TOO_MANY, {**shown, "running": found.running(at), "at most": found.limits.max_concurrent}))
    used = Counter(name for step in found.steps for name in step.request["consumed"])
    begun, back = ({c.request["rollout"] for c in calls} for calls in (found.slots, found.accepted))
    wrong += [(TWICE, {"rollout": name, "times": n}) for name, n in used.items() if n > 1 or name not in begun]
    wrong += [(LOST, {"rollout": name}) for name in sorted(back - set(used))]
    facts += len(used)
    if wrong:
        return concluded(facts, wrong)
    waited = sum(_waited(found, slot) for slot in found.slots)
    if not waited:
        return untestable(NEVER_FULL)
    ages = _ages(found).values()
    if not ages:
        return untestable(UNUSED)
    over = sum(age > found.limits.max_staleness_steps for age in ages)
    mean = sum(ages) / len(ages)
    return passed(facts, waited=waited, oldest_steps=max(ages), older_than_meant=over, mean_steps=mean)


def _waited(found: Rollouts, slot: Call) -> bool:
    """True if the slot had to wait for a training step: there was no room when it was requested."""
    at = slot.started_ns
    return found.begun(at) >= found.ahead(at) and slot.ended_ns > at


CAPACITY = Check(
    name="staleness.capacity",
    fault="rollouts begin that will be older than max_staleness_steps when they are used, or rollouts are lost or used twice",
    source='SkyRL documentation, Fully Async Training, "Async staleness manager"; SkyRL #1014, task 5: staleness',
    judge=_judge,
)
