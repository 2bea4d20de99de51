"""A batch that pause(abort) interrupts, and wrong retries by a client."""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness.checks.conservation import CONSERVATION
from harness.checks.continuation import CONTINUATION, NOT_CONTINUED, continuation
from harness.checks.echo import ECHO
from harness.checks.history import BY, explained, waited
from harness.checks.moments import Moment
from harness.checks.pausing import NOTHING_PAUSED
from harness.checks.register import REPLACED
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene, without_observations

PROMPTS = [[10, 11], [20, 21]]
LENGTH = 30
PARAMS = {"temperature": 0.0, "max_tokens": LENGTH, "min_tokens": 12}


class Retried(Scene):
    """A batch of two, interrupted after `cuts` tokens, each time followed by a retry.

    `fed(done, cut)` are a retry's tokens after the prompt, `left(params, cut)` its parameters, `joined(parts)` the answer.
    """

    def __init__(self, *cuts, fed=None, left=None, joined=None, reason="length", params=PARAMS, sync=False, **changes):
        super().__init__()
        cuts = cuts or (10,)
        begun, parts = self.pass_time(), [[] for _ in PROMPTS]
        bounds = [0, *cuts, LENGTH]
        versions = [0, 1] if sync else [0] * (len(cuts) + 1)
        for number, (start, end) in enumerate(pairwise(bounds)):
            at = self.pass_time()
            for row, prompt in enumerate(PROMPTS):
                done = [t for part in parts[row] for t in part]
                given = prompt + (fed(done, start) if fed and number else done)
                made = self.reference.greedy(prompt + done, end - start, version=versions[number])
                given_params = left(params, start) if left and number else remaining(params, start)
                self.seen += traces.executed(
                    given,
                    made,
                    server=SERVERS[(row + number) % 2],
                    params=given_params,
                    reason="abort" if end != LENGTH else "length",
                    from_ns=at,
                    step_ns=STEP,
                )
                parts[row].append(made)
            self.pass_time(end - start + 2)
            if end != LENGTH:
                self.control("pause", mode="abort", clear_cache=False)
                if sync:
                    self.sync(1)
                self.control("resume")
        self.answer = traces.generate(
            PROMPTS,
            [joined(p) if joined else [t for part in p for t in part] for p in parts],
            stop_reasons=[reason] * 2,
            params=params,
            started_ns=begun,
            ended_ns=self.pass_time(),
            **changes,
        )
        self.calls.append(self.answer)


def remaining(params, made):
    least = {"min_tokens": max(0, params["min_tokens"] - made)} if "min_tokens" in params else {}
    return {**params, "max_tokens": params["max_tokens"] - made, **least}


@pytest.mark.parametrize("cuts", [(10,), (10, 20), (10, 10), (0, 10)])
def test_a_right_retry_passes(cuts):
    for check in (CONTINUATION, CONSERVATION, ECHO):
        found = Retried(*cuts).judge(check)
        assert (check.name, found.status, found.reason) == (check.name, "pass", "")


def test_what_is_interrupted_before_its_first_token_has_nothing_to_go_on_with():
    assert Retried(0).judge(CONTINUATION).reason == NOT_CONTINUED
    assert Retried(0).judge(CONSERVATION).status == "pass"


def test_what_is_asked_again_whole_is_put_to_the_test_where_any_moment_will_do():
    anywhere = continuation(*Moment)
    assert Retried(0).judge(anywhere).status == "pass"
    assert Retried(10).judge(anywhere).status == "pass"
    assert Retried(0, left=lambda params, _: {**params, "max_tokens": 5}).judge(anywhere).status == "fail"
    assert Retried(0).judge(continuation(Moment.LAST_TOKEN)).reason == f"{NOT_CONTINUED} {Moment.LAST_TOKEN}"


