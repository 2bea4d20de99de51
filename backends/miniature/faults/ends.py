"""Errors, hangs, deaths and delays that end calls wrongly, and false reports of the stack about itself."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from backends.miniature.client import Client, error_body
from backends.miniature.engine import BadRequest, Engine, EngineDead, Output, Request
from backends.miniature.faults.registry import ONE, REFUSED, seeded
from backends.miniature.router import Router
from harness.contract.faults import Fact
from harness.contract.messages import GenerateRequest, Generation, SampleRequest, SessionId


@seeded(
    "error_becomes_empty",
    "generate",
    caught_by=["conservation", "errors.named", "refusals"],
    corrupts=Fact.ERRORS,
    changes=REFUSED,
)
class ErrorsBecomeEmpty(Client):
    """A refused batch is returned as an empty success."""

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            return await super().generate(request)
        except BadRequest:
            self.fired += 1
            rows = len(request.prompt_token_ids or request.prompts or ())
            return Generation(response_ids=[[]] * rows, responses=[""] * rows, stop_reasons=[None] * rows)


@seeded(
    "error_becomes_empty", "one_row", caught_by=["conservation", "errors.named"], corrupts=Fact.ERRORS, changes=REFUSED
)
class BadRowsBecomeEmpty(Client):
    """A refused row comes back empty, and the rest of its batch succeeds."""

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
    """OpenAI errors are raised instead of returned as bodies."""

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        answer = await super()._answered(body, prompts, kind)
        if "error" in answer:
            self.fired += 1
            raise BadRequest(answer["error"]["message"])
        return answer


@seeded("error_blames_server", caught_by=["errors.named"], corrupts=Fact.ERRORS)
class ErrorsAreServerErrors(Client):
    """The caller's mistakes are answered with status 500."""

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        answer = await super()._answered(body, prompts, kind)
        if "error" not in answer:
            return answer
        self.fired += 1
        return error_body(answer["error"]["message"], 500)


@seeded("bad_input_accepted", "max_tokens", caught_by=["errors.named"], corrupts=Fact.ERRORS, changes=REFUSED)
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


@seeded("bad_input_accepted", "images", caught_by=["errors.named"])
class ImagesDropped(Client):
    """Images are dropped, and the text alone is answered."""

    def refuse_images(self) -> None:
        self.fired += 1


@seeded("bad_input_accepted", "sessions", caught_by=["errors.named"], changes=REFUSED)
class SessionsFilledUp(Client):
    """If there are too few session ids, all are dropped instead of refused."""

    async def generate(self, request: GenerateRequest) -> Generation:
        rows = len(request.prompt_token_ids or request.prompts or ())
        if request.session_ids is not None and len(request.session_ids) < rows:
            self.fired += 1
            request = msgspec.structs.replace(request, session_ids=None)
        return await super().generate(request)


@seeded("nothing_answered", caught_by=["errors.empty"], corrupts=Fact.ERRORS)
class NothingIsAnswered(Client):
    """An empty batch is answered with a row."""

    async def generate(self, request: GenerateRequest) -> Generation:
        done = await super().generate(request)
        if not done.response_ids:
            self.fired += 1
            return Generation(response_ids=[[3]], responses=["!"], stop_reasons=["stop"])
        return done


@seeded("nothing_answered", "sample", caught_by=["errors.empty"], corrupts=Fact.ERRORS)
class NoSampleIsAnswered(Client):
    """sample() gives a sample where none was asked for."""

    async def sample(self, request: SampleRequest) -> Generation:
        self.fired += request.num_samples == 0
        return await super().sample(msgspec.structs.replace(request, num_samples=max(1, request.num_samples)))


@seeded("nothing_answered", "completion", caught_by=["errors.empty"], corrupts=Fact.ERRORS)
class NoPromptIsAnswered(Client):
    """completion() answers an empty list of prompts with a choice."""

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"]:
            return await super().completion(body)
        self.fired += 1
        return {"object": "text_completion", "choices": [{"index": 0, "text": "!", "finish_reason": "stop"}]}


