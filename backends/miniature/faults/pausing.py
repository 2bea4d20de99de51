"""Pauses that do not stop, reach or hold requests, or that change them; wrong retries of requests that pauses cut short."""

from __future__ import annotations

import asyncio
from typing import Any

from backends.miniature import tokenizer
from backends.miniature.client import Client, RetryingClient
from backends.miniature.engine import PENALTIES, Engine, Output, Request
from backends.miniature.faults.registry import ONE, PAUSED, RECOMPUTED, seeded
from harness.contract.faults import Fact
from harness.contract.messages import PauseMode, SessionId

CUT_SHORT = frozenset({"Engine.abort_all"})
"""Only what calls it cuts a request short (stop reason "abort")."""
RETRIED = frozenset({"RetryingClient.again"})
"""The client that retries calls it for every request that was cut short."""


@seeded("preempted", "wait_last", caught_by=["preemption"])
class PreemptedWaitLast(Engine):
    """A request that loses its place in the cache goes to the end of the queue."""

    def preempt(self, request: Request) -> None:
        self.fired += 1
        self.waiting.append(request)


@seeded("preempted", "forget_their_seed", caught_by=["preemption_changes_nothing"], corrupts=Fact.CHANCE)
class PreemptedForgetTheirSeed(Engine):
    """A request that loses its place in the cache goes on with a random sequence that has nothing to do with its seed."""

    def preempt(self, request: Request) -> None:
        self.fired += 1
        request.random.seed(request.id)
        super().preempt(request)


@seeded(
    "tokens_lost_on_continuation", "keep", caught_by=["conservation", "pause_changes_nothing"], corrupts=Fact.ANSWERS
)
class TokenLostOnResume(Engine):
    """A frozen request loses its last token on resume."""

    def thaw(self, request: Request) -> None:
        if len(request.tokens) > 1:
            self.fired += 1
            request.tokens.pop()
            request.logprobs.pop()


@seeded(
    "tokens_doubled_on_continuation", "keep", caught_by=["conservation", "pause_changes_nothing"], corrupts=Fact.ANSWERS
)
class TokenDoubledOnResume(Engine):
    """A frozen request repeats its last token on resume."""

    def thaw(self, request: Request) -> None:
        if request.tokens:
            self.fired += 1
            request.tokens.append(request.tokens[-1])
            request.logprobs.append(request.logprobs[-1])


@seeded("budget_not_reduced", "keep", caught_by=["pause_changes_nothing"], corrupts=Fact.ANSWERS)
class BudgetRenewedOnResume(Engine):
    """A frozen request gets its whole budget again on resume."""

    def thaw(self, request: Request) -> None:
        self.fired += 1
        request.params["max_tokens"] = request.params.get("max_tokens", 16) + len(request.tokens)


@seeded("abort_leaks", "keep", caught_by=["all_complete", "pause_changes_nothing"], corrupts=Fact.ANSWERS)
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


@seeded("partial_answers_lost", "emptied", caught_by=["conservation"], changes=CUT_SHORT)
class PartialAnswersEmptied(Engine):
    """A request that pause(abort) cut short comes back without its tokens."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        if done.reason == "abort":
            self.fired += 1
            done.tokens, done.text = [], ""
        return done


@seeded(
    "partial_answers_lost",
    "renamed",
    caught_by=["abort_returns_partial"],
    corrupts=Fact.ANSWERS,
    changes=CUT_SHORT,
)
class AbortCalledLength(Client):
    """A request that pause(abort) cut short has the stop reason "length"."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await super().row(session, prompt, params, **more)
        if done.reason == "abort":
            self.fired += 1
            done.reason = "length"
        return done