@pytest.mark.parametrize(
    ("fault", "reason", "conserved"),
    [
        ({"joined": lambda parts: parts[1]}, "an answer lacks the tokens that were made for it", False),
        ({"joined": lambda parts: parts[0] + parts[1][1:]}, "an answer lacks the tokens that were made for it", False),
        (
            {"joined": lambda parts: parts[0] + parts[0][-1:] + parts[1]},
            "an answer holds more than the tokens that were made for it",
            False,
        ),
        (
            {"joined": lambda parts: parts[0] + [63, *parts[1][1:]]},
            "an answer holds other than the tokens that were made for it",
            False,
        ),
        ({"fed": lambda done, _: done[:-1]}, "a retry was not given all tokens that had been made", False),
        ({"fed": lambda *_: []}, "a retry was not given all tokens that had been made", False),
        ({"fed": lambda done, _: done + done[-1:]}, "a retry was given more tokens than had been made", False),
        ({"fed": lambda done, _: done + done}, "a retry was given more tokens than had been made", False),
        ({"fed": lambda done, _: done[::-1]}, "a retry was given other tokens than had been made", False),
        ({"left": lambda params, _: params}, "a retry was given the whole", True),
        (
            {"left": lambda params, made: {**params, "max_tokens": params["max_tokens"] - made}},
            "a retry was given the whole min_tokens, not what was left of it",
            True,
        ),
        (
            {"left": lambda params, made: remaining(params, made) | {"max_tokens": 19}},
            "a retry was given a wrong max_tokens, not what was left of it",
            True,
        ),
        (
            {"left": lambda params, made: {**remaining(params, made), "temperature": 1.0}},
            "a retry ran under another temperature",
            True,
        ),
        ({"reason": "abort"}, 'an answer reached the caller with the finish reason "abort"', True),
        ({"reason": "stop"}, "an answer has another finish reason than its last attempt", True),
    ],
)
def test_each_way_to_go_wrong_is_told(fault, reason, conserved):
    scene = Retried(**fault)
    found = scene.judge(CONTINUATION)
    assert found.status == "fail"
    assert found.reason.startswith(reason)
    assert found.evidence[0]["attempts"][1]["made"] == 20
    assert (scene.judge(CONSERVATION).status == "pass") is conserved
    assert scene.judge(ECHO).status == "pass", "what a retry is given is not the caller's"


def test_an_abort_that_reaches_the_caller_without_a_retry():
    scene = Retried(joined=lambda parts: parts[0], reason="abort")
    retries = {o.data["request_id"] for o in scene.seen if len(o.data.get("prompt_token_ids", ())) > 2}
    scene.seen = [
        o for o in scene.seen if o.data.get("request_id") not in retries and not retries & set(o.data.get("tokens", ()))
    ]
    assert scene.judge(CONTINUATION).reason == 'an answer reached the caller with the finish reason "abort"'


def test_an_answer_that_is_run_again():
    scene = Retried()
    last = scene.reference.greedy(PROMPTS[0], LENGTH)
    scene.seen += traces.executed(
        PROMPTS[0], last, params=PARAMS, from_ns=scene.answer.ended_ns - 1, step_ns=1, server=SERVERS[0]
    )
    assert scene.judge(CONTINUATION).reason == "a request that had come to its end was run again"
    assert scene.judge(CONSERVATION).status == "fail"


def test_more_attempts_than_interruptions():
    scene = Retried(10, 10)
    first = next(c for c in scene.calls if c.method == "pause" and c.phase == "scenario")
    scene.calls.remove(first)
    assert scene.judge(CONTINUATION).reason == "a request was tried more often than it was cut short"


def test_a_log_probability_of_one_part_alone():
    scene = Retried(params=PARAMS | {"logprobs": 0}, logprobs=[[-0.1] * LENGTH] * 2)
    assert scene.judge(CONTINUATION).status == "pass"
    scene = Retried(params=PARAMS | {"logprobs": 0}, logprobs=[[-0.1] * LENGTH, [-0.1] * 20])
    assert scene.judge(CONTINUATION).reason == "an answer does not have one log-probability a token over all attempts"


def test_a_request_that_is_lost_or_fails():
    scene = Retried()
    scene.change(scene.answer, error=traces.error(), result=None)
    assert scene.judge(CONTINUATION).reason == "a request that pause(abort) cut short was not answered"


def test_what_was_not_interrupted_says_nothing():
    assert without_observations(Retried()).judge(CONTINUATION).status == "untestable"
    scene = Scene()
    scene.generate(PROMPTS)
    assert scene.judge(CONTINUATION).reason == NOTHING_PAUSED


def test_after_a_sync_the_rest_is_made_by_the_new_policy():
    plain = {"temperature": 0.0, "max_tokens": LENGTH}
    scene = Retried(sync=True, params=plain)
    assert scene.judge(explained(waited)).status == "pass"
    assert scene.judge(CONTINUATION).status == "pass"
    assert Retried(sync=True).judge(explained(waited)).status == "untestable", (
        "min_tokens bars what the model may prefer"
    )
    stale = Retried(sync=False, params=plain)
    resume = next(c for c in stale.calls if c.method == "resume" and c.phase == "scenario")
    sync = traces.call("sync_weights", {"version": 1}, started_ns=resume.started_ns - 2, ended_ns=resume.started_ns - 1)
    stale.calls.append(sync)
    found = stale.judge(explained(waited))
    assert found.reason == BY[REPLACED]
