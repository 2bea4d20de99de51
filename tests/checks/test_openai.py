"""Bodies of completion() and chat_completion(): green on a correct recording, red on each fault."""

from __future__ import annotations

import copy

import pytest

from harness.checks import openai
from harness.checks.stopping import ends_as_asked
from harness.checks.text import text_of_tokens
from harness.checks.tokens import greedy
from tests.traces import MODEL, FakeReference, decode, encode, error, judge, render
from tests.traces import openai as called

REFERENCE = FakeReference(vocab_size=128)
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
ANSWERS = [REFERENCE.greedy(p, 4) for p in PROMPTS]
MESSAGES = [{"role": "user", "content": "What is nine times seven?"}]
REPLY = REFERENCE.greedy(render(MESSAGES), 4)
PARAMS = {"model": MODEL, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
ERROR = {"error": {"message": "no", "type": "BadRequestError", "code": 400}}


def body(answers=ANSWERS, prompts=PROMPTS):
    prompt, completion = sum(map(len, prompts)), sum(map(len, answers))
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {"index": i, "text": decode(a), "finish_reason": "length", "token_ids": a} for i, a in enumerate(answers)
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }


def completion(response=None, prompt=PROMPTS, **about):
    return called("completion", PARAMS | {"prompt": prompt}, response or body(), **about)


def chat(**changes):
    response = body([REPLY], [render(MESSAGES)]) | {"object": "chat.completion"}
    choice = {"index": 0, "finish_reason": "length", "token_ids": REPLY}
    response["choices"] = [choice | {"message": {"role": "assistant", "content": decode(REPLY)}} | changes]
    return called("chat_completion", PARAMS | {"messages": MESSAGES}, response)


def checks(method):
    methods = (method,)
    return {
        "envelope": openai.envelope(method),
        "usage": openai.usage(method),
        "greedy": greedy(methods=methods),
        "text": text_of_tokens(methods=methods),
        "end": ends_as_asked(causes=["length"], methods=methods),
    }


def found(check, *calls):
    finding = judge(check, *calls, reference=REFERENCE)
    return finding.status, finding.reason


TEXT = "hello there"
TEXT_ANSWER = REFERENCE.greedy(encode(TEXT), 4)


@pytest.mark.parametrize(
    "call",
    [
        completion(),
        completion(body(ANSWERS[:1], PROMPTS[:1]), PROMPTS[0]),
        completion(body([TEXT_ANSWER], [encode(TEXT)]), TEXT),
        completion(body([TEXT_ANSWER, TEXT_ANSWER], [encode(TEXT)] * 2), [TEXT, TEXT]),
        chat(),
    ],
    ids=["batched ids", "single ids", "single text", "batched text", "chat"],
)
def test_a_correct_body_passes_every_check(call):
    for name, check in checks(call.method).items():
        assert (name, *found(check, call)) == (name, "pass", "")


def damaged(**changes):
    response = copy.deepcopy(body())
    for path, value in changes.items():
        at, *rest = path.split("__")
        if rest:
            (response["choices"][int(rest[0])] if at == "choice" else response[at])[rest[-1]] = value
        else:
            response[at] = value
    return response


@pytest.mark.parametrize(
    ("check", "response", "reason"),
    [
        ("envelope", damaged(object="list"), "completion() has a wrong or missing object"),
        ("envelope", damaged(model="default"), "completion() has a wrong or missing model"),
        ("envelope", damaged(choice__1__text=None), "completion() has a wrong or missing choices.text"),
        (
            "envelope",
            damaged(choice__1__index=0),
            "completion() returned choices whose indices are not 0, 1, … in the order of the prompts",
        ),
        (
            "envelope",
            damaged(choices=body()["choices"][::-1]),
            "completion() returned choices whose indices are not 0, 1, … in the order of the prompts",
        ),
        ("envelope", damaged(choices=body()["choices"][:2]), "completion() returned fewer choices than were asked for"),
        ("envelope", damaged(choices=[]), "completion() returned fewer choices than were asked for"),
        ("envelope", ERROR, "completion() was answered with BadRequestError 400: no"),
        ("envelope", body() | ERROR, "completion() was answered with BadRequestError 400: no"),
        ("usage", damaged(usage__prompt_tokens=3), "usage of completion() miscounts prompt_tokens"),
        ("usage", damaged(usage__completion_tokens=4), "usage of completion() miscounts completion_tokens"),
        ("usage", damaged(usage__total_tokens=0), "usage of completion() miscounts total_tokens"),
        ("usage", damaged(usage=None), "completion() has no usage"),
        (
            "greedy",
            damaged(choice__0__token_ids=ANSWERS[1], choice__1__token_ids=ANSWERS[0]),
            "greedy output parts from the reference's at its first token",
        ),
        (
            "greedy",
            damaged(choice__0__token_ids=ANSWERS[0][:3]),
            "greedy output has another length than max_tokens with ignore_eos",
        ),
        ("envelope", damaged(choice__0__token_ids=None), "completion() has a wrong or missing choices.token_ids"),
        ("text", damaged(choice__0__text=decode(ANSWERS[1])), "text is not the decoding of the tokens"),
        (
            "end",
            damaged(choice__0__finish_reason="stop"),
            "an output ended by length does not have the finish reason 'length'",
        ),
        ("end", damaged(choice__0__finish_reason=None), "completion() returned a choice without a finish reason"),
    ],
)
def test_each_fault_of_a_completion_is_red(check, response, reason):
    assert found(checks("completion")[check], completion(response)) == ("fail", reason)


@pytest.mark.parametrize(
    ("check", "changes", "reason"),
    [
        (
            "envelope",
            {"message": {"role": "user", "content": "x"}},
            "chat_completion() has a wrong or missing choices.message.role",
        ),
        (
            "envelope",
            {"message": {"role": "assistant", "content": None}},
            "chat_completion() has a wrong or missing choices.message.content",
        ),
        ("text", {"message": {"role": "assistant", "content": "x"}}, "text is not the decoding of the tokens"),
        ("greedy", {"token_ids": ANSWERS[0]}, "greedy output parts from the reference's at its first token"),
    ],
)
def test_each_fault_of_a_chat_completion_is_red(check, changes, reason):
    assert found(checks("chat_completion")[check], chat(**changes)) == ("fail", reason)


def test_a_template_other_than_the_models_is_red():
    wrong = REFERENCE.greedy(render([{"role": "user", "content": "other"}]), 4)
    call = chat(token_ids=wrong)
    assert found(checks("chat_completion")["greedy"], call)[0] == "fail"


def test_a_raised_error_is_named_and_no_call_is_untestable():
    for check in checks("completion").values():
        assert found(check, completion(error=error("ClientResponseError"))) == (
            "fail",
            "completion() failed with ClientResponseError: not like this",
        )
        assert found(check)[0] == "untestable"


@pytest.mark.parametrize(("got", "status"), [("chatcmpl-rollout-7", "pass"), ("chatcmpl-4f3a", "fail"), (None, "fail")])
def test_the_id_of_a_request_is_that_of_its_answer(got, status):
    call = chat()
    call.request["headers"]["X-Request-Id"] = "rollout-7"
    call.result["body"]["id"] = got
    assert found(openai.REQUEST_IDS, chat(), call)[0] == status


def test_without_a_request_that_has_an_id_nothing_is_judged():
    assert found(openai.REQUEST_IDS, chat())[0] == "untestable"
