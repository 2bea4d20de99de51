"""Pauses: one greedy batch with and without a pause, on a timeline of engine steps."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.pausing import (
    ABORTED,
    ALL_PARTED,
    FROZEN,
    GIVEN_UP,
    HELD,
    IDLE_SERVER,
    KEPT,
    NOTHING_PAUSED,
    PAUSED,
    SAME_AS_UNINTERRUPTED,
    TOO_SHORT,
    UNINTERRUPTED,
    WAITED,
)
from harness.records.reference import Noise, NoiseRequest, Score, ScoreRequest
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene, without_observations

PROMPTS = [[10, 11], [20, 21]]
LENGTH = 30
PARAMS = {"temperature": 0.0, "max_tokens": LENGTH}


class Paused(Scene):
    """A batch of two, one request per server, paused after ten of thirty tokens for `steps` engine steps.

    `leak` is the number of steps that server-1 still makes after pause() has returned; `answers` are the batch's answers.
    """

    def __init__(self, mode="keep", *, steps=20, leak=0, late=True):
        super().__init__()
        self.generate(PROMPTS, length=LENGTH, params=PARAMS, label=UNINTERRUPTED)
        self.answers = [self.reference.greedy(p, LENGTH) for p in PROMPTS]
        begun, first = self.pass_time(), self.pass_time()
        finishing = mode == "wait"
        returned = first + ((LENGTH + 2) if finishing else 11) * STEP
        resumed = returned + steps * STEP
        for number, (prompt, answer) in enumerate(zip(PROMPTS, self.answers, strict=True)):
            server = SERVERS[number]
            seen = traces.executed(prompt, answer, server=server, params=PARAMS, from_ns=first, step_ns=STEP)
            before = LENGTH if finishing else 10 + (leak if number else 0)
            self.seen.append(seen[0])
            for at, step in enumerate(seen[1:], start=1):
                moved = first + at * STEP
                if at > before:
                    if mode == "abort":
                        break
                    moved = max(moved, resumed + (at - before) * STEP)
                self.seen.append(traces.observation(step.kind, server, moved, **step.data))
            if mode == "abort":
                name = seen[0].data["request_id"]
                self.seen.append(traces.observation("finish", server, returned - 1, request_id=name, reason="abort"))
        self.now = first + 10 * STEP
        self.control_at("pause", self.now, returned, mode=mode)
        self.control_at("resume", resumed, resumed + STEP)
        if late:
            self.now = resumed
            self.late = self.change(self.generate([[40, 41]], length=2), started_ns=returned + STEP)
        self.answer = traces.generate(
            PROMPTS,
            [a[:10] for a in self.answers] if mode == "abort" else self.answers,
            stop_reasons=["abort" if mode == "abort" else "length"] * 2,
            params=PARAMS,
            label=PAUSED,
            started_ns=begun,
            ended_ns=returned if mode == "abort" else resumed + 40 * STEP,
        )
        self.calls.append(self.answer)

    def control_at(self, method, started, ended, **request):
        for server in SERVERS:
            op = {"pause": "pause_generation", "resume": "resume_generation"}[method]
            data = {"op": op, "arguments": request, "ended_ns": ended, "error": None}
            self.seen.append(traces.observation("control", server, started, **data))
        self.calls.append(traces.call(method, request, started_ns=started, ended_ns=ended))

    def answered(self, response_ids, reasons):
        result = {**self.answer.result, "response_ids": response_ids, "stop_reasons": reasons}
        self.answer = self.change(self.answer, result=result)
        return self


@pytest.mark.parametrize(
    ("check", "mode"),
    [
        (FROZEN, "keep"),
        (SAME_AS_UNINTERRUPTED, "keep"),
        (HELD, "keep"),
        (KEPT, "keep"),
        (FROZEN, "abort"),
        (ABORTED, "abort"),
        (HELD, "abort"),
        (FROZEN, "wait"),
        (WAITED, "wait"),
        (SAME_AS_UNINTERRUPTED, "wait"),
        (HELD, "wait"),
    ],
)
def test_a_right_pause_passes_and_a_blind_tap_judges_nothing(check, mode):
    assert Paused(mode).judge(check).status == "pass"
    if check is not HELD:  # judged from the calls alone
        assert without_observations(Paused(mode)).judge(check).status == "untestable"


def alone(mode: str) -> Paused:
    """The same pause, with all requests on the first server."""
    scene = Paused(mode, late=False)
    scene.seen = [s if s.kind == "control" else msgspec.structs.replace(s, server=SERVERS[0]) for s in scene.seen]
    scene.seen += traces.executed([60, 61], [1], server=SERVERS[1], from_ns=0)
    return scene


@pytest.mark.parametrize(("check", "mode"), [(FROZEN, "keep"), (ABORTED, "abort"), (WAITED, "wait")])
def test_a_server_with_nothing_to_pause_shows_nothing(check, mode):
    assert alone(mode).judge(check).reason == IDLE_SERVER
    assert Paused(mode).judge(check).numbers["servers"] == 2


def test_a_pause_that_returned_holds_from_then_on_however_late_a_server_obeys():
    scene = Paused(leak=8)
    scene.seen = [
        msgspec.structs.replace(one, data=one.data | {"ended_ns": one.data["ended_ns"] + 15 * STEP})
        if one.kind == "control" and one.data["op"] == "pause_generation"
        else one
        for one in scene.seen
    ]
    assert scene.judge(FROZEN).status == "fail"


def test_what_put_the_promise_to_the_test_is_counted():
    assert Paused().judge(SAME_AS_UNINTERRUPTED).numbers["interrupted"] == 2
    assert Paused("abort").judge(ABORTED).numbers["interrupted"] == 2
    assert Paused("wait").judge(WAITED).numbers["waited_for"] == 2
    assert Paused().judge(HELD).numbers == {"held": 1}


def test_one_step_may_be_under_way_when_pause_returns():
    assert Paused(leak=2).judge(FROZEN).status == "pass"  # the first ends at the return, the second after it


@pytest.mark.parametrize("leak", [4, 15])
def test_a_pause_that_returns_before_generation_has_stopped(leak):
    found = Paused(leak=leak).judge(FROZEN)
    assert (found.status, found.reason) == ("fail", "an engine made tokens after pause(keep) had returned")
    assert not found.reasons, "one mode, one reason"
    assert found.evidence[0]["server"] == "server-1"


def test_a_pause_too_short_or_of_nothing_says_nothing():
    assert Paused(steps=4).judge(FROZEN).reason == TOO_SHORT
    scene = Scene()
    scene.generate(PROMPTS, length=LENGTH, label=UNINTERRUPTED)
    scene.generate(PROMPTS, length=LENGTH, label=PAUSED)
    scene.control("pause", mode="keep")
    scene.control("resume")
    for check in (FROZEN, SAME_AS_UNINTERRUPTED, ABORTED, WAITED):
        assert scene.judge(check).reason == NOTHING_PAUSED


@pytest.mark.parametrize(
    "damage",
    [
        lambda ids: ids[:9] + ids[10:],
        lambda ids: [*ids[:10], ids[9], *ids[10:]],
        lambda ids: ids[:10],
        lambda ids: [*ids[:10], (ids[10] + 1) % 60, *ids[11:]],
    ],
    ids=["lost", "doubled", "cut off", "changed"],
)
def test_tokens_damaged_across_a_pause(damage):
    scene = Paused()
    scene.answered([scene.answers[0], damage(scene.answers[1])], ["length", "length"])
    found = scene.judge(SAME_AS_UNINTERRUPTED)
    assert found.reason == "a greedy run with a pause in it differs from the run without"
    assert found.evidence[0]["first difference"] in {9, 10}


@pytest.mark.parametrize(("margin", "verdict"), [(1e-5, "pass"), (1e-2, "fail")])
def test_rounding_may_decide_between_two_tokens_that_are_all_but_equal(margin, verdict):
    scene = Paused()
    plain = scene.answers[1]
    other = [*plain[:10], (plain[10] + 1) % 60, *plain[11:]]
    scene.answered([scene.answers[0], other], ["length", "length"])
    for tokens in (plain, other):
        ranks = [int(a != b) for a, b in zip(tokens, plain, strict=True)]
        margins = [margin if at == 10 else 1.0 for at in range(LENGTH)]
        score = Score(logprobs=[-1.0] * LENGTH, ranks=ranks, margins=margins)
        scene.reference.set(ScoreRequest(version=0, prompt=PROMPTS[1], tokens=tokens), score)
    assert scene.judge(SAME_AS_UNINTERRUPTED).status == verdict


def bfloat16(rms: float = 0.002) -> tuple[dict, Noise]:
    return {"model": {"name": "tiny", "sha256": "0" * 64, "dtype": "bfloat16"}}, Noise(largest=0.2, rms=rms)


def under(scene: Paused, **params) -> tuple[list[int], list[int]]:
    """Gives both calls of a scene these parameters, and the second one another 11th token. Returns that row's two answers."""
    plain = scene.answers[1]
    other = [*plain[:10], (plain[10] + 1) % 60, *plain[11:]]
    for call in [call for call in scene.calls if call.label in {UNINTERRUPTED, PAUSED}]:
        asked = {**call.request, "sampling_params": {**call.request["sampling_params"], **params}}
        scene.answer = scene.change(call, request=asked)
    scene.answered([scene.answers[0], other], ["length", "length"])
    steps = [s for s in scene.seen if s.kind == "step" and s.server == SERVERS[1] and s.at_ns > scene.answer.started_ns]
    [name] = steps[10].data["tokens"]
    changed = msgspec.structs.replace(steps[10], data={**steps[10].data, "tokens": {name: [other[10]]}})
    scene.seen[scene.seen.index(steps[10])] = changed
    return plain, other