@seeded("pause_reaches_some", "one_server", caught_by=["fan_out"], corrupts=Fact.PAUSES)
class PauseMissesOne(Client):
    """pause() is sent to all servers except one."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if op == "pause_generation" and engine.name == ONE:
            self.fired += 1
            return
        await super().tell(engine, op, **arguments)


@seeded("pause_reaches_some", "answered_and_ignored", caught_by=["frozen_while_paused"], corrupts=Fact.PAUSES)
class PauseIgnored(Engine):
    """One server confirms pause() and goes on."""

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


@seeded("control_argument_dropped", caught_by=["echo"], corrupts=Fact.PAUSES, changes=PAUSED | RECOMPUTED)
class ClearCacheDropped(Client):
    """pause() and reset_prefix_cache() lose their arguments on the way."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        changed = {name: False for name, value in arguments.items() if value is True}
        self.fired += bool(changed)
        await super().tell(engine, op, **{**arguments, **changed})


@seeded("pause_returns_early", "keep", caught_by=["frozen_while_paused"], corrupts=Fact.PAUSES)
class PauseReturnsEarly(Engine):
    """pause() returns immediately, and generation stops thirty steps later."""

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
    """pause(wait) returns while requests are still in flight; they finish later."""

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "wait" and self.running:
            self.fired += 1
            self.closed = True
            return
        await super().pause_generation(mode=mode, clear_cache=clear_cache)


@seeded("held_requests_answered", "empty", caught_by=["held_until_resume"], corrupts=Fact.ANSWERS, changes=PAUSED)
class AnsweredDuringPause(Engine):
    """A request that arrives during a pause returns immediately, empty."""

    def arrive(self, request: Request) -> None:
        super().arrive(request)
        if self.closed:
            self.fired += 1
            self.held.remove(request)
            request.reason = "abort"
            self.finish(request)


@seeded("held_requests_answered", "refused", caught_by=["all_complete", "driven", "held_until_resume"], changes=PAUSED)
class RefusedDuringPause(Engine):
    """A request that arrives during a pause is refused."""

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        super().refuse_wrong(prompt, params, adapter)
        if self.closed:
            self.fired += 1
            raise RuntimeError("the engine is paused")


@seeded("held_requests_answered", "forgotten", caught_by=["driven"])
class ForgottenAfterPause(Engine):
    """One server forgets the requests that arrived during a pause."""

    async def resume_generation(self) -> None:
        if self.name == ONE and self.held:
            self.fired += 1
            self.held = []
        await super().resume_generation()


@seeded("pause_state_wrong", "one_server", caught_by=["pause_states"])
class PauseStateOfOneLeftOut(Client):
    """is_paused() omits a server."""

    def paused(self) -> dict[str, bool]:
        self.fired += 1
        return {name: state for name, state in super().paused().items() if name != ONE}


@seeded("pause_state_wrong", "always_running", caught_by=["pause_states"])
class PauseStateStuck(Client):
    """is_paused() always reports every server as running."""

    def paused(self) -> dict[str, bool]:
        self.fired += 1
        return dict.fromkeys(super().paused(), False)


@seeded(
    "tokens_lost_on_continuation", "retry", caught_by=["continuation", "pause_changes_nothing"], corrupts=Fact.ANSWERS
)
class RetryLosesAToken(RetryingClient):
    """A retried answer lacks the last token from before the interruption."""

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
    """A retried answer repeats the last token from before the interruption."""

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
    """A retry starts from the bare prompt, and its tokens are appended to the earlier ones."""

    async def again(self, done: Output, session: SessionId | None, params: dict[str, Any], **more: Any) -> Output:
        self.fired += 1
        return await Client.row(self, session, done.prompt, self.remaining(params, done), **more)


@seeded("control_waits_for_requests", caught_by=["driven"], corrupts=Fact.ANSWERS)
class ControlWaitsForRequests(RetryingClient):
    """A client with a hundred connections for all its calls: resume() waits for one, while all wait for resume()."""

    connections = 100
    taken = 0

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        self.taken += 1
        try:
            return await super().row(session, prompt, params, **more)
        finally:
            self.taken -= 1

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        while op == "resume_generation" and self.taken > self.connections:
            self.fired += 1
            await asyncio.sleep(1)
        await super().tell(engine, op, **arguments)


