"""How a stack by itself continues a request that pause(abort) cut short.

A retry gets the prompt, all tokens made so far and the rest of the budget; the caller sees one answer. Each *attempt* is
an engine's execution of the row's prompt, or of a prompt that begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded, passed, stop_strings, untestable
from harness.checks.echo import ENGINE_DEFAULTS
from harness.checks.matching import Row, assignment, queries
from harness.checks.moments import Moment, caught_at
from harness.checks.pausing import NOTHING_PAUSED, SAME_AS_UNINTERRUPTED, same
from harness.contract.faults import Fact
from harness.records.recording import Call

NOT_CONTINUED = "no request was cut short and continued"
SPENT = frozenset({"max_tokens", "min_tokens"})
"""Sampling parameters that an attempt uses up in part: the next attempt gets the rest. All others stay the same."""


def _aborts(evidence: Evidence, row: Row) -> list[Call]:
    """The pause(abort) calls that may have cut a row short: those that began during its call."""
    pauses = [c for c in evidence.calls("pause") if c.error is None and c.request.get("mode") == "abort"]
    return [c for c in pauses if row.call.started_ns < c.started_ns < row.call.ended_ns]


def _attempts(evidence: Evidence, row: Row) -> list[Execution]:
    """The row's executions in order of time, whether or not they fit together."""
    found = assignment(evidence)
    others = {
        (e.server, e.request_id)
        for other in found.rows
        if (other.call.id, other.index) != (row.call.id, row.index)
        for e in found.where(other)
    }
    prompt = row.prompt or ()
    mine = [
        e
        for e in evidence.executions
        if row.call.started_ns <= e.started_ns <= row.call.ended_ns
        and e.prompt[: len(prompt)] == prompt
        and (e.server, e.request_id) not in others
    ]
    return sorted(mine, key=lambda e: e.started_ns)


def _wrong(row: Row, attempts: list[Execution], aborts: int) -> str | None:
    """The first fault found, or None. Faults nearest to the cause come first."""
    if row.state != "returned":
        return "a request that pause(abort) cut short was not answered"
    if row.finish_reason == "abort":
        return 'an answer reached the caller with the finish reason "abort"'
    wrong = _wrong_attempts(row, attempts)
    if wrong is None and len(attempts) > aborts + 1:
        wrong = "a request was tried more often than it was cut short"
    return wrong or _wrong_answer(row, attempts)


def _wrong_attempts(row: Row, attempts: list[Execution]) -> str | None:
    done: tuple[int, ...] = ()
    for number, attempt in enumerate(attempts):
        given = attempt.prompt[len(row.prompt or ()) :]
        if number and attempts[number - 1].finish_reason in {"stop", "length"}:
            return "a request that had come to its end was run again"
        if given != done:
            return _wrong_start(given, done)
        for field in SPENT & set(row.params) if number else ():
            asked = row.params[field]
            if asked is not None and attempt.sampling_params.get(field, 0) != max(0, asked - len(done)):
                whole = attempt.sampling_params.get(field, 0) == asked
                return f"a retry was given {f'the whole {field}' if whole else f'a wrong {field}'}, not what was left of it"
        if changed := _changed(attempts[0], attempt):
            return f"a retry ran under another {changed}"
        done += attempt.tokens
    return None


def _wrong_start(given: tuple[int, ...], done: tuple[int, ...]) -> str:
    if given == done[: len(given)]:
        return "a retry was not given all tokens that had been made"
    if given[: len(done)] == done:
        return "a retry was given more tokens than had been made"
    return "a retry was given other tokens than had been made"


def _changed(first: Execution, later: Execution) -> str | None:
    """A sampling parameter that differs from the first attempt's. The contract does not define a seed after an interruption."""
    fields = (f for f in ENGINE_DEFAULTS if f not in SPENT and f != "seed")
    return next((f for f in fields if first.sampling_params.get(f) != later.sampling_params.get(f)), None)


