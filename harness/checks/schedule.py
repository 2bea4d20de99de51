"""The schedule of one-step off-policy training: what overlaps, what must not, and which version made which rollout.

Steps count from 0. Generation N+1 runs while step N is trained; then the generator acknowledges ("generation_ack" N), the
version of step N is synced, and the trainer reports that ("sync_finished" N). So the version of step N-2 makes rollout N, and
version 0 makes the first two (SkyRL, examples/train/async: a queue of one batch between generator and trainer).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from harness.checks import matching
from harness.checks.answers import Answer, answers, trouble, unexpected
from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded, failed, kept, passed, untestable
from harness.checks.logprobs import Distances, farthest
from harness.checks.pausing import pauses
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.reference import Query, ScoreRequest

ROLLOUT, TRAIN, SYNC = "rollout", "train", "sync"
"""A label is one of these and the number of the step: "rollout 3"."""
LEAST_STEPS = 10
"""An overlap of training and generation is long enough to judge if an engine would have made more than this many steps in it."""
NO_OVERLAP = "no generation was in flight while a step was trained"
UNDER_WAY = 1
"""Steps that an idle engine may make during a training step: the one in flight at its start."""
WEIGHT_OPS = ("start_weight_update", "update_weights", "finish_weight_update", "update_weights_chunk")
SOURCE = "SkyRL #1014, task 4; SkyRL documentation, One-Step Off-Policy Pipeline"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one step. A rollout may be several calls."""

    rollouts: list[Call]
    train: Call | None
    sync: Call | None

    @property
    def generated_ns(self) -> tuple[int, int]:
        """From the first call of the rollout to the last one's return."""
        return min(c.started_ns for c in self.rollouts), max(c.ended_ns for c in self.rollouts)


@kept
def steps(evidence: Evidence) -> dict[int, Step]:
    """The scenario's steps that have a rollout, by number."""
    found: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for call in evidence.calls():
        kind, _, number = (call.label or "").rpartition(" ")
        if kind in (ROLLOUT, TRAIN, SYNC) and number.isdigit():
            found[kind, int(number)].append(call)
    one: Any = lambda kind, number: next(iter(found.get((kind, number), ())), None)  # noqa: E731
    return {
        number: Step(rollouts=calls, train=one(TRAIN, number), sync=one(SYNC, number))
        for (kind, number), calls in sorted(found.items())
        if kind == ROLLOUT
    }


def _executions(evidence: Evidence, calls: list[Call]) -> list[Execution]:
    wanted = {call.id for call in calls}
    found = matching.assignment(evidence)
    return [e for row in found.rows if row.call.id in wanted for e in found.where(row)]


def _unfit(evidence: Evidence) -> Finding | None:
    """Why no schedule can be judged; None if it can."""
    found = steps(evidence)
    if len(found) < 3 or not any(step.train for step in found.values()):
        return untestable("fewer than three steps were trained and rolled out")
    calls = [call for step in found.values() for call in (*step.rollouts, step.train, step.sync) if call is not None]
    broken = [unexpected(call) for call in calls if call.error is not None]
    wrong = [(one.reason, shown) for one in broken if one.status == "fail" for shown in one.evidence]
    return concluded(len(calls), wrong) if wrong else next(iter(broken), None)


def _judge_overlap(evidence: Evidence) -> Finding:
    """Red if engines made no tokens over all training steps together: a single one may be short, or its batch late."""
    if unfit := _unfit(evidence):
        return unfit
    made, windows = 0, []
    known = steps(evidence)
    for number, step in known.items():
        beside = known.get(number + 1)
        if step.train is None or beside is None:
            continue
        began, ended = beside.generated_ns
        began, ended = max(began, step.train.started_ns), min(ended, step.train.ended_ns)
        times = [sorted(set(ns)) for ns in _step_times(evidence, beside.rollouts).values()]
        usual = min(((ns[-1] - ns[0]) / (len(ns) - 1) for ns in times if len(ns) > 1), default=0.0)
        here = max((sum(began <= at <= ended for at in ns) for ns in times), default=0)
        made += here
        if 0 < LEAST_STEPS * usual < ended - began:
            shown = {"milliseconds of both": (ended - began) / 1e6, "of an engine step": usual / 1e6, "steps": here}
            windows.append({"step": number, **shown})
    if windows and sum(window["steps"] for window in windows) <= UNDER_WAY * len(windows):
        return failed(made + len(windows), "engines make no token while a step is trained, though asked to", windows)
    return passed(made, overlaps=len(windows)) if made else untestable(NO_OVERLAP)


