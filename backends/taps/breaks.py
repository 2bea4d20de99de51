"""Effects of the tap's seeded faults on a call in flight, over HTTP or over an engine's methods.

A `Break` is a few lines on an `Exchange`. `backends.taps.faults` names the checks that must catch it; `tap` carries the calls.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.contract.messages import HopFault, HopForm

DATA = frozenset({"generate", "completion", "chat_completion"})
"""sample() counts as "generate": it uses the same endpoint of a server and the same columns of an engine."""
OPENAI = frozenset({"completion", "chat_completion"})
GENERATE = frozenset({"generate"})
CONTROL = frozenset({"pause", "resume", "sleep", "wake_up", "reset_prefix_cache"})
SYNC = frozenset({"sync"})

SLOW_S = 1.5
"""Delay of an answer under `slow` (seconds): ten times the duration of a short answer of the tiny model."""
LATE_S = 0.3
"""Seconds until the headers of a slow answer, longer than a short answer of the tiny model takes."""
PARTNER_S = 2.0
"""Longest time (seconds) that an answer waits for another one to be swapped with."""
SESSION = "x-session-id"
"""Header in which SkyRL's client sends the session to the router."""
SKIPPED = "model.layers.0.self_attn.rotary_emb.inv_freq"
"""A parameter name that vLLM's loaders skip: the engine receives weights under this name and does not load them."""
LONE = "model.norm.weight"
"""A parameter that vLLM fuses with no other, in the models that SkyRL trains (Llama, Qwen)."""

Document = dict[str, Any]


@dataclass
class Row:
    """One response within an answer. Fields that the answer lacks are None; `rest` is the whole choice, with its other fields."""

    tokens: list[int] | None = None
    text: str | None = None
    reason: str | None = None
    logprobs: list[float] | None = None
    index: int | None = None
    rest: dict[str, Any] = field(default_factory=dict)


class Exchange(ABC):
    """One call in flight. `server` is the engine's number; None for the hop between client and router."""

    op: str
    server: int | None
    injection: Injection
    budget: int | None = None
    """max_tokens of a data-plane call, if given."""

    @abstractmethod
    async def forward(self) -> Any:
        """The engine's whole answer. Each call of `forward` sends the call once more. Raises the engine's errors."""

    @abstractmethod
    def document(self, answer: Any) -> Document | None:
        """The answer as a JSON object or columns; None if it is an error or something else."""

    @abstractmethod
    def with_document(self, answer: Any, document: Document) -> Any:
        """The answer with this content instead."""

    @abstractmethod
    def accepted(self) -> Any:
        """A success answer that no engine gave."""

    @abstractmethod
    def failed(self) -> Any:
        """A server error: returned over HTTP, raised by an engine's method."""

    @abstractmethod
    def cut(self, answer: Any) -> Any:
        """The answer with its connection lost in the middle."""

    @abstractmethod
    def is_error(self, answer: Any) -> bool: ...

    @abstractmethod
    def emptied(self) -> Document:
        """A success whose rows have no tokens."""

    @abstractmethod
    def rename_parameters(self, rename: Callable[[str], str]) -> None:
        """Change the parameter names of a weight update before it is forwarded."""

    @abstractmethod
    def reform(self, form: HopForm) -> None:
        """Give the request this form. Only HTTP has forms."""

    @abstractmethod
    def broken(self, fault: HopFault, answer: Any) -> Any:
        """What the caller gets under a fault of a hop; `answer` is the engine's, or None if it was not asked."""

    def set_header(self, name: str, value: str | None) -> bool:
        """Replace a header of the request, or drop it. True if it was there before. Only HTTP has headers."""
        raise NotImplementedError(f"no header {name} = {value} on this wire")

    def has_header(self, name: str) -> bool:
        raise NotImplementedError(f"no header {name} on this wire")

    def strike(self) -> None:
        """Count that the fault took effect."""
        self.injection.fired += 1


Act = Callable[[Exchange], Awaitable[Any]]