def _wrong_answer(row: Row, attempts: list[Execution]) -> str | None:
    made = tuple(token for attempt in attempts for token in attempt.tokens)
    tokens = row.tokens or ()
    # The frontend finds stop strings, so an engine may run a step further.
    by_string = row.finish_reason == "stop" and bool(stop_strings(row.params))
    if tokens != made and not (by_string and tokens == made[: len(tokens)]):
        kind = (
            "lacks" if len(tokens) < len(made) else "holds more than" if len(tokens) > len(made) else "holds other than"
        )
        return f"an answer {kind} the tokens that were made for it"
    if attempts and row.finish_reason != attempts[-1].finish_reason and not by_string:
        return "an answer has another finish reason than its last attempt"
    if row.params.get("logprobs") is not None:
        numbers = ((row.call.result or {}).get("response_logprobs") or [])[row.index : row.index + 1]
        if [len(n or ()) for n in numbers] != [len(tokens)]:
            return "an answer does not have one log-probability a token over all attempts"
    return None


def _shown(row: Row, attempts: list[Execution]) -> dict[str, Any]:
    prompt = len(row.prompt or ())
    return {
        **row.shown,
        "attempts": [
            {
                "server": attempt.server,
                "given tokens": len(attempt.prompt) - prompt,
                "made": len(attempt.tokens),
                **{field: attempt.sampling_params.get(field) for field in sorted(SPENT)},
                "finish_reason": attempt.finish_reason,
            }
            for attempt in attempts
        ],
        "answer": {"length": len(row.tokens or ()), "finish_reason": row.finish_reason},
    }


def _judge(evidence: Evidence, moments: Sequence[Moment]) -> Finding:
    facts, continued, interrupted = 0, 0, 0
    wrong: list[tuple[str, dict[str, Any]]] = []
    for row in assignment(evidence).rows:
        aborts = _aborts(evidence, row)
        if row.call.method != "generate" or row.prompt is None or not aborts:
            continue
        attempts = _attempts(evidence, row)
        facts += 1 + len(attempts)
        interrupted += len(aborts)
        if moments:
            continued += len(attempts) > 1 and caught_at(evidence, row, *moments) > 0
        else:
            continued += sum(bool(attempt.tokens) for attempt in attempts) > 1
        if why := _wrong(row, attempts, len(aborts)):
            wrong.append((why, _shown(row, attempts)))
    if wrong:
        return concluded(facts, wrong)
    if not continued:
        nowhere = f"{NOT_CONTINUED} {' or '.join(moments)}" if moments else NOT_CONTINUED
        return untestable(nowhere if facts else NOTHING_PAUSED)
    return passed(facts, interrupted=interrupted, continued=continued)


def continuation(*moments: Moment) -> Check:
    """Requests that were cut short continue correctly. At least one must be cut at one of `moments`; if none are named, at
    least one must have tokens from two attempts."""
    return Check(
        name="continuation",
        fault="a request that continues after an abort loses or doubles tokens, gets its whole budget again, or shows the abort",
        next_step="compare the attempts in the evidence: what each one was given has to be the prompt and all tokens made before it",
        reads=Fact.ANSWERS | Fact.PAUSES,
        source='SkyRL #1014, task 5: "Partial responses accumulated correctly", "Retry-on-abort works (re-feed accumulated tokens)"',
        tap=Tap.READ,
        judge=lambda evidence: _judge(evidence, moments),
        queries=queries,
    )


CONTINUATION = continuation()


def same_as_uninterrupted(*moments: Moment) -> Check:
    """`pausing.SAME_AS_UNINTERRUPTED`, if the pause, in any mode, met at least one request at one of `moments`."""

    def judge(evidence: Evidence) -> Finding:
        return same(
            evidence,
            lambda row: caught_at(evidence, row, *moments) > 0,
            f"the pause met no request {' or '.join(moments)}",
        )

    return msgspec.structs.replace(SAME_AS_UNINTERRUPTED, judge=judge)
