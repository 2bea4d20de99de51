"""Runs of the stack's own fully asynchronous trainer: it pauses the engines for weights, uses each rollout once, and ends."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec

from harness.checks.base import Check, Evidence, Finding, Tap, concluded, request, untestable
from harness.contract.faults import Fact
from harness.contract.messages import TrainerRunRequest, TrainerWants
from harness.records.recording import Call

FAILS = "fails"
"""Label of the calls of a run in which a rollout fails."""
SYNC_FAILS = "a sync fails"
"""Label of the calls of a run in which the second sync fails."""
WAITS = "the trainer neither ends nor asks for anything: it waits for a rollout that nobody makes"
UNTOLD = "a rollout or a sync failed, and the trainer's run ended as if nothing had happened"
LEFT = "a sync failed, and the trainer left engines paused at its end"
ENDED = "the trainer's run ended early: {}"
ORDER = "the trainer does not ask for weights before its first step and after each"
SIZE = "the trainer did not train on a whole mini-batch in each step of the epoch"
TWICE = "the trainer used a rollout twice"
ELSEWHERE = "the trainer does not go on at the step after its last checkpoint, up to the last step of its epochs"
AGAIN = "in an epoch that was resumed the trainer did not train on each prompt once"
EVALUATED = "the trainer did not log the evaluation before its first step, and the one after each step, under that step"
RUNNING = "an engine worked on rollouts, and was not paused, when the trainer asked for weights"
IDLE = "no rollout was under way when weights were asked for"

Problem = tuple[str, dict[str, Any]]


def _runs(evidence: Evidence) -> list[tuple[Call, list[Call]]]:
    """Each run with its calls of `trainer_wants`, in order."""
    starts = evidence.succeeded("start_trainer_run")
    wants = evidence.succeeded("trainer_wants")
    until: list[float] = [*(start.started_ns for start in starts[1:]), math.inf]
    return [
        (start, [w for w in wants if start.started_ns < w.started_ns < end])
        for start, end in zip(starts, until, strict=False)
    ]


def _told(wants: list[Call]) -> list[TrainerWants]:
    return [msgspec.convert(call.result, TrainerWants) for call in wants]


def broken_off(evidence: Evidence) -> list[int]:
    """When the runs began that an error or the scenario ended: how many rollouts such a run asks for is a matter of time."""

    def whole(last: TrainerWants) -> bool:
        return last.what == "nothing" and last.ended is None

    return [start.started_ns for start, wants in _runs(evidence) if not any(map(whole, _told(wants[-1:])))]


def _schedule(asked: TrainerRunRequest, told: list[TrainerWants]) -> list[Problem]:
    """What is wrong with the order of the trainer's steps and with the rollouts that they use."""
    kinds = [one.what for one in told if one.what in ("weights", "training")]
    steps = [one for one in told if one.what == "training"]
    wrong: list[Problem] = []
    if kinds != ["weights", *["training", "weights"] * len(steps)]:
        wrong.append((ORDER, {"asked for": kinds}))
    sizes = [len(one.groups) for one in steps]
    if sizes != [asked.mini_batch_size] * (len(asked.prompts) // asked.mini_batch_size):
        wrong.append((SIZE, {"groups": sizes, "prompts": len(asked.prompts), "mini-batch": asked.mini_batch_size}))
    uids = [group.uid for one in steps for group in one.groups]
    if len(set(uids)) < len(uids):
        wrong.append((TWICE, {"rollouts": uids}))
    return wrong


def _epochs(asked: TrainerRunRequest, steps: list[TrainerWants]) -> list[list[str]]:
    """The prompts of the steps, epoch by epoch, in the order of their numbers."""
    size = len(asked.prompts) // asked.mini_batch_size
    return [
        sorted((group.uid for step in steps[at : at + size] for group in step.groups), key=int)
        for at in range(0, len(steps), size)
    ]


def _ended_early(told: list[TrainerWants]) -> str | None:
    """Why a run that ought to end well did not."""
    last = told[-1] if told else TrainerWants(what="unknown")
    return WAITS if last.what == "unknown" else last.ended and ENDED.format(last.ended)


def _judge_resumes(evidence: Evidence) -> Finding:
    """Of a run that was broken off when it asked for a step, all steps before that one have a checkpoint."""
    facts = 0
    wrong: list[Problem] = []
    done: list[TrainerWants] = []
    for start, wants in _runs(evidence):
        asked, told = request(start, TrainerRunRequest), _told(wants)
        steps = [one for one in told if one.what == "training"]
        if not asked.resumes:
            done = steps if told and told[-1].what == "nothing" else steps[:-1]
            continue
        facts += len(told)
        due = list(range(len(done) + 1, asked.epochs * len(asked.prompts) // asked.mini_batch_size + 1))
        if early := _ended_early(told):
            wrong.append((early, {"call": start.id, "asked for": [(one.what, one.step) for one in told]}))
        elif (numbers := [one.step for one in steps]) != due:
            wrong.append((ELSEWHERE, {"call": start.id, "steps": numbers, "steps that were left": due}))
        elif (epochs := _epochs(asked, done + steps)) != [[str(n) for n in range(len(asked.prompts))]] * asked.epochs:
            wrong.append((AGAIN, {"call": start.id, "prompts of each epoch": epochs}))
    if not done or not facts:
        return untestable("no run was resumed that had finished a step")
    return concluded(facts, wrong, steps_before=len(done))


def _judge_evaluations(evidence: Evidence) -> Finding:
    runs = [one for one in _runs(evidence) if request(one[0], TrainerRunRequest).evaluates]
    wrong: list[Problem] = []
    for start, wants in runs:
        told = _told(wants)
        due = [0, *(one.step for one in told if one.what == "training")]
        if early := _ended_early(told):
            wrong.append((early, {"call": start.id}))
        elif told[-1].evaluated != due:
            wrong.append((EVALUATED, {"call": start.id, "logged": told[-1].evaluated, "steps": due}))
    return concluded(len(runs), wrong) if runs else untestable("no run evaluated its policy")


def _paused_between(evidence: Evidence, begin_ns: float, end_ns: float) -> set[str]:
    """The servers that were paused last, and not resumed, in this time."""
    changes = [*evidence.controls("pause_generation"), *evidence.controls("resume_generation")]
    changes.sort(key=lambda seen: seen.at_ns)
    last = {seen.server: seen.data["op"] for seen in changes if begin_ns < seen.at_ns < end_ns}
    return {server for server, op in last.items() if op == "pause_generation"}


def _paused(evidence: Evidence, asked: list[Call]) -> tuple[list[Problem], int]:
    """What is wrong with the engines' pauses when the trainer asked for weights, and how often that met an unfinished rollout.

    How a stack pauses is its own: an engine either freezes its requests or gives them back.
    """
    wrong: list[Problem] = []
    met = 0
    for before, call in pairwise(asked):  # nothing runs before the first weights
        at = call.ended_ns
        paused = _paused_between(evidence, before.ended_ns, at)
        held = {e.server for e in evidence.executions if e.started_ns < at and e.step_ns[-1:] > (at,)}
        given_back = any(
            e.step_ns[-1:] <= (at,) and e.finish_reason in (None, "abort")
            for e in evidence.executions
            if before.ended_ns < e.started_ns < at
        )
        met += bool(held) or given_back
        if running := sorted(held - paused):
            wrong.append((RUNNING, {"call": call.id, "servers": running}))
    return wrong, met


def _judge(evidence: Evidence) -> Finding:
    runs = _runs(evidence)
    if not runs:
        return untestable("no run of the trainer was started")
    facts = met = 0
    wrong: list[Problem] = []
    for start, wants in runs:
        told = _told(wants)
        facts += len(told)
        fails = any(call.label in (FAILS, SYNC_FAILS) for call in wants)
        last = told[-1] if told else TrainerWants(what="unknown")
        if last.what == "unknown":
            wrong.append((WAITS, {"call": start.id, "asked for": [one.what for one in told]}))
        elif fails and last.ended is None:
            wrong.append((UNTOLD, {"call": start.id}))
        elif wants[-1].label == SYNC_FAILS and (left := _paused_between(evidence, -math.inf, wants[-1].ended_ns)):
            wrong.append((LEFT, {"call": start.id, "servers": sorted(left), "ended": last.ended}))
        elif not fails and last.ended is not None:
            wrong.append((ENDED.format(last.ended), {"call": start.id}))
        elif not fails:
            wrong += _schedule(request(start, TrainerRunRequest), told)
            asked = [call for call, one in zip(wants, told, strict=True) if one.what == "weights"]
            pauses, meeting = _paused(evidence, asked)
            wrong += pauses
            met += meeting
            if not meeting and not wrong:
                return untestable(IDLE)
    return concluded(facts, wrong, syncs_that_met_rollouts=met)


TRAINER_RUN = Check(
    name="trainer_run",
    fault="the trainer hangs when a rollout fails, leaves engines paused when a sync does, trains twice on one, or changes weights "
    "under running engines",
    next_step="follow the trainer's loop from the last thing that it asked for: what does it wait for, and who would tell it",
    source='SkyRL documentation, Fully Async Training; SkyRL #1014, task 5; SkyRL #1691: "Prevent process hang when vLLM engine dies '
    'during async generation"',
    reads=Fact.ANSWERS | Fact.PAUSES | Fact.ERRORS,
    tap=Tap.READ,
    judge=_judge,
)

TRAINER_RESUMES = Check(
    name="trainer_resumes",
    fault="a resumed run begins anew, repeats or leaves out steps, trains again on prompts of its epoch, or waits for ever",
    next_step="compare the step and the consumed prompts of the checkpoint with those with which the resumed run begins",
    source='SkyRL documentation, Checkpointing and Resumption; SkyRL, FullyAsyncRayPPOTrainer: consumed data UIDs are kept "to '
    'avoid training on the same data upon resuming"',
    reads=Fact.ANSWERS | Fact.ERRORS,
    judge=_judge_resumes,
)
TRAINER_EVALUATIONS = Check(
    name="trainer_evaluations",
    fault="evaluations are logged under another step than that of their policy, or not at all",
    next_step="see where the trainer puts an evaluation's metrics, and when it hands them to its tracker",
    source='SkyRL, RayPPOTrainer.eval: "The eval metrics are recorded after having finished training `self.global_step` steps. '
    'Metrics recorded in global_step 0 corresponds to evaluations before training"',
    reads=Fact.ANSWERS | Fact.ERRORS,
    judge=_judge_evaluations,
)
