"""Headers, query parameters and fields of an address: took effect, ignored, changed, refused by name, or broke it."""

from __future__ import annotations

import json

import pytest

from harness.checks.http_fields import HTTP_FIELDS
from harness.contract.messages import HttpRequest, HttpResponse
from harness.records.verdict import Effect
from tests import traces
from tests.checks.scene import Scene

PLAIN = {"mode": "abort", "clear_cache": True}


def scene(path, label, query="", *, status=200, body="{}", at_engine=None, usual="{}") -> Scene:
    """A plain call of a server's route, and one with a field. `at_engine`: the arguments that its engine got then."""
    made = Scene()
    for name, asked, answer, arguments in (
        ("as it is", path, HttpResponse(status=200, body=usual), PLAIN),
        (label, path + query, HttpResponse(status=status, body=body), at_engine),
    ):
        started = made.pass_time()
        if arguments is not None:
            at = made.pass_time()
            told = {"op": "pause_generation", "arguments": arguments, "ended_ns": at, "error": None}
            made.seen.append(traces.observation("control", "server-0", at, **told))
        times = {"started_ns": started, "ended_ns": made.pass_time(), "label": f"{path} {name}"}
        made.calls.append(traces.call("http", HttpRequest(path=asked, server="server-0"), answer, **times))
    return made


@pytest.mark.parametrize(
    ("query", "at_engine", "effect"),
    [
        ("?mode=keep", {**PLAIN, "mode": "keep"}, Effect.TOOK_EFFECT),
        ("?mode=abort", PLAIN, Effect.AS_USUAL),
        ("?mode=keep", PLAIN, Effect.DROPPED),
        ("?mode=keep", {**PLAIN, "mode": "wait"}, Effect.CHANGED),
        ("?mode=keep", None, Effect.DROPPED),
    ],
)
def test_what_became_of_a_parameter_at_the_engine(query, at_engine, effect):
    found = scene("/pause", "mode: a value", query, at_engine=at_engine).judge(HTTP_FIELDS)
    assert [one.effect for one in found.effects] == [effect]
    assert (found.status == "fail") == (effect in (Effect.DROPPED, Effect.CHANGED))


@pytest.mark.parametrize(("text", "seen", "right"), [("false", False, True), ("0", False, True), ("1", False, False)])
def test_a_boolean_of_a_query_has_several_spellings(text, seen, right):
    made = scene("/pause", "clear_cache: a value", f"?clear_cache={text}", at_engine={**PLAIN, "clear_cache": seen})
    assert (made.judge(HTTP_FIELDS).status == "pass") == right


@pytest.mark.parametrize(
    ("status", "body", "effect"),
    [
        (422, '{"detail": "mode: one of abort, keep"}', Effect.REFUSED),
        (422, '{"detail": "bad request"}', Effect.REFUSED_NAMELESS),
        (415, "", Effect.REFUSED),
        (404, "", Effect.NO_ROUTE),
        (500, "mode", Effect.BROKE),
    ],
)
def test_what_an_error_makes_of_a_field(status, body, effect):
    found = scene("/pause", "mode: a value", "?mode=x", status=status, body=body).judge(HTTP_FIELDS)
    assert [one.effect for one in found.effects] == [effect]
    assert (found.status == "fail") == (effect in (Effect.REFUSED_NAMELESS, Effect.BROKE))


@pytest.mark.parametrize(("body", "effect"), [([1, 2], Effect.TOOK_EFFECT), ([1], Effect.AS_USUAL)])
def test_an_answer_without_an_engine_shows_the_effect_itself(body, effect):
    answers = {"body": json.dumps({"tokens": body}), "usual": json.dumps({"tokens": [1]})}
    found = scene("/tokenize", "add_special_tokens: true", **answers).judge(HTTP_FIELDS)
    assert [one.effect for one in found.effects] == [effect]


def test_nothing_is_told_if_the_plain_call_failed():
    made = scene("/pause", "mode: a value", "?mode=keep", at_engine=PLAIN)
    made.change(made.calls[-2], result={"status": 500, "body": "", "headers": {}})
    assert made.judge(HTTP_FIELDS).status == "untestable"


@pytest.mark.parametrize(("body", "effect"), [('{"id": "cmpl-mine"}', Effect.TOOK_EFFECT), ("{}", Effect.DROPPED)])
def test_the_id_of_a_request_comes_back(body, effect):
    made = scene("/v1/completions", "x-request-id: a name", body=body)
    made.change(made.calls[-1], request={**made.calls[-1].request, "headers": {"X-Request-Id": "mine"}})
    assert [one.effect for one in made.judge(HTTP_FIELDS).effects] == [effect]


def test_an_unknown_model_is_no_missing_route():
    found = scene("/tokenize", "model: short", status=404, body="The model `a` does not exist.").judge(HTTP_FIELDS)
    assert [one.effect for one in found.effects] == [Effect.REFUSED]
