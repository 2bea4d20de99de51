"""Clients whose public surface is not the documented one."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.miniature.faults.registry import seeded
from backends.miniature.interface import Interface
from harness.contract.messages import CensusResult, Generation, Offer, SessionId

CAUGHT = ["documented_interface"]
SEEN = frozenset({"Interface._census"})
"""What a fault of the surface changes: what a caller sees of it."""


class _Changed(Interface):
    """Takes effect when a caller looks at it."""

    def _census(self, keys: list[Offer]) -> CensusResult:
        self.fired += 1
        return super()._census(keys)


@seeded("interface_changed", "method_gone", caught_by=CAUGHT, changes=SEEN)
class MethodGone(_Changed):
    """The client has no dp_size()."""

    dp_size = None  # type: ignore[assignment]


@seeded("interface_changed", "default", caught_by=CAUGHT, changes=SEEN)
class OtherDefault(_Changed):
    """Samples without a session share the session 0."""

    async def sample(
        self,
        prompt_token_ids: list[int],
        num_samples: int,
        sampling_params: dict[str, Any],
        session_id: SessionId | None = 0,
        **more: Any,
    ) -> Generation:
        return await super().sample(prompt_token_ids, num_samples, sampling_params, session_id, **more)


@seeded("interface_changed", "async", caught_by=CAUGHT, changes=SEEN)
class AsyncInsteadOfSync(_Changed):
    """tp_size() has to be awaited."""

    async def tp_size(self) -> int:  # type: ignore[override]
        return super().tp_size()


@seeded("interface_changed", "parameter_gone", caught_by=CAUGHT, changes=SEEN)
class ParameterGone(_Changed):
    """init_weight_update_communicator() takes no argument."""

    async def init_weight_update_communicator(self) -> None:  # type: ignore[override]
        return await super().init_weight_update_communicator(None)


@seeded("interface_changed", "parameter_renamed", caught_by=CAUGHT, changes=SEEN)
class ParameterRenamed(_Changed):
    """chat_completion() calls its argument by another name."""

    async def chat_completion(self, payload: dict[str, Any]) -> dict[str, Any]:
        return await super().chat_completion(payload)


@seeded("interface_changed", "new_requirement", caught_by=CAUGHT, changes=SEEN)
class OneMoreArgument(_Changed):
    """pause_generation() has to be told its mode, and whether it clears the cache."""

    async def pause_generation(self, mode: Any, clear_cache: bool) -> None:  # type: ignore[override]
        await super().pause_generation(mode, clear_cache)


@seeded("variable_kept_back", caught_by=["variables_passed_on"], changes=SEEN)
class VariableKeptBack(_Changed):
    """A variable that the client documents stays in the user's shell."""

    def _census(self, keys: list[Offer]) -> CensusResult:
        kept = [offer.name for offer in keys if offer.kind == "variable"]
        return msgspec.structs.replace(super()._census(keys), kept_back=kept)