@dataclass(frozen=True)
class Break:
    """Runs `act` on exchanges of these `ops`, at most `times` per tap. `where` is any engine, the first engine only, or the hop in
    front of the router. Data-plane requests for a single token always pass, because the clean room's canary is such a request.
    """

    act: Act
    ops: frozenset[str] = DATA
    where: Literal["engines", "first_engine", "router"] = "engines"
    times: int | None = None

    def strikes(self, exchange: Exchange) -> bool:
        here = {"engines": exchange.server is not None, "first_engine": exchange.server == 0}
        spent = self.times is not None and exchange.injection.fired >= self.times
        canary = exchange.op in DATA and exchange.budget == 1
        return exchange.op in self.ops and here.get(self.where, exchange.server is None) and not spent and not canary


class Injection:
    """One fault, from the moment it is switched on until the next one is. Calls that it holds are released then."""

    def __init__(self, chosen: Break | None = None) -> None:
        self.chosen = chosen
        self.fired = 0
        self.over = asyncio.Event()
        self.waiting: asyncio.Future[Any] | None = None
        """The call that waits for a partner to swap answers with (`swapped_between_requests`)."""


def of_hop(fault: HopFault) -> Break:
    """The effect of a fault that a scenario chose. It strikes once per tap."""

    async def act(exchange: Exchange) -> Any:
        exchange.strike()
        if fault.connection == "hanging":
            return await hung(exchange)
        if fault.form is not None:
            exchange.reform(fault.form)
        answer = await exchange.forward() if fault.moment == "after" or fault.connection == "whole" else None
        if fault.form == "slow":
            await asyncio.sleep(LATE_S)
        return exchange.broken(fault, answer)

    if fault.call != "request":
        return Break(act, ops=frozenset({fault.call}), where="first_engine", times=1)
    return Break(act, where="router" if fault.hop == "router" else "engines", times=1)


# --- acts on the call itself


async def slow(exchange: Exchange) -> Any:
    exchange.strike()
    await asyncio.sleep(SLOW_S)
    return await exchange.forward()


async def hang(exchange: Exchange) -> Any:
    exchange.strike()
    return await hung(exchange)


async def hung(exchange: Exchange) -> Any:
    await exchange.injection.over.wait()
    return await exchange.forward()


async def executed_twice(exchange: Exchange) -> Any:
    exchange.strike()
    await exchange.forward()
    return await exchange.forward()


async def swallowed(exchange: Exchange) -> Any:
    exchange.strike()
    return exchange.accepted()


async def refused(exchange: Exchange) -> Any:
    exchange.strike()
    return exchange.failed()


async def failed_after_execution(exchange: Exchange) -> Any:
    exchange.strike()  # before the call runs: calls that arrive meanwhile are not the first
    await exchange.forward()
    return exchange.failed()


async def disconnected(exchange: Exchange) -> Any:
    exchange.strike()
    return exchange.cut(await exchange.forward())


async def error_becomes_empty(exchange: Exchange) -> Any:
    try:
        answer = await exchange.forward()
        if not exchange.is_error(answer):
            return answer
    except Exception:  # noqa: BLE001 - this fault hides whatever an engine raises
        answer = exchange.accepted()
    exchange.strike()
    return exchange.with_document(answer, exchange.emptied())


async def session_dropped(exchange: Exchange) -> Any:
    if exchange.set_header(SESSION, None):
        exchange.strike()
    return await exchange.forward()


async def session_renamed(exchange: Exchange) -> Any:
    if exchange.has_header(SESSION):
        exchange.set_header(SESSION, uuid.uuid4().hex)
        exchange.strike()
    return await exchange.forward()


async def one_session_for_all(exchange: Exchange) -> Any:
    if not exchange.has_header(SESSION):
        exchange.set_header(SESSION, "everybody")
        exchange.strike()
    return await exchange.forward()


async def swapped_between_requests(exchange: Exchange) -> Any:
    """Two callers of one server get each other's answers."""
    answer, injection = await exchange.forward(), exchange.injection
    if injection.waiting is not None:
        partner, injection.waiting = injection.waiting, None
        mine: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        partner.set_result((answer, mine))
        exchange.strike()
        return await mine
    waiting = injection.waiting = asyncio.get_running_loop().create_future()
    try:
        async with asyncio.timeout(PARTNER_S):
            other, mine = await waiting
    except TimeoutError:
        injection.waiting = None
        return answer
    mine.set_result(answer)
    return other