@seeded("budget_not_reduced", "retry", caught_by=["continuation", "pause_changes_nothing"], corrupts=Fact.ANSWERS)
class RetryKeepsItsBudget(RetryingClient):
    """A retry gets the first attempt's whole budget."""

    def remaining(self, params: dict[str, Any], done: Output) -> dict[str, Any]:
        self.fired += bool(done.tokens)
        return params


@seeded(
    "abort_leaks",
    "retry",
    caught_by=["all_complete", "continuation", "pause_changes_nothing"],
    corrupts=Fact.ANSWERS,
    changes=RETRIED,
)
class RetryNever(RetryingClient):
    """A request that pause(abort) cut short is never retried."""

    def cut_short(self, done: Output) -> bool:
        self.fired += done.reason == "abort"
        return False


@seeded(
    "abort_leaks",
    "second_time",
    caught_by=["continuation", "all_complete", "pause_changes_nothing"],
    changes=RETRIED,
)
class RetryOnce(RetryingClient):
    """A request that is cut short a second time is not retried again."""

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
    """A retried request that was cut short before its first token loses that token."""

    def joined(self, done: Output, again: Output) -> Output:
        if not done.tokens and again.tokens:
            self.fired += 1
            again.tokens = again.tokens[1:]
            again.logprobs = None if again.logprobs is None else again.logprobs[1:]
        return super().joined(done, again)


@seeded("budget_not_reduced", "last_token", caught_by=["continuation", "pause_changes_nothing"])
class RetryMakesOneMore(RetryingClient):
    """A retry with one token left gets a budget of two."""

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
    changes=RETRIED,
)
class RetryOnlyWhatHasTokens(RetryingClient):
    """A request that was cut short before its first token is not retried."""

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
    """A retry is sent and cancelled twice before it is awaited."""

    async def again(self, done: Output, session: SessionId | None, params: dict[str, Any], **more: Any) -> Output:
        for _ in range(2):
            given_up = asyncio.create_task(super().again(done, session, params, **more))
            await asyncio.sleep(0.001)
            given_up.cancel()
            self.fired += 1
        return await super().again(done, session, params, **more)


@seeded("budget_not_reduced", "keep_last_token", caught_by=["pause_changes_nothing"])
class OneMoreOnResume(Engine):
    """A request that was frozen with one token left generates two."""

    def thaw(self, request: Request) -> None:
        if request.params.get("max_tokens", 16) - len(request.tokens) == 1:
            self.fired += 1
            request.params["max_tokens"] += 1


class _CutsTheQueue(Engine):
    """A pause in mode `cut_by` ends queued requests."""

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
    """pause(keep) ends queued requests."""

    cut_by = "keep"


@seeded("pause_returns_early", "wait_queued", caught_by=["pause_changes_nothing", "all_complete"])
class WaitCutsTheQueue(_CutsTheQueue):
    """pause(wait) waits for running requests, and ends queued ones."""

    cut_by = "wait"


@seeded("abort_leaks", "chat", caught_by=["all_complete", "pause_changes_nothing"], changes=RETRIED)
class ChatIsNotRetried(RetryingClient):
    """A chat completion that pause(abort) cut short is not retried."""

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
    """A retry looks for stop strings only in its own tokens."""

    async def again(self, done: Output, session: SessionId | None, params: dict[str, Any], **more: Any) -> Output:
        if not params.get("stop"):
            return await super().again(done, session, params, **more)
        self.fired += 1
        return await Client.row(self, session, done.prompt + done.tokens, self.remaining(params, done), **more)


@seeded("seed_ignored", "begun_anew_on_resume", caught_by=["pause_changes_nothing"])
class SeedBeginsAnewOnResume(Engine):
    """A frozen request with a seed restarts its random sequence on resume."""

    def thaw(self, request: Request) -> None:
        if request.params.get("seed") is not None and request.tokens:
            self.fired += 1
            request.random.seed(f"{request.params['seed']} {request.prompt}")


