"""Broken miniatures: each is a part that does one thing wrong, and says which checks must see it.

`seeded` registers a class as a fault: it replaces the part that it inherits from. Every time that it does wrong it counts
itself (`fired`), so that a fault which never took effect is not mistaken for one that was survived. Names are those
of the contract's promises; variants say where (one server), when (under load, the second time) and how much (a little).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from backends.miniature import model, tokenizer
from backends.miniature.client import Client, RetryingClient, error_body
from backends.miniature.engine import BadRequest, Engine, Output, Request
from backends.miniature.router import Router
from harness.contract import GenerateRequest, Generation, PauseMode, SampleRequest, SessionId
from harness.faults import Fault

Part = type[Engine] | type[Router] | type[Client]
T = TypeVar("T", bound=Part)

FAULTS: list[Fault] = []
RETRY_FAULTS: list[Fault] = []
_PARTS: dict[str, Part] = {}

ONE = "server-1"
"""The server that variants of one server break."""
MANY = 6
"""So many requests at one server are load."""


def seeded(name: str, variant: str = "", *, caught_by: Iterable[str], also: Iterable[str] = ()) -> Callable[[T], T]:
    """Register a part as a fault; its docstring says what breaks. A `RetryingClient` breaks the miniature that retries."""

    def register(part: T) -> T:
        fault = Fault(
            name=name,
            variant=variant,
            breaks=" ".join((part.__doc__ or "").split()),
            caught_by=frozenset(caught_by),
            also=frozenset(also),
        )
        (RETRY_FAULTS if issubclass(part, RetryingClient) else FAULTS).append(fault)
        _PARTS[fault.id] = part
        return part

    return register


def parts(fault: str, correct: Any) -> Any:
    """The parts of a miniature with one of them broken. Raises KeyError for a fault that is not seeded here."""
    broken = _PARTS[fault]
    for field, kind in (("engine", Engine), ("router", Router), ("client", Client)):
        if issubclass(broken, kind):
            return msgspec.structs.replace(correct, **{field: broken})
    raise TypeError(f"{broken} replaces no part")


# --- results, and who gets them -------------------------------------------------------------------------------------


@seeded("results_swapped", "in_a_batch", caught_by=["ordering"])
class FirstTwoSwapped(Client):
    """The first two results of every batch change places."""

    async def gather(self, calls: Any) -> list[Output]:
        rows = await super().gather(calls)
        if len(rows) > 1:
            self.fired += 1
            rows[0], rows[1] = rows[1], rows[0]
        return rows


@seeded("results_swapped", "under_load", caught_by=["ordering"])
class SwappedInLargeBatches(Client):
    """In batches of more than sixteen, the last two results change places."""

    async def gather(self, calls: Any) -> list[Output]:
        rows = await super().gather(calls)
        if len(rows) > 16:
            self.fired += 1
            rows[-2], rows[-1] = rows[-1], rows[-2]
        return rows


@seeded("results_swapped", "between_servers", caught_by=["ordering"])
class SwappedBetweenServers(Router):
    """Two responses that come from different servers at the same time change places."""

    _partner: tuple[Engine, asyncio.Future[Output], Output] | None = None

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        mine = await super().forward(engine, prompt, params, **more)
        if self._partner is not None and self._partner[0] is not engine:
            _, waiting, theirs = self._partner
            self._partner = None
            self.fired += 1
            waiting.set_result(mine)
            return theirs
        if self._partner is None:
            waiting = asyncio.get_running_loop().create_future()
            self._partner = (engine, waiting, mine)
            done, _ = await asyncio.wait({waiting}, timeout=0.002)
            if done:
                return waiting.result()
            self._partner = None
        return mine


@seeded("choice_index_wrong", "off_by_one", caught_by=["completion.envelope"])
class IndexFromOne(Client):
    """Choices are numbered from one."""

    def choice(self, index: int, row: Output, kind: str) -> dict[str, Any]:
        self.fired += 1
        return super().choice(index + 1, row, kind)


@seeded("choice_index_wrong", "all_zero", caught_by=["completion.envelope"])
class IndexAlwaysZero(Client):
    """Every choice of a batch is number zero, as a sub-request numbers its own."""

    def choice(self, index: int, row: Output, kind: str) -> dict[str, Any]:
        self.fired += index > 0
        return super().choice(0, row, kind)


@seeded("choice_index_wrong", "reversed", caught_by=["ordering"])
class ChoicesReversed(Client):
    """The choices of a batch are listed, and numbered, from the last prompt to the first."""

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await super().completion(body)
        if len(answer.get("choices", ())) > 1:
            self.fired += 1
            answer["choices"] = [c | {"index": i} for i, c in enumerate(reversed(answer["choices"]))]
        return answer


@seeded("usage_wrong", "first_prompt_only", caught_by=["completion.usage"])
class UsageOfTheFirst(Client):
    """The usage of a batch counts the prompt of its first row alone."""

    def usage(self, rows: list[Output]) -> dict[str, int]:
        self.fired += len(rows) > 1
        return super().usage(rows) | {"prompt_tokens": len(rows[0].prompt)}


@seeded("usage_wrong", "counted_twice", caught_by=["completion.usage", "chat_completion.usage"])
class UsageTwice(Client):
    """The usage counts generated tokens twice."""

    def usage(self, rows: list[Output]) -> dict[str, int]:
        self.fired += 1
        honest = super().usage(rows)
        made = 2 * honest["completion_tokens"]
        return honest | {"completion_tokens": made, "total_tokens": honest["prompt_tokens"] + made}


@seeded("envelope_incomplete", caught_by=["completion.envelope", "chat_completion.envelope"])
class NoModelInTheBody(Client):
    """OpenAI bodies come without the model's name."""

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        answer = await super()._answered(body, prompts, kind)
        if answer.pop("model", None):
            self.fired += 1
        return answer