def renaming(rename: Callable[[str], str]) -> Act:
    """Send a weight update under other names. The engine still takes part, so the others do not wait for it."""

    async def act(exchange: Exchange) -> Any:
        exchange.strike()
        exchange.rename_parameters(rename)
        return await exchange.forward()

    return act


# --- acts on the answer


def editing(change: Callable[[Document], object]) -> Act:
    """Change the content of good answers in place."""

    async def act(exchange: Exchange) -> Any:
        answer = await exchange.forward()
        before = exchange.document(answer)
        after = copy.deepcopy(before)
        if after is None or before is None:
            return answer
        change(after)
        if after == before:
            return answer
        exchange.strike()
        return exchange.with_document(answer, after)

    return act


def editing_rows(change: Callable[[list[Row]], object]) -> Act:
    """Change the rows of good answers in place."""

    def of_document(document: Document) -> None:
        rows = rows_of(document)
        change(rows)
        put_rows(document, rows)

    return editing(of_document)


def rows_of(document: Document) -> list[Row]:
    """The responses of an answer: a server's choices, or an engine's columns."""
    if "choices" in document:
        return [_row_of(choice) for choice in document["choices"]]
    columns = [document.get(name) for name in COLUMNS]
    count = len(document.get("response_ids") or ())
    values = [list(column) if column is not None else [None] * count for column in columns]
    return [
        Row(tokens=list(tokens), text=text, reason=reason, logprobs=None if logprobs is None else list(logprobs))
        for tokens, text, reason, logprobs in zip(*values, strict=True)
    ]


COLUMNS = ("response_ids", "responses", "stop_reasons", "response_logprobs")
"""SkyRL, InferenceEngineOutput."""


def _row_of(choice: dict[str, Any]) -> Row:
    tokens, content = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
    return Row(
        tokens=None if tokens is None else list(tokens),
        text=(choice.get("message") or choice).get("content" if "message" in choice else "text"),
        reason=choice.get("finish_reason"),
        logprobs=None if content is None else [entry["logprob"] for entry in content],
        index=choice.get("index"),
        rest=choice,
    )


def _choice_of(row: Row) -> dict[str, Any]:
    choice = copy.deepcopy(row.rest)
    changed = {"token_ids": row.tokens, "finish_reason": row.reason, "index": row.index}
    choice |= {name: value for name, value in changed.items() if name in choice}
    if row.logprobs is not None:
        entries = choice["logprobs"]["content"]
        choice["logprobs"]["content"] = [
            {**entry, "logprob": number} for entry, number in zip(entries, row.logprobs, strict=False)
        ]
    if "message" in choice:
        choice["message"]["content"] = row.text
    elif "text" in choice:
        choice["text"] = row.text
    return choice


def put_rows(document: Document, rows: list[Row]) -> None:
    """Put rows back where `rows_of` found them."""
    if "choices" in document:
        document["choices"] = [_choice_of(row) for row in rows]
        return
    columns = ([r.tokens for r in rows], [r.text for r in rows], [r.reason for r in rows], [r.logprobs for r in rows])
    for name, column in zip(COLUMNS, columns, strict=True):
        if document.get(name) is not None:
            document[name] = column


def long(rows: list[Row]) -> list[Row]:
    """Rows of more than one token."""
    return [row for row in rows if row.tokens is not None and len(row.tokens) > 1]


def another(token: int) -> int:
    """Another ordinary token id: a plain character in every byte-level vocabulary."""
    return token + 1 if token < 90 else 40 + token % 50


def edit_every_token(rows: list[Row]) -> None:
    for row in long(rows):
        row.tokens = [another(token) for token in row.tokens or ()]


def edit_one_token(rows: list[Row]) -> None:
    for row in long(rows)[:1]:
        assert row.tokens is not None
        row.tokens[-1] = another(row.tokens[-1])


def cut_short(rows: list[Row]) -> None:
    for row in long(rows):
        assert row.tokens is not None
        half = len(row.tokens) // 2
        row.tokens = row.tokens[:half]
        row.logprobs = None if row.logprobs is None else row.logprobs[:half]


def lower_logprobs(by: float) -> Callable[[list[Row]], None]:
    """Lower every log-probability by `by` nats."""

    def change(rows: list[Row]) -> None:
        for row in long(rows):
            row.logprobs = None if row.logprobs is None else [number - by for number in row.logprobs]

    return change


