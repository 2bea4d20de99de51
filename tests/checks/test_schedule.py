"""One-step off-policy training: a correct schedule, and each kind of wrong one."""

from __future__ import annotations

import math

import msgspec
import pytest

from harness.checks.logprobs import farthest
from harness.checks.schedule import ACKNOWLEDGED, OVERLAP, STAGES, VERSIONS
from harness.contract.messages import FIRST_TRAINED
from harness.records.recording import Mark
from harness.records.reference import Noise, NoiseRequest, ScoreRequest
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene

PROMPTS = [[10, 11], [20, 21]]
LENGTH = 12
TRAINING = 20
"""Duration of a training step, in engine steps."""
STEPS = 5


def version_of(step: int) -> int:
    """The version that training step `step` makes."""
    return FIRST_TRAINED + step


class Pipeline(Scene):
    """Rollout N+1 overlaps training N; then a sync. `late` engine steps pass before a rollout's first token. `by` chooses the
    version that makes a rollout."""

    def __init__(self, *, late: int = 0, by=None, synced=version_of) -> None:
        super().__init__()
        self.marks: list[Mark] = []
        made = by or (lambda step: 0 if step < 2 else version_of(step - 2))
        self.roll_out(0, made(0))
        self.pass_time(LENGTH + 3)
        for step in range(STEPS):
            began = self.pass_time()
            if step + 1 < STEPS:
                self.roll_out(step + 1, made(step + 1), late)
            self.now = began + TRAINING * STEP
            result = {"version": version_of(step), "response_logprobs": []}
            self.add("train", {"base_version": 0}, result, label=f"train {step}", began=began, ended=self.now)
            self.pass_time(LENGTH)
            if step + 1 < STEPS:
                self.mark("generation_ack", step)
            began = self.pass_time()
            self.add(
                "sync_weights",
                {"version": synced(step), "chunks": 1},
                {},
                label=f"sync {step}",
                began=began,
                ended=self.pass_time(),
            )
            self.mark("sync_finished", step)

    def add(self, method, request, result, *, label, began, ended) -> None:
        self.calls.append(traces.call(method, request, result, label=label, started_ns=began, ended_ns=ended))

    def mark(self, name: str, step: int) -> None:
        self.marks.append(Mark(name=name, step=step, at_ns=self.pass_time()))

    def roll_out(self, step: int, version: int, late: int = 0) -> None:
        """A call that begins now; the clock does not move."""
        began = self.now + 1
        prompts = [[*prompt, 30 + step] for prompt in PROMPTS]
        answers = [self.reference.drawn(prompt, LENGTH, seed=step) for prompt in prompts]
        params = {"temperature": 1.0, "max_tokens": LENGTH, "logprobs": 0, "ignore_eos": True}
        for prompt, answer, server in zip(prompts, answers, SERVERS, strict=True):
            self.seen += traces.executed(
                prompt, answer, server=server, params=params, from_ns=began + 1 + late * STEP, step_ns=STEP
            )
        self.calls.append(
            traces.generate(
                prompts,
                answers,
                logprobs=[
                    self.reference.logprobs(p, a, version=version) for p, a in zip(prompts, answers, strict=True)
                ],
                params=params,
                label=f"rollout {step}",
                started_ns=began,
                ended_ns=began + (LENGTH + 2 + late) * STEP,
            )
        )

    def judge(self, check, **about):
        return super().judge(check, marks=self.marks, **about)

    def move_mark(self, name: str, step: int, by: int) -> Pipeline:
        self.marks = [
            msgspec.structs.replace(m, at_ns=m.at_ns + by) if (m.name, m.step) == (name, step) else m
            for m in self.marks
        ]
        return self


@pytest.mark.parametrize("check", [OVERLAP, STAGES, ACKNOWLEDGED, VERSIONS], ids=lambda check: check.name)
def test_a_right_schedule_passes(check):
    finding = Pipeline().judge(check)
    assert (finding.status, finding.reason) == ("pass", "")
    assert finding.facts > 0


@pytest.mark.parametrize("check", [OVERLAP, STAGES, ACKNOWLEDGED, VERSIONS], ids=lambda check: check.name)
def test_without_steps_nothing_can_be_said(check):
    assert Scene().judge(check).status == "untestable"


def test_engines_that_wait_for_the_trainer_are_red():
    finding = Pipeline(late=TRAINING + 1).judge(OVERLAP)
    assert finding.status == "fail"
    assert finding.reason == "engines make no token while a step is trained, though asked to"