@seeded("health_always_yes", caught_by=["health_follows_servers"])
class HealthAlwaysYes(Router):
    """health() reports healthy with all servers dead."""

    def healthy(self) -> bool:
        self.fired += not super().healthy()
        return True


@seeded("health_says_no", caught_by=["healthy"], corrupts=Fact.ERRORS)
class HealthNeedsAll(Router):
    """health() reports unhealthy as soon as one server is dead, and at every third call."""

    _asked = 0

    def healthy(self) -> bool:
        self._asked += 1
        self.fired += 1
        return all(not engine.dead for engine in self.engines) and self._asked % 3 != 2


@seeded("world_size_wrong", caught_by=["world_size"])
class WorldSizeOfOne(Client):
    """world_size() is always 1."""

    def world_size(self) -> int:
        self.fired += 1
        return 1


@seeded("world_size_wrong", "servers", caught_by=["world_size"])
class WorldSizeOfServers(Client):
    """world_size() counts servers instead of workers."""

    def world_size(self) -> int:
        self.fired += len(self.engines) != super().world_size()
        return len(self.engines)


@seeded("hang", "one_request", caught_by=["driven"])
class OneRequestHangs(Engine):
    """The fortieth request of each server never ends."""

    def finish(self, request: Request) -> None:
        if request.id.endswith("-40"):
            self.fired += 1
            return
        super().finish(request)


@seeded("hang", "min_tokens", caught_by=["driven"])
class MinTokensHang(Engine):
    """A request whose min_tokens do not fit into the context is never answered."""

    def finish(self, request: Request) -> None:
        if request.reason == "length" and len(request.tokens) < (request.params.get("min_tokens") or 0):
            self.fired += 1
        else:
            super().finish(request)


@seeded("hang", "under_load", caught_by=["driven"])
class HangsUnderLoad(Engine):
    """An engine stops for good once it has sixteen requests."""

    def step(self) -> None:
        if len(self.running) + len(self.waiting) >= 16:
            self.fired += 1
            self.frozen = True
            return
        super().step()


@seeded("crash", "one_server", caught_by=["driven"])
class CrashesUnderLoad(Engine):
    """An engine dies once it has sixteen requests."""

    def step(self) -> None:
        if len(self.running) + len(self.waiting) >= 16:
            self.fired += 1
            raise MemoryError("no block of the cache is free")
        super().step()


@seeded("crash", "stop_token", caught_by=["errors.refused"])
class StopTokenCrashes(Engine):
    """A stop token beyond the vocabulary is not refused, and ends an engine that has to exclude it."""

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        try:
            super().refuse_wrong(prompt, params, adapter)
        except BadRequest as e:
            if not params.get("min_tokens") or "stop_token_ids" not in str(e):
                raise
            self.fired += 1


