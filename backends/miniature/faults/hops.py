"""Broken hops whose errors are swallowed or lose their cause, and requests that are sent again."""

from __future__ import annotations

from typing import Any

from backends.miniature.engine import Engine, Output
from backends.miniature.faults.registry import seeded
from backends.miniature.router import HopBroken, Router
from harness.contract.faults import Fact


class _SendsAgain(Router):
    """Sends a request again after some errors of a hop."""

    def repeats(self, error: HopBroken) -> bool:
        raise NotImplementedError

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        try:
            return await super().forward(engine, prompt, params, **more)
        except HopBroken as e:
            if not self.repeats(e):
                raise
            self.fired += 1
            return await super().forward(engine, prompt, params, **more)


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

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        try:
            return await super().forward(engine, prompt, params, **more)
        except HopBroken as e:
            self.fired += 1
            e.args, e.status = ("something went wrong",), None
            raise


@seeded("hop_error_becomes_empty", caught_by=["broken_hops", "conservation"], corrupts=Fact.ANSWERS)
class BrokenAnswersAreEmpty(Router):
    """A request that met a broken hop comes back as an empty success."""

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        try:
            return await super().forward(engine, prompt, params, **more)
        except HopBroken:
            self.fired += 1
            answer = await engine.generate(prompt, params | {"max_tokens": 1}, **more)
            answer.tokens, answer.text = [], ""
            return answer
