"""Samples that the Tinker API's process sends to the router by itself, without its backend (SkyRL,
SkyRLTrainInferenceForwardingClient).

Written for skyrl 0.3.0 and 0.4.0.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from backends.skyrl import tinker
from backends.skyrl.source import taken
from harness.contract import messages

MODULE = "skyrl.tinker.extra.skyrl_train_inference_forwarding"
CLIENT = "SkyRLTrainInferenceForwardingClient"
OF_CLIENT = (CLIENT, "TransientInferenceError", "_ROUTER_CONNECT_TIMEOUT_SECONDS")
API = "skyrl.tinker.api"
OF_REQUESTS = (
    "EncodedTextChunk",
    "ImageChunk",
    "ImageAssetPointerChunk",
    "_get_model_chunk_type",
    "ModelInputChunk",
    "ModelInput",
    "SamplingParams",
    "SampleRequest",
)
"""The models of the API's own requests."""


class ForwardingError(Exception):
    """The client stored an ErrorResponse, whose text this is."""


class _Database:
    """In place of the API's database: one row, with the router's address."""

    def __init__(self, proxy_url: str) -> None:
        self._row = SimpleNamespace(inference_proxy_url=proxy_url)

    async def __aenter__(self) -> _Database:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is kept."""

    async def get(self, *_: Any) -> Any:
        return self._row


class Forwarding:
    """SkyRL's client, and the API's models of requests. `base_model` is the name by which the servers know their model."""

    def __init__(self, proxy_url: str, base_model: str) -> None:
        self._base_model = base_model
        self._requests = _requests()
        shipped = _client_of(proxy_url)
        settings = SimpleNamespace(forwarding_inference_max_connections=None, forwarding_inference_timeout_sec=300.0)
        given = dict.fromkeys(inspect.signature(shipped).parameters) | {"engine_config": settings}
        self._client = shipped(**given)

    async def sample(self, request: messages.SampleRequest) -> messages.Generation:
        """Raises ForwardingError for what becomes an ErrorResponse, and pydantic's error for a request that the API refuses."""
        asked = self._requests["SampleRequest"].model_validate(_body_of(request, self._base_model))
        try:
            found = await self._client._forward_with_retry(asked, "", base_model=self._base_model)
        except Exception as e:  # as call_and_store_result() does
            raise ForwardingError(str(e)) from e
        return messages.Generation(
            response_ids=[[int(token) for token in one.tokens] for one in found.sequences],
            responses=None,
            stop_reasons=[one.stop_reason for one in found.sequences],
            response_logprobs=[list(one.logprobs) for one in found.sequences],
            prompt_logprobs=found.prompt_logprobs,
            topk_prompt_logprobs=getattr(found, "topk_prompt_logprobs", None),
        )

    async def close(self) -> None:
        await self._client.aclose()


def _body_of(request: messages.SampleRequest, base_model: str) -> dict[str, Any]:
    """What a user's client of Tinker's sends."""
    return tinker.body_of(request, {"stop": "stop", "stop_token_ids": "stop"}) | {"base_model": base_model}


def _requests() -> dict[str, Any]:
    import pydantic
    from fastapi import HTTPException
    from skyrl.tinker import types

    given = {name: getattr(pydantic, name) for name in ("Base64Bytes", "BaseModel", "Discriminator", "Field", "Tag")}
    given |= {"model_validator": pydantic.model_validator, "HTTPException": HTTPException, "random": random}
    given |= {"types": types, "Annotated": Annotated, "Any": Any, "Literal": Literal}
    return taken(API, OF_REQUESTS, given, hints_matter=True)


def _client_of(proxy_url: str) -> Any:
    import aiohttp
    import httpx
    import orjson
    from skyrl.backends import utils
    from skyrl.backends.renderer import render_model_input
    from skyrl.tinker import types
    from skyrl.utils.log import logger

    def serialized(sequences: Any, prompt_logprobs: Any, topk: Any) -> Any:
        """In place of the message that the client of Tinker's reads (0.4.0)."""
        made = [
            types.GeneratedSequence(stop_reason=reason, tokens=tokens, logprobs=logprobs)
            for reason, tokens, logprobs in sequences
        ]
        return SimpleNamespace(sequences=made, prompt_logprobs=prompt_logprobs, topk_prompt_logprobs=topk)

    given = {
        "asyncio": asyncio, "aiohttp": aiohttp, "httpx": httpx, "orjson": orjson, "logger": logger, "types": types,
        "datetime": datetime, "timezone": timezone, "render_model_input": render_model_input,
        "convert_vllm_prompt_logprobs": getattr(utils, "convert_vllm_prompt_logprobs", None),
        "AsyncSession": lambda _engine: _Database(proxy_url), "EngineStateDB": None, "FutureDB": None,
        "RequestStatus": None, "serialize_sample_output": serialized,
    }  # fmt: skip
    return taken(MODULE, OF_CLIENT, given)[CLIENT]
