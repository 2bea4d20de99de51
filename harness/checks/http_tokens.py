"""Answers of a server that is asked by token ids: the alternatives that it names beside each token, and streams. A case is an http()
call for `TOKENS`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.checks.staleness import overlap
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.wire import TOKENS, body_of, streams, token_name


def _places(answer: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Each token of an answer, with what is said of its place."""
    found = []
    for choice in body_of(answer["body"]).get("choices") or ():
        said = (choice.get("logprobs") or {}).get("content") or []
        found += list(zip(choice["token_ids"], said, strict=False))
    return found


def _wrong(token: int, place: dict[str, Any], asked: int) -> str | None:
    names = [one["token"] for one in place.get("top_logprobs") or ()]
    faults = {
        "a place does not name its own token": place.get("token") != token_name(token),
        "a place has fewer alternatives than were asked for": len(names) < asked,
        "several alternatives of a place have one name": len(set(names)) < len(names),
        "the alternatives of a greedy token lack it": token_name(token) not in names,
    }
    return next((reason for reason, present in faults.items() if present), None)


def _answers(evidence: Evidence) -> list[tuple[Call, dict[str, Any]]]:
    calls = [call for call in evidence.trace.own_calls if call.method == "http" and call.request["path"] == TOKENS]
    return [(call, call.result) for call in calls if call.result]


def _asked(call: Call) -> int:
    """How many alternatives a greedy request asks for; 0 for other requests."""
    params = body_of(call.request["body"])["sampling_params"]
    return 0 if params.get("temperature") != 0 else params.get("logprobs") or 0


def _judge(evidence: Evidence) -> Finding:
    every = _answers(evidence)
    answers = [(call, answer) for call, answer in every if _asked(call)]
    if not answers:
        return untestable(f"no server answered {TOKENS}")
    facts, wrong = 0, []
    for call, answer in answers:
        asked, places = _asked(call), _places(answer)
        facts += len(places)
        shown = {"call": call.id, "status": answer["status"]}
        if beside := [other.label for other, _ in every if other is not call and overlap(other, call)]:
            shown["beside"] = beside
        if shown["status"] != HTTPStatus.OK or not places:
            wrong.append(("an answer has no log-probabilities", shown))
        wrong += [
            (why, {**shown, "position": position, "token": token, "place": place})
            for position, (token, place) in enumerate(places)
            if (why := _wrong(token, place, asked)) is not None
        ]
    return concluded(facts, wrong, answers=len(answers))


HTTP_TOKENS = Check(
    name="http_tokens",
    fault="the most probable tokens of a place are not named, or all by the name of the chosen one",
    next_step="compare the names in top_logprobs with those that /v1/completions gives for the same prompt",
    reads=Fact.LOGPROBS | Fact.ANSWERS,
    falsifies=Fact.LOGPROBS,
    source="vLLM documentation, /inference/v1/generate; OpenAI API reference, chat completions: top_logprobs",
    judge=_judge,
)


def _judge_streams(evidence: Evidence) -> Finding:
    asked = [one for one in _answers(evidence) if body_of(one[0].request["body"]).get("stream")]
    if not asked:
        return untestable(f"no server answered a stream of {TOKENS}")
    wrong = [
        ("a stream was asked for, and the answer is none", {"call": call.id, "status": answer["status"]})
        for call, answer in asked
        if not streams(answer)
    ]
    return concluded(len(asked), wrong, answers=len(asked))


TOKEN_STREAM = Check(
    name="token_stream",
    fault="a caller who asks for events as tokens are made waits for the whole answer",
    next_step="read the answer's content-type in the evidence; vLLM's GenerateRequest has the field stream",
    source="vLLM documentation, /inference/v1/generate: GenerateRequest.stream",
    judge=_judge_streams,
)
