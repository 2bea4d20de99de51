"""Answers of the data plane, one per row, and the faults of a call that show before any row is judged.

`of_answers` makes a check of rows. A call that failed, lost a row or returned lists of unequal lengths is a named failure. A
recording without such calls is untestable. Only complete answers reach the check's own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from harness.checks import matching
from harness.checks.base import Check, Evidence, Finding, concluded, failed, kept, together, untestable
from harness.contract.errors import Blame
from harness.contract.faults import NOTHING, Fact
from harness.contract.messages import CHOICES, LISTS
from harness.contract.topology import Quantization
from harness.records.recording import Call
from harness.records.reference import NextRequest, Query, Routed, ScoreRequest, UnansweredQuery

TOKENS = 64
"""Most tokens of a prompt or an answer that evidence shows."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One returned row. `logprobs` and `text` are None if the result holds none. `version` is the policy's."""

    call: Call
    index: int
    prompt: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: str | None
    logprobs: list[Any] | None
    params: dict[str, Any]
    version: int
    adapter: int | None = None
    """Version of the requested LoRA adapter; None is the base model."""
    quantization: Quantization | None = None
    routed: Routed = []
    """Experts that the reference takes at near ties (`Evidence.followed`)."""

    @property
    def score(self) -> ScoreRequest:
        """The question for the teacher-forced scores of these tokens."""
        return ScoreRequest(prompt=self.prompt, tokens=self.tokens, routed=self.routed, **self._weights)

    def next_after(self, tokens: int) -> NextRequest:
        """The question for the distribution of the token that follows the first `tokens`."""
        return NextRequest(prompt=self.prompt + self.tokens[:tokens], **self._weights)

    @property
    def _weights(self) -> dict[str, Any]:
        return {"version": self.version, "adapter": self.adapter, "quantization": self.quantization}

    def shown(self, **more: Any) -> dict[str, Any]:
        """The smallest input that shows this row's fault, with its result: the first tokens, or those around `position`."""
        first = max(0, more.get("position", 0) - TOKENS // 2)
        return {
            **self.call.named,
            "method": self.call.method,
            "row": self.index,
            "prompt": self.prompt[:TOKENS],
            "sampling_params": self.params,
            **({"tokens from": first} if first else {}),
            "tokens": self.tokens[first : first + TOKENS],
            "finish_reason": self.finish_reason,
            **more,
        }


Rule = Callable[[Evidence, list[Answer]], Finding]
Asks = Callable[[Evidence, list[Answer]], Iterable[Query]]


def of_answers(
    name: str,
    *,
    fault: str,
    source: str,
    rule: Rule,
    asks: Asks | None = None,
    labels: Sequence[str] = (),
    methods: Sequence[str] = LISTS,
    reads: Fact = Fact.ANSWERS,
    falsifies: Fact = NOTHING,
    next_step: str = "",
) -> Check:
    """A check of the answers of the calls with these `labels` (empty: all calls). The labels become part of its name."""

    def judge(evidence: Evidence) -> Finding:
        calls = select(evidence, labels, methods)
        wrong, rows = trouble(calls, labels, methods), whole(evidence, calls)
        if wrong is None or not rows:
            return wrong or rule(evidence, rows)
        return together([wrong, rule(evidence, rows)])

    def queries(evidence: Evidence) -> Iterator[Query]:
        calls = select(evidence, labels, methods)
        yield from matching.queries(evidence)
        if asks is not None and (rows := whole(evidence, calls)):
            yield from asks(evidence, rows)

    full_name = f"{name}:{'+'.join(labels)}" if labels else name
    return Check(
        name=full_name,
        fault=fault,
        source=source,
        reads=reads,
        falsifies=falsifies,
        next_step=next_step,
        judge=judge,
        queries=queries,
    )


def select(evidence: Evidence, labels: Sequence[str], methods: Sequence[str]) -> list[Call]:
    """The scenario's calls of these methods that carry one of `labels` (empty: all calls)."""
    return [c for c in evidence.calls() if c.method in methods and (not labels or c.label in labels)]


def trouble(calls: Sequence[Call], labels: Sequence[str], methods: Sequence[str]) -> Finding | None:
    """What is wrong before any row is judged, or None: no call, an absent label, failed calls, results that are not one row per
    prompt, rows without tokens or finish reason."""
    absent = sorted(set(labels) - {c.label for c in calls})
    if absent:
        return untestable(f"no call labelled {', '.join(absent)} was recorded")
    if not calls:
        return untestable(f"no call of {' or '.join(methods)} was recorded")
    found = [finding for call in calls if (finding := _broken(call) or _hollow(call)) is not None]
    return together(found) if found else None


def whole(evidence: Evidence, calls: Sequence[Call]) -> list[Answer]:
    """The rows of `calls` in which `trouble` finds nothing."""
    judged = answered(calls)
    hollow = {call.id: _hollow_rows(call) for call in judged}
    return [row for row in answers(evidence, judged) if row.index not in hollow[row.call.id]]


def answered(calls: Iterable[Call]) -> list[Call]:
    """Those calls whose rows can be judged."""
    return [call for call in calls if _broken(call) is None]


def _broken(call: Call) -> Finding | None:
    """The finding for a call without a row that can be judged."""
    if call.error is not None:
        return unexpected(call)
    wrong = _shape(call)
    return failed(1, f"{call.method}() {wrong}", [_summary(call)]) if wrong else None


def _hollow(call: Call) -> Finding | None:
    """The finding for rows that came back without tokens or finish reason."""
    rows = _hollow_rows(call)
    if not rows:
        return None
    shown = _summary(call)
    return concluded(len(rows), [(f"{call.method}() {why}", shown | {"row": row}) for row, why in rows.items()])


def _hollow_rows(call: Call) -> dict[int, str]:
    """Index of each row without tokens or finish reason → what is wrong."""
    if call.method in CHOICES:
        ends = [choice.get("finish_reason") for choice in choices(call)]
        return {row: "returned a choice without a finish reason" for row, end in enumerate(ends) if not end}
    result = call.result or {}
    found = {
        row: "returned a result without a finish reason" for row, end in enumerate(result["stop_reasons"]) if not end
    }
    return found | {
        row: "returned a result without tokens" for row, ids in enumerate(result["response_ids"]) if not ids
    }


def unexpected(call: Call) -> Finding:
    """The finding for a call that failed and should not have. Its reason names the error; the message varies and is evidence."""
    assert call.error is not None
    error = call.error
    reason, blame = f"{call.method}() failed with {error.said}", Blame(error.blame)
    told = {"error": error.kind, "message": error.message, "status": error.status}
    shown = {**call.named, **told, "request": short(call.request)}
    return failed(1, reason, [shown]) if blame == Blame.STACK else untestable(reason, blame, [shown])


def nothing_to_judge(evidence: Evidence, why: str, methods: Collection[str]) -> Finding:
    """The finding of a check that had nothing to judge: the first of these calls that failed, or else why not.

    A sync that is meant to fail is none of them.
    """
    broken = (
        call
        for call in evidence.calls()
        if call.method in methods
        and call.error is not None
        and call.request.get("fail_after_chunks") is None
        and not call.request.get("unfit")
    )
    return next(map(unexpected, broken), untestable(why))


def answers(evidence: Evidence, calls: Sequence[Call]) -> list[Answer]:
    """The rows of `calls`, whose results have the right shape. The reference renders prompts of chat messages."""
    wanted, known = {call.id for call in calls}, _known(evidence)
    found = []
    for row in matching.rows(evidence):
        if row.call.id in wanted:
            at = (row.call.id, row.index)
            if at not in known:
                known[at] = _answer(evidence, row)
            found.append(known[at])
    return found


@kept
def _known(_evidence: Evidence) -> dict[tuple[int, int], Answer]:
    """Cache of answers, shared by the checks of one scenario: (call id, row) → answer."""
    return {}


def _answer(evidence: Evidence, row: matching.Row) -> Answer:
    text, logprobs = (_choice if row.call.method in CHOICES else _listed)(row)
    return Answer(
        call=row.call,
        index=row.index,
        prompt=_prompt(evidence, row),
        tokens=_tokens(evidence, row),
        text=text,
        finish_reason=row.finish_reason,
        logprobs=logprobs,
        params=row.params,
        version=evidence.version_at(row.call.started_ns),
        adapter=evidence.adapter_at(row.call),
        quantization=evidence.header.topology.quantization,
        routed=evidence.followed(row.routed),
    )


def _tokens(evidence: Evidence, row: matching.Row) -> list[int]:
    """The row's tokens as returned; for a body with text only, as the engine made them."""
    if row.tokens is not None or row.call.method not in CHOICES:
        return list(row.tokens or ())
    return [token for execution in matching.assignment(evidence).of(row) for token in execution.tokens]


def _prompt(evidence: Evidence, row: matching.Row) -> list[int]:
    if row.prompt is None and row.call.method == "completion":
        raise UnansweredQuery(f"encoding of the prompts of call {row.call.id}")
    if row.prompt is None:
        request = row.call.request
        messages = request["prompts"][row.index] if row.call.method == "generate" else request["body"]["messages"]
        return evidence.reference.render(messages)
    return list(row.prompt)


def _listed(row: matching.Row) -> tuple[str | None, list[Any] | None]:
    result = row.call.result or {}
    texts, logprobs = result.get("responses"), result.get("response_logprobs")
    return None if texts is None else texts[row.index], None if logprobs is None else logprobs[row.index]


def _choice(row: matching.Row) -> tuple[str | None, list[Any] | None]:
    choice = choices(row.call)[row.index]
    message = choice.get("message") or {}
    return choice["text"] if "text" in choice else message.get("content"), None


def choices(call: Call) -> list[dict[str, Any]]:
    """The choices of a completion or chat completion, in the listed order."""
    body = (call.result or {}).get("body")
    found = body.get("choices") if isinstance(body, dict) else None
    return [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []


def asked_rows(call: Call) -> int:
    """How many rows this call asked for."""
    if call.method == "sample":
        return int(call.request["num_samples"])
    if call.method in CHOICES:
        body = call.request["body"]
        prompt = body.get("prompt") if call.method == "completion" else None
        batched = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
        return (len(prompt) if batched and prompt else 1) * matching.copies_of(body)
    return len(call.request.get("prompt_token_ids") or call.request.get("prompts") or ())


def _shape(call: Call) -> str | None:
    return _shape_of_body(call) if call.method in CHOICES else _shape_of_lists(call)


def _shape_of_body(call: Call) -> str | None:
    body, rows = (call.result or {}).get("body"), asked_rows(call)
    if not isinstance(body, dict):
        return "returned no body"
    if matching.is_error(body):
        return f"was answered with {matching.said_by(body)}"
    found = choices(call)
    if len(found) != rows:
        return f"returned {'fewer' if len(found) < rows else 'more'} choices than were asked for"
    if [choice.get("index") for choice in found] != list(range(rows)):
        return "returned choices whose indices are not 0, 1, … in the order of the prompts"
    return None


def _shape_of_lists(call: Call) -> str | None:
    result, rows = call.result or {}, asked_rows(call)
    ids = result.get("response_ids")
    if not isinstance(ids, list):
        return "returned no token ids"
    if len(ids) != rows:
        return f"returned {'fewer' if len(ids) < rows else 'more'} results than were asked for"
    for field in ("stop_reasons", "responses", "response_logprobs"):
        found = result.get(field)
        optional = field != "stop_reasons"
        if not (found is None and optional) and (not isinstance(found, list) or len(found) != rows):
            return f"returned another number of {field} than of results"
    return None


def _summary(call: Call) -> dict[str, Any]:
    result = call.result or {}
    if call.method in CHOICES:
        return {**call.named, "request": short(call.request), "returned": result.get("body")}
    counts = {name: len(value) for name, value in result.items() if isinstance(value, list)}
    lengths = [len(row) for row in result.get("response_ids") or ()][:32]
    return {**call.named, "rows asked for": asked_rows(call), "returned": counts, "lengths": lengths}


def short(request: dict[str, Any]) -> dict[str, Any]:
    """A request shortened for display: the first two rows of a batch, the first 32 tokens of a prompt."""

    def cut(value: Any, depth: int) -> Any:
        if isinstance(value, list):
            return [
                cut(v, depth + 1) for v in value[: 2 if depth == 0 and value and isinstance(value[0], list) else 32]
            ]
        if isinstance(value, dict):
            return {k: cut(v, depth) for k, v in value.items()}
        return value

    return {k: cut(v, 0) for k, v in request.items() if v is not None}
