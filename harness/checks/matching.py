"""Which engine execution served which row of which call. Checks that look at both sides start here.

A *row* is one response that a caller asked for: a prompt of generate(), one of the samples of sample(), a choice of
completion() or chat_completion(). Rows and executions are matched by prompt, tokens and time, never by ids, since an
id does not survive every hop. Rows with one prompt and one answer are interchangeable.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from harness.checks import trajectories
from harness.checks.base import Evidence, Execution, kept
from harness.contract.messages import METHODS, SessionId
from harness.records.recording import Call, saying
from harness.records.reference import EncodeRequest, Query, ReferenceBook, RenderRequest, Routed, UnansweredQuery
from harness.records.wire import SESSION

WITH_ROWS = tuple(name for name, method in METHODS.items() if method.answers is not None)
"""Calls whose result has one response per row. `http` calls of OpenAI routes are read as the OpenAI calls."""


SHAPING = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "truncate_prompt_tokens",
    }
)
"""Fields of an OpenAI body that make another prompt of the same input (vLLM documentation, OpenAI-Compatible Server)."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One response that a caller asked for.

    `prompt` is None for a text whose tokens the oracle was not asked for. `tokens` is None if the result shows text
    only; `count` is then their number from the usage, if it has one. `params` are the caller's.
    """

    call: Call
    index: int
    state: Literal["returned", "failed", "lost"]
    """Failed: the call raised or returned an error body. Lost: the call succeeded and this row is not in its result."""
    prompt: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    count: int | None
    finish_reason: str | None
    session: SessionId | None
    params: dict[str, Any]
    routed: Routed = []
    """The result's experts for each token fed to the model: the prompt and all but the last of `tokens`. Empty if the result names
    none, or not that many."""

    @property
    def shown(self) -> dict[str, Any]:
        """The row as evidence."""
        prompt = None if self.prompt is None else list(self.prompt[:16])
        return {"call": self.call.id, "method": self.call.method, "row": self.index, "prompt": prompt}


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Rows and the executions that served them. Every execution is in exactly one place."""

    rows: tuple[Row, ...]
    served: dict[tuple[int, int], list[Execution]]
    """(call id, row index) → its executions in order: one, or several if a client continued after an abort."""
    altered: list[tuple[Row, Execution]]
    """A returned row and an execution of its prompt that made other tokens."""
    repeated: list[Execution]
    """Executions of a requested prompt beyond those that rows account for."""
    strangers: list[Execution]
    """Executions of a prompt that no call requested."""
    aborted: list[Execution]
    """Executions that ended early and were started again. They belong to no row and are no fault."""

    def of(self, row: Row) -> list[Execution]:
        return self.served.get((row.call.id, row.index), [])

    def where(self, row: Row) -> list[Execution]:
        """The executions that took up the row, even if other tokens came back than they made: for routing."""
        return self.of(row) or [execution for other, execution in self.altered if other is row]


def is_error(body: dict[str, Any]) -> bool:
    """True if this OpenAI-style body is an error response (vLLM, ErrorResponse)."""
    return bool(body.get("error")) or body.get("object") == "error"


def error_in(body: dict[str, Any]) -> tuple[str, str, int | None]:
    """Type, message and code of an error response."""
    inner = body["error"] if isinstance(body.get("error"), dict) else body
    code = inner.get("code")
    return str(inner.get("type") or ""), str(inner.get("message") or ""), code if isinstance(code, int) else None


def said_by(body: dict[str, Any]) -> str:
    """As `CallError.said`, of an error response."""
    return saying(*error_in(body))


def queries(evidence: Evidence) -> Iterator[Query]:
    """The questions for the token ids of text and chat prompts."""
    for call in evidence.calls():
        if call.method in WITH_ROWS:
            yield from _text_queries(call)
    yield from trajectories.queries(evidence)


