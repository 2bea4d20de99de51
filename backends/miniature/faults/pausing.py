"""Pauses that do not stop, do not reach, do not hold, or change what they interrupt; retries of what they cut short."""

from __future__ import annotations

import asyncio
from typing import Any

from backends.miniature import tokenizer
from backends.miniature.client import Client, RetryingClient
from backends.miniature.engine import Engine, Output, Request
from backends.miniature.faults.registry import ONE, seeded
from harness.contract.faults import Fact
from harness.contract.messages import PauseMode, SessionId


@seeded(
    "tokens_lost_on_continuation",
    "keep",
    caught_by=["conservation", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
)
class TokenLostOnResume(Engine):
    """A request that was frozen has forgotten its last token when it goes on."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            if len(request.tokens) > 1:
                self.fired += 1
                request.tokens.pop()
                request.logprobs.pop()
        await super().resume_generation()


@seeded(
    "tokens_doubled_on_continuation",
    "keep",
    caught_by=["conservation", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
)
class TokenDoubledOnResume(Engine):
    """A request that was frozen says its last token once more when it goes on."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            if request.tokens:
                self.fired += 1
                request.tokens.append(request.tokens[-1])
                request.logprobs.append(request.logprobs[-1])
        await super().resume_generation()


@seeded("budget_not_reduced", "keep", caught_by=["pause_changes_nothing"], corrupts=Fact.ANSWERS)
class BudgetRenewedOnResume(Engine):
    """A request that was frozen is given its whole budget again."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            self.fired += 1
            request.params["max_tokens"] = request.params.get("max_tokens", 16) + len(request.tokens)
        await super().resume_generation()


@seeded(
    "abort_leaks",
    "keep",
    caught_by=["all_complete", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
)
class KeepAborts(Engine):
    """pause(keep) ends requests as pause(abort) does."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        self.fired += mode == "keep" and bool(self.running)
        await super().pause_generation(mode="abort" if mode == "keep" else mode, clear_cache=clear_cache)


@seeded("abort_leaks", "wait", caught_by=["wait_lets_finish"], corrupts=Fact.PAUSES)
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


@seeded(
    "pause_reaches_some",
    "one_server",
    caught_by=["fan_out"],
    corrupts=Fact.PAUSES,
)
class PauseMissesOne(Client):
    """pause() is sent to all servers but one."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if op == "pause_generation" and engine.name == ONE:
            self.fired += 1
            return
        await super().tell(engine, op, **arguments)


@seeded(
    "pause_reaches_some",
    "answered_and_ignored",
    caught_by=["frozen_while_paused"],
    corrupts=Fact.PAUSES,
)
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


@seeded("control_argument_dropped", caught_by=["echo"], corrupts=Fact.PAUSES)
class ClearCacheDropped(Client):
    """pause() and reset_prefix_cache() lose their arguments on the way."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        changed = {name: False for name, value in arguments.items() if value is True}
        self.fired += bool(changed)
        await super().tell(engine, op, **{**arguments, **changed})


@seeded(
    "pause_returns_early",
    "keep",
    caught_by=["frozen_while_paused"],
    corrupts=Fact.PAUSES,
)
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


@seeded("pause_returns_early", "wait", caught_by=["wait_lets_finish"], corrupts=Fact.PAUSES)
class WaitDoesNotWait(Engine):
    """pause(wait) returns while requests are still in flight; they are let finish."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "wait" and self.running:
            self.fired += 1
            self.closed = True
            return
        await super().pause_generation(mode=mode, clear_cache=clear_cache)


@seeded("held_requests_answered", "empty", caught_by=["held_until_resume"], corrupts=Fact.ANSWERS)
class AnsweredDuringPause(Engine):
    """A request that comes during a pause comes back at once, empty."""

    def arrive(self, request: Request) -> None:
        super().arrive(request)
        if self.closed:
            self.fired += 1
            self.held.remove(request)
            request.reason = "abort"
            self.finish(request)


@seeded("held_requests_answered", "refused", caught_by=["driven"])
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


@seeded(
    "tokens_lost_on_continuation",
    "retry",
    caught_by=["continuation", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
)
class RetryLosesAToken(RetryingClient):
    """Where a retry goes on, the last token of the part before is missing."""

    def joined(self, done: Output, again: Output) -> Output:
        if done.tokens:
            self.fired += 1
            done.tokens = done.tokens[:-1]
            done.logprobs = None if done.logprobs is None else done.logprobs[:-1]
        return super().joined(done, again)


@seeded(
    "tokens_doubled_on_continuation",
    "retry",
    caught_by=["continuation", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
)
class RetryDoublesAToken(RetryingClient):
    """Where a retry goes on, the last token of the part before stands twice."""

    def joined(self, done: Output, again: Output) -> Output:
        if done.tokens:
            self.fired += 1
            again.tokens = [*done.tokens[-1:], *again.tokens]
            again.logprobs = None if again.logprobs is None else [*(done.logprobs or [])[-1:], *again.logprobs]
        return super().joined(done, again)


@seeded(
    "tokens_doubled_on_continuation",
    "retry_from_the_start",
    caught_by=["continuation", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
)
class RetryStartsAnew(RetryingClient):
    """A retry is given the bare prompt, and what it makes is put behind what was there."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        while done.reason == "abort":
            self.fired += 1
            done = self.joined(done, await Client.row(self, session, prompt, self.remaining(params, done), **more))
        return done


@seeded("budget_not_reduced", "retry", caught_by=["continuation", "pause_changes_nothing"], corrupts=Fact.ANSWERS)
class RetryKeepsItsBudget(RetryingClient):
    """A retry may make as many tokens as the first attempt might have."""

    def remaining(self, params: dict[str, Any], done: Output) -> dict[str, Any]:
        self.fired += bool(done.tokens)
        return params


@seeded(
    "abort_leaks",
    "retry",
    caught_by=["all_complete", "continuation", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
)
class RetryNever(RetryingClient):
    """What pause(abort) cut short comes back as it is."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        self.fired += done.reason == "abort"
        return done


@seeded("abort_leaks", "second_time", caught_by=["continuation", "all_complete", "pause_changes_nothing"])
class RetryOnce(RetryingClient):
    """A request that is cut short a second time comes back as it is."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        if done.reason == "abort":
            left, prior = self.remaining(params, done), len(done.tokens)
            done = self.joined(done, await Client.row(self, session, prompt + done.tokens, left, prior=prior, **more))
            self.fired += done.reason == "abort"
        return done


@seeded(
    "tokens_lost_on_continuation",
    "before_the_first_token",
    caught_by=["continuation", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
)
class RetryLosesTheFirst(RetryingClient):
    """What was cut short before its first token comes back without it."""

    def joined(self, done: Output, again: Output) -> Output:
        if not done.tokens and again.tokens:
            self.fired += 1
            again.tokens = again.tokens[1:]
            again.logprobs = None if again.logprobs is None else again.logprobs[1:]
        return super().joined(done, again)


@seeded("budget_not_reduced", "last_token", caught_by=["continuation", "pause_changes_nothing"])
class RetryMakesOneMore(RetryingClient):
    """A retry with one token left is given two."""

    def remaining(self, params: dict[str, Any], done: Output) -> dict[str, Any]:
        left = super().remaining(params, done)
        if left["max_tokens"] == 1:
            self.fired += 1
            left["max_tokens"] = 2
        return left


@seeded(
    "abort_leaks",
    "before_the_first_token",
    caught_by=["continuation", "all_complete", "pause_changes_nothing"],
)
class RetryOnlyWhatHasTokens(RetryingClient):
    """What was cut short before its first token comes back as it is."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        while done.reason == "abort" and done.tokens:
            left, prior = self.remaining(params, done), len(done.tokens)
            again = await Client.row(self, session, prompt + done.tokens, left, prior=prior, **more)
            if not again.tokens and again.reason == "abort":
                return self.joined(done, again)
            done = self.joined(done, again)
        self.fired += done.reason == "abort"
        return done


@seeded("attempts_unbounded", caught_by=["continuation"], corrupts=Fact.ANSWERS)
class RetryAsksThreeTimes(RetryingClient):
    """A retry is given up twice before it is waited for."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        while done.reason == "abort":
            left, prior = self.remaining(params, done), len(done.tokens)
            fed = prompt + done.tokens
            for _ in range(2):
                given_up = asyncio.create_task(Client.row(self, session, fed, left, prior=prior, **more))
                await asyncio.sleep(0.001)
                given_up.cancel()
                self.fired += 1
            done = self.joined(done, await Client.row(self, session, fed, left, prior=prior, **more))
        return done


@seeded("budget_not_reduced", "keep_last_token", caught_by=["pause_changes_nothing"])
class OneMoreOnResume(Engine):
    """A request that was frozen with one token left makes two."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            if request.params.get("max_tokens", 16) - len(request.tokens) == 1:
                self.fired += 1
                request.params["max_tokens"] += 1
        await super().resume_generation()


class _CutsTheQueue(Engine):
    """A pause in this mode ends the requests that wait for their turn."""

    cut_by: PauseMode

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        if mode == self.cut_by:
            waiting, self.waiting = self.waiting, []
            for request in waiting:
                self.fired += 1
                request.reason = "abort"
                self.finish(request)
        await super().pause_generation(mode=mode, clear_cache=clear_cache)


@seeded("abort_leaks", "keep_queued", caught_by=["pause_changes_nothing", "all_complete"])
class KeepAbortsTheQueue(_CutsTheQueue):
    """pause(keep) ends the requests that wait for their turn."""

    cut_by = "keep"


@seeded("pause_returns_early", "wait_queued", caught_by=["pause_changes_nothing", "all_complete"])
class WaitCutsTheQueue(_CutsTheQueue):
    """pause(wait) waits for what runs, and ends what has not begun."""

    cut_by = "wait"


@seeded("abort_leaks", "chat", caught_by=["all_complete", "pause_changes_nothing"])
class ChatIsNotRetried(RetryingClient):
    """A conversation that pause(abort) cut short comes back as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._conversations: set[tuple[int, ...]] = set()

    async def chat_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if all(set(message) == {"role", "content"} for message in body["messages"]):
            self._conversations.add(tuple(tokenizer.render(body["messages"])))
        return await super().chat_completion(body)

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if tuple(prompt) not in self._conversations:
            return await super().row(session, prompt, params, **more)
        done = await Client.row(self, session, prompt, params, **more)
        self.fired += done.reason == "abort"
        return done


@seeded("stop_string_missed", "across_an_interruption", caught_by=["pause_changes_nothing"])
class StopStringAcrossIsMissed(RetryingClient):
    """A retry looks for stop strings only in what it makes itself."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await Client.row(self, session, prompt, params, **more)
        while done.reason == "abort":
            self.fired += bool(params.get("stop"))
            left = self.remaining(params, done)
            done = self.joined(done, await Client.row(self, session, prompt + done.tokens, left, **more))
        return done


@seeded("seed_ignored", "begun_anew_on_resume", caught_by=["pause_changes_nothing"])
class SeedBeginsAnewOnResume(Engine):
    """A request that was frozen draws as if it had just begun."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            if request.params.get("seed") is not None and request.tokens:
                self.fired += 1
                request.random.seed(f"{request.params['seed']} {request.prompt}")
        await super().resume_generation()


@seeded("stop_string_missed", "across_a_freeze", caught_by=["pause_changes_nothing"])
class StopStringAcrossAFreezeIsMissed(Engine):
    """A request that was frozen looks for stop strings only in what it makes after that."""

    def __init__(self, name: str, **about: Any) -> None:
        super().__init__(name, **about)
        self._thawed: dict[str, int] = {}

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            if request.params.get("stop"):
                self.fired += 1
                self._thawed[request.id] = len(request.answer)
        await super().resume_generation()

    def stop_string(self, request: Request) -> str | None:
        stop = request.params.get("stop") or []
        text = self.decode(request, request.answer[self._thawed.get(request.id, 0) :])
        return next((s for s in ([stop] if isinstance(stop, str) else stop) if s in text), None)


@seeded("budget_not_reduced", "min_tokens", caught_by=["continuation", "pause_changes_nothing"])
class RetryKeepsItsMinimum(RetryingClient):
    """A retry has to make as many tokens at least as the whole answer."""

    def remaining(self, params: dict[str, Any], done: Output) -> dict[str, Any]:
        left = super().remaining(params, done)
        if params.get("min_tokens"):
            self.fired += bool(done.tokens)
            left["min_tokens"] = params["min_tokens"]
        return left