@seeded("result_lost", "last_row", caught_by=["conservation"])
class LastRowLost(Client):
    """A batch of several rows comes back without the last one."""

    def generation(self, rows: list[Output]) -> Generation:
        if len(rows) > 1:
            self.fired += 1
            rows = rows[:-1]
        return super().generation(rows)


@seeded("result_lost", "empty_row", caught_by=["conservation"])
class RowEmptied(Client):
    """Under load, one row comes back without its tokens."""

    def generation(self, rows: list[Output]) -> Generation:
        if len(rows) > MANY:
            self.fired += 1
            rows[MANY].tokens, rows[MANY].text = [], ""
        return super().generation(rows)


@seeded("executed_twice", "always", caught_by=["conservation"])
class ExecutedTwice(Router):
    """Every request is sent to a server twice, and one of the answers is thrown away."""

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        self.fired += 1
        once, _ = await asyncio.gather(
            super().forward(engine, prompt, params, **more), super().forward(engine, prompt, params, **more)
        )
        return once


@seeded("executed_twice", "under_load", caught_by=["conservation"])
class ExecutedTwiceUnderLoad(Router):
    """A request that finds its server busy is sent again."""

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        busy = len(engine.running) >= MANY
        answer = await super().forward(engine, prompt, params, **more)
        if busy:
            self.fired += 1
            await super().forward(engine, prompt, params, **more)
        return answer


@seeded("output_cut_short", "last_token", caught_by=["conservation"])
class LastTokenCut(Client):
    """Answers of more than eight tokens come back without the last one."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await super().row(session, prompt, params, **more)
        if len(done.tokens) > 8:
            self.fired += 1
            done.tokens = done.tokens[:-1]
        return done


@seeded("output_cut_short", "under_load", caught_by=["stopping"])
class CutShortUnderLoad(Engine):
    """A busy engine ends requests one token before their length."""

    def ended(self, request: Request) -> Any:
        reason = super().ended(request)
        if (
            reason is None
            and len(self.running) > MANY
            and len(request.tokens) == request.params.get("max_tokens", 16) - 1
        ):
            self.fired += 1
            return "length"
        return reason


# --- routing --------------------------------------------------------------------------------------------------------


class _Turns(Router):
    """Counts the turns of each session."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self.turns: dict[SessionId, int] = {}

    def next_to(self, engine: Engine) -> Engine:
        self.fired += 1
        return self.engines[(self.engines.index(engine) + 1) % len(self.engines)]


@seeded("session_moves", "second_turn", caught_by=["sticky_sessions"])
class SessionMovesOnItsSecondTurn(_Turns):
    """A session's first turn runs on another server than the later ones."""

    def server_of(self, session: SessionId | None) -> Engine:
        engine = super().server_of(session)
        if session is None:
            return engine
        self.turns[session] = self.turns.get(session, 0) + 1
        return self.next_to(engine) if self.turns[session] == 2 else engine


@seeded("session_moves", "under_load", caught_by=["sticky_sessions"])
class SessionMovesUnderLoad(_Turns):
    """A session whose server is busy goes to another one."""

    def server_of(self, session: SessionId | None) -> Engine:
        engine = super().server_of(session)
        return self.next_to(engine) if session is not None and len(engine.running) + len(engine.waiting) > 3 else engine


@seeded("session_moves", "falsy_id", caught_by=["sticky_sessions"])
class FalsySessionsAreNone(Router):
    """The session ids 0 and "" count as no session."""

    def server_of(self, session: SessionId | None) -> Engine:
        self.fired += session is not None and not session
        return super().server_of(session or None)


@seeded("integer_session_apart", caught_by=["integer_is_its_text"])
class IntegersHashedByType(Router):
    """The session ids 7 and "7" are two sessions."""

    def hashed(self, session: SessionId) -> int:
        self.fired += isinstance(session, int)
        return super().hashed(f"{type(session).__name__} {session}")


@seeded("one_server_gets_all", "without_session", caught_by=["sessionless_spread"])
class SessionlessToTheFirst(Router):
    """All requests without a session go to the first server."""

    def server_of(self, session: SessionId | None) -> Engine:
        if session is None:
            self.fired += 1
            return self.engines[0]
        return super().server_of(session)


@seeded("one_server_gets_all", "by_content", caught_by=["sessionless_spread"])
class SessionlessByContent(Router):
    """Requests without a session go by a hash of their prompt: all samples of a prompt load one server."""

    async def generate(
        self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any
    ) -> Output:
        self.fired += session is None
        return await super().generate(f"prompt {prompt}" if session is None else session, prompt, params, **more)


@seeded("one_server_gets_all", "sessions", caught_by=["sessions_spread"])
class SessionsToTheFirst(Router):
    """Every session is hashed to the first server."""

    def hashed(self, session: SessionId) -> int:
        self.fired += 1
        return 0


# --- pausing --------------------------------------------------------------------------------------------------------


@seeded("tokens_lost_on_continuation", "keep", caught_by=["pause_changes_nothing"])
class TokenLostOnResume(Engine):
    """A request that was frozen has forgotten its last token when it goes on."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            if len(request.tokens) > 1:
                self.fired += 1
                request.tokens.pop()
                request.logprobs.pop()
        await super().resume_generation()


@seeded("tokens_doubled_on_continuation", "keep", caught_by=["pause_changes_nothing"])
class TokenDoubledOnResume(Engine):
    """A request that was frozen says its last token once more when it goes on."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            if request.tokens:
                self.fired += 1
                request.tokens.append(request.tokens[-1])
                request.logprobs.append(request.logprobs[-1])
        await super().resume_generation()