def _text_queries(call: Call) -> Iterator[RenderRequest | EncodeRequest]:
    request = call.request
    match call.method:
        case "generate":
            yield from (asked for p in request.get("prompts") or () if (asked := conversation(p)))
        case "chat_completion":
            if asked := conversation(request["body"].get("messages"), request["body"].get("tools")):
                yield asked
        case "completion":
            special = bool(request["body"].get("add_special_tokens", True))
            for prompt in _prompts(request["body"].get("prompt")):
                if isinstance(prompt, str):
                    yield EncodeRequest(text=prompt, add_special_tokens=special)
        case _:
            pass


def conversation(messages: Any, tools: Any = None) -> RenderRequest | None:
    """What the oracle is asked to render; None for what it cannot: a message with another field, or another kind of content or tool.

    Parts of a text are joined by newlines (vLLM documentation, OpenAI-Compatible Server: --chat-template-content-format "string").
    """
    if not isinstance(messages, list) or not messages or not (tools is None or isinstance(tools, list)):
        return None
    said = [found for message in messages if (found := _message(message)) is not None]
    offered = tuple(tool for tool in tools or () if _is_whole(tool))
    whole = len(said) == len(messages) and len(offered) == len(tools or ())
    return RenderRequest(messages=said, tools=offered) if whole else None


def _message(message: Any) -> dict[str, Any] | None:
    """The message as a template reads it; None if the oracle cannot tell."""
    match message:
        case {"role": str(role), **others} if {*others} <= {"content", *OF_ROLE.get(role, ())}:
            content = _text_of(others.get("content"))
            calls = _calls(others.get("tool_calls") or [])
        case _:
            return None
    if calls is None or not (isinstance(content, str) or (content is None and calls)):
        return None
    found: dict[str, Any] = {"role": role, "content": content or ""}
    if calls:
        found["tool_calls"] = calls
    if reasoning := others.get("reasoning"):
        found["reasoning_content"] = reasoning
    if tool := others.get("tool_call_id"):
        found["tool_call_id"] = tool
    return found


OF_ROLE = {"assistant": ("tool_calls", "reasoning"), "tool": ("tool_call_id",)}
"""Role → what its messages may have beside a content (OpenAI API reference, chat completions; vLLM documentation, Reasoning Outputs).
Templates know earlier reasoning by the name that it had before, `reasoning_content`."""