def _step_times(evidence: Evidence, calls: list[Call]) -> dict[str, list[int]]:
    """Server → when it made tokens for these calls."""
    found: dict[str, list[int]] = defaultdict(list)
    for execution in _executions(evidence, calls):
        found[execution.server].extend(execution.step_ns)
    return found


OVERLAP = Check(
    name="schedule.overlap",
    fault="training and generation wait for each other: engines stand still while a step is trained",
    source=f'{SOURCE}: "Generation step N+1 overlaps training step N"',
    tap=Tap.READ,
    judge=_judge_overlap,
    queries=matching.queries,
)


def _judge_stages(evidence: Evidence) -> Finding:
    if unfit := _unfit(evidence):
        return unfit
    syncs = evidence.succeeded("sync_weights")
    held = [(p.from_ns, p.to_ns) for p in pauses(evidence)]
    facts, wrong = 0, []
    for sync in syncs:
        if any(began <= sync.started_ns and sync.ended_ns <= ended for began, ended in held):
            continue
        facts += 1
        for execution in evidence.executions:
            last = execution.ended_ns if execution.ended_ns is not None else max(execution.step_ns, default=None)
            if execution.started_ns < sync.ended_ns and (last is None or last > sync.started_ns):
                shown = {"sync": sync.label, "server": execution.server, "request": execution.request_id}
                wrong.append(("an engine works on a request while weights are synced", shown))
    for seen in evidence.controls():
        if seen.data["op"] in WEIGHT_OPS and seen.at_ns >= evidence.began_ns:
            facts += 1
            if not any(s.started_ns <= seen.at_ns and seen.data["ended_ns"] <= s.ended_ns for s in syncs):
                shown = {"server": seen.server, "op": seen.data["op"]}
                wrong.append(("weights move in an engine outside of any sync", shown))
    if wrong:
        return concluded(facts, wrong)
    return passed(facts, syncs=len(syncs)) if facts else untestable("no weights were synced between generations")


STAGES = Check(
    name="schedule.stages",
    fault="weights move while a generation is in flight, before sync_weights() is called or after it has returned",
    source=f'{SOURCE}: "Weight sync between pipeline stages"',
    tap=Tap.READ,
    judge=_judge_stages,
    queries=matching.queries,
)


def _judge_acknowledged(evidence: Evidence) -> Finding:
    if unfit := _unfit(evidence):
        return unfit
    known = steps(evidence)
    acks = {mark.step: mark.at_ns for mark in evidence.marks("generation_ack")}
    said = {mark.step: mark.at_ns for mark in evidence.marks("sync_finished")}
    facts = 0
    wrong: list[tuple[str, dict[str, Any]]] = []
    for number, step in known.items():
        if step.sync is None:
            continue
        after, later = known.get(number + 1), known.get(number + 2)
        order = [("the training step ended", None if step.train is None else step.train.ended_ns)]
        if after is not None:
            if number not in acks:
                wrong.append(("a generation was never acknowledged", {"step": number}))
                continue
            left = [
                e
                for e in evidence.executions
                if e.started_ns < acks[number] and (e.ended_ns is None or e.ended_ns > acks[number])
            ]
            if left:
                shown = {"step": number, "requests": len(left), "server": left[0].server}
                wrong.append(("a generation is acknowledged while an engine works on it", shown))
            facts += 1
            order = [("generation ended", after.generated_ns[1]), ("generation_ack", acks[number])]
        order += [("sync begins", step.sync.started_ns), ("sync ends", step.sync.ended_ns)]
        order += [("sync_finished", said.get(number))]
        order += [("the next generation begins", later.generated_ns[0])] if later is not None else []
        facts += len(order) - 1
        for (name, at), (next_name, next_at) in pairwise(order):
            if at is None or next_at is None or at > next_at:
                wrong.append(
                    ("the events of a step come in another order", {"step": number, name: at, next_name: next_at})
                )
    return concluded(facts, wrong)


