"""A caller that is gone: its request ends at the engine, and is not sent again."""

from __future__ import annotations

import pytest

from harness.checks.cancellation import CANCELLATION, FAILED, QUEUED
from harness.contract.errors import CANCELLED
from tests import traces
from tests.checks.scene import Scene
from tests.traces import error

MS = 1_000_000
PARAMS = {"max_tokens": 200, "temperature": 0.0}
PROMPT = [10, 11, 12]


def left(made: int, *, step_ms: int = 1, gone_ms: int = 20, again_ms: int | None = None) -> Scene:
    """A request of which an engine made `made` tokens, and whose caller went away."""
    scene = Scene()
    answer = scene.reference.greedy(PROMPT, made)
    started = scene.now
    reason = "length" if made == PARAMS["max_tokens"] else None
    scene.seen += traces.executed(
        PROMPT, answer, params=PARAMS, from_ns=started, step_ns=step_ms * MS, reason=reason, request_id="first"
    )
    if again_ms is not None:
        from_ns = started + again_ms * MS
        scene.seen += traces.executed(
            PROMPT, answer, params=PARAMS, from_ns=from_ns, step_ns=MS, reason=None, request_id="again"
        )
    times = {"started_ns": started, "ended_ns": started + gone_ms * MS}
    scene.calls.append(traces.generate([PROMPT], None, params=PARAMS, error=error(CANCELLED), **times))
    return scene


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        (left(30), ""),
        (left(200), "generate() ran to its end without its caller"),
        (left(150, step_ms=20), "generate() ran on for more than 2 s without its caller"),
        (left(30, again_ms=40), "generate() was sent to an engine after its caller had gone"),
    ],
)
def test_what_an_engine_does_without_the_caller(scene, reason):
    found = scene.judge(CANCELLATION)
    assert (found.status, found.reason) == (("fail", reason) if reason else ("pass", found.reason))


def test_the_rows_of_a_batch_that_failed_are_nobodys():
    for made, status in ((30, "pass"), (200, "fail")):
        scene = left(made)
        scene.change(scene.calls[-1], label=FAILED, error=error("ValueError"))
        assert scene.judge(CANCELLATION).status == status


def test_nothing_is_told_of_a_request_that_no_engine_ran_or_that_was_nearly_done():
    unseen = left(30)
    unseen.seen.clear()
    assert unseen.judge(CANCELLATION).status == "untestable"
    assert left(180, gone_ms=170).judge(CANCELLATION).status == "untestable"


@pytest.mark.parametrize(
    ("made", "taken", "reason"),
    [
        (0, False, ""),
        (0, True, ""),
        (110, True, "generate() was computed although its caller had gone while it waited"),
    ],
)
def test_a_request_whose_caller_goes_while_it_waits_is_never_computed(made, taken, reason):
    scene = left(made, step_ms=30, gone_ms=1)
    scene.change(scene.calls[-1], label=QUEUED)
    if not taken:
        scene.seen = [seen for seen in scene.seen if "first" not in str(seen.data)]
    found = scene.judge(CANCELLATION)
    assert (found.status, found.reason) == (("fail", reason) if reason else ("pass", ""))
