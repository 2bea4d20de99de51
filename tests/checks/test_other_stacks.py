"""Starts that fail and ends of stacks: which errors, in time or not, and what is left."""

from __future__ import annotations

import pytest

from harness.checks.other_stacks import FAILED_START, STACK_ENDS
from harness.contract.messages import OtherStackRequest, OtherStackResult, Remnant
from tests import traces
from tests.checks.scene import Scene

ROUTER = Remnant(kind="router", what="pid 7: vllm-router")
ENGINE = Remnant(kind="engine", what="pid 8: VLLM::EngineCore")
NAMED = {"error": "ValueError: /none does not exist", "names": ["/none"]}


def scene(wrong=None, then="stays", **result) -> Scene:
    made = Scene()
    request = OtherStackRequest(wrong=wrong, then=then, start_s=60, end_s=10)
    times = {"started_ns": made.pass_time(), "ended_ns": made.pass_time()}
    made.calls.append(traces.call("other_stack", request, OtherStackResult(**result), **times))
    return made


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (NAMED, ""),
        (NAMED | {"error": "RuntimeError: see above"}, "the error of a start does not name its cause (no model)"),
        (NAMED | {"error": None}, "a stack starts that cannot (no model)"),
        (NAMED | {"error": None, "in_time": False}, "a start that cannot succeed does not end in time (no model)"),
        (NAMED | {"left": [ENGINE]}, "a start that failed leaves: engine (no model)"),
        (NAMED | {"outlived": [ENGINE]}, "after its process, it leaves: engine (no model)"),
    ],
)
def test_a_start_that_fails_names_its_cause_in_time_and_leaves_nothing(result, reason):
    found = scene("no model", **result).judge(FAILED_START)
    assert (found.status, found.reason) == ("fail" if reason else "pass", reason)


@pytest.mark.parametrize(
    ("then", "result", "reason"),
    [
        ("stays", {}, ""),
        ("killed", {}, ""),
        ("stays", {"left": [ROUTER, ROUTER]}, "a stack that was ended leaves: router"),
        ("killed", {"outlived": [ROUTER]}, "a stack whose process was killed leaves: router"),
        ("exits", {"outlived": [ENGINE]}, "a stack whose process ended leaves: engine"),
        ("stays", {"end_error": "RayError: no group"}, "the end of a stack fails: RayError: no group"),
    ],
)
def test_a_stack_that_ends_leaves_nothing(then, result, reason):
    found = scene(None, then, ran=[ROUTER, ENGINE], **result).judge(STACK_ENDS)
    assert (found.status, found.reason) == ("fail" if reason else "pass", reason)


@pytest.mark.parametrize(
    "result", [{}, {"error": "RuntimeError: no memory"}, {"in_time": False, "ran": [ROUTER]}], ids=str
)
def test_nothing_is_told_of_a_stack_that_had_nothing(result):
    assert scene(**result).judge(STACK_ENDS).status == "untestable"


def test_nothing_is_told_without_another_stack():
    assert [Scene().judge(check).facts for check in (FAILED_START, STACK_ENDS)] == [0, 0]
