"""The moment at which a pause met a request: before its first token, in the middle, with one token left, in the queue."""

from __future__ import annotations

import pytest

from harness.checks.base import Check, Evidence, passed
from harness.checks.continuation import NOT_CONTINUED, continuation, same_as_uninterrupted
from harness.checks.matching import rows
from harness.checks.moments import Moment, caught_at
from harness.checks.pausing import DIFFERS, PAUSED, UNINTERRUPTED
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene
from tests.checks.test_continuation import LENGTH, Retried

PROMPT = [10, 11]


@pytest.mark.parametrize(
    ("cuts", "moment"),
    [((0,), Moment.BEFORE_FIRST_TOKEN), ((10,), Moment.UNDER_WAY), ((LENGTH - 1,), Moment.LAST_TOKEN)],
)
def test_a_retry_is_judged_at_its_moment(cuts, moment):
    scene = Retried(*cuts)
    assert scene.judge(continuation(moment)).status == "pass"
    for other in set(Moment) - {moment}:
        found = scene.judge(continuation(other))
        assert (found.status, found.reason) == ("untestable", f"{NOT_CONTINUED} {other}")


def test_one_token_more_than_was_left():
    scene = Retried(LENGTH - 1, left=lambda params, cut: {**params, "max_tokens": 2, "min_tokens": 0})
    assert "max_tokens" in scene.judge(continuation(Moment.LAST_TOKEN)).reason


def frozen(mode: str, made: int, *, queue_steps: int = 0, answer: list[int] | None = None, length: int = 6) -> Scene:
    """One request alone, then again, paused after `made` tokens. Its server was busy for `queue_steps` steps before."""
    scene = Scene()
    scene.generate([PROMPT], length=length, label=UNINTERRUPTED)
    tokens = scene.reference.greedy(PROMPT, length, version=0)
    begun = scene.pass_time()
    params = {"temperature": 0.0, "max_tokens": length}
    scene.seen += traces.executed([50], [1] * max(1, queue_steps), server=SERVERS[0], from_ns=begun, step_ns=STEP)
    first = traces.executed(PROMPT, tokens, server=SERVERS[0], params=params, from_ns=begun, step_ns=STEP)
    paused_ns = begun + int((made + queue_steps + 0.5) * STEP)
    moved = 100 * STEP
    for seen in first:
        number = sum(o.kind == "step" and o.at_ns <= seen.at_ns for o in first)
        late = seen.kind != "request" and number > made
        scene.seen.append(traces.observation(seen.kind, seen.server, seen.at_ns + (moved if late else 0), **seen.data))
    scene.now = paused_ns
    scene.control("pause", mode=mode, clear_cache=False)
    scene.control("resume")
    scene.now = begun + 200 * STEP
    call = traces.generate(
        [PROMPT], [answer or tokens], stop_reasons=["length"], params=params, label=PAUSED,
        started_ns=begun - 1, ended_ns=scene.pass_time(),
    )  # fmt: skip
    scene.calls.append(call)
    return scene


def met(scene: Scene) -> set[Moment]:
    found: set[Moment] = set()

    def look(evidence: Evidence):
        row = next(row for row in rows(evidence) if row.call.label == PAUSED)
        found.update(moment for moment in Moment if caught_at(evidence, row, moment))

    scene.judge(traces_check(look))
    return found


def traces_check(look):
    return Check(name="look", fault="", source="", judge=lambda evidence: look(evidence) or passed(1))


@pytest.mark.parametrize(
    ("made", "queue_steps", "moments"),
    [
        (0, 0, {Moment.BEFORE_FIRST_TOKEN}),
        (0, 4, {Moment.BEFORE_FIRST_TOKEN, Moment.QUEUED}),
        (3, 0, {Moment.UNDER_WAY}),
        (5, 0, {Moment.LAST_TOKEN}),
    ],
)
def test_what_had_become_of_a_frozen_request(made, queue_steps, moments):
    assert met(frozen("keep", made, queue_steps=queue_steps)) == moments


def test_a_frozen_request_is_judged_at_its_moment():
    scene = frozen("keep", 5)
    assert scene.judge(same_as_uninterrupted(Moment.LAST_TOKEN)).status == "pass"
    assert (
        scene.judge(same_as_uninterrupted(Moment.QUEUED)).reason
        == "the pause met no request while it waited for its turn"
    )
    other = frozen("keep", 5, answer=[1, 2, 3, 4, 5, 6])
    assert other.judge(same_as_uninterrupted(Moment.LAST_TOKEN)).reason == DIFFERS
