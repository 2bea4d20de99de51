"""Broken hops whose errors are swallowed or lose their cause, requests that are sent again, and forms that are not read."""

from __future__ import annotations

from typing import Any

from backends.miniature.client import Client
from backends.miniature.engine import Engine, Output
from backends.miniature.faults.registry import seeded
from backends.miniature.router import HopBroken, Router
from harness.contract.faults import Fact
from harness.contract.messages import HopForm


class _SendsAgain(Router):
    """Sends a request again after some errors of a hop."""

    def repeats(self, error: HopBroken) -> bool:
        raise NotImplementedError

    async def over_broken_hop(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        try:
            return await super().over_broken_hop(engine, prompt, params, **more)
        except HopBroken as e:
            if not self.repeats(e):
                raise
            self.fired += 1
            return await super().over_broken_hop(engine, prompt, params, **more)


@seeded("hop_error_repeated", "refused", caught_by=["broken_hops", "conservation"])
class RefusedIsSentAgain(_SendsAgain):
    """A request that a server refused is sent again."""

    def repeats(self, error: HopBroken) -> bool:
        return error.status in range(400, 500)


@seeded("hop_error_repeated", "after_execution", caught_by=["broken_hops", "conservation"])
class AnswerLostIsComputedAgain(_SendsAgain):
    """A request whose connection broke is sent again, although an engine has run it."""

    def repeats(self, error: HopBroken) -> bool:
        return error.status is None


@seeded("hop_error_loses_its_cause", caught_by=["broken_hops"])
class CauseIsLost(Router):
    """Every error of a hop becomes the same message."""

    async def over_broken_hop(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        try:
            return await super().over_broken_hop(engine, prompt, params, **more)
        except HopBroken as e:
            self.fired += 1
            e.args, e.status = ("something went wrong",), None
            raise


@seeded("hop_error_becomes_empty", caught_by=["broken_hops", "conservation"], corrupts=Fact.ANSWERS)
class BrokenAnswersAreEmpty(Router):
    """A request that met a broken hop comes back as an empty success."""

    async def over_broken_hop(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        try:
            return await super().over_broken_hop(engine, prompt, params, **more)
        except HopBroken:
            self.fired += 1
            answer = await engine.generate(prompt, params | {"max_tokens": 1}, **more)
            answer.tokens, answer.text = [], ""
            return answer


@seeded("legal_form_not_read", caught_by=["broken_hops"])
class OtherFormsAreRefused(Router):
    """A request or answer in another legal form than the usual one is refused."""

    async def over_broken_hop(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        fault = self.broken
        if fault is not None and fault.form not in {None, "slow"} and self.strikes(engine, params) is not None:
            self.fired += 1
            raise ConnectionError("this message cannot be read")
        return await super().over_broken_hop(engine, prompt, params, **more)


@seeded("control_answer_not_read", "chunked", caught_by=["broken_control"], corrupts=Fact.ERRORS)
class ChunkedAnswersAreEmpty(Router):
    """The answer to a control call that leaves its length open is read as empty."""

    def read_over_hops(self, call: str) -> None:
        super().read_over_hops(call)
        if self.broken is not None and (self.broken.call, self.broken.form) == (call, "chunked"):
            self.fired += 1
            raise TypeError("the answer has no body")


@seeded("control_error_loses_its_text", caught_by=["broken_control"])
class ControlErrorWithoutItsText(Router):
    """The error of a control call that a server refuses with a sentence has the status alone."""

    async def control_over_broken_hop(self, engine: Engine, op: str, **arguments: Any) -> None:
        try:
            await super().control_over_broken_hop(engine, op, **arguments)
        except HopBroken as e:
            if self.broken is not None and self.broken.body == "sentence":
                self.fired += 1
                e.args = (f"{e.status} at {engine.name}",)
            raise


@seeded("slow_hop_asked_again", "slow", caught_by=["broken_hops", "conservation"])
class SlowIsAskedAgain(Router):
    """A request whose answer is slow is sent again, although an engine works on it."""

    form: HopForm | None = "slow"
    connection = "whole"

    async def over_broken_hop(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        fault = self.broken
        if fault is not None and (fault.form, fault.connection) == (self.form, self.connection):
            self.fired += 1
            await super().over_broken_hop(engine, prompt, params, **more)
        return await super().over_broken_hop(engine, prompt, params, **more)


@seeded("slow_hop_asked_again", "hanging", caught_by=["broken_hops", "conservation"])
class HangingIsAskedAgain(SlowIsAskedAgain):
    """A request that hung is sent again once its hop goes on, and so are those after it."""

    form, connection = None, "hanging"


@seeded("control_error_swallowed", "one_server", caught_by=["broken_control"], corrupts=Fact.ADAPTERS)
class ControlErrorSwallowed(Router):
    """A control call that meets a broken hop to one server is reported as done."""

    async def control_over_broken_hop(self, engine: Engine, op: str, **arguments: Any) -> None:
        try:
            await super().control_over_broken_hop(engine, op, **arguments)
        except HopBroken:
            self.fired += 1


@seeded("control_error_swallowed", "its_server", caught_by=["broken_control"])
class ControlErrorWithoutServer(Router):
    """The error of a control call that meets a broken hop does not say at which server."""

    async def control_over_broken_hop(self, engine: Engine, op: str, **arguments: Any) -> None:
        try:
            await super().control_over_broken_hop(engine, op, **arguments)
        except HopBroken as e:
            self.fired += 1
            e.args = (e.args[0].rpartition(" at ")[0],)
            raise


@seeded("control_error_lasts", caught_by=["broken_control"], corrupts=Fact.PAUSES | Fact.ADAPTERS)
class ControlErrorLasts(Router):
    """After a control call that met a broken hop, the next one fails as well."""

    _last: HopBroken | None = None

    async def control(self, engine: Engine, op: str, **arguments: Any) -> None:
        if self._last is not None and engine is self.engines[0]:
            self.fired += 1
            last, self._last = self._last, None
            raise last
        try:
            await super().control(engine, op, **arguments)
        except HopBroken as e:
            self._last = e
            raise


@seeded("hop_error_not_repeated", caught_by=["all_complete"])
class StaleConnectionFails(Client):
    """A request that meets a connection which had gone stale fails."""

    def asks_again(self, error: HopBroken) -> bool:
        self.fired += super().asks_again(error)
        return False