@seeded("budget_not_reduced", "keep", caught_by=["pause_changes_nothing"])
class BudgetRenewedOnResume(Engine):
    """A request that was frozen is given its whole budget again."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            self.fired += 1
            request.params["max_tokens"] = request.params.get("max_tokens", 16) + len(request.tokens)
        await super().resume_generation()


@seeded("abort_leaks", "keep", caught_by=["pause_changes_nothing", "all_complete"])
class KeepAborts(Engine):
    """pause(keep) ends requests as pause(abort) does."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        self.fired += mode == "keep" and bool(self.running)
        await super().pause_generation(mode="abort" if mode == "keep" else mode, clear_cache=clear_cache)


@seeded("abort_leaks", "wait", caught_by=["wait_lets_finish"])
class WaitAborts(Engine):
    """pause(wait) ends requests as pause(abort) does."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        self.fired += mode == "wait" and bool(self.running)
        await super().pause_generation(mode="abort" if mode == "wait" else mode, clear_cache=clear_cache)


@seeded("partial_answers_lost", "emptied", caught_by=["conservation"])
class PartialAnswersEmptied(Engine):
    """What pause(abort) cut short comes back without the tokens that were made."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        if done.reason == "abort":
            self.fired += 1
            done.tokens, done.text = [], ""
        return done


@seeded("partial_answers_lost", "renamed", caught_by=["abort_returns_partial"])
class AbortCalledLength(Client):
    """What pause(abort) cut short says that it reached its length."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await super().row(session, prompt, params, **more)
        if done.reason == "abort":
            self.fired += 1
            done.reason = "length"
        return done


@seeded("pause_reaches_some", "one_server", caught_by=["fan_out"])
class PauseMissesOne(Client):
    """pause() is sent to all servers but one."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if op == "pause_generation" and engine.name == ONE:
            self.fired += 1
            return
        await super().tell(engine, op, **arguments)


@seeded("pause_reaches_some", "answered_and_ignored", caught_by=["frozen_while_paused"])
class PauseIgnored(Engine):
    """One server answers pause() and goes on."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        if self.name != ONE:
            await super().pause_generation(mode=mode, clear_cache=clear_cache)
        else:
            self.fired += 1


@seeded("control_doubled", caught_by=["fan_out"])
class ControlTwice(Client):
    """Control calls reach one server twice."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        await super().tell(engine, op, **arguments)
        if engine.name == ONE and op in ("pause_generation", "reset_prefix_cache", "sleep"):
            self.fired += 1
            await super().tell(engine, op, **arguments)


@seeded("control_argument_dropped", caught_by=["echo"])
class ClearCacheDropped(Client):
    """pause() and reset_prefix_cache() lose their arguments on the way."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        changed = {name: False for name, value in arguments.items() if value is True}
        self.fired += bool(changed)
        await super().tell(engine, op, **{**arguments, **changed})


@seeded("pause_returns_early", "keep", caught_by=["frozen_while_paused"])
class PauseReturnsEarly(Engine):
    """pause() returns at once, and generation stops thirty steps later."""

    _late: asyncio.Task[None] | None = None

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        if not self.running:
            await super().pause_generation(mode=mode, clear_cache=clear_cache)
            return
        self.fired += 1
        self.closed = True
        self._late = asyncio.create_task(self._later(mode, clear_cache))

    async def _later(self, mode: PauseMode, clear_cache: bool) -> None:
        await asyncio.sleep(30 * self.step_s())
        if self.closed:
            await super().pause_generation(mode=mode, clear_cache=clear_cache)


@seeded("pause_returns_early", "wait", caught_by=["wait_lets_finish"])
class WaitDoesNotWait(Engine):
    """pause(wait) returns while requests are still in flight; they are let finish."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "wait" and self.running:
            self.fired += 1
            self.closed = True
            return
        await super().pause_generation(mode=mode, clear_cache=clear_cache)


@seeded("held_requests_answered", "empty", caught_by=["held_until_resume"])
class AnsweredDuringPause(Engine):
    """A request that comes during a pause comes back at once, empty."""

    def arrive(self, request: Request) -> None:
        super().arrive(request)
        if self.closed:
            self.fired += 1
            self.held.remove(request)
            request.reason = "abort"
            self.finish(request)


@seeded("held_requests_answered", "refused", caught_by=["held_until_resume"])
class RefusedDuringPause(Engine):
    """A request that comes during a pause is refused."""

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        super().refuse_wrong(prompt, params, adapter)
        if self.closed:
            self.fired += 1
            raise RuntimeError("the engine is paused")


@seeded("held_requests_answered", "forgotten", caught_by=["driven"])
class ForgottenAfterPause(Engine):
    """Requests that came to one server during a pause are never taken up again."""

    async def resume_generation(self) -> None:
        if self.name == ONE and self.held:
            self.fired += 1
            self.held = []
        await super().resume_generation()


@seeded("pause_state_wrong", "one_server", caught_by=["pause_states"])
class PauseStateOfOneLeftOut(Client):
    """is_paused() leaves a server out."""

    def paused(self) -> dict[str, bool]:
        self.fired += 1
        return {name: state for name, state in super().paused().items() if name != ONE}


@seeded("pause_state_wrong", "always_running", caught_by=["pause_states"])
class PauseStateStuck(Client):
    """is_paused() always says no."""

    def paused(self) -> dict[str, bool]:
        self.fired += 1
        return dict.fromkeys(super().paused(), False)


class _Retry(RetryingClient):
    """Counts what it does with rows that were cut short."""


@seeded("tokens_lost_on_continuation", "retry", caught_by=["continuation"])
class RetryLosesAToken(_Retry):
    """Where a retry goes on, the last token of the part before is missing."""

    def joined(self, done: Output, again: Output) -> Output:
        if done.tokens:
            self.fired += 1
            done.tokens = done.tokens[:-1]
            done.logprobs = None if done.logprobs is None else done.logprobs[:-1]
        return super().joined(done, again)


