"""Provoked errors: a named error is green; hangs, silence and empty successes are red."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.errors import answered_or_named, names_error, nothing_for_nothing, returns_error
from harness.records.recording import CallError
from tests.traces import call, error, generate, judge, sample
from tests.traces import openai as called

ERROR = {"error": {"message": "The model `nope` does not exist.", "type": "NotFoundError", "param": None, "code": 404}}


def asked(response=None, **about):
    return called("completion", {"model": "nope", "prompt": [3, 4]}, response, label="bad", **about)


def found(check, *calls):
    finding = judge(check, *calls)
    return finding.status, finding.reason


def raised(kind, message, status=None):
    return generate([[3]], None, label="bad", error=error(kind, message, status=status))


def test_a_named_error_is_green_raised_or_returned():
    check = names_error("bad", "model")
    assert (
        found(check, asked(ERROR), asked(error=error("ClientResponseError", "no such MODEL", status=404)))[0] == "pass"
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (generate([[3]], [[4, 5]], label="bad"), "generate() succeeded instead of failing"),
        (generate([[3]], [[]], label="bad"), "generate() returned an empty success instead of failing"),
        (generate([[3]], [], label="bad"), "generate() returned an empty success instead of failing"),
        (asked({"choices": []}), "completion() succeeded instead of failing"),
        (raised("CallTimedOut", "no answer after 30 s"), "generate() did not end"),
        (raised("StackDied", "engine-0 ended"), "generate() took the stack down"),
        (raised("Exception", "model"), "generate() failed with an error that has no name or no message"),
        (raised("ValueError", " "), "generate() failed with an error that has no name or no message"),
        (
            raised("ClientResponseError", "Internal Server Error", 500),
            "generate() answered the caller's mistake as a server error",
        ),
        (
            raised("JSONDecodeError", "Expecting value"),
            "generate() failed with an error that does not say what was wrong: JSONDecodeError: Expecting value",
        ),
        (
            asked({"error": {"message": "", "type": "x", "code": 400}}),
            "completion() failed with an error that has no name or no message",
        ),
    ],
)
def test_other_ends_are_red(bad, reason):
    assert found(names_error("bad", "model", "length"), bad) == ("fail", reason)


def test_what_may_be_refused_is_answered_whole_or_refused_by_name():
    check = answered_or_named("bad", "model")
    choice = {"index": 0, "text": "x", "finish_reason": "stop"}
    assert found(check, asked(ERROR), asked({"choices": [choice]}))[0] == "pass"
    assert found(check, asked({"choices": []})) == ("fail", "completion() returned fewer choices than were asked for")
    nameless = {"error": ERROR["error"] | {"message": "no"}}
    assert found(check, asked(nameless))[0] == "fail"
    assert found(check, asked({"error": ERROR["error"] | {"code": 500}}))[1].endswith("as a server error")
    assert found(check)[0] == "untestable"


def test_what_was_not_provoked_or_not_the_stacks_is_untestable():
    assert found(names_error("bad"))[0] == "untestable"
    ours = call("generate", {}, error=CallError(kind="KeyError", message="x", blame="harness"), label="bad")
    finding = judge(names_error("bad"), ours)
    assert (finding.status, finding.blame) == ("untestable", "harness")


def test_an_error_response_is_returned_as_documented():
    check = returns_error("bad")
    assert found(check, asked(ERROR))[0] == "pass"
    assert found(check, asked(error=error("ClientResponseError", "x", status=404))) == (
        "fail",
        "completion() raised an exception instead of returning an ErrorResponse: ClientResponseError 404: x",
    )
    assert found(check, asked({"choices": []})) == ("fail", "completion() did not return an ErrorResponse")
    for lacking in ({"code": None}, {"type": None}, {"message": 3}, {"code": 200}):
        assert found(check, asked({"error": ERROR["error"] | lacking})) == (
            "fail",
            "the ErrorResponse of completion() lacks a field",
        )
    server_error = asked({"error": ERROR["error"] | {"code": 500}})
    assert found(check, server_error)[0] == "pass", "documented in form; that the wrong side is blamed is names_error's"
    assert found(names_error("bad"), server_error)[0] == "fail"
    assert found(check)[0] == "untestable"


def test_an_empty_batch_gives_nothing_or_a_named_error():
    check = nothing_for_nothing("none")
    assert found(check, generate([], [], label="none"))[0] == "pass"
    assert (
        found(check, generate([], None, label="none", error=error("AssertionError", "at least one prompt")))[0]
        == "pass"
    )
    assert found(check, generate([], [[5]], label="none"))[0] == "fail"
    assert found(check, generate([], [], responses=[""], label="none"))[0] == "fail"
    assert found(check, generate([], None, label="none", error=error("CallTimedOut", "late"))) == (
        "fail",
        "generate() did not end",
    )
    assert found(check)[0] == "untestable"


def test_no_samples_and_no_prompts_give_nothing_or_a_named_error():
    check = nothing_for_nothing("none")
    asked: dict[str, Any] = {"label": "none"}
    assert found(check, sample([10], [], **asked))[0] == "pass"
    assert found(check, sample([10], [[5]], **asked)) == ("fail", "sample() succeeded instead of failing")
    assert found(check, called("completion", {"prompt": []}, ERROR, **asked))[0] == "pass"
    assert found(check, called("completion", {"prompt": []}, {"choices": [{}]}, **asked))[0] == "fail"
