"""Conservation and the instruments: green on a whole recording, red on each lost or doubled event."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks import conservation
from harness.checks.conservation import CONSERVATION
from harness.checks.instruments import INSTRUMENTS, NEVER_LATE
from tests import traces
from tests.checks.scene import STEP, Scene, without_observations

PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.generate(PROMPTS)
    return scene


def damaged_result(scene: Scene, **fields) -> None:
    call = scene.calls[-1]
    scene.change(call, result={**call.result, **fields})


def test_a_whole_recording_passes(scene):
    found = scene.judge(CONSERVATION)
    assert (found.status, found.facts) == ("pass", 6)
    assert scene.judge(INSTRUMENTS).status == "pass"


def test_a_blind_tap_is_untestable(scene):
    without_observations(scene)
    assert scene.judge(CONSERVATION).status == "untestable"
    assert scene.judge(INSTRUMENTS).status == "untestable"


def test_a_schedule_under_which_nothing_was_late_is_untestable(scene):
    scene.call("delay", {"seed": 1})
    assert scene.judge(INSTRUMENTS).reason == NEVER_LATE
    scene.seen.append(traces.observation("delay", at_ns=scene.now, what="request", seconds=0.01))
    assert scene.judge(INSTRUMENTS).status == "pass"


def test_a_scenario_without_such_calls_has_nothing_to_judge():
    scene = Scene()
    scene.control("pause")
    assert scene.judge(CONSERVATION) is None


def test_rows_of_a_failed_batch_may_start_late_but_returned_ones_may_not(scene):
    call = scene.calls[-1]
    scene.change(call, ended_ns=call.started_ns + 1)
    assert scene.judge(CONSERVATION).status == "fail"
    scene.change(scene.calls[-1], result=None, error=traces.error())
    assert scene.judge(CONSERVATION).status == "pass"


def test_a_lost_row(scene):
    damaged_result(scene, response_ids=scene.calls[-1].result["response_ids"][:2])
    assert scene.judge(CONSERVATION).reason == conservation.LOST


def test_a_row_too_many(scene):
    ids = scene.calls[-1].result["response_ids"]
    damaged_result(scene, response_ids=[*ids, ids[0]])
    assert scene.judge(CONSERVATION).reason == conservation.EXTRA


def test_a_result_that_came_back_empty(scene):
    damaged_result(scene, response_ids=[*scene.calls[-1].result["response_ids"][:2], []])
    assert scene.judge(CONSERVATION).reason == conservation.EMPTIED


def test_an_error_that_became_an_empty_success(scene):
    damaged_result(scene, response_ids=[*scene.calls[-1].result["response_ids"][:2], []])
    scene.seen = [s for s in scene.seen if s.data.get("prompt_token_ids") != PROMPTS[2]]
    assert scene.judge(CONSERVATION).reason == conservation.EMPTY


@pytest.mark.parametrize("damage", [lambda ids: ids[:-1], lambda ids: [*ids, ids[-1]], lambda ids: [ids[0], *ids]])
def test_lost_or_doubled_tokens(scene, damage):
    ids = [list(row) for row in scene.calls[-1].result["response_ids"]]
    damaged_result(scene, response_ids=[ids[0], damage(ids[1]), ids[2]])
    assert scene.judge(CONSERVATION).reason == conservation.ALTERED


def test_a_request_that_was_executed_twice(scene):
    scene.seen += traces.executed(
        PROMPTS[0], scene.reference.greedy(PROMPTS[0], 6), from_ns=scene.calls[-1].started_ns + STEP
    )
    assert scene.judge(CONSERVATION).reason == conservation.REPEATED


def test_rows_with_one_prompt_are_counted():
    scene = Scene()
    scene.generate([PROMPTS[0]] * 3)
    assert scene.judge(CONSERVATION).status == "pass"
    scene.seen += traces.executed(
        PROMPTS[0], scene.reference.greedy(PROMPTS[0], 6), from_ns=scene.calls[-1].started_ns + STEP
    )
    assert scene.judge(CONSERVATION).reason == conservation.REPEATED


def test_a_prompt_that_nobody_asked_for(scene):
    scene.seen += traces.executed([50, 51], [5], from_ns=scene.calls[-1].started_ns + STEP)
    assert scene.judge(CONSERVATION).reason == conservation.STRANGER


def test_a_made_up_row(scene):
    scene.seen = [s for s in scene.seen if s.data.get("prompt_token_ids") != PROMPTS[2]]
    assert scene.judge(CONSERVATION).reason == conservation.UNSERVED


def test_a_refused_body_counts_as_reported_whatever_it_asked_for(scene):
    times = {"started_ns": scene.pass_time(), "ended_ns": scene.pass_time()}
    body = {"prompt": [[1, "x"], [[2]]], "n": 10**12, "session_id": ["a"]}
    scene.calls.append(traces.openai("completion", body, {"error": {"message": "no"}}, **times))
    assert scene.judge(CONSERVATION).status == "pass"


def test_a_failed_call_counts_as_reported(scene):
    scene.calls.append(
        traces.generate([[40]], error=traces.error(), started_ns=scene.pass_time(), ended_ns=scene.pass_time())
    )
    assert scene.judge(CONSERVATION).status == "pass"


def test_a_retry_that_goes_on_after_an_abort_is_one_row():
    scene = Scene()
    answer = scene.reference.greedy(PROMPTS[0], 6)
    started = scene.pass_time()
    scene.seen += traces.executed(PROMPTS[0], answer[:2], reason="abort", from_ns=scene.pass_time(), step_ns=STEP)
    scene.pass_time(4)
    scene.seen += traces.executed([*PROMPTS[0], *answer[:2]], answer[2:], from_ns=scene.now, step_ns=STEP)
    scene.pass_time(6)
    scene.calls.append(traces.generate([PROMPTS[0]], [answer], started_ns=started, ended_ns=scene.now))
    assert scene.judge(CONSERVATION).status == "pass"


def test_an_answer_after_a_stop_string_may_be_shorter_than_what_the_engine_ran(scene):
    call = scene.calls[-1]
    ids = [list(row) for row in call.result["response_ids"]]
    damaged_result(scene, response_ids=[ids[0][:4], *ids[1:]], stop_reasons=["stop", "length", "length"])
    assert scene.judge(CONSERVATION).reason == conservation.ALTERED, "no stop string was asked for"
    call = scene.calls[-1]
    scene.change(call, request={**call.request, "sampling_params": {**call.request["sampling_params"], "stop": ["x"]}})
    assert scene.judge(CONSERVATION).status == "pass"


def test_text_answers_are_matched_by_their_prompt_and_usage():
    scene = Scene()
    text = "hello"
    started = scene.pass_time()
    tokens = scene.reference.greedy(traces.encode(text), 5)
    scene.seen += traces.executed(traces.encode(text), tokens, from_ns=scene.pass_time(), step_ns=STEP)
    body = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 5}}
    scene.pass_time(8)
    asked = traces.openai("completion", {"prompt": text}, body, started_ns=started, ended_ns=scene.now)
    scene.calls.append(asked)
    assert scene.judge(CONSERVATION).status == "pass"
    body["usage"]["completion_tokens"] = 4
    scene.change(asked, result={"body": body})
    assert scene.judge(CONSERVATION).reason == conservation.ALTERED
    scene.change(scene.calls[-1], result={"body": {**body, "choices": body["choices"] * 2}})
    assert scene.judge(CONSERVATION).reasons == [conservation.EXTRA, conservation.ALTERED]


def test_samples_may_be_children_of_one_request():
    scene = Scene()
    started = scene.pass_time()
    answers = [scene.reference.drawn(PROMPTS[0], 4, seed=seed) for seed in (1, 2, 3)]
    for number, answer in enumerate(answers):
        name = f"{number}_parent"
        scene.seen += traces.executed(
            PROMPTS[0], answer, request_id=name, parent_id="parent", from_ns=scene.now + STEP, step_ns=STEP
        )
    scene.pass_time(9)
    call = traces.sample(PROMPTS[0], answers[::-1], started_ns=started, ended_ns=scene.now)
    scene.calls.append(call)
    assert scene.judge(CONSERVATION).status == "pass"
    scene.change(call, result=msgspec.to_builtins(call.result) | {"response_ids": [answers[0]] * 3})
    assert scene.judge(CONSERVATION).status == "fail"


def test_a_chat_that_failed_after_its_engine_ran_is_no_stranger():
    scene = Scene()
    messages = [{"role": "user", "content": "hello"}]
    prompt = traces.render(messages)
    started = scene.pass_time()
    scene.seen += traces.executed(
        prompt, scene.reference.greedy(prompt, 4), params={"max_tokens": 4}, from_ns=scene.pass_time(), step_ns=STEP
    )
    about = {"started_ns": started, "ended_ns": scene.pass_time(9)}
    lost = traces.error("ServerError", "the answer was lost")
    scene.calls.append(
        traces.openai("chat_completion", {"messages": messages, "max_tokens": 4}, None, error=lost, **about)
    )
    assert scene.judge(CONSERVATION).status == "pass"