@pytest.mark.parametrize(("apart", "verdict"), [(0.3, "pass"), (0.5, "fail")])
def test_choices_that_are_reshaped_may_part_between_two_tokens_that_are_all_but_equal(apart, verdict):
    about, noise = bfloat16()
    scene = Paused()
    scene.reference.set(NoiseRequest(), noise)
    for tokens, last in zip(under(scene, allowed_token_ids=[*range(64)]), (-4.0, -4.0 - apart), strict=True):
        numbers = [*[-1.0] * 10, last]
        score = Score(logprobs=numbers, ranks=[9] * 11, margins=[1.0] * 11, behind=(3.0,) * 11)
        scene.reference.set(ScoreRequest(version=0, prompt=PROMPTS[1], tokens=tokens[:11]), score)
    found = scene.judge(SAME_AS_UNINTERRUPTED, **about)
    assert found.status == verdict
    assert verdict == "fail" or found.numbers["interrupted"] == 1, (
        "a row that parts shows nothing of the pause after it"
    )
    assert scene.judge(SAME_AS_UNINTERRUPTED, **about, batch_invariant=True).status == "fail"
    if verdict == "pass":
        scene.seen = [
            s for s in scene.seen if s.kind == "control" or s.server == SERVERS[1] or s.at_ns < scene.answer.started_ns
        ]
        assert scene.judge(SAME_AS_UNINTERRUPTED, **about).reason == ALL_PARTED


