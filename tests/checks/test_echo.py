"""Echo: parameters that take effect at the engine are the caller's, or a documented translation of them."""

from __future__ import annotations

import pytest

from harness.checks.echo import ECHO
from harness.contract.capability import Capability
from harness.records.argument_forms import NO_NUMBERS
from harness.records.recording import Raw
from tests import traces
from tests.checks.scene import STEP, Scene, without_observations

PROMPT = [10, 11, 12]


def one_call(given: dict, at_engine: dict, method: str = "generate") -> Scene:
    scene = Scene()
    answer = scene.reference.greedy(PROMPT, 4)
    started = scene.pass_time()
    scene.seen += traces.executed(PROMPT, answer, params=at_engine, from_ns=scene.pass_time(), step_ns=STEP)
    scene.pass_time(7)
    times = {"started_ns": started, "ended_ns": scene.now}
    if method == "generate":
        scene.calls.append(traces.generate([PROMPT], [answer], params=given, **times))
    else:
        scene.calls.append(traces.sample(PROMPT, [answer], params=given, **times))
    return scene


@pytest.mark.parametrize(
    ("given", "at_engine"),
    [
        ({"max_tokens": 4, "temperature": 0.7, "top_p": 0.9}, {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9}),
        ({"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.0, "top_p": 1.0}),
        ({"stop": "x", "top_k": -1, "seed": None}, {"stop": ["x"], "top_k": 0}),
        ({"stop_token_ids": [7]}, {"stop_token_ids": [7, 2]}),
        ({"repetition_penalty": 1.0, "ignore_eos": False}, {}),
        ({"logit_bias": {"5": 200.0}}, {"logit_bias": {5: 100.0}}),
        ({"structured_outputs": {"choice": ["1"]}}, {"structured_outputs": "<StructuredOutputsParams>"}),
        ({"thinking_token_budget": -1}, {"thinking_token_budget": None}),
        ({"logprobs": 1, "logprob_token_ids": [3]}, {"logprobs": None, "logprob_token_ids": [3]}),
        (
            {"max_tokens": "4", "top_p": "0.5", "ignore_eos": "true"},
            {"max_tokens": 4, "top_p": 0.5, "ignore_eos": True},
        ),
    ],
)
def test_what_was_given_and_its_translations_pass(given, at_engine):
    assert one_call(given, at_engine).judge(ECHO).status == "pass"


@pytest.mark.parametrize(
    ("given", "at_engine", "field"),
    [
        ({"top_k": 5, "temperature": 1.0}, {"temperature": 1.0}, "top_k"),
        ({"min_p": 0.1}, {"min_p": 0.0}, "min_p"),
        ({"seed": 3}, {"seed": 9}, "seed"),
        ({"thinking_token_budget": 3}, {"thinking_token_budget": None}, "thinking_token_budget"),
        ({"stop": ["x"]}, {"stop": []}, "stop"),
        ({"max_tokens": 400}, {"max_tokens": 16}, "max_tokens"),
        ({"ignore_eos": True}, {}, "ignore_eos"),
        ({"stop_token_ids": [7]}, {"stop_token_ids": [7, 8]}, "stop_token_ids"),
        ({"stop_token_ids": [7]}, {"stop_token_ids": [2]}, "stop_token_ids"),
        ({"logprobs": 1}, {"logprobs": 0}, "logprobs"),
        ({"temperature": "hot"}, {"temperature": 1.0}, "temperature"),
        ({"max_tokens": "4"}, {"max_tokens": 16}, "max_tokens"),
        ({"a_field_nobody_knows": 1}, {}, "a_field_nobody_knows"),
        ({"structured_outputs": {"choice": ["1"]}}, {}, "structured_outputs"),
    ],
)
def test_an_argument_dropped_or_changed_on_the_way(given, at_engine, field):
    found = one_call(given, at_engine).judge(ECHO)
    assert (found.status, found.reason) == ("fail", f"generate() changed {field} on the way")


def test_every_argument_that_sample_drops_is_told():
    found = one_call({"min_tokens": 2, "logprobs": 1}, {"logprobs": 0}, "sample").judge(ECHO)
    assert found.reasons == ["sample() changed logprobs on the way", "sample() changed min_tokens on the way"]


def test_a_prompt_that_was_changed_on_the_way():
    scene = one_call({"max_tokens": 4}, {"max_tokens": 4})
    changed = [s for s in scene.seen if s.data.get("prompt_token_ids") == PROMPT]
    changed[0].data["prompt_token_ids"] = [0, *PROMPT]
    assert scene.judge(ECHO).reason == "a prompt was changed on the way"


@pytest.mark.parametrize(
    ("method", "given", "arrived", "name"),
    [
        ("pause", {"mode": "abort", "clear_cache": True}, {"mode": "keep", "clear_cache": True}, "mode"),
        ("pause", {"mode": "abort", "clear_cache": True}, {"mode": "abort", "clear_cache": False}, "clear_cache"),
        ("sleep", {"level": 2}, {}, "level"),
        ("wake_up", {"tags": ["weights"]}, {}, "tags"),
        ("reset_prefix_cache", {"reset_running_requests": True}, {}, "reset_running_requests"),
    ],
)
def test_control_arguments(method, given, arrived, name):
    scene = Scene()
    scene.control(method, **given)
    assert scene.judge(ECHO).status == "pass"
    scene.control(method, arguments=arrived, **given)
    assert scene.judge(ECHO).reason == f"{method}() changed {name} on the way"


def test_blind_and_nothing_to_judge():
    assert without_observations(one_call({"seed": 1}, {"seed": 1})).judge(ECHO).status == "untestable"
    scene = Scene()
    scene.call("health", {}, {"healthy": True})
    assert scene.judge(ECHO) is None


def test_an_argument_that_the_stack_does_not_offer_is_left_open():
    """SkyRL 0.1.0's pause() has no clear_cache, so its engines use vLLM's default."""
    scene = Scene()
    scene.control("pause", mode="abort", clear_cache=False, arguments={"mode": "abort", "clear_cache": True})
    offered = list(Capability)
    assert scene.judge(ECHO, capabilities=offered).reason == "pause() changed clear_cache on the way"
    offered.remove(Capability.PAUSE_CLEAR_CACHE)
    assert scene.judge(ECHO, capabilities=offered).status == "pass"
    scene.control("pause", mode="keep", clear_cache=False, arguments={"mode": "keep"})
    assert scene.judge(ECHO, capabilities=offered).reason == "pause() changed clear_cache on the way"


@pytest.mark.parametrize("form", NO_NUMBERS)
def test_the_parameters_of_a_call_that_gave_no_finite_number_are_not_those_of_its_recording(form):
    scene = one_call({"temperature": 0.5}, {"temperature": None})
    assert scene.judge(ECHO).status == "fail"
    formed = f"input_batch.sampling_params.temperature: {form}"
    scene.change(
        scene.calls[-1], raw=[Raw(method="generate", arguments=["input_batch"], forms={"": "dict"}, formed=formed)]
    )
    assert scene.judge(ECHO).status == "pass"