def test_a_first_token_that_is_late_is_no_standing_still():
    assert Pipeline(late=TRAINING // 2).judge(OVERLAP).status == "pass"


def test_a_sync_beside_a_generation_is_red():
    scene = Pipeline()
    sync = next(c for c in scene.calls if c.label == "sync 1")
    train = next(c for c in scene.calls if c.label == "train 1")
    scene.change(sync, started_ns=train.started_ns + 2 * STEP, ended_ns=train.started_ns + 3 * STEP)
    assert scene.judge(STAGES).reason == "an engine works on a request while weights are synced"


def test_weights_that_move_after_the_sync_has_returned_are_red():
    scene = Pipeline()
    sync = next(c for c in scene.calls if c.label == "sync 1")
    at = sync.ended_ns + 1
    scene.seen.append(
        traces.observation("control", SERVERS[0], at, op="update_weights", arguments={}, ended_ns=at, error=None)
    )
    assert scene.judge(STAGES).reason == "weights move in an engine outside of any sync"


def test_an_acknowledgement_before_the_generation_has_ended_is_red():
    finding = Pipeline().move_mark("generation_ack", 1, -30 * STEP).judge(ACKNOWLEDGED)
    assert finding.status == "fail"
    assert "a generation is acknowledged while an engine works on it" in finding.reason
    assert "the events of a step come in another order" in finding.reason


def test_an_acknowledgement_that_never_comes_is_red():
    scene = Pipeline()
    scene.marks = [mark for mark in scene.marks if (mark.name, mark.step) != ("generation_ack", 2)]
    assert scene.judge(ACKNOWLEDGED).reason == "a generation was never acknowledged"


def test_sync_finished_before_the_sync_has_ended_is_red():
    finding = Pipeline().move_mark("sync_finished", 1, -3 * STEP).judge(ACKNOWLEDGED)
    assert finding.reason == "the events of a step come in another order"


def test_rollouts_of_an_old_version_are_red():
    finding = Pipeline(by=lambda step: 0 if step < 3 else version_of(step - 3)).judge(VERSIONS)
    assert finding.reason == "a rollout was made by another version than the schedule allows"


@pytest.mark.parametrize(("rounding", "status"), [(0.3, "pass"), (0.1, "fail")])
def test_in_16_bits_the_rounding_of_a_rollout_in_doubt_counts(rounding, status):
    scene = Pipeline()
    scene.reference.set(NoiseRequest(), Noise(largest=0.2, rms=0.05))
    last = next(call for call in scene.calls if call.label == "rollout 4")
    (first, *others), tokens = last.result["response_logprobs"], last.result["response_ids"][0]
    scene.change(last, result={**last.result, "response_logprobs": [[first[0] - 0.5, *first[1:]], *others]})
    asked = ScoreRequest(version=version_of(2), prompt=last.request["prompt_token_ids"][0], tokens=tokens)
    moved = msgspec.structs.replace(scene.reference.score(asked), rounding=(rounding,) * len(tokens))
    scene.reference.set(asked, moved)
    found = scene.judge(VERSIONS, model={"name": "tiny", "sha256": "0" * 64, "dtype": "bfloat16"})
    assert found.status == status


def test_a_number_that_is_not_one_is_infinitely_far():
    assert farthest([-1.0, math.nan, -2.0], [-1.0, -1.5, -5.0]) == (math.inf, 1)
    assert farthest([-1.0, -2.0], [-1.5, -5.0]) == (3.0, 1)
    assert farthest([], []) == (0.0, 0)


def test_every_wrong_rollout_is_reported():
    scene = Pipeline(by=lambda step: 0 if step < 3 else version_of(step - 3))
    last = next(call for call in scene.calls if call.label == "rollout 4")
    scene.change(last, result={**last.result, "response_logprobs": None})
    found = scene.judge(VERSIONS)
    assert found.reasons == [
        "a rollout lacks log-probabilities",
        "a rollout was made by another version than the schedule allows",
    ]
    assert found.facts == STEPS * len(PROMPTS) * LENGTH


def test_every_call_that_failed_is_named():
    scene = Pipeline()
    for label in ("sync 1", "train 2"):
        call = next(call for call in scene.calls if call.label == label)
        scene.change(call, result=None, error=traces.error())
    found = scene.judge(STAGES)
    assert found.reasons == [
        "sync_weights() failed with ValueError: not like this",
        "train() failed with ValueError: not like this",
    ]


def test_a_sync_of_another_version_is_red():
    finding = Pipeline(synced=lambda step: version_of(max(0, step - 1))).judge(VERSIONS)
    assert finding.reason == "a generation began under another version than the schedule allows"