@seeded(
    "stop_string_missed",
    "across_a_freeze",
    caught_by=["pause_changes_nothing"],
    changes=frozenset({"Engine.thaw"}),  # it is correct until a frozen request goes on
)
class StopStringAcrossAFreezeIsMissed(Engine):
    """A request that was frozen looks for stop strings only in the tokens after the freeze."""

    def __init__(self, name: str, **about: Any) -> None:
        super().__init__(name, **about)
        self._thawed: dict[str, int] = {}

    def thaw(self, request: Request) -> None:
        if request.params.get("stop"):
            self.fired += 1
            self._thawed[request.id] = len(request.answer)

    def stop_string(self, request: Request) -> str | None:
        stop = request.params.get("stop") or []
        text = self.decode(request, request.answer[self._thawed.get(request.id, 0) :])
        return next((s for s in ([stop] if isinstance(stop, str) else stop) if s in text), None)


@seeded("budget_not_reduced", "min_tokens", caught_by=["continuation", "pause_changes_nothing"])
class RetryKeepsItsMinimum(RetryingClient):
    """A retry must generate the whole answer's minimum number of tokens."""

    def remaining(self, params: dict[str, Any], done: Output) -> dict[str, Any]:
        left = super().remaining(params, done)
        if params.get("min_tokens"):
            self.fired += bool(done.tokens)
            left["min_tokens"] = params["min_tokens"]
        return left


@seeded("penalties_begun_anew", caught_by=["pause_changes_nothing"])
class RetryForgetsWhatWasMade(RetryingClient):
    """A retry's penalties count from its own first token."""

    async def again(self, done: Output, session: SessionId | None, params: dict[str, Any], **more: Any) -> Output:
        if not any(map(params.get, PENALTIES)):
            return await super().again(done, session, params, **more)
        self.fired += bool(done.tokens)
        return await Client.row(self, session, done.prompt + done.tokens, self.remaining(params, done), **more)


@seeded("held_requests_answered", "completions_refused", caught_by=["all_complete", "driven", "held_until_resume"])
class CompletionsRefusedDuringPause(Client):
    """A completion that arrives during a pause is refused; other requests wait."""

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if any(engine.closed for engine in self.engines):
            self.fired += 1
            raise RuntimeError("completions are not supported during a pause")
        return await super().completion(body)


@seeded(
    "pause_returns_early",
    "one_server_is_late",
    caught_by=["driven", "fan_out", "frozen_while_paused", "pause_states"],
    corrupts=Fact.PAUSES,
)
class PauseReturnsAfterAGrace(Client):
    """pause(keep) waits for servers for a hundredth of a second at most, which is enough if no message is late."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        paused = asyncio.ensure_future(super().pause(mode, clear_cache=clear_cache))
        if mode != "keep":
            return await paused
        await asyncio.wait({paused}, timeout=0.01)
        self.fired += not paused.done()
        return paused.result() if paused.done() else None


@seeded("pause_ended_early", "by_wake_up", caught_by=["as_the_state_says"], corrupts=Fact.PAUSES, changes=PAUSED)
class WakeUpResumes(Engine):
    """wake_up() also ends a pause, as vLLM's does."""

    async def wake_up(self, *, tags: list[str] | None) -> None:
        await super().wake_up(tags=tags)
        self.fired += self.frozen
        await self.resume_generation()


@seeded(
    "control_call_refused",
    "resume_of_a_running_engine",
    caught_by=["as_the_state_says", "driven"],
    corrupts=Fact.PAUSES,
)
class ResumeRefused(Engine):
    """resume() fails unless the engine is paused."""

    async def resume_generation(self) -> None:
        if not self.closed:
            self.fired += 1
            raise RuntimeError(f"{self.name} is not paused")
        await super().resume_generation()


@seeded("aborted_without_a_token", caught_by=["driven"])
class AbortedWithoutAToken(Client):
    """One row that a pause ends before its first token makes an error of the whole batch."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await super().row(session, prompt, params, **more)
        if done.reason != "abort" or done.tokens:
            return done
        self.fired += 1
        raise ValueError("a row has no experts")