ACKNOWLEDGED = Check(
    name="schedule.acknowledged",
    fault="generation_ack or sync_finished comes before the event that it reports",
    source=f'{SOURCE}: "generation_ack and sync_finished events work"',
    tap=Tap.READ,
    judge=_judge_acknowledged,
    queries=matching.queries,
)


def _allowed(evidence: Evidence) -> dict[int, int]:
    """Step → the version that must make its rollout."""
    known = steps(evidence)
    made = {n: step.train.result["version"] for n, step in known.items() if step.train and step.train.result}
    return {number: made.get(number - 2, 0) for number in known if number < 2 or number - 2 in made}


def _rows(evidence: Evidence) -> list[tuple[int, Answer]]:
    """Rows of rollouts with their step, each with the version that the schedule allows."""
    allowed = _allowed(evidence)
    return [
        (number, msgspec.structs.replace(row, version=allowed[number]))
        for number, step in steps(evidence).items()
        if number in allowed and trouble(step.rollouts, (), ("generate",)) is None
        for row in answers(evidence, step.rollouts)
    ]


def _before(evidence: Evidence, rows: list[tuple[int, Answer]]) -> list[tuple[Answer, ScoreRequest]]:
    """For the first row of each step under a trained version: the question for its tokens under the version before."""
    allowed, asked, found = _allowed(evidence), set(), []
    for number, row in rows:
        other = allowed.get(number - 1)
        if number not in asked and other is not None and other != row.version:
            asked.add(number)
            found.append((row, msgspec.structs.replace(row.score, version=other)))
    return found


def _queries(evidence: Evidence) -> Iterator[Query]:
    yield from matching.queries(evidence)
    rows = _rows(evidence)
    yield from (row.score for _, row in rows)
    yield from (question for _, question in _before(evidence, rows))


def _judge_versions(evidence: Evidence) -> Finding:
    troubles = (trouble(step.rollouts, (), ("generate",)) for step in steps(evidence).values())
    if unfit := _unfit(evidence) or next(filter(None, troubles), None):
        return unfit
    rows = _rows(evidence)
    trained = sum(row.version != 0 for _, row in rows)
    if not trained:
        return untestable("no rollout was made by a version that was trained")
    distances = Distances(evidence)
    wrong: list[tuple[str, dict[str, Any]]] = []
    for number, row in rows:
        synced = evidence.version_at(row.call.started_ns)
        if synced != row.version:
            shown = row.shown(step=number, allowed=row.version, synced=synced)
            wrong.append(("a generation began under another version than the schedule allows", shown))
            continue
        if row.logprobs is None or len(row.logprobs) != len(row.tokens) or None in row.logprobs:
            wrong.append(("a rollout lacks log-probabilities", row.shown(step=number)))
            continue
        score = evidence.reference.score(row.score)
        off, _ = farthest(row.logprobs, score.logprobs)
        if distances.beyond(score, off):
            shown = row.shown(step=number, version=row.version, largest_difference=off)
            wrong.append(("a rollout was made by another version than the schedule allows", shown))
    facts = sum(max(1, len(row.tokens)) for _, row in rows)
    sizes = [_between(evidence, row, other) for row, other in _before(evidence, rows)]
    faults = {"one version too old": max(sizes)} if sizes else {}
    numbers = {"max_abs_error": distances.worst, "bound": distances.bound}
    return concluded(facts, wrong, margin=distances.margin(faults), **numbers, trained_rows=trained)


def _between(evidence: Evidence, row: Answer, other: ScoreRequest) -> float:
    ours, theirs = (evidence.reference.score(question).logprobs for question in (row.score, other))
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


VERSIONS = Check(
    name="schedule.versions",
    fault="a rollout is older than one step, or newer than the schedule allows: the trainer weighs it wrongly",
    reads=Fact.ANSWERS | Fact.LOGPROBS | Fact.POLICY,
    source=f"{SOURCE}; SkyRL's AsyncRayPPOTrainer: one batch lies between generator and trainer",
    tap=Tap.READ,
    judge=_judge_versions,
    queries=_queries,
)