@seeded("tokens_doubled_on_continuation", "retry", caught_by=["continuation"])
class RetryDoublesAToken(_Retry):
    """Where a retry goes on, the last token of the part before stands twice."""

    def joined(self, done: Output, again: Output) -> Output:
        if done.tokens:
            self.fired += 1
            again.tokens = [*done.tokens[-1:], *again.tokens]
            again.logprobs = None if again.logprobs is None else [*(done.logprobs or [])[-1:], *again.logprobs]
        return super().joined(done, again)


@seeded("tokens_doubled_on_continuation", "retry_from_the_start", caught_by=["continuation"])
class RetryStartsAnew(_Retry):
    """A retry is given the bare prompt, and what it makes is put behind what was there."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        while done.reason == "abort":
            self.fired += 1
            done = self.joined(done, await Client.row(self, session, prompt, self.remaining(params, done), **more))
        return done


@seeded("budget_not_reduced", "retry", caught_by=["continuation"])
class RetryKeepsItsBudget(_Retry):
    """A retry may make as many tokens as the first attempt might have."""

    def remaining(self, params: dict[str, Any], done: Output) -> dict[str, Any]:
        self.fired += bool(done.tokens)
        return params


@seeded("abort_leaks", "retry", caught_by=["continuation"])
class RetryNever(_Retry):
    """What pause(abort) cut short comes back as it is."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        self.fired += done.reason == "abort"
        return done


@seeded("abort_leaks", "second_time", caught_by=["continuation"])
class RetryOnce(_Retry):
    """A request that is cut short a second time comes back as it is."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        if done.reason == "abort":
            left, prior = self.remaining(params, done), len(done.tokens)
            done = self.joined(done, await Client.row(self, session, prompt + done.tokens, left, prior=prior, **more))
            self.fired += done.reason == "abort"
        return done


# --- caches ---------------------------------------------------------------------------------------------------------


@seeded("stale_prefix_cache", "every_server", caught_by=["fresh_prefix_cache"])
class CacheNeverForgotten(Engine):
    """reset_prefix_cache() is answered and nothing is dropped."""

    def forget(self) -> None:
        self.fired += bool(self.cache)


@seeded("stale_prefix_cache", "one_server", caught_by=["fresh_prefix_cache"])
class CacheOfOneNeverForgotten(Engine):
    """reset_prefix_cache() is answered and one server drops nothing."""

    def forget(self) -> None:
        if self.name == ONE:
            self.fired += bool(self.cache)
        else:
            super().forget()


# --- weights --------------------------------------------------------------------------------------------------------


class _Syncing(Engine):
    """Looks at the tensors of a sync before they count."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        raise NotImplementedError

    def quantized(self, tensors: dict[str, model.Array]) -> model.Parameters:
        return super().quantized(self.changed(dict(tensors)))


@seeded("sync_missed", "one_server", caught_by=["every_parameter", "uniform_servers"])
class SyncMissesOne(Client):
    """A weight sync never reaches one server."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if "weight" in op and engine.name == ONE:
            self.fired += 1
            return
        await super().tell(engine, op, **arguments)


@seeded("sync_missed", "every_server", caught_by=["every_parameter", "forced_effect"])
class SyncWithoutEffect(Client):
    """A weight sync reports success and sends nothing."""

    async def sync_weights(self, version: int, chunks: int) -> None:
        self.fired += version != 0


@seeded("sync_missed", "second_time", caught_by=["every_parameter"])
class SyncOnlyOnce(Client):
    """One server misses every second weight sync."""

    _syncs = 0

    async def sync_weights(self, version: int, chunks: int) -> None:
        self._syncs += 1
        await super().sync_weights(version, chunks)

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if "weight" in op and engine.name == ONE and self._syncs % 2 == 0:
            self.fired += 1
            return
        await super().tell(engine, op, **arguments)


@seeded("sync_missed", "compiled_weights", caught_by=["current_policy", "forced_effect"])
class OldNetworkKept(Engine):
    """Engines take the new parameters and go on computing with the old ones."""

    def hold(self, held: model.Parameters) -> None:
        networks = dict(self._networks)
        super().hold(held)
        self.fired += bool(networks)
        self._networks.update(networks)


@seeded("parameter_not_updated", "every_server", caught_by=["every_parameter"])
class ParameterSkipped(_Syncing):
    """The gate of the second layer is never updated."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        self.fired += tensors.pop("layers.1.gate", None) is not None
        return tensors


@seeded("parameter_not_updated", "one_server", caught_by=["every_parameter", "uniform_servers"])
class ParameterSkippedByOne(_Syncing):
    """One server never updates the gate of the second layer."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        if self.name == ONE:
            self.fired += tensors.pop("layers.1.gate", None) is not None
        return tensors


@seeded("parameter_not_updated", "in_chunks", caught_by=["every_parameter"])
class ParameterSkippedInChunks(Client):
    """A sync in chunks loses the last parameter of each chunk."""

    async def sync_weights(self, version: int, chunks: int) -> None:
        self._chunked = chunks > 1
        await super().sync_weights(version, chunks)

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if op == "update_weights" and self._chunked:
            self.fired += 1
            arguments["names"] = arguments["names"][:-1]
        await super().tell(engine, op, **arguments)


@seeded("sync_not_idempotent", "a_little", caught_by=["every_parameter", "same_version_same_parameters"])
class SameVersionDrifts(_Syncing):
    """Syncing what is there already moves one parameter by a ten-thousandth."""

    _last: dict[str, model.Array] | None = None

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        same = self._last is not None and np.array_equal(self._last["out"], tensors["out"])
        self._last = dict(tensors)
        if same:
            self.fired += 1
            tensors["out"] = (tensors["out"] * np.float32(1.0001)).astype(np.float32)
        return tensors


@seeded("corruption_from_second_sync", "one_row", caught_by=["every_parameter"])
class CorruptedFromTheSecond(_Syncing):
    """From the third sync of a start on, one row of the embedding is lost."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        if self.syncs > 1:
            self.fired += 1
            tensors["embed"] = tensors["embed"].copy()
            tensors["embed"][5] = 0
        return tensors


