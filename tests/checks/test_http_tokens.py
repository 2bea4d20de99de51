"""The alternatives of a server that is asked by token ids: each by its own name."""

import json

import pytest

from harness.checks.http_tokens import HTTP_TOKENS
from harness.records.wire import TOKENS
from tests.checks.scene import Scene


def asked(names=(7, 8), token=7, content=None, status=200, **params) -> Scene:
    scene = Scene()
    place = {"token": f"token_id:{token}", "logprob": -0.1}
    place["top_logprobs"] = [{"token": f"token_id:{name}", "logprob": -0.1} for name in names]
    choice = {
        "token_ids": [7],
        "finish_reason": "length",
        "logprobs": {"content": [place] if content is None else content},
    }
    body = json.dumps({"token_ids": [1, 2], "sampling_params": {"temperature": 0, "logprobs": 2, **params}})
    request = {"method": "POST", "path": TOKENS, "headers": {}, "body": body, "server": "server-0"}
    scene.call("http", request, {"status": status, "headers": {}, "body": json.dumps({"choices": [choice]})})
    return scene


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({}, ""),
        ({"names": (7, 7)}, "several alternatives of a place have one name"),
        ({"names": (8, 9)}, "the alternatives of a greedy token lack it"),
        ({"names": (7,)}, "a place has fewer alternatives than were asked for"),
        ({"token": 9}, "a place does not name its own token"),
        ({"content": []}, "an answer has no log-probabilities"),
        ({"status": 500}, "an answer has no log-probabilities"),
    ],
)
def test_an_answer(about, reason):
    found = asked(**about).judge(HTTP_TOKENS)
    assert (found.status, found.reason) == ("fail" if reason else "pass", reason)


def test_without_an_answer_nothing_is_known():
    assert Scene().judge(HTTP_TOKENS).status == "untestable"


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"logprobs": None}])
def test_only_greedy_answers_with_alternatives_are_judged(params):
    assert asked(names=(8, 9), **params).judge(HTTP_TOKENS).status == "untestable"


def test_the_evidence_names_what_ran_beside():
    scene = asked(names=(7,))
    (call,) = [call for call in scene.calls if call.method == "http"]
    beside = scene.call("http", {**call.request, "body": json.dumps({"sampling_params": {}})}, call.result)
    scene.change(beside, label="top_k: one", started_ns=call.started_ns)
    (shown,) = scene.judge(HTTP_TOKENS).evidence
    assert shown["beside"] == ["top_k: one"]
