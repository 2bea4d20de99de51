"""A small training run: the evaluation rises, and trainer and engines agree on the log-probabilities of its rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from harness.checks import curves
from harness.checks.answers import unexpected
from harness.checks.base import Check, Evidence, Finding, concluded, failed, passed, together, untestable
from harness.checks.gaps import gap_of, matching
from harness.checks.logprobs import TEMPERATURE, seeded
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.reference import WIDER, NoiseRequest, Query
from harness.records.verdict import Gap, Margin

RISE = 0.15
"""Mean reward of the evaluation, as a fraction: the least rise over the run. A policy that learns nothing does not move it."""

SOURCE = 'SkyRL #1014, task 1: "Evaluation accuracy is at least that of the legacy path"'


def _judge_gap(evidence: Evidence) -> Finding:
    calls = evidence.calls("train")
    if not calls:
        return untestable("nothing was trained")
    facts, k3, bound = 0, 0.0, WIDER * evidence.noise.weights
    steps: list[_Step] = []
    if broken := [unexpected(call) for call in calls if call.error is not None]:
        return together(broken)
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in calls:
        rollouts, result = call.request.get("rollout_logprobs"), call.result or {}
        if not rollouts:
            return untestable("a training step was not given the log-probabilities of its rollouts")
        if not matching(rollouts, result):
            reason = "trainer and engines do not give one log-probability for each token of a rollout"
            wrong.append((reason, {"call": call.id}))
            continue
        gap = gap_of(rollouts, result["response_logprobs"])
        facts, k3 = facts + gap.tokens, max(k3, gap.k3)
        own = bound
        if _doubted(evidence, gap):
            own = max(own, WIDER * evidence.reference.noise(_noise_of(evidence, call)).weights)
        numbers = [float(x) for x in chain.from_iterable(rollouts)]
        steps.append(_Step(gap.largest, own, _seeded(numbers, exact=evidence.exact)))
        if not gap.largest <= own:
            shown = {"call": call.id, "mean": gap.mean, "max": gap.largest, "k3": gap.k3}
            wrong.append(("trainer and engines give the tokens of a rollout other probabilities", shown))
    # A step that its own rounding explains says nothing of what the check can detect.
    told = [step for step in steps if not bound < step.gap <= step.bound]
    counted = told or steps
    worst = max((step.gap for step in counted), default=0.0)
    if wrong:
        return concluded(facts + len(wrong), wrong, max_gap=worst, bound=bound, k3=k3)
    bound = bound if told else max(step.bound for step in counted)
    faults = {name: max(step.faults[name] for step in counted) for name in counted[0].faults}
    margin = Margin(unit="nats", measured=worst, bound=bound, faults=faults)
    return passed(facts, margin=margin, max_gap=worst, bound=bound, k3=k3)


class _Step(NamedTuple):
    """One training step: its largest gap, the bound of its own policy, and what seeded faults would measure."""

    gap: float
    bound: float
    faults: dict[str, float]


def _doubted(evidence: Evidence, gap: Gap) -> bool:
    """True if the gap is larger than the noise explains, in 16 bits: the policy of this step may be more peaked than the checkpoint,
    on which the noise was measured, and then rounding moves it further."""
    return not evidence.exact and gap.largest > WIDER * evidence.noise.weights


def _noise_of(evidence: Evidence, call: Call) -> NoiseRequest:
    """Asks how far rounding moves the policy of a training step, on the step's own rollouts."""
    both = zip(call.request["prompt_token_ids"], call.request["response_ids"], strict=True)
    rows = [[*prompt, *response] for prompt, response in both]
    return msgspec.structs.replace(evidence.noise_question, version=call.request["base_version"], rows=rows)


def _queries(evidence: Evidence) -> Iterator[Query]:
    for call in evidence.succeeded("train"):
        rollouts, result = call.request.get("rollout_logprobs") or (), call.result or {}
        if matching(rollouts, result) and _doubted(evidence, gap_of(rollouts, result["response_logprobs"])):
            yield _noise_of(evidence, call)


def _seeded(numbers: list[float], *, exact: bool) -> dict[str, float]:
    """Fault that can be seeded in the numbers alone → the most that it moves one of them."""
    tempered = {f"of temperature {TEMPERATURE:g}, not renormalized": max(map(abs, numbers)) * (1 - 1 / TEMPERATURE)}
    return seeded(numbers, exact=exact) | (tempered if exact else {})


GAP = Check(
    name="training.gap",
    fault="rollouts come from other weights than the trainer's, or their log-probabilities are at another temperature",
    reads=Fact.ANSWERS | Fact.LOGPROBS | Fact.POLICY,
    source="SkyRL documentation, rollout_train_logprobs_abs_diff: rollout against trainer log-probabilities",
    judge=_judge_gap,
    queries=_queries,
)


def _judge_rise(evidence: Evidence) -> Finding:
    curve = curves.rewards(evidence.trace)
    trained = evidence.succeeded("train")
    if len(curve) < 2 or not trained:
        return untestable("nothing was trained between two evaluations")
    rise = curve[-1] - curve[0]
    shown = [{"evaluation reward by step": [round(x, 4) for x in curve]}]
    if rise < RISE:
        reason = "the evaluation reward does not rise over the training steps"
        return failed(len(curve), reason, shown, rise=rise, least=RISE)
    return passed(len(curve), rise=rise, least=RISE, first=curve[0], last=curve[-1])


RISES = Check(
    name="training.rises",
    fault="training has no effect on the engines' answers, or the wrong one",
    next_step="read the curve in the evidence: if it is flat, syncs do not reach the answers; if it falls, rewards "
    "belong to other rows",
    reads=Fact.ANSWERS | Fact.POLICY | Fact.CHANCE,
    source=SOURCE,
    judge=_judge_rise,
)
