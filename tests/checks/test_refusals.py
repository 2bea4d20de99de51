"""Refusals of servers: told to a caller, or red."""

from __future__ import annotations

import pytest

from harness.checks.refusals import REFUSALS
from tests import traces
from tests.checks.scene import Scene

HTTP = {"method": "POST", "path": "/x", "headers": {}, "body": "{}"}
BODY = {"body": {"model": "tiny", "prompt": [1]}}


def refused(method: str = "pause", request: dict | None = None, result: dict | None = None, **about) -> Scene:
    """A call during which a server refuses something."""
    scene = Scene()
    started = scene.pass_time()
    seen = {"method": "POST", "path": "/done", "status": 404} | about.pop("seen", {})
    scene.seen.append(traces.observation("refusal", "server-1", scene.pass_time(), **seen))
    call = traces.call(method, request or {}, result, started_ns=started, ended_ns=scene.pass_time(), **about)
    scene.calls.append(call)
    return scene


def test_a_refusal_that_no_caller_learns_of_is_red():
    scene = refused()
    found = scene.judge(REFUSALS)
    assert found.status == "fail"
    assert found.reason == "a server refused POST /done with 404, and no caller was told"
    shown = {"server": "server-1", "asked": "POST /done", "status": 404}
    assert found.evidence == [shown | {"call": scene.calls[-1].id}]
    call = scene.calls[-1]
    scene.calls.append(traces.call("resume", {}, started_ns=call.started_ns, ended_ns=call.ended_ns))
    assert scene.judge(REFUSALS).evidence == [shown | {"during": ["pause", "resume"]}]


@pytest.mark.parametrize(
    "scene",
    [
        refused(error=traces.error("BadRequest", "no such route")),
        refused("http", HTTP, {"status": 404, "headers": {}, "body": "no such route"}),
        refused("completion", BODY, {"body": {"error": {"message": "no such model", "code": 404}}}),
        refused("request_schemas"),
    ],
    ids=["an error", "a status", "an error body", "an instrument's own"],
)
def test_a_refusal_of_which_a_caller_learns_is_green(scene):
    assert scene.judge(REFUSALS).status == "pass"


def test_a_call_that_went_well_beside_it_tells_nobody():
    answered = {"status": 200, "headers": {}, "body": "{}"}
    assert refused("http", HTTP, answered).judge(REFUSALS).status == "fail"


def test_a_refusal_after_its_call_is_red_unless_it_is_another_row_of_it():
    scene = refused(error=traces.error("BadRequest", "no such route"))
    scene.seen.append(traces.observation("refusal", at_ns=scene.pass_time(), method="POST", path="/done", status=404))
    assert scene.judge(REFUSALS).status == "pass"
    scene.seen.append(traces.observation("refusal", at_ns=scene.pass_time(), method="POST", path="/x", status=404))
    assert scene.judge(REFUSALS).status == "fail"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_an_answer_that_asks_to_come_again_is_no_refusal(status):
    assert refused(seen={"status": status}).judge(REFUSALS) is None


def test_the_clean_room_and_a_scenario_without_refusals_give_nothing_to_judge():
    scene = Scene()
    assert scene.judge(REFUSALS) is None
    scene.seen.append(traces.observation("refusal", at_ns=1, method="POST", path="/done", status=404))
    assert scene.judge(REFUSALS) is None


@pytest.mark.parametrize(
    ("method", "request_", "status"),
    [
        ("generate", {"prompt_token_ids": [[10, 11]] * 2, "sampling_params": {}}, "pass"),
        ("generate", {"prompt_token_ids": [[10, 11]], "sampling_params": {}}, "fail"),
        ("load_lora_adapter", {"name": "policy", "version": 1}, "pass"),
    ],
    ids=["another row", "no row is left", "another server"],
)
def test_another_part_of_a_call_that_is_refused_while_the_next_call_is_at_work(method, request_, status):
    scene = refused(method, request_, error=traces.error("BadRequest", "no such model"))
    started = scene.pass_time()
    scene.seen.append(traces.observation("refusal", at_ns=scene.pass_time(), method="POST", path="/done", status=404))
    scene.calls.append(traces.call("resume", {}, {}, started_ns=started, ended_ns=scene.pass_time()))
    assert scene.judge(REFUSALS).status == status
