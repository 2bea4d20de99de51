"""Why an output ended, and whether it ended there: finish reasons, stop tokens, stop strings, lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from harness.checks.answers import Answer, of_answers
from harness.checks.base import Check, Evidence, Finding, Tap, concluded, stop_strings, untestable
from harness.checks.matching import assignment, queries
from harness.contract.faults import Fact
from harness.contract.messages import LISTS, MAX_MODEL_LEN
from harness.records.reference import DecodeRequest, Query

SOURCE = "vLLM documentation, SamplingParams: max_tokens, min_tokens, stop, stop_token_ids, ignore_eos"
Cause = Literal["length", "stop token", "eos", "stop string"]
FINISH_REASON: dict[Cause, str] = {"length": "length", "stop token": "stop", "eos": "stop", "stop string": "stop"}


def decoded(answer: Answer, tokens: list[int]) -> DecodeRequest:
    """How the tokens read under the answer's own skip_special_tokens."""
    return DecodeRequest(tokens=tokens, skip_special_tokens=answer.params.get("skip_special_tokens", True))


def _asks(_: Evidence, rows: list[Answer]) -> Iterator[Query]:
    for row in rows:
        if stop_strings(row.params):
            yield decoded(row, row.tokens)
            yield decoded(row, row.tokens[:-1])


def ends_as_asked(
    *labels: str, causes: Iterable[Cause], methods: Sequence[str] = LISTS, max_model_len: int = MAX_MODEL_LEN
) -> Check:
    """Each output ends at the first token that should end it, not before, and its finish reason says why.

    The model's end of sequence ends an output unless ignore_eos is set; `max_model_len` caps prompt and response together. Each of
    `causes` must have ended some output, or the check is untestable.
    """
    wanted = set(causes)

    def rule(evidence: Evidence, rows: list[Answer]) -> Finding:
        ends = [(row, *_end(evidence, row, max_model_len)) for row in rows]
        wrong = [
            (why, row.shown(expected_length=at, expected_cause=cause))
            for row, at, cause in ends
            if (why := _wrong(row, at, cause))
        ]
        if unmet := wanted - {cause for _, _, cause in ends} if not wrong else ():
            return untestable(f"no output was ended by {' or '.join(sorted(unmet))}")
        return concluded(2 * len(rows), wrong)

    return of_answers(
        "stopping",
        fault="a stop condition or length is ignored, met late or invented, or a finish reason is wrong",
        next_step="compare `expected_length` and `expected_cause` with the stop parameters that reached the engine",
        source=SOURCE,
        rule=rule,
        asks=_asks,
        labels=labels,
        methods=methods,
    )


def _end(evidence: Evidence, row: Answer, max_model_len: int) -> tuple[int | None, Cause | None]:
    """The right number of tokens and the right cause of the end; (None, None) if the output should have continued."""
    params = row.params
    most = min(params.get("max_tokens") or 16, max_model_len - len(row.prompt))
    ends = evidence.trace.header.vocabulary.ends
    stops, least = set(params.get("stop_token_ids") or ()), params.get("min_tokens") or 0
    if not least and _has_stop_string(evidence, row, row.tokens[:-1]):
        return len(row.tokens) - 1, "stop string"
    for count, token in enumerate(row.tokens, start=1):
        if count > least and token in ends and not params.get("ignore_eos"):
            return count, "eos"
        if count > least and token in stops:
            return count, "stop token"
        if count == len(row.tokens) and count > least and _has_stop_string(evidence, row, row.tokens):
            return count, "stop string"
        if count == most:
            return count, "length"
    return None, None


def _has_stop_string(evidence: Evidence, row: Answer, tokens: list[int]) -> bool:
    strings = stop_strings(row.params)
    if not strings:
        return False
    text = evidence.reference.decode(tokens, skip_special_tokens=decoded(row, tokens).skip_special_tokens)
    return any(s in text for s in strings)


