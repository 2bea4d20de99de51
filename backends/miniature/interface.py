"""The client under the names of SkyRL's documented interface, through which the adapter calls it."""

from __future__ import annotations

from typing import Any

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


class Interface:
    """SkyRL API reference, InferenceEngineInterface."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.fired = 0

    def _census(self, keys: list[Offer]) -> CensusResult:
        """What a caller meets here."""
        return census.of(self, types={}, keys=keys)

    async def generate(self, input_batch: GenerateRequest) -> Generation:
        return await self._client.generate(input_batch)

    async def sample(
        self,
        prompt_token_ids: list[int],
        num_samples: int,
        sampling_params: dict[str, Any],
        session_id: SessionId | None = None,
        *,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Generation:
        return await self._client.sample(
            SampleRequest(
                prompt_token_ids=prompt_token_ids,
                num_samples=num_samples,
                sampling_params=sampling_params,
                session_id=session_id,
                prompt_logprobs=prompt_logprobs,
                topk_prompt_logprobs=topk_prompt_logprobs,
            )
        )

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        body = self._client.identified(request_payload["json"], request_payload["headers"])
        return await self._client.chat_completion(body)

    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        return await self._client.completion(request_payload["json"])

    async def pause_generation(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        await self._client.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        await self._client.everywhere("resume_generation")

    async def sleep(self, level: int = 2) -> None:
        await self._client.everywhere("sleep", level=level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._client.everywhere("wake_up", tags=tags)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        await self._client.everywhere("reset_prefix_cache", reset_running_requests=reset_running_requests)

    async def init_weight_update_communicator(self, init_info: Any) -> None:
        """There is no group to join."""

    async def update_named_weights(self, request: SyncWeightsRequest) -> None:
        await self._client.sync_weights(request.version, request.chunks, request.layout)

    async def teardown(self) -> None:
        for engine in self._client.engines:
            engine.stop()

    def tp_size(self) -> int:
        return len(self._client.engines[0].workers)

    def pp_size(self) -> int:
        return 1

    def dp_size(self) -> int:
        return 1