@seeded("half_sync_visible", "for_good", caught_by=["every_parameter"])
class LastChunkLost(Engine):
    """Of a sync in chunks, the last chunk never becomes visible."""

    _chunks = 0

    async def start_weight_update(self) -> None:
        self._chunks = 0
        await super().start_weight_update()

    async def update_weights(self, *, names: list[str], tensors: dict[str, model.Array]) -> None:
        self._chunks += 1
        self._last = names
        await super().update_weights(names=names, tensors=tensors)

    async def finish_weight_update(self) -> None:
        if self._chunks > 1 and self._staged is not None:
            self.fired += 1
            for name in self._last:
                self._staged.pop(name, None)
        await super().finish_weight_update()


@seeded("half_sync_visible", "for_a_while", caught_by=["whole_version"])
class LastChunkLate(Engine):
    """The last half of a sync becomes visible twenty steps after the sync has returned."""

    _late: asyncio.Task[None] | None = None

    async def finish_weight_update(self) -> None:
        assert self._staged is not None
        names = list(self._staged)[len(self._staged) // 2 :]
        late = {name: self._staged.pop(name) for name in names}
        await super().finish_weight_update()
        self._late = asyncio.create_task(self._later(late))

    async def _later(self, late: dict[str, model.Array]) -> None:
        await asyncio.sleep(20 * self.step_s())
        self.fired += 1
        self.hold({**self.held_parameters, **self.quantized(late)})


@seeded("wrong_quantization_scale", "a_lot", caught_by=["every_parameter"])
class ScaleWrong(Engine):
    """After a sync the scales of a quantized engine are a fifth too large."""

    factor = 1.2

    def quantized(self, tensors: dict[str, model.Array]) -> model.Parameters:
        held = dict(super().quantized(tensors))
        scales = {name: tensor for name, tensor in held.items() if name.endswith(".scale")}
        self.fired += len(scales)
        return held | {name: (scale * np.float32(self.factor)).astype(np.float32) for name, scale in scales.items()}


@seeded("wrong_quantization_scale", "a_little", caught_by=["every_parameter"])
class ScaleSlightlyWrong(ScaleWrong):
    """After a sync the scales of a quantized engine are a hundredth too large."""

    factor = 1.01


@seeded("wrong_quantization_scale", "stale", caught_by=["every_parameter"])
class ScaleStale(Engine):
    """A sync brings new integers and keeps the old scales."""

    def quantized(self, tensors: dict[str, model.Array]) -> model.Parameters:
        held = dict(super().quantized(tensors))
        scales = [name for name in held if name.endswith(".scale")]
        self.fired += len(scales)
        return {name: tensor for name, tensor in held.items() if name not in scales}


@seeded("quantization_ignored", caught_by=["quantization_effect"])
class FullPrecision(Engine):
    """Engines that were to quantize hold full precision."""

    def __init__(self, name: str, *, max_model_len: int, quantization: str | None, seed: int) -> None:
        super().__init__(name, max_model_len=max_model_len, quantization=None, seed=seed)
        self.fired += quantization is not None


@seeded("sleeps_to_sync", caught_by=["no_sleep"])
class SleepsToSync(Client):
    """Engines are put to sleep and woken around each weight sync, whatever the placement."""

    async def sync_weights(self, version: int, chunks: int) -> None:
        self.fired += 1
        await self.everywhere("sleep", level=1)
        await self.everywhere("wake_up", tags=None)
        await super().sync_weights(version, chunks)


# --- log-probabilities ----------------------------------------------------------------------------------------------


class _Tempered(Engine):
    temperature = 1.0

    def logprob(self, request: Request, token: int) -> float:
        self.fired += request.wants_logprobs
        row = self.row(request) / self.temperature
        return min(0.0, float(row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()))


@seeded("logprobs_other_temperature", "a_lot", caught_by=["logprobs.reference"])
class LogprobsTempered(_Tempered):
    """Log-probabilities are those of temperature 2."""

    temperature = 2.0


@seeded("logprobs_other_temperature", "a_little", caught_by=["logprobs.reference"])
class LogprobsSlightlyTempered(_Tempered):
    """Log-probabilities are those of temperature 1.01."""

    temperature = 1.01


@seeded("logprobs_other_version", caught_by=["logprobs.reference"])
class LogprobsOfAnotherVersion(Engine):
    """Log-probabilities are those that another policy version gives these tokens."""

    def logprob(self, request: Request, token: int) -> float:
        if not request.wants_logprobs:
            return super().logprob(request, token)
        self.fired += 1
        other = model.network(model.policy(7))
        node = other.root
        for fed in request.context:
            node = other.feed(node, fed)
        return float(other.row(node)[token])


class _Off(Engine):
    by = 0.0

    def logprob(self, request: Request, token: int) -> float:
        self.fired += request.wants_logprobs
        return super().logprob(request, token) - self.by


@seeded("logprobs_off_by_constant", "a_lot", caught_by=["logprobs.reference"])
class LogprobsOff(_Off):
    """Log-probabilities are a tenth of a nat too small."""

    by = 0.1


@seeded("logprobs_off_by_constant", "a_little", caught_by=["logprobs.reference"])
class LogprobsSlightlyOff(_Off):
    """Log-probabilities are two thousandths of a nat too small."""

    by = 2e-3


@seeded("logprobs_nan", "always", caught_by=["numbers_are_numbers", "logprobs.numbers"])
class LogprobsNaN(Engine):
    """Log-probabilities are no numbers."""

    def logprob(self, request: Request, token: int) -> float:
        self.fired += request.wants_logprobs
        return float("nan")


@seeded("logprobs_nan", "now_and_then", caught_by=["numbers_are_numbers", "logprobs.numbers"])
class LogprobsNowAndThenNaN(Engine):
    """The tenth log-probability of a long answer is no number."""

    def logprob(self, request: Request, token: int) -> float:
        if len(request.tokens) == 9:
            self.fired += request.wants_logprobs
            return float("nan")
        return super().logprob(request, token)


@seeded("logprobs_nan", "positive", caught_by=["numbers_are_numbers", "logprobs.numbers"])
class LogprobsPositive(Engine):
    """Log-probabilities come without their sign."""

    def logprob(self, request: Request, token: int) -> float:
        self.fired += request.wants_logprobs
        return -super().logprob(request, token)


@seeded("logprobs_shifted", caught_by=["logprobs.reference"])
class LogprobsShifted(Engine):
    """Each token has the log-probability of the one before."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        if done.logprobs is not None and len(done.logprobs) > 1:
            self.fired += 1
            done.logprobs = [done.logprobs[0], *done.logprobs[:-1]]
        return done


@seeded("logprobs_missing", caught_by=["logprobs.numbers"])
class LogprobsMissing(Engine):
    """Log-probabilities that were asked for do not come."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += done.logprobs is not None
        done.logprobs = None
        return done


@seeded("logprobs_unasked", caught_by=["logprobs.numbers"])
class LogprobsAlways(Engine):
    """Log-probabilities come that nobody asked for."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += done.logprobs is None
        done.logprobs = list(request.logprobs)
        return done


# --- sampling, as the engine does it --------------------------------------------------------------------------------


class _Ignores(Engine):
    """Takes sampling parameters as given, and samples under others."""

    instead: ClassVar[dict[str, Any]] = {}

    async def generate(self, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        self.fired += any(params.get(name) not in (None, value) for name, value in self.instead.items())
        return await super().generate(prompt, params, **more)

    def effective(self, request: Request) -> dict[str, Any]:
        told = dict(request.params)
        request.params.update({name: value for name, value in self.instead.items() if name in request.params})
        return told


def _ignoring(name: str, variant: str, caught_by: list[str], also: Iterable[str] = (), **instead: Any) -> None:
    """A fault of an engine that samples under `instead` where it was given something else."""
    told = ", ".join(f"{field} {value}" for field, value in instead.items())
    body = {"instead": instead, "__doc__": f"Engines are given sampling parameters and sample with {told}."}
    seeded(name, variant, caught_by=caught_by, also=also)(type(f"Ignores_{name}_{variant}", (_Ignores,), body))


_ignoring("parameter_ignored", "temperature", ["tokens.greedy"], temperature=1.0)
_ignoring("parameter_ignored", "top_k", ["sampling.filters"], top_k=0)
_ignoring("parameter_ignored", "top_p", ["sampling.filters"], top_p=1.0)
_ignoring("parameter_ignored", "min_p", ["sampling.filters"], min_p=0.0)
_ignoring("parameter_ignored", "seed", ["tokens.same"], seed=None)
_ignoring("parameter_ignored", "other_seeds", ["tokens.differ"], seed=1)
_ignoring("parameter_ignored", "max_tokens", ["stopping"], max_tokens=8)
_ignoring("parameter_ignored", "min_tokens", ["stopping"], min_tokens=0)
_ignoring("parameter_ignored", "stop", ["stopping"], stop=[])
_ignoring("parameter_ignored", "stop_token_ids", ["stopping"], stop_token_ids=[])
_ignoring("parameter_ignored", "ignore_eos", ["stopping"], ignore_eos=False)
_ignoring("parameter_ignored", "stop_string_kept", ["stopping.text"], include_stop_str_in_output=False)
_ignoring("parameter_ignored", "special_tokens", ["text"], skip_special_tokens=True)


@seeded("parameter_dropped", "seed", caught_by=["echo"])
class SeedDropped(Client):
    """The seed is lost on the way to the engine."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        self.fired += "seed" in params
        return await super().row(session, prompt, {k: v for k, v in params.items() if k != "seed"}, **more)


@seeded("sampling_tempered", "a_third", caught_by=["sampling.distribution"])
class SampledTooCold(Engine):
    """Engines sample at 0.7 of the temperature."""

    def draw(self, request: Request, row: Any) -> int:
        self.fired += 1
        return super().draw(request, row / 0.7)


@seeded("samples_alike", "one_seed", caught_by=["sampling.independent"])
class SamplesShareASeed(Client):
    """All samples of a seeded call run under the same seed."""

    async def sample(self, request: SampleRequest) -> Generation:
        if request.sampling_params.get("seed") is None or request.num_samples < 2:
            return await super().sample(request)
        self.fired += 1
        params = request.sampling_params
        rows = [self.row("one server", request.prompt_token_ids, params) for _ in range(request.num_samples)]
        return self.generation(await self.gather(rows))


@seeded("samples_alike", "one_chance", caught_by=["sampling.independent"])
class UnseededRowsAlike(Engine):
    """Requests without a seed all run under the same one."""

    def chance(self, request: Request) -> float:
        if request.params.get("seed") is not None:
            return super().chance(request)
        self.fired += 1
        return hash((len(request.prompt), len(request.tokens))) % 1009 / 1009


# --- text -----------------------------------------------------------------------------------------------------------


@seeded("text_not_of_tokens", "last_character", caught_by=["text"])
class TextCut(Engine):
    """Texts of more than four characters lack the last one."""

    def text(self, request: Request) -> str:
        text = super().text(request)
        self.fired += len(text) > 4
        return text[:-1] if len(text) > 4 else text


@seeded("text_not_of_tokens", "another_request", caught_by=["text"])
class TextOfAnother(Engine):
    """A text is that of the request that ended before."""

    _before = ""

    def text(self, request: Request) -> str:
        text, self._before = self._before, super().text(request)
        self.fired += text != self._before
        return text


@seeded("turns_retokenized", caught_by=["turns_keep_tokens"])
class TurnsRetokenized(Client):
    """A prompt that begins with an earlier answer is decoded and encoded again."""

    def __init__(self) -> None:
        super().__init__()
        self._said: list[tuple[int, ...]] = []

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if session is not None and any(tuple(prompt[: len(said)]) == said for said in self._said):
            again = tokenizer.encode(tokenizer.decode(prompt, skip_special_tokens=False))
            self.fired += again != prompt
            prompt = again
        done = await super().row(session, prompt, params, **more)
        if session is not None:
            self._said.append((*prompt, *done.tokens))
        return done


@seeded("tokenizer_wrong", "lower_case", caught_by=["tokenize"])
class TokenizesLowerCase(Client):
    """tokenize() reads everything as lower case."""

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        self.fired += any(text != text.lower() for text in texts)
        return super().tokenize([text.lower() for text in texts])


@seeded("tokenizer_wrong", "spaces", caught_by=["tokenize.round_trip"])
class DetokenizesTrimmed(Client):
    """detokenize() trims white space."""

    def detokenize(self, token_ids: list[list[int]]) -> list[str]:
        texts = super().detokenize(token_ids)
        self.fired += any(text != text.strip() for text in texts)
        return [text.strip() for text in texts]


@seeded("tokenizer_wrong", "special_tokens", caught_by=["detokenize"])
class DetokenizesWithoutSpecial(Client):
    """detokenize() leaves special tokens out."""

    def detokenize(self, token_ids: list[list[int]]) -> list[str]:
        self.fired += 1
        return [tokenizer.decode(ids) for ids in token_ids]


# --- adapters, experts ----------------------------------------------------------------------------------------------


@seeded("adapter_ignored", "every_server", caught_by=["adapter_effect"])
class AdapterIgnored(Engine):
    """Requests under an adapter are answered by the base model."""

    def network(self, adapter: str | None) -> model.Network:
        self.fired += adapter is not None
        return super().network(None)


@seeded("adapter_ignored", "one_server", caught_by=["tokens.greedy"])
class AdapterIgnoredByOne(Engine):
    """One server answers requests under an adapter by the base model."""

    def network(self, adapter: str | None) -> model.Network:
        self.fired += adapter is not None and self.name == ONE
        return super().network(None if self.name == ONE else adapter)


@seeded("adapter_leaks", "into_the_base", caught_by=["adapter_isolated"])
class AdapterLeaks(Engine):
    """Once an adapter is loaded, requests without one are answered under it."""

    def network(self, adapter: str | None) -> model.Network:
        if adapter is None and self.adapters:
            self.fired += 1
            adapter = next(iter(self.adapters))
        return super().network(adapter)


@seeded("adapter_leaks", "into_the_weights", caught_by=["every_parameter", "adapter_isolated"])
class AdapterMerged(Engine):
    """Loading an adapter merges it into the base model's weights."""

    async def load_lora_adapter(self, *, name: str, factors: dict[str, model.Array]) -> None:
        self.fired += 1
        await super().load_lora_adapter(name=name, factors=factors)
        self.hold(model.with_adapter(self.held_parameters, factors))


@seeded("adapter_cache_reused", "reloaded_name", caught_by=["fresh_adapter_cache"])
class AdapterCacheByName(Engine):
    """An adapter that is loaded over the same name meets the prefix cache of the one before."""

    def cache_key(self, adapter: str | None, tokens: list[int]) -> Any:
        loading = self.loading(adapter)
        self.fired += loading > 1
        return (0 if adapter is None else adapter, tuple(tokens))


@seeded("adapter_cache_reused", "base", caught_by=["fresh_adapter_cache"])
class AdapterCacheOfTheBase(Engine):
    """Adapters and base model share one prefix cache."""

    def cache_key(self, adapter: str | None, tokens: list[int]) -> Any:
        self.fired += adapter is not None
        return (0, tuple(tokens))


@seeded("experts_shifted", "by_a_position", caught_by=["routed_experts"])
class ExpertsOfTheTokenBefore(Engine):
    """Each position has the experts of the one before."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += len(done.experts) > 1
        done.experts = [*done.experts[:1], *done.experts[:-1]]
        return done


@seeded("experts_shifted", "by_an_index", caught_by=["routed_experts"])
class ExpertsCountedFromOne(Engine):
    """Experts are counted from one."""

    def routed(self, chosen: list[list[int]]) -> list[list[int]]:
        self.fired += 1
        return [[expert + 1 for expert in layer] for layer in chosen]


@seeded("experts_shifted", "order", caught_by=["routed_experts"])
class ExpertsInAnotherOrder(Engine):
    """The second expert of each layer is named first."""

    def routed(self, chosen: list[list[int]]) -> list[list[int]]:
        self.fired += 1
        return [layer[::-1] for layer in chosen]


@seeded("experts_empty", "always", caught_by=["routed_experts"])
class ExpertsEmpty(Engine):
    """No experts are named."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += 1
        done.experts = []
        return done


@seeded("experts_empty", "after_a_pause", caught_by=["routed_experts"])
class ExpertsLostInAPause(Engine):
    """Experts that were noted before a pause are lost with it."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            self.fired += 1
            request.experts = request.experts[len(request.experts) // 2 :]
        await super().resume_generation()


# --- errors and ends ------------------------------------------------------------------------------------------------


@seeded("error_becomes_empty", "generate", caught_by=["errors.named"])
class ErrorsBecomeEmpty(Client):
    """A batch that is refused comes back as an empty success."""

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            return await super().generate(request)
        except BadRequest:
            self.fired += 1
            rows = len(request.prompt_token_ids or request.prompts or ())
            return Generation(response_ids=[[]] * rows, responses=[""] * rows, stop_reasons=[None] * rows)


@seeded("error_becomes_empty", "one_row", caught_by=["errors.named"])
class BadRowsBecomeEmpty(Client):
    """A row that is refused comes back empty, and the rest of its batch as if nothing had been."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        try:
            return await super().row(session, prompt, params, **more)
        except BadRequest:
            self.fired += 1
            nothing = Output(Request("none", prompt, {}, adapter=None, prior=0), "")
            nothing.reason = "stop"
            return nothing


@seeded("error_raised", caught_by=["errors.returned"])
class ErrorsRaised(Client):
    """OpenAI errors are raised where a body was promised."""

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        answer = await super()._answered(body, prompts, kind)
        if "error" in answer:
            self.fired += 1
            raise BadRequest(answer["error"]["message"])
        return answer


@seeded("error_blames_server", caught_by=["errors.named"])
class ErrorsAreServerErrors(Client):
    """The caller's mistakes are answered with status 500."""

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        answer = await super()._answered(body, prompts, kind)
        if "error" not in answer:
            return answer
        self.fired += 1
        return error_body(answer["error"]["message"], 500)


@seeded("bad_input_accepted", "max_tokens", caught_by=["errors.named"])
class NoTokensAccepted(Engine):
    """Sampling parameters are never refused."""

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        try:
            super().refuse_wrong(prompt, params, adapter)
        except BadRequest as e:
            if "must be" not in str(e):
                raise
            self.fired += 1
            params.update(max_tokens=4, temperature=0, top_p=1.0)


@seeded("bad_input_accepted", "sessions", caught_by=["errors.named"])
class SessionsFilledUp(Client):
    """Too few session ids are filled up with none."""

    async def generate(self, request: GenerateRequest) -> Generation:
        rows = len(request.prompt_token_ids or request.prompts or ())
        if request.session_ids is not None and len(request.session_ids) < rows:
            self.fired += 1
            request = msgspec.structs.replace(request, session_ids=None)
        return await super().generate(request)


@seeded("nothing_answered", caught_by=["errors.empty"])
class NothingIsAnswered(Client):
    """An empty batch is answered with a row."""

    async def generate(self, request: GenerateRequest) -> Generation:
        done = await super().generate(request)
        if not done.response_ids:
            self.fired += 1
            return Generation(response_ids=[[3]], responses=["!"], stop_reasons=["stop"])
        return done


@seeded("health_always_yes", caught_by=["health_follows_servers"])
class HealthAlwaysYes(Router):
    """health() says yes with all servers dead."""

    def healthy(self) -> bool:
        self.fired += not super().healthy()
        return True


@seeded("health_always_yes", "never", caught_by=["healthy"])
class HealthNeedsAll(Router):
    """health() says no as soon as one server is dead, and at every third question."""

    _asked = 0

    def healthy(self) -> bool:
        self._asked += 1
        self.fired += 1
        return all(not engine.dead for engine in self.engines) and self._asked % 3 != 2


@seeded("world_size_wrong", caught_by=["world_size"])
class WorldSizeOfOne(Client):
    """world_size() counts one server's workers."""

    def world_size(self) -> int:
        self.fired += 1
        return 1


@seeded("control_plane_exposed", "every_route", caught_by=["control_plane_closed"])
class ControlPlaneExposed(Router):
    """The data plane's address passes control calls on to the servers."""

    def status_of(self, route: str) -> int:
        self.fired += 1
        return 200


@seeded("control_plane_exposed", "one_route", caught_by=["control_plane_closed"])
class PauseExposed(Router):
    """The data plane's address passes pauses on to the servers."""

    def status_of(self, route: str) -> int:
        self.fired += route == "POST /pause"
        return 200 if route == "POST /pause" else super().status_of(route)


@seeded("hang", "one_request", caught_by=["driven"])
class OneRequestHangs(Engine):
    """The fortieth request of a start never ends."""

    def finish(self, request: Request) -> None:
        if request.id.endswith("-40"):
            self.fired += 1
            return
        super().finish(request)


@seeded("hang", "under_load", caught_by=["driven"])
class HangsUnderLoad(Engine):
    """An engine stops for good once it works on sixteen requests."""

    def step(self) -> None:
        if len(self.running) + len(self.waiting) >= 16:
            self.fired += 1
            self.frozen = True
            return
        super().step()


@seeded("crash", "one_server", caught_by=["driven"])
class CrashesUnderLoad(Engine):
    """An engine dies of sixteen requests at once."""

    def step(self) -> None:
        if len(self.running) + len(self.waiting) >= 16:
            self.fired += 1
            raise MemoryError("no block of the cache is free")
        super().step()


@seeded("crash", "whole_stack", caught_by=["driven"])
class ProcessDies(Engine):
    """A process that the stack cannot do without dies at the hundredth step."""

    _steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps > 100:
            self.fired += 1
            self.crash = f"{self.name}/worker-0 (pid 0) died"
        super().step()


@seeded("dead_server_waited_for", caught_by=["every_call_ends"])
class NobodyIsTold(Engine):
    """Requests at a server that dies are never told."""

    def die(self, cause: Exception | None) -> None:
        self.fired += bool(self.running or self.waiting)
        self.dead = True


@seeded("slow", "every_server", caught_by=["pace"])
class TenTimesSlower(Engine):
    """Steps take ten times as long."""

    def step_s(self) -> float:
        self.fired += 1
        return 10 * super().step_s()


@seeded("slow", "one_server", caught_by=["pace"])
class OneServerSlower(Engine):
    """One server's steps take twenty times as long."""

    def step_s(self) -> float:
        self.fired += self.name == ONE
        return (20 if self.name == ONE else 1) * super().step_s()


@seeded("instrument_blind", caught_by=["instruments"])
class TapBlind(Engine):
    """The engine tap writes nothing down."""

    def tell(self, kind: str, **data: Any) -> None:
        self.fired += 1