def _wrong(row: Answer, at: int | None, cause: Cause | None) -> str | None:
    least = row.params.get("min_tokens") or 0
    if row.finish_reason == "stop" and len(row.tokens) <= least:
        return "output was stopped before min_tokens"
    if cause is None or at is None:
        return "output ended before anything that was to end it"
    if at < len(row.tokens):
        return f"output went on after its {cause}"
    if row.finish_reason != FINISH_REASON[cause]:
        return f"an output ended by {cause} does not have the finish reason {FINISH_REASON[cause]!r}"
    return None


def _cut_short(evidence: Evidence) -> Finding:
    rows = [row for row in assignment(evidence).rows if row.params.get("max_tokens") is not None]
    cut = any(execution.finish_reason == "abort" for execution in evidence.executions)
    if not rows or not (cut or any(seen.kind == "abort" for seen in evidence.trace.observations)):
        return untestable("no request was cut short")
    wrong = [
        ("an output that was cut short is returned as one that has reached its length", row.shown)
        for row in rows
        if row.finish_reason == "length" and (row.count or 0) < row.params["max_tokens"]
    ]
    return concluded(len(rows), wrong)


CUT_SHORT = Check(
    name="stopping.cut_short",
    fault="an output that a pause cut short has the finish reason of a whole one, and is trained on as one",
    next_step='look at what the stack makes of the engine\'s finish reason "abort"',
    reads=Fact.ANSWERS | Fact.PAUSES,
    falsifies=Fact.ANSWERS,
    source="SkyRL #904, PauseMode.ABORT; vLLM documentation, SamplingParams.max_tokens",
    tap=Tap.READ,
    judge=_cut_short,
    queries=queries,
)


def stop_text(*labels: str, methods: Sequence[str] = LISTS) -> Check:
    """The text of an output that a stop string ended: up to that string, or with it if the caller asked to include it. Of several
    that end within the last token, the first in the text counts. If several were asked for, an output must have two there."""
    return of_answers(
        "stopping.text",
        fault="text keeps the stop string, loses it although it was requested, or continues after it",
        next_step="look at which side cuts the text at the stop string: the engine does so if include_stop_str_in_output is false",
        reads=Fact.ANSWERS | Fact.TEXT,
        falsifies=Fact.ANSWERS | Fact.TEXT,
        source='vLLM documentation, SamplingParams.stop: "The returned output will not contain the stop strings"; '
        "include_stop_str_in_output: whether to include the stop strings in output text",
        rule=_stop_text,
        asks=_asks,
        labels=labels,
        methods=methods,
    )


def _stop_text(evidence: Evidence, rows: list[Answer]) -> Finding:
    facts, wrong, at_once = 0, [], 0
    for row in rows:
        if row.text is None or row.finish_reason != "stop" or not _has_stop_string(evidence, row, row.tokens):
            continue
        facts += 1
        skip = decoded(row, row.tokens).skip_special_tokens
        whole = evidence.reference.decode(row.tokens, skip_special_tokens=skip)
        include = bool(row.params.get("include_stop_str_in_output"))
        found = [(whole.find(s), s) for s in stop_strings(row.params) if s in whole]
        ends = {at + len(s) for at, s in found}
        at_once += len(ends) > 1
        if row.text not in {whole[: at + (len(s) if include else 0)] for at, s in found if at + len(s) == min(ends)}:
            shown = row.shown(text=row.text, decoded=whole, stop=stop_strings(row.params))
            wrong.append((_wrong_text(row.text, [s for _, s in found], include=include), shown))
    if not wrong and not at_once and any(len(stop_strings(row.params)) > 1 for row in rows):
        return untestable("no two stop strings ended within one token")
    return concluded(facts, wrong) if facts else untestable("no output with a text was ended by a stop string")


def _wrong_text(text: str, strings: list[str], *, include: bool) -> str:
    if not include and any(s in text for s in strings):
        return "text holds the stop string, which was to be left out"
    if include and not any(s in text for s in strings):
        return "text lacks the stop string, which was to be included"
    return "text does not end where the stop string says"
