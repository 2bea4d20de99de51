"""The alternatives that a server names beside each token, where it is asked by token ids. A case is an http() call for `TOKENS`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.contract.faults import Fact
from harness.records.wire import TOKENS, body_of, token_name


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


def _judge(evidence: Evidence) -> Finding:
    calls = [call for call in evidence.trace.own_calls if call.method == "http" and call.request["path"] == TOKENS]
    answers = [(call, call.result) for call in calls if call.result]
    if not answers:
        return untestable(f"no server answered {TOKENS}")
    facts, wrong = 0, []
    for call, answer in answers:
        asked = body_of(call.request["body"])["sampling_params"]["logprobs"]
        places = _places(answer)
        facts += len(places)
        shown = {"call": call.id, "status": answer["status"]}
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