@seeded("crash", "experts_of_nothing", caught_by=["errors.refused"])
class ExpertsOfNothingCrash(Engine):
    """A request for the experts from its prompt's end on ends its engine."""

    async def generate(self, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if params.get("routed_experts_prompt_start") == len(prompt):
            self.fired += 1
            self.die(IndexError("a place beyond the prompt"))
        return await super().generate(prompt, params, **more)


@seeded("crash", "whole_stack", caught_by=["driven"])
class ProcessDies(Engine):
    """A process that the stack needs dies after a hundred steps of an engine."""

    _steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps > 100:
            self.fired += 1
            self.crash = f"{self.name}/worker-0 (pid 0) died"
        super().step()


@seeded("error_becomes_empty", "dead_server", caught_by=["every_call_ends", "conservation"])
class DeadServersAnswerNothing(Engine):
    """Requests at a dying server come back as empty successes."""

    def die(self, cause: Exception | None) -> None:
        for request in self.unanswered:
            self.fired += 1
            request.tokens, request.reason = [], "stop"
            request.done.set_result(self.output(request))
        super().die(cause)


@seeded("dead_server_waited_for", caught_by=["driven"])
class NobodyIsTold(Engine):
    """Requests at a dying server never get an error."""

    def die(self, cause: Exception | None) -> None:
        self.fired += bool(self.running or self.waiting)
        self.dead = True


@seeded("dead_router_has_no_name", caught_by=["every_call_ends"])
class RouterDiesWithoutAName(Router):
    """What a caller reads of a dead router is no JSON, and the error says no more."""

    def refuse_if_dead(self) -> None:
        if self.dead:
            self.fired += 1
            raise ValueError("Expecting value: line 1 column 1 (char 0)")


@seeded("dead_router_waited_for", caught_by=["driven"])
class RouterDiesUnnoticed(Router):
    """Requests on their way through a dying router never get an error."""

    def kill(self) -> None:
        self.dead = True
        for engine in self.engines:
            for request in engine.unanswered:
                self.fired += 1
                engine.drop(request)


@seeded("dead_server_keeps_the_pause", caught_by=["driven"])
class NobodyElseResumes(Client):
    """With one server dead, resume() fails there and reaches no other: their requests wait for ever."""

    async def everywhere(self, op: str, **arguments: Any) -> None:
        dead = [engine for engine in self.engines if engine.dead]
        if op == "resume_generation" and dead and len(dead) < len(self.engines):
            self.fired += 1
            await self.tell(dead[0], op, **arguments)
        await super().everywhere(op, **arguments)


@seeded(
    "dead_server_ends_the_fan_out",
    caught_by=["fan_out"],
    corrupts=Fact.PAUSES,
    changes=frozenset({"Engine.kill"}),
)
class NobodyElsePauses(Client):
    """With one server dead, pause() fails there and reaches no other: their requests run through it."""

    async def everywhere(self, op: str, **arguments: Any) -> None:
        dead = [engine for engine in self.engines if engine.dead]
        if op == "pause_generation" and dead and len(dead) < len(self.engines):
            self.fired += 1
            await self.tell(dead[0], op, **arguments)
        await super().everywhere(op, **arguments)


@seeded(
    "dead_server_ends_the_pause",
    caught_by=["as_the_state_says"],
    corrupts=Fact.PAUSES,
    changes=frozenset({"Engine.kill"}),
)
class FailedCallsAreUndone(Client):
    """A control call that fails at a dead server resumes the living ones, as if no pause had come before."""

    async def everywhere(self, op: str, **arguments: Any) -> None:
        try:
            await super().everywhere(op, **arguments)
        except EngineDead:
            for engine in self.engines:
                if engine.frozen and not engine.dead:
                    self.fired += 1
                    await engine.resume_generation()
            raise


@seeded(
    "dead_server_fails_every_request",
    caught_by=["as_the_state_says"],
    corrupts=Fact.ANSWERS | Fact.ROUTES,
    changes=frozenset({"Engine.kill"}),
)
class OneDeathIsEverybodys(Router):
    """With one server dead, requests are refused that the others could answer."""

    def server_of(self, session: SessionId | None) -> Engine:
        if any(engine.dead for engine in self.engines):
            self.fired += 1
            raise EngineDead("a server is dead")
        return super().server_of(session)


@seeded(
    "dead_server_takes_others_along",
    caught_by=["as_the_state_says"],
    corrupts=Fact.ERRORS,
    changes=frozenset({"Engine.kill"}),
)
class OneConnectionForAll(Router):
    """When a server dies, requests at the others fail with it."""

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        answer = asyncio.ensure_future(super().forward(engine, prompt, params, **more))
        living = [one for one in self.engines if not one.dead]
        while not (await asyncio.wait({answer}, timeout=0.01))[0]:
            if any(one.dead for one in living) and not engine.dead:
                self.fired += 1
                answer.cancel()
                raise EngineDead("a server died")
        return await answer


@seeded(
    "dead_server_has_no_name", caught_by=["as_the_state_says"], corrupts=Fact.ERRORS, changes=frozenset({"Engine.kill"})
)
class ControlOfTheDeadHasNoName(Client):
    """A control call that fails at a dead server says what its parser met, and no more."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        try:
            await super().tell(engine, op, **arguments)
        except EngineDead:
            self.fired += 1
            raise ValueError("Expecting value: line 1 column 1 (char 0)") from None


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
    """The engine tap records nothing."""

    def tell(self, kind: str, **data: Any) -> None:
        self.fired += 1
