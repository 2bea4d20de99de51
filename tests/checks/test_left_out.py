"""Parameters that requests leave out have a documented default, and always the same one."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.left_out import LEFT_OUT
from harness.contract.messages import MAX_MODEL_LEN
from harness.contract.vocabulary import LLAMA_SAMPLING, TINY
from tests import traces
from tests.checks.scene import STEP, Scene


def asked(*calls: tuple[dict, dict]) -> Scene:
    """A call of generate() per pair of what was given and what the engine had."""
    scene = Scene()
    for number, (given, at_engine) in enumerate(calls):
        prompt = [10, 11, 12 + number]
        answer = scene.reference.greedy(prompt, 4)
        started = scene.pass_time()
        scene.seen += traces.executed(prompt, answer, params=at_engine, from_ns=scene.pass_time(), step_ns=STEP)
        scene.pass_time(7)
        times = {"started_ns": started, "ended_ns": scene.now}
        scene.calls.append(traces.generate([prompt], [answer], params=given, **times))
    return scene


@pytest.mark.parametrize(
    "at_engine", [{"temperature": 0.7}, {"temperature": 1.0}, {}], ids=["the checkpoint's", "vLLM's", "not shown"]
)
def test_a_documented_default(at_engine):
    assert asked(({}, at_engine), ({"temperature": None}, at_engine)).judge(LEFT_OUT).status == "pass"


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"temperature": 0.5}, "generate() without temperature gets neither the checkpoint's nor the engine's"),
        (
            {"temperature": 1.0},
            "generate() without temperature gets the checkpoint's at times, and at times the engine's",
        ),
    ],
)
def test_another_default(second, reason):
    found = asked(({}, {"temperature": 0.7}), ({}, second)).judge(LEFT_OUT)
    assert (found.status, found.reason) == ("fail", reason)


@pytest.mark.parametrize(
    ("method", "length", "status"),
    [
        ("chat_completion", LLAMA_SAMPLING["max_tokens"], "pass"),
        ("chat_completion", None, "pass"),
        ("chat_completion", 16, "fail"),
        ("completion", 16, "pass"),
        ("completion", None, "pass"),
        ("completion", 17, "fail"),
    ],
)
def test_a_length(method, length, status):
    """None: to the end of the context."""
    said = [{"role": "user", "content": "hi"}]
    prompt = traces.render(said) if method == "chat_completion" else [3, 4, 5]
    at_engine = {"temperature": 1.0, "max_tokens": length or MAX_MODEL_LEN - len(prompt)}
    scene = Scene()
    started = scene.pass_time()
    scene.seen += traces.executed(prompt, [9] * 4, params=at_engine, from_ns=scene.pass_time(), step_ns=STEP)
    scene.pass_time(7)
    times = {"started_ns": started, "ended_ns": scene.now}
    choice = {"index": 0, "finish_reason": "length", "token_ids": [9] * 4, "text": "", "message": {"content": ""}}
    asked_for = {"messages": said} if method == "chat_completion" else {"prompt": prompt}
    body = {"model": traces.MODEL, "temperature": 1.0, **asked_for}
    scene.calls.append(traces.openai(method, body, {"choices": [choice]}, **times))
    vocabulary = msgspec.structs.replace(TINY, sampling=LLAMA_SAMPLING)
    assert scene.judge(LEFT_OUT, vocabulary=vocabulary).status == status


@pytest.mark.parametrize(
    ("generated", "sampled", "reason"),
    [
        (16, 16, ""),
        (None, None, ""),
        (
            16,
            None,
            "generate() without max_tokens ends after 16 tokens, and sample() without max_tokens ends at the end of the context",
        ),
        (17, 16, "generate() without max_tokens gets neither the checkpoint's nor the engine's"),
    ],
)
def test_one_length_of_both_calls(generated, sampled, reason):
    """None: to the end of the context."""
    scene = Scene()
    for number, (method, length) in enumerate(((traces.generate, generated), (traces.sample, sampled))):
        prompt = [10, 11, 12 + number]
        started = scene.pass_time()
        at_engine = {"temperature": 1.0, "max_tokens": length or MAX_MODEL_LEN - len(prompt)}
        scene.seen += traces.executed(prompt, [9] * 4, params=at_engine, from_ns=scene.pass_time(), step_ns=STEP)
        scene.pass_time(7)
        asked_for = [prompt] if method is traces.generate else prompt
        times = {"started_ns": started, "ended_ns": scene.now}
        scene.calls.append(method(asked_for, [[9] * 4], params={"temperature": 1.0}, **times))
    assert (scene.judge(LEFT_OUT).reason or "") == reason


def test_a_parameter_that_is_named():
    named = {"temperature": 0.2, "max_tokens": 4}
    assert asked((named, named)).judge(LEFT_OUT).status == "untestable"
