"""Engines that cannot bear a value of one field, or do not name the field that they refuse."""

from __future__ import annotations

import asyncio
from typing import Any

from backends.miniature import parameters
from backends.miniature.engine import BadRequest, Engine
from backends.miniature.faults.registry import seeded


class Broken(RuntimeError):
    """A server error."""

    status = 500


class _Refuses(Engine):
    """Refuses values of `field` in its own way."""

    field = ""

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        if parameters.wrong({name: value for name, value in params.items() if name == self.field}):
            self.fired += 1
            raise self.error()
        super().refuse_wrong(prompt, params, adapter)

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
