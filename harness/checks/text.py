"""Text is the decoding of the answer's tokens, with the requested treatment of special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from harness.checks.answers import Answer, of_answers
from harness.checks.base import Check, Evidence, Finding, concluded, stop_strings, untestable
from harness.checks.stopping import decoded
from harness.contract.faults import Fact
from harness.contract.messages import LISTS
from harness.records.differing import parting
from harness.records.reference import DecodeRequest, Query

REPLACEMENT = "\ufffd"
"""A decoder's output for bytes that form no whole character."""
BEFORE_PUNCTUATION = re.compile(r" +(?=[.,?!']|n't)|(?<=') +")
"""Spaces that a tokenizer's clean-up may remove (Transformers documentation, clean_up_tokenization_spaces)."""


def text_of_tokens(*labels: str, special: bool = False, spaced: bool = False, methods: Sequence[str] = LISTS) -> Check:
    """`text` is the decoding of `tokens`, without special tokens unless skip_special_tokens is false.

    `stopping.stop_text` judges rows that a stop string ended. `special` requires that special tokens occur before the
    end of an output, `spaced` that an output begins with a space. If the checkpoint asks for a clean-up, spaces before punctuation
    may be missing: SkyRL does not say with which arguments it decodes.
    """

    def rule(evidence: Evidence, rows: list[Answer]) -> Finding:
        rows = [row for row in rows if row.text is not None and not _stopped_by_string(row)]
        if not rows:
            return untestable("no output had a text to compare")
        if special and not any(_has_special(evidence, row) for row in rows):
            return untestable("no special token occurred within an output")
        if spaced and not any(row.tokens[:1] == [evidence.header.vocabulary.space] for row in rows):
            return untestable("no output began with a space")
        wrong = [
            (why, row.shown(**parting(text=row.text or "", decoded=_expected(evidence, row))))
            for row in rows
            if (why := _wrong(evidence, row))
        ]
        return concluded(len(rows), wrong)

    return of_answers(
        "text",
        fault="text is of other tokens, has special tokens that should be skipped, or lacks those that should be kept",
        next_step="look at who turns tokens into text, and with which tokenizer and skip_special_tokens",
        reads=Fact.ANSWERS | Fact.TEXT,
        source="SkyRL, InferenceEngineOutput: "
        "tokenizer.decode(response_token_ids, skip_special_tokens=True) == responses; "
        "vLLM documentation, SamplingParams.skip_special_tokens",
        rule=rule,
        asks=_asks,
        labels=labels,
        methods=methods,
    )


def _asks(_: Evidence, rows: list[Answer]) -> Iterator[Query]:
    for row in rows:
        for tokens in (row.tokens, row.tokens[:-1]):
            for skip in (True, False):
                yield DecodeRequest(tokens=tokens, skip_special_tokens=skip)


def _stopped_by_string(row: Answer) -> bool:
    return bool(stop_strings(row.params)) and row.finish_reason == "stop"


def _has_special(evidence: Evidence, row: Answer) -> bool:
    within = row.tokens[:-1]
    decode = evidence.reference.decode
    return decode(within, skip_special_tokens=True) != decode(within, skip_special_tokens=False)


def _expected(evidence: Evidence, row: Answer) -> str:
    return evidence.reference.decode(row.tokens, skip_special_tokens=decoded(row, []).skip_special_tokens)


def _wrong(evidence: Evidence, row: Answer) -> str | None:
    tidy, skip = cleaned if evidence.header.vocabulary.cleans else str, decoded(row, []).skip_special_tokens

    def decode(tokens: list[int], *, skip_special_tokens: bool) -> str:
        return tidy(evidence.reference.decode(tokens, skip_special_tokens=skip_special_tokens))

    expected, text = decode(row.tokens, skip_special_tokens=skip), tidy(row.text or "")
    if row.text == f" {_expected(evidence, row)}":
        return "text begins with a space that the decoding of its tokens leaves out"
    if text == expected:
        return None
    if text == decode(row.tokens, skip_special_tokens=not skip):
        return (
            "text holds special tokens that were to be skipped"
            if skip
            else "text lacks special tokens that were asked for"
        )
    if row.finish_reason == "stop" and text == decode(row.tokens[:-1], skip_special_tokens=skip):
        return "text lacks the stop token that the tokens hold"
    if text.rstrip(REPLACEMENT) == expected.rstrip(REPLACEMENT):
        return "text and tokens differ in a character that the output was cut off in"
    return "text is not the decoding of the tokens"


def cleaned(text: str) -> str:
    """The text without the spaces that a clean-up may remove."""
    return BEFORE_PUNCTUATION.sub("", text)