def _calls(calls: Any) -> list[dict[str, Any]] | None:
    """An assistant's calls of tools with their arguments as objects, as templates read them (Transformers documentation, Tool use);
    None if the oracle cannot tell."""
    try:
        return [
            call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    except (TypeError, KeyError, ValueError):
        return None


def _is_whole(tool: Any) -> bool:
    """True for a tool that a template sees as the caller wrote it: with each of its fields, in the order of the API reference. Servers
    may fill in others."""
    match tool:
        case {"type": "function", "function": {"name": str(), "description": str(), "parameters": dict(), **others}}:
            in_order = [*tool] == ["type", "function"] and [*tool["function"]][:3] == [
                "name",
                "description",
                "parameters",
            ]
            return in_order and {*others} <= {"strict"}
        case _:
            return False


def _text_of(content: Any) -> Any:
    """A content's text, if it is parts of one; what it is otherwise."""
    if not isinstance(content, list) or not content:
        return content
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else content  # type: ignore[arg-type]


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of a completion body: text or token ids, single or batched (OpenAI completions API)."""
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        return prompt
    return [prompt]


def _asked(ask: Callable[[], list[int]]) -> tuple[int, ...] | None:
    try:
        return tuple(ask())
    except UnansweredQuery:
        return None


def _rendered(messages: Any, tools: Any, book: ReferenceBook) -> tuple[int, ...] | None:
    said = conversation(messages, tools)
    return None if said is None else _asked(lambda: book.render(said.messages, tools=said.tools))


@kept
def rows(evidence: Evidence) -> tuple[Row, ...]:
    """Every row that the scenario asked for, in order of its calls' start. Shared by the checks of one scenario."""
    found: list[Row] = []
    for call in evidence.calls():
        match call.method:
            case "generate":
                found.extend(_generate_rows(call, evidence.reference))
            case "sample":
                found.extend(_sample_rows(call))
            case "completion" | "chat_completion":
                found.extend(_openai_rows(call, evidence.reference))
            case "gym_generate":
                found.extend(_gym_rows(call, evidence))
            case _:
                pass
    return tuple(found)


def _generate_rows(call: Call, book: ReferenceBook) -> Iterable[Row]:
    ids, said = call.request.get("prompt_token_ids"), call.request.get("prompts") or []
    prompts = [_rendered(messages, None, book) for messages in said] if ids is None else [tuple(p) for p in ids]
    sessions = call.request.get("session_ids") or []
    for index, prompt in enumerate(prompts):
        session = sessions[index] if index < len(sessions) else None
        yield _row(call, index, prompt, session, call.request.get("sampling_params") or {})


def _sample_rows(call: Call) -> Iterable[Row]:
    for index in range(call.request["num_samples"]):
        prompt = tuple(call.request["prompt_token_ids"])
        yield _row(call, index, prompt, call.request.get("session_id"), call.request.get("sampling_params") or {})


def _row(call: Call, index: int, prompt: tuple[int, ...] | None, session: Any, params: dict[str, Any]) -> Row:
    result = call.result
    tokens = reason = None
    state: Literal["returned", "failed", "lost"] = "failed"
    if call.error is None and result is not None:
        state = "returned" if index < len(result.get("response_ids") or ()) else "lost"
    if state == "returned":
        assert result is not None
        tokens = tuple(result["response_ids"][index])
        reasons = result.get("stop_reasons") or ()
        reason = reasons[index] if index < len(reasons) else None
    return Row(
        call=call,
        index=index,
        state=state,
        prompt=prompt,
        tokens=tokens,
        count=None if tokens is None else len(tokens),
        finish_reason=reason,
        session=session,
        params=params,
        routed=_routed(result, index, len(prompt or ()) + len(tokens or ()) - 1),
    )


def _routed(result: Any, index: int, fed: int) -> Routed:
    named = (result or {}).get("routed_experts") or ()
    found = named[index] if index < len(named) else None
    return found if found and len(found) == fed else []


def _gym_rows(call: Call, evidence: Evidence) -> Iterable[Row]:
    """One row per turn. The prompts follow from the engines' tokens, not from the result."""
    params = call.request.get("sampling_params") or {}
    try:
        found = [t for t in trajectories.trajectories(evidence) if t.call.id == call.id]
    except UnansweredQuery:
        found = []
    if not found:
        for index, messages in enumerate(call.request["prompts"]):
            yield _row(call, index, _asked(lambda m=messages: evidence.reference.render(m)), None, params)  # type: ignore[misc]
        return
    returned, reasons = (call.result or {}).get("response_ids") or [], (call.result or {}).get("stop_reasons") or []
    number = 0
    for trajectory in found:
        there = trajectory.index < len(returned)
        left = tuple(returned[trajectory.index]) if there else None
        for turn in trajectory.turns:
            claimed = None if left is None else left if turn.execution is None else left[: len(turn.kept)]
            if trajectory.retokenized is not None:
                claimed = None
            elif claimed is not None and left is not None:
                left = left[len(turn.kept) + len(turn.others) :]
                claimed += turn.tokens[len(turn.kept) :]
            last = turn is trajectory.turns[-1] and trajectory.index < len(reasons)
            made = None if turn.execution is None else turn.execution.finish_reason
            yield Row(
                call=call,
                index=number,
                state="failed" if call.error is not None else "returned" if there else "lost",
                prompt=turn.prompt,
                tokens=claimed,
                count=None if claimed is None else len(claimed),
                finish_reason=reasons[trajectory.index] if last else made,
                session=trajectory.session,
                params=params,
            )
            number += 1


def usual_prompts(call: Call, book: ReferenceBook) -> list[tuple[int, ...] | None]:
    """The prompts of an OpenAI call whose body has no field that shapes them. None: the oracle was not asked."""
    asked = call.request["body"]
    prompts: list[tuple[int, ...] | None]
    if call.method == "chat_completion":
        prompts = [_rendered(asked.get("messages"), asked.get("tools"), book)]
    else:
        special = bool(asked.get("add_special_tokens", True))
        prompts = [
            _asked(lambda p=p: book.encode(p, add_special_tokens=special))  # type: ignore[misc]
            if isinstance(p, str)
            else (tuple(p) if isinstance(p, list) and all(isinstance(token, int) for token in p) else None)
            for p in _prompts(asked.get("prompt"))
        ]
    return prompts


def copies_of(body: dict[str, Any]) -> int:
    """Choices per prompt that an OpenAI body asks for; 1 if its "n" is no such number, which the stack has to refuse."""
    wanted = body.get("n")
    return wanted if isinstance(wanted, int) and wanted > 0 else 1


def _openai_rows(call: Call, book: ReferenceBook) -> Iterable[Row]:
    asked = call.request["body"]
    answer = None if call.error is not None or call.result is None else call.result["body"]
    failed = answer is None or is_error(answer)
    prompts = usual_prompts(call, book)
    if any(asked.get(name) is not None for name in SHAPING):
        prompts = [None] * len(prompts)
    copies = 1 if failed else copies_of(asked)
    choices = {} if failed else {c.get("index", at): c for at, c in enumerate((answer or {}).get("choices") or ())}
    usage = ((answer or {}).get("usage") or {}).get("completion_tokens")
    session = asked.get("session_id")
    if session is None:
        session = (call.request.get("headers") or {}).get(SESSION)
    for index in range(len(prompts) * copies):
        at = index // copies
        choice = choices.get(index)
        tokens = (choice or {}).get("token_ids")
        only = len(prompts) * copies == 1
        yield Row(
            call=call,
            index=index,
            state="failed" if failed else ("lost" if choice is None else "returned"),
            prompt=prompts[at],
            tokens=None if tokens is None else tuple(tokens),
            count=len(tokens) if tokens is not None else (usage if only else None),
            finish_reason=(choice or {}).get("finish_reason"),
            session=session[at] if isinstance(session, list) and at < len(session) else session,
            params=asked,
        )


@kept
def assignment(evidence: Evidence) -> Assignment:
    """Match the scenario's rows with its engines' executions. Pure; shared by the checks of one scenario."""
    return _Matcher(evidence).run()


class _Matcher:
    """One pass per kind of match, from the strictest to the loosest. Each execution is assigned once."""

    def __init__(self, evidence: Evidence) -> None:
        self.rows = rows(evidence)
        self.executions = sorted(evidence.executions, key=lambda e: e.started_ns)
        self.dropped = {
            (seen.server, request_id)
            for seen in evidence.trace.observations
            if seen.kind == "abort"
            for request_id in seen.data["request_ids"]
        }
        self.killed = {call.request["server"] for call in evidence.calls("kill_server") if call.error is None}
        self.by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, execution in enumerate(self.executions):
            self.by_prompt[execution.prompt].append(number)
        self.taken: set[int] = set()
        self.served: dict[tuple[int, int], list[Execution]] = {}
        self.altered: list[tuple[Row, Execution]] = []

    def run(self) -> Assignment:
        returned = [r for r in self.rows if r.state == "returned"]
        for row in (r for r in returned if r.prompt is not None and r.tokens is not None):
            self._give(row, self._direct(row)) or self._give(row, self._chain(row))
        for row in (r for r in returned if r.prompt is not None and r.tokens is None):
            self._give(row, self._pick(row, lambda e, r=row: r.count is None or len(e.tokens) == r.count))  # type: ignore[misc]
        for row in (r for r in returned if r.prompt is None):
            self._give(row, self._by_answer(row))
        for row in (r for r in self.rows if r.state == "failed" and r.prompt is not None):
            self._give(row, self._tried(row))
        for row in (r for r in self.rows if r.state != "failed" and (r.call.id, r.index) not in self.served):
            for number in self._pick(row, lambda _: True):
                self.taken.add(number)
                self.altered.append((row, self.executions[number]))
        return self._rest()

    def _give(self, row: Row, numbers: list[int]) -> bool:
        if numbers:
            self.taken.update(numbers)
            self.served[row.call.id, row.index] = [self.executions[n] for n in numbers]
        return bool(numbers)

    def _open(self, row: Row, prompt: tuple[int, ...]) -> Iterator[int]:
        for number in self.by_prompt.get(prompt, ()):
            if number not in self.taken and self._in_time(row, self.executions[number]):
                yield number

    @staticmethod
    def _in_time(row: Row, execution: Execution) -> bool:
        """True if the execution started while the row's call was pending. A failed batch may have rows that start later."""
        late = row.state == "failed"
        return row.call.started_ns <= execution.started_ns and (late or execution.started_ns <= row.call.ended_ns)

    def _pick(self, row: Row, fits: Callable[[Execution], bool]) -> list[int]:
        if row.prompt is None:
            return []
        return next(([n] for n in self._open(row, row.prompt) if fits(self.executions[n])), [])

    def _direct(self, row: Row) -> list[int]:
        """One execution with the row's tokens. An engine may run past a stop string, which vLLM finds later."""

        def alike(e: Execution) -> bool:
            return e.tokens == row.tokens and e.finish_reason == row.finish_reason

        seed = row.params.get("seed")
        own = [] if seed is None else self._pick(row, lambda e: alike(e) and e.sampling_params.get("seed") == seed)
        same_end = own or self._pick(row, alike)  # two samples of one prompt may be equal: each has its own seed
        same = same_end or self._pick(row, lambda e: e.tokens == row.tokens)
        return same or (
            self._pick(row, lambda e: row.tokens == e.tokens[: len(row.tokens or ())])
            if row.finish_reason == "stop" and row.tokens and row.params.get("stop")
            else []
        )

    def _chain(self, row: Row) -> list[int]:
        """Executions that each continue where the one before was aborted: a client's retry with accumulated tokens."""
        assert row.prompt is not None
        assert row.tokens is not None
        done: tuple[int, ...] = ()
        numbers: list[int] = []
        while True:
            left = row.tokens[len(done) :]
            for number in self._open(row, row.prompt + done):
                execution = self.executions[number]
                if number in numbers:
                    continue
                if execution.tokens == left and numbers:
                    return [*numbers, number]
                if self._ended_early(execution) and execution.tokens == left[: len(execution.tokens)]:
                    numbers.append(number)  # an execution aborted before its first token belongs to the chain too
                    done += execution.tokens
                    break
            else:
                return []

    def _tried(self, row: Row) -> list[int]:
        """For a row without an answer: an execution of its prompt, and those that each continue where the one before was aborted."""
        assert row.prompt is not None
        numbers = self._pick(row, lambda e: not self._ended_early(e)) or self._pick(row, lambda _: True)
        done: tuple[int, ...] = ()
        while numbers and self._ended_early(last := self.executions[numbers[-1]]) and last.tokens:
            done += last.tokens
            following = next(self._open(row, row.prompt + done), None)
            if following is None:
                break
            numbers.append(following)
        return numbers

    def _by_answer(self, row: Row) -> list[int]:
        """For a prompt of unknown tokens: an execution in time with the row's answer, whose prompt no row has."""
        claimed = {r.prompt for r in self.rows}
        for number, execution in enumerate(self.executions):
            if number in self.taken or execution.prompt in claimed:
                continue
            if not self._in_time(row, execution):
                continue
            if row.tokens is not None and execution.tokens != row.tokens:
                continue
            if row.count is not None and len(execution.tokens) != row.count:
                continue
            return [number]
        return []

    def _ended_early(self, execution: Execution) -> bool:
        """True if the execution was aborted, was dropped by its frontend, or died with its server."""
        died = execution.finish_reason is None and execution.server in self.killed
        dropped = (execution.server, execution.request_id) in self.dropped
        return execution.finish_reason == "abort" or dropped or died

    def _rest(self) -> Assignment:
        asked = {r.prompt for r in self.rows if r.prompt is not None}
        repeated, strangers, aborted = [], [], []
        for number, execution in enumerate(self.executions):
            if number in self.taken:
                continue
            known = execution.prompt in asked
            if known and self._ended_early(execution):
                aborted.append(execution)
            elif known:
                repeated.append(execution)
            else:
                strangers.append(execution)
        return Assignment(
            rows=self.rows,
            served=self.served,
            altered=self.altered,
            repeated=repeated,
            strangers=strangers,
            aborted=aborted,
        )
