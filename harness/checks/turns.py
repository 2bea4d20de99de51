"""Conversations of several turns through token ids: an engine reads what the caller gave, id for id.

A turn's prompt is the turn before, its response and some new ids. Decoding and encoding again would give other ids for
the same text, and the trainer would score tokens that the policy never saw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded, failed, passed, untestable
from harness.checks.matching import Row, assignment, queries
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import CHOICES, SessionId
from harness.records.differing import common_prefix, parting
from harness.records.reference import DecodeRequest, EncodeRequest, Query

NO_TURNS = "no session asked for a second turn that begins with the first"
OTHER_TOKENS = "an engine read other tokens than the turn was given"
OTHER_RETRY = "a turn that was interrupted went on with other tokens than had been made"
NO_TEXT_TURNS = "no session asked for a second turn by text"
OTHER_TEXT = "an engine read another prompt than template and tokenizer make of the text"
SURVIVES = "every turn's prompt survives decoding and encoding: the promise was not put to the test"


def _conversations(evidence: Evidence) -> list[list[Row]]:
    """The turns of each session of generate(), where each begins with the turn before and its response."""
    sessions: dict[tuple[str, SessionId], list[Row]] = defaultdict(list)
    for row in assignment(evidence).rows:
        if row.call.method == "generate" and row.session is not None and row.prompt is not None:
            sessions[type(row.session).__name__, row.session].append(row)
    return [turns for turns in sessions.values() if len(turns) > 1 and all(_goes_on(a, b) for a, b in pairwise(turns))]


def _goes_on(before: Row, after: Row) -> bool:
    start = (before.prompt or ()) + (before.tokens or ())
    return (after.prompt or ())[: len(start)] == start


def _asks(evidence: Evidence) -> Iterator[Query]:
    yield from queries(evidence)
    for turns in _conversations(evidence):
        for row in turns[1:]:
            prompt = list(row.prompt or ())
            yield DecodeRequest(tokens=prompt, skip_special_tokens=False)
            text = evidence.reference.decode(prompt, skip_special_tokens=False)
            yield EncodeRequest(text=text, add_special_tokens=False)


def _survives(evidence: Evidence, row: Row) -> bool:
    text = evidence.reference.decode(list(row.prompt or ()), skip_special_tokens=False)
    return evidence.reference.encode(text, add_special_tokens=False) == list(row.prompt or ())


def _first(evidence: Evidence, row: Row) -> Execution | None:
    """The first execution for a row: its own, or one of that time whose prompt no call requested."""
    found = assignment(evidence)
    if ran := found.where(row):
        return ran[0]
    during = [e for e in found.strangers if row.call.started_ns <= e.started_ns <= row.call.ended_ns]
    return next((e for e in during if e.tokens == row.tokens), during[0] if during else None)


def _wrong(evidence: Evidence, turns: list[Row]) -> tuple[str, dict[str, Any]] | None:
    before: tuple[int, ...] = ()
    for number, row in enumerate(turns):
        shown = {**row.shown, "session": row.session, "turn": number}
        ran = _first(evidence, row)
        if row.state != "returned":
            return "a turn was not answered", shown
        if ran is None:
            return "a turn was answered and no engine ran it", shown
        given = row.prompt or ()
        if ran.prompt != given:
            return OTHER_TOKENS, {**shown, **parting(given=given, engine=ran.prompt)}
        if ran.prompt[: len(before)] != before:
            return "a turn does not begin with what the engines read and made in the turn before", shown
        if wrong := _wrong_retry(evidence, row):
            return wrong[0], {**shown, **wrong[1]}
        parts = assignment(evidence).where(row) or [ran]
        before = given + tuple(token for part in parts for token in part.tokens)
    return None


def _wrong_retry(evidence: Evidence, row: Row) -> tuple[str, dict[str, Any]] | None:
    """The fault of an interrupted turn that did not continue with the tokens made before, id for id; else None."""
    found, given = assignment(evidence), row.prompt or ()
    read = given
    for attempt in found.where(row):
        if attempt.prompt != read:
            return OTHER_RETRY, parting(given=read, engine=attempt.prompt)
        read += attempt.tokens
    if found.of(row) or read == given + (row.tokens or ()):
        return None
    rest = (row.tokens or ())[len(read) - len(given) :]
    for stray in found.strangers:  # a retry that does not fit the turn's other parts, but made the missing tokens
        if row.call.started_ns <= stray.started_ns <= row.call.ended_ns and stray.tokens == rest:
            return OTHER_RETRY, parting(given=read, engine=stray.prompt)
    return None


def _judge(evidence: Evidence) -> Finding:
    conversations = _conversations(evidence)
    if not conversations:
        return untestable(NO_TURNS)
    facts = sum(len(row.prompt or ()) for turns in conversations for row in turns)
    wrong = [found for turns in conversations if (found := _wrong(evidence, turns))]
    if wrong:
        return concluded(facts, wrong)
    if all(_survives(evidence, row) for turns in conversations for row in turns[1:]):
        return untestable(SURVIVES)
    return passed(facts, conversations=len(conversations))


TURNS_KEEP_TOKENS = Check(
    name="turns_keep_tokens",
    fault="between two turns token ids become text and then other ids",
    next_step="look at where the turns are joined: the ids at `first difference` went through text",
    reads=Fact.ANSWERS,
    falsifies=ROWS,
    source='SkyRL #1014, task 6: "Token IDs preserved across turns (no re-tokenization)"',
    tap=Tap.READ,
    judge=_judge,
    queries=_asks,
)


def _text_conversations(evidence: Evidence) -> list[list[Row]]:
    """The turns of each session of chat_completion() and of completion(), by text."""
    sessions: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in assignment(evidence).rows:
        if row.call.method in CHOICES and row.session is not None and row.prompt is not None:
            sessions[row.call.method, str(row.session)].append(row)
    return [turns for turns in sessions.values() if len(turns) > 1]


def _drift(before: Execution, after: Row) -> int:
    """How many tokens made in a turn the next turn's prompt does not repeat, from the first difference on."""
    context = before.prompt + before.tokens
    return min(len(before.tokens), len(context) - common_prefix(context, after.prompt or ()))


