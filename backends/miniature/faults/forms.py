"""Clients that take arguments of one type only, or that change what their caller gave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from backends.miniature.faults.registry import seeded
from backends.miniature.interface import Interface
from harness.contract.messages import Generation

IN_ANOTHER_FORM = frozenset({"formed"})
"""What gives an argument another form than the adapter's (`harness.records.argument_forms`)."""


@seeded("argument_form", "taken_for_another", caught_by=["call_forms", "echo"])
class OnlyLists(Interface):
    """Stop tokens that are not a list are taken for none."""

    async def generate(self, input_batch: Mapping[str, Any]) -> Generation:
        params = input_batch["sampling_params"]
        if "stop_token_ids" in params and type(params["stop_token_ids"]) is not list:
            self.fired += 1
            params = {name: value for name, value in params.items() if name != "stop_token_ids"}
        return await super().generate({**input_batch, "sampling_params": params})


@seeded("argument_form", "refused", caught_by=["call_forms"], changes=IN_ANOTHER_FORM)
class NoSubclass(Interface):
    """A dict of another class is refused."""

    async def generate(self, input_batch: Mapping[str, Any]) -> Generation:
        if type(input_batch) is not dict:
            self.fired += 1
            raise TypeError("input_batch has to be a dict")
        return await super().generate(input_batch)


@seeded("argument_form", "breaks", caught_by=["call_forms"], changes=IN_ANOTHER_FORM)
class Breaks(Interface):
    """A tuple of prompts fails with an error that says nothing."""

    async def generate(self, input_batch: Mapping[str, Any]) -> Generation:
        if isinstance(input_batch["prompt_token_ids"], tuple):
            self.fired += 1
            raise RuntimeError
        return await super().generate(input_batch)


@seeded("argument_form", "hangs", caught_by=["call_forms"], changes=IN_ANOTHER_FORM)
class Hangs(Interface):
    """A tuple of prompts is never answered."""

    async def generate(self, input_batch: Mapping[str, Any]) -> Generation:
        if isinstance(input_batch["prompt_token_ids"], tuple):
            self.fired += 1
            await asyncio.Event().wait()
        return await super().generate(input_batch)


@seeded("argument_form", "by_position", caught_by=["call_forms", "echo"], changes=IN_ANOTHER_FORM)
class OnlyByKeyword(Interface):
    """wake_up() wakes everything if its tags are given by position."""

    async def wake_up(self, *args: Any, **given: Any) -> None:
        self.fired += len(args)
        await super().wake_up(given.get("tags"))


@seeded("argument_form", "nan_for_one", caught_by=["errors.named"], changes=IN_ANOTHER_FORM)
class NaNForOne(Interface):
    """A temperature of NaN counts as 1."""

    async def generate(self, input_batch: Mapping[str, Any]) -> Generation:
        params = input_batch["sampling_params"]
        if math.isnan(params.get("temperature") or 0.0):
            self.fired += 1
            params = params | {"temperature": 1.0}
        return await super().generate({**input_batch, "sampling_params": params})


@seeded("argument_form", "infinity_breaks", caught_by=["errors.refused"], changes=IN_ANOTHER_FORM)
class InfinityBreaks(Interface):
    """An infinite temperature fails with an error that says nothing."""

    async def generate(self, input_batch: Mapping[str, Any]) -> Generation:
        if math.isinf(input_batch["sampling_params"].get("temperature") or 0.0):
            self.fired += 1
            raise RuntimeError
        return await super().generate(input_batch)


@seeded("argument_changed", caught_by=["kept_arguments"])
class TakesOut(Interface):
    """The session is taken out of the caller's own body."""

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        answer = await super().chat_completion(request_payload)
        if request_payload["json"].pop("session_id", None) is not None:
            self.fired += 1
        return answer
