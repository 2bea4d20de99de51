"""Addresses that ignore, change, or break at headers and parameters, and batches that take others along."""

from __future__ import annotations

from typing import Any

from backends.miniature.endpoint import Endpoint, Json
from backends.miniature.engine import BadRequest, Engine
from backends.miniature.faults.registry import REFUSED, seeded
from harness.contract.faults import Fact
from harness.contract.messages import HttpRequest, HttpResponse


@seeded("http_field", "ignored", caught_by=["http_fields"])
class IgnoresClearCache(Endpoint):
    """A server's `/pause` always clears the cache."""

    async def run(self, engine: Engine, op: str, values: Json, path: str) -> HttpResponse:
        if values.get("clear_cache") is False:
            self.fired += 1
            values = values | {"clear_cache": True}
        return await super().run(engine, op, values, path)


@seeded("http_field", "refused_without_its_name", caught_by=["http_fields"])
class NamelessRefusal(Endpoint):
    """A server refuses a mode that it does not know, and does not say what it refuses."""

    def parameter(self, name: str, given: Any, schema: Json) -> tuple[str, Any]:
        said, value = super().parameter(name, given, schema)
        if said and name == "mode":
            self.fired += 1
            said = "bad request"
        return said, value


@seeded("http_field", "breaks", caught_by=["http_fields"])
class BreaksAtCompression(Endpoint):
    """The address answers a compressed body with a server error."""

    async def http(self, request: HttpRequest) -> HttpResponse:
        if request.encoding == "gzip":
            self.fired += 1
            return self.json(500, {"detail": "'utf-8' codec can't decode byte 0x8b"})
        return await super().http(request)


@seeded("bad_row", "takes_others_along", caught_by=["bad_rows"], corrupts=Fact.ERRORS | Fact.ANSWERS, changes=REFUSED)
class TakesOthersAlong(Engine):
    """An engine that refuses a request ends all others that it runs."""

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        try:
            super().refuse_wrong(prompt, params, adapter)
        except BadRequest:
            for request in [*self.running, *self.waiting]:
                self.fired += 1
                self.drop(request)
                self.running = [one for one in self.running if one is not request]
                request.done.set_exception(RuntimeError("the batch was dropped"))
            raise


@seeded("bad_row", "answered", caught_by=["bad_rows"], corrupts=Fact.ERRORS, changes=REFUSED)
class AnswersBadRows(Engine):
    """An engine reads a token beyond its vocabulary as another one."""

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        for at, token in enumerate(prompt):
            if token >= 2**20:
                self.fired += 1
                prompt[at] = 5
        super().refuse_wrong(prompt, params, adapter)
