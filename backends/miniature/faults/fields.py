"""Engines that cannot bear a value of one field, or do not name the field that they refuse."""

from __future__ import annotations

import asyncio
from typing import Any

from backends.miniature import parameters
from backends.miniature.client import Client
from backends.miniature.engine import BadRequest, Engine, Output, Request
from backends.miniature.faults.registry import seeded
from harness.contract.faults import Fact
from harness.contract.messages import GenerateRequest, Generation, SessionId

PLAIN_AND_ONE = 4
"""Most parameters of a request that has one field beside the plain ones."""


class Broken(RuntimeError):
    """A server error."""

    status = 500


class _Refuses(Engine):
    """Refuses values of `field` in its own way."""

    field = ""

    def refusal(self, said: str, params: dict[str, Any]) -> Exception:
        if not parameters.wrong({name: value for name, value in params.items() if name == self.field}):
            return super().refusal(said, params)
        self.fired += 1
        return self.error()

    def error(self) -> Exception:
        raise NotImplementedError


@seeded("field_refused", "without_its_name", caught_by=["request_fields"])
class NamelessRefusal(_Refuses):
    """The engine refuses a wrong min_p with an error that does not name it."""

    field = "min_p"

    def error(self) -> Exception:
        return BadRequest("this value cannot be used")


@seeded("field_refused", "as_a_server_error", caught_by=["request_fields"])
class ServerError(_Refuses):
    """The engine breaks at a wrong list of stop tokens, and names it in a server error."""

    field = "stop_token_ids"

    def error(self) -> Exception:
        return Broken("stop_token_ids: 'State' object has no attribute 'server'")


@seeded("field_refused", "a_number_as_text", caught_by=["request_fields"])
class NumberAsText(_Refuses):
    """The engine breaks at a number that is written as text, and names it in a server error."""

    field = "max_tokens"

    def refusal(self, said: str, params: dict[str, Any]) -> Exception:
        return super().refusal(said, params if isinstance(params.get(self.field), str) else {})

    def error(self) -> Exception:
        return Broken("max_tokens: '<' not supported between instances of 'str' and 'int'")


@seeded(
    "field_refused",
    "a_token_as_text",
    caught_by=["request_fields"],
    changes=frozenset({"sampling_params.logit_bias"}),
)
class TokenAsText(Client):
    """generate() breaks at a bias: its tokens are keys, which JSON has as texts."""

    async def generate(self, request: GenerateRequest) -> Generation:
        if not request.sampling_params.get("logit_bias"):
            return await super().generate(request)
        self.fired += 1
        raise Broken("'<' not supported between instances of 'str' and 'int'")


@seeded("field_refused", "hangs", caught_by=["request_fields"])
class Hangs(Engine):
    """After a wrong value of ignore_eos the engine answers no request any more."""

    stuck = False

    async def generate(self, prompt: list[int], params: dict[str, Any], **more: Any) -> Any:
        self.stuck |= bool(parameters.wrong({"ignore_eos": params.get("ignore_eos")}))
        if self.stuck:
            self.fired += 1
            await asyncio.Event().wait()
        return await super().generate(prompt, params, **more)


@seeded("fields_together", "break", caught_by=["field_pairs"])
class BreakTogether(Engine):
    """The engine takes top_k and min_p alone, and breaks at a request that has both."""

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        super().refuse_wrong(prompt, params, adapter)
        if {"top_k", "min_p"} <= params.keys():
            self.fired += 1
            raise Broken("top_k, min_p: 'NoneType' object has no attribute 'apply'")


@seeded("fields_together", "one_is_lost", caught_by=["field_pairs", "echo"], corrupts=Fact.ANSWERS)
class LostBeside(Client):
    """The client leaves out top_k of a request that also has stop."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if "stop" in params and params.get("top_k"):
            self.fired += 1
            params = {name: value for name, value in params.items() if name != "top_k"}
        return await super().row(session, prompt, params, **more)


@seeded("fields_together", "in_a_batch", caught_by=["field_pairs", "echo"], corrupts=Fact.CHANCE)
class LostInABatch(Client):
    """The client leaves out min_p, beside another field, in every row of a batch but the first."""

    _later: tuple[list[int], ...] = ()

    async def generate(self, request: GenerateRequest) -> Generation:
        self._later += tuple(request.prompt_token_ids or ())[1:]
        return await super().generate(request)

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if prompt in self._later and params.get("min_p") and len(params) > PLAIN_AND_ONE:
            self.fired += 1
            params = {name: value for name, value in params.items() if name != "min_p"}
        return await super().row(session, prompt, params, **more)


@seeded(
    "allowed_tokens_bind_others",
    caught_by=["tokens.greedy"],
    corrupts=Fact.CHANCE | Fact.LOGPROBS,
    changes=frozenset({"sampling_params.allowed_token_ids"}),
)
class BindsOthers(Engine):
    """A request that runs beside another one's allowed tokens makes only these."""

    def choose(self, request: Request) -> int:
        bound = [
            tokens for one in self.running if (tokens := one.params.get("allowed_token_ids")) and one is not request
        ]
        if bound and not request.params.get("allowed_token_ids"):
            self.fired += 1
            return int(bound[0][0])
        return super().choose(request)
