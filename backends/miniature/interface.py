"""The client under the names of SkyRL's documented interface, through which the adapter calls it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from backends.miniature.client import Client
from harness.contract.messages import (
    CensusResult,
    GenerateRequest,
    Generation,
    Offer,
    PauseMode,
    SampleRequest,
    SessionId,
    SyncWeightsRequest,
)
from harness.driving import census


def plain(given: Any) -> Any:
    """A copy of Python's own types only. Raises TypeError, naming the type, for values that JSON does not know."""
    return json.loads(json.dumps(given))


class Interface:
    """SkyRL API reference, InferenceEngineInterface."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.fired = 0

    def _census(self, keys: list[Offer]) -> CensusResult:
        """What a caller meets here."""
        return census.of(self, types={}, keys=keys)

    async def generate(self, input_batch: Mapping[str, Any]) -> Generation:
        return await self.client.generate(msgspec.convert(plain(input_batch), GenerateRequest))

    async def sample(
        self,
        prompt_token_ids: list[int],
        num_samples: int,
        sampling_params: dict[str, Any],
        session_id: SessionId | None = None,
        *,
        lora_adapter: str | None = None,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        image: str | None = None,
    ) -> Generation:
        return await self.client.sample(
            SampleRequest(
                prompt_token_ids=plain(prompt_token_ids),
                num_samples=plain(num_samples),
                sampling_params=plain(sampling_params),
                session_id=plain(session_id),
                lora_adapter=lora_adapter,
                prompt_logprobs=prompt_logprobs,
                topk_prompt_logprobs=topk_prompt_logprobs,
                image=image,
            )
        )

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        payload = plain(request_payload)
        body = self.client.identified(payload["json"], payload["headers"])
        return await self.client.chat_completion(body)

    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        return await self.client.completion(plain(request_payload)["json"])

    async def pause_generation(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        await self.client.pause(plain(mode), clear_cache=plain(clear_cache))

    async def resume_generation(self) -> None:
        await self.client.everywhere("resume_generation")

    async def sleep(self, level: int = 2, tags: list[str] | None = None) -> None:
        await self.client.everywhere("sleep", level=self.level(plain(level)), tags=plain(tags))

    def level(self, asked: Any) -> Any:
        """The level at which engines sleep. With adapters they keep the model, since no sync brings it back."""
        return 1 if self.client.takes_adapters else asked

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self.client.everywhere("wake_up", tags=plain(tags))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        await self.client.everywhere("reset_prefix_cache", reset_running_requests=plain(reset_running_requests))

    async def init_weight_update_communicator(self, init_info: Any) -> None:
        """There is no group to join."""

    async def update_named_weights(self, request: SyncWeightsRequest) -> None:
        await self.client.sync_weights(request.version, request.chunks, request.layout)

    async def teardown(self) -> None:
        for engine in self.client.engines:
            engine.stop()

    def tp_size(self) -> int:
        return len(self.client.engines[0].workers)

    def pp_size(self) -> int:
        return 1

    def dp_size(self) -> int:
        return 1