@pytest.mark.parametrize(
    ("rms", "verdict"), [(0.002, "pass"), (1e-9, "fail")], ids=["as seldom as noise explains", "more often"]
)
def test_rounding_may_change_a_draw(rms, verdict):
    about, noise = bfloat16(rms)
    scene = Paused()
    scene.reference.set(NoiseRequest(), noise)
    _, other = under(scene, temperature=1.0, seed=11)
    found = scene.judge(SAME_AS_UNINTERRUPTED, **about)
    assert (found.status, scene.judge(SAME_AS_UNINTERRUPTED).status) == (verdict, "fail")
    scene.answered([scene.answers[0], other[:12]], ["length", "length"])
    assert scene.judge(SAME_AS_UNINTERRUPTED, **about).status == "fail", "cut off"


def test_aborted_answers():
    scene = Paused("abort")
    partial = [a[:10] for a in scene.answers]
    invented = scene.answered([partial[0], [*partial[1][:-1], 63]], ["abort", "abort"])
    assert invented.judge(ABORTED).reason == "the tokens of an aborted request are no prefix of the uninterrupted run's"
    both = Paused("abort").answered([partial[0], [*partial[1][:-1], 63]], ["stop", "abort"]).judge(ABORTED)
    assert (len(both.reasons), len(both.concerns)) == (2, 2)
    scene = Paused("abort").answered(partial, ["abort", "stop"])
    assert scene.judge(ABORTED).reason == 'a request cut short by pause(abort) does not say finish reason "abort"'
    scene = Paused("abort").answered(scene.answers, ["length", "length"])
    scene.seen = Paused("keep").seen
    assert scene.judge(ABORTED).reason == "pause(abort) aborted none of the requests in flight"


@pytest.mark.parametrize(("margin", "verdict"), [(7e-6, "pass"), (0.3, "fail")])
def test_an_aborted_answer_may_part_at_a_near_tie_alone(margin, verdict):
    scene = Paused("abort")
    whole, partial = scene.answers[1], [*scene.answers[1][:9], 63]
    scene.answered([scene.answers[0][:10], partial], ["abort", "abort"])
    for tokens in (whole, partial):
        ranks, margins = [0] * len(tokens), [2.0] * len(tokens)
        ranks[9], margins[9] = int(tokens is partial), margin
        score = Score(logprobs=[-1.0] * len(tokens), ranks=ranks, margins=margins)
        scene.reference.set(ScoreRequest(version=0, prompt=PROMPTS[1], tokens=tokens), score)
    assert scene.judge(ABORTED).status == verdict
    assert scene.judge(ABORTED, batch_invariant=True).status == "fail", "no near tie parts batch-invariant engines"