def _judge_text(evidence: Evidence) -> Finding:
    conversations = _text_conversations(evidence)
    if not conversations:
        return untestable(NO_TEXT_TURNS)
    facts = made = drifted = 0
    wrong: list[dict[str, Any]] = []
    for turns in conversations:
        before: Execution | None = None
        for number, row in enumerate(turns):
            facts += 1
            ran = _first(evidence, row)
            if ran is None or ran.prompt != row.prompt:
                read = () if ran is None else ran.prompt
                wrong.append(
                    {
                        **row.shown,
                        "session": row.session,
                        "turn": number,
                        **parting(given=row.prompt or (), engine=read),
                    }
                )
            elif before is not None:
                made += len(before.tokens)
                drifted += _drift(before, row)
            before = ran
    if wrong:
        return failed(facts, OTHER_TEXT, wrong)
    return passed(facts, tokens_made=made, tokens_drifted=drifted)


TEXT_TURNS = Check(
    name="text_turns",
    fault="earlier turns of a conversation are left out, put in another order, or rendered by another template",
    next_step="look at the text that is rendered for the later turn: the tokens at `first difference` show what was left out or added",
    reads=Fact.ANSWERS | Fact.TEXT,
    falsifies=ROWS,
    source='SkyRL #1014, task 6: "Chat template applied correctly"; SkyRL 0.1.0, _generate_single_with_retry: the text path '
    '"re-encodes in each new request": how many tokens that changes is shown',
    tap=Tap.READ,
    judge=_judge_text,
    queries=queries,
)