def logprobs_of_the_token_before(rows: list[Row]) -> None:
    for row in long(rows):
        row.logprobs = None if row.logprobs is None else [*row.logprobs[:1], *row.logprobs[:-1]]


def one_nan(rows: list[Row]) -> None:
    for row in long(rows)[:1]:
        if row.logprobs:
            row.logprobs[-1] = float("nan")


def other_reason(rows: list[Row]) -> None:
    for row in long(rows):
        row.reason = "stop" if row.reason == "length" else "length"


def other_text(rows: list[Row]) -> None:
    for row in rows:
        row.text = None if row.text is None else f"{row.text}~"


def lose_the_last(rows: list[Row]) -> None:
    del rows[-1:]


def double_the_last(rows: list[Row]) -> None:
    rows.extend(copy.deepcopy(rows[-1:]))


def swap_the_first_two(rows: list[Row]) -> None:
    if len(rows) > 1:
        rows[0], rows[1] = rows[1], rows[0]
        rows[0].index, rows[1].index = rows[1].index, rows[0].index


def shift_indices(rows: list[Row]) -> None:
    for row in rows:
        row.index = None if row.index is None else row.index + 1


def count_one_more(document: Document) -> None:
    if document.get("usage"):
        document["usage"]["completion_tokens"] += 1


BREAKS: dict[str, Break] = {
    "slow": Break(slow),
    "hang": Break(hang),
    "executed_twice": Break(executed_twice),
    "server_error/always": Break(refused),
    "server_error/in_front_of_the_router": Break(refused, where="router"),
    "server_error/first_time_after_execution": Break(failed_after_execution, times=1),
    "server_error/first_completion_after_execution": Break(failed_after_execution, ops=OPENAI, times=1),
    "disconnected/first_time": Break(disconnected, times=1),
    "error_becomes_empty": Break(error_becomes_empty),
    "result_lost": Break(editing_rows(lose_the_last)),
    "response_doubled": Break(editing_rows(double_the_last)),
    "results_swapped/within_an_answer": Break(editing_rows(swap_the_first_two)),
    "results_swapped/between_requests": Break(swapped_between_requests),
    "choice_index_wrong": Break(editing_rows(shift_indices), ops=OPENAI),
    "usage_wrong": Break(editing(count_one_more), ops=OPENAI),
    "text_not_of_tokens": Break(editing_rows(other_text)),
    "finish_reason_edited": Break(editing_rows(other_reason)),
    "tokens_edited/a_lot": Break(editing_rows(edit_every_token)),
    "tokens_edited/a_little": Break(editing_rows(edit_one_token)),
    "output_cut_short": Break(editing_rows(cut_short)),
    "logprobs_off_by_constant/a_lot": Break(editing_rows(lower_logprobs(0.5)), ops=GENERATE),
    "logprobs_off_by_constant/a_little": Break(editing_rows(lower_logprobs(2e-2)), ops=GENERATE),
    "logprobs_off_by_constant/a_hair": Break(editing_rows(lower_logprobs(2e-3)), ops=GENERATE),
    "logprobs_shifted": Break(editing_rows(logprobs_of_the_token_before), ops=GENERATE),
    "logprobs_nan": Break(editing_rows(one_nan), ops=GENERATE),
    "header_dropped/session": Break(session_dropped, where="router"),
    "session_moves": Break(session_renamed, where="router"),
    "one_server_gets_all": Break(one_session_for_all, where="router"),
    "control_swallowed/every_server": Break(swallowed, ops=CONTROL),
    "control_swallowed/one_server": Break(swallowed, ops=CONTROL, where="first_engine"),
    "pause_reaches_some": Break(swallowed, ops=frozenset({"pause"}), where="first_engine"),
    "stale_prefix_cache": Break(swallowed, ops=frozenset({"reset_prefix_cache"})),
    "sync_missed/one_server": Break(renaming(lambda _: SKIPPED), ops=SYNC, where="first_engine"),
    "sync_missed/every_server": Break(renaming(lambda _: SKIPPED), ops=SYNC),
    "parameter_not_updated": Break(renaming(lambda name: SKIPPED if name == LONE else name), ops=SYNC),
}
"""Id of a seeded fault → its effect."""