@pytest.mark.parametrize(("penalties", "verdict"), [({}, "fail"), ({"frequency_penalty": 0.5}, "pass")])
def test_penalties_decide_whether_two_tokens_tie(penalties, verdict):
    """At the place where two answers part, one token is more probable by half a nat, and is there once already."""
    scene = Paused()
    plain, _ = under(scene, **{"presence_penalty": 0.0, "min_tokens": 1, "temperature": 0.0}, **penalties)
    del plain
    whole = scene.answers[1]
    again = [*whole[:9], whole[0], *whole[10:]]
    scene.answered([scene.answers[0], again], ["length", "length"])
    for tokens, last in ((whole, -1.5), (again, -1.0)):
        score = Score(logprobs=[-1.0] * 9 + [last], ranks=[0] * 10, margins=[2.0] * 10)
        scene.reference.set(ScoreRequest(version=0, prompt=PROMPTS[1], tokens=tokens[:10]), score)
    assert scene.judge(SAME_AS_UNINTERRUPTED).status == verdict


def test_a_pause_that_should_change_nothing_may_not_abort():
    scene = Paused("abort")
    for tokens in (scene.answers[0], scene.answers[0][:10], scene.answers[1], scene.answers[1][:10]):
        prompt = PROMPTS[0] if tokens[0] == scene.answers[0][0] else PROMPTS[1]
        score = Score(logprobs=[-1.0] * len(tokens), ranks=[0] * len(tokens), margins=[2.0] * len(tokens))
        scene.reference.set(ScoreRequest(version=0, prompt=prompt, tokens=tokens), score)
    assert scene.judge(ABORTED).status == "pass"
    assert scene.judge(SAME_AS_UNINTERRUPTED).reason == "a greedy run with a pause in it differs from the run without"


def test_a_pause_that_does_not_wait():
    scene = Paused("keep", steps=60)
    scene.calls = [
        traces.call("pause", {"mode": "wait"}, started_ns=c.started_ns, ended_ns=c.ended_ns)
        if c.method == "pause"
        else c
        for c in scene.calls
    ]
    found = scene.judge(WAITED)
    assert found.reason == "pause(wait) returned before the requests in flight had finished"
    assert found.concerns == [(scene.answer.id, 0), (scene.answer.id, 1)]


def test_a_request_that_is_not_held():
    scene = Paused()
    scene.change(scene.late, ended_ns=scene.late.started_ns + 5 * STEP)
    assert scene.judge(HELD).reason == "a request that came during pause(keep) ended before resume()"
    scene = Paused()
    scene.change(scene.late, result=None, error=traces.error())
    assert scene.judge(HELD).reason == "a request that came during pause(keep) failed"
    assert Paused(late=False).judge(HELD).status == "untestable"


def test_every_request_that_is_not_held_is_reported():
    scene = Paused()
    early = scene.change(scene.late, ended_ns=scene.late.started_ns + 5 * STEP)
    broken = traces.generate(
        [[41, 42]], error=traces.error(), started_ns=early.started_ns, ended_ns=scene.answer.ended_ns
    )
    scene.calls.append(broken)
    found = scene.judge(HELD)
    assert [reason.rpartition(") ")[2] for reason in found.reasons] == ["ended before resume()", "failed"]
    assert {call for call, _ in found.concerns} == {early.id, broken.id}


def test_a_request_whose_caller_is_gone_is_not_waited_for():
    scene = Paused("wait")
    scene.seen += traces.executed([70, 71], [1, 2, 3], from_ns=scene.answer.started_ns + 1, step_ns=STEP, reason=None)
    unfinished = scene.seen[-1].data["tokens"]
    assert scene.judge(WAITED).reason == "pause(wait) returned before the requests in flight had finished"
    gone = traces.observation("abort", "server-0", scene.answer.started_ns + 4 * STEP, request_ids=list(unfinished))
    scene.seen.append(gone)
    assert scene.judge(WAITED).status == "pass"


def test_a_frozen_request_that_somebody_gives_up():
    scene = Paused()
    frozen = next(s for s in scene.seen if s.kind == "request" and s.at_ns >= scene.answer.started_ns)
    resumed = max(call.started_ns for call in scene.calls if call.method == "resume")
    for at_ns, reason in ((resumed + 1, ""), (resumed - 1, GIVEN_UP)):
        scene.seen.append(traces.observation("abort", frozen.server, at_ns, request_ids=[frozen.data["request_id"]]))
        found = scene.judge(KEPT)
        assert (found.reason, len(found.evidence)) == (reason, bool(reason))
    assert Paused("abort").judge(KEPT).reason == NOTHING_PAUSED
