"""SkyRL's backend of the Tinker API (`SkyRLTrainBackend`) over the engines of a running stack: its own `sample()`, without a trainer.

Written for skyrl 0.1.0 to 0.4.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from unittest import mock

from backends.skyrl.source import taken
from harness.contract import messages
from harness.driving import raw

MODULE = "skyrl.backends.skyrl_train_backend"
ENGINE = "skyrl.tinker.engine"
"""Module whose function makes the backend's batch of requests. It imports a database, which no environment here has."""
PREPARES = "prepare_sample_batch"
POLICY = "policy"
"""Tinker's id of the one model."""
NAMES = {"stop": "stop_strings", "stop_token_ids": "stop_tokens"}
"""vLLM's name of a sampling parameter → Tinker's, where they differ."""
REQUEST = "request"


class TinkerError(Exception):
    """The backend answered with an ErrorResponse, whose text this is."""


class InLoop:
    """An engine whose calls run in the loop that it works in. The backend makes a loop for each of its own calls."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **given: Any) -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(found(*args, **given), self._loop))

        return call


class Backend:
    """SkyRL's backend after its create_model(): the trainer's workers are stubbed, everything else is SkyRL's own."""

    def __init__(self, cfg: Any) -> None:
        from skyrl.backends import skyrl_train_backend as shipped
        from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

        backend = shipped.SkyRLTrainBackend(cfg.trainer.policy.model.path, shipped.FSDPBackendOverrides())
        backend._cfg, backend._colocate_pg = cfg, None
        backend._dispatch = mock.create_autospec(WorkerDispatch, instance=True)
        if hasattr(backend, "_model_ids_to_role"):  # from 0.3.0 on
            backend._model_ids_to_role[POLICY] = "policy"
        else:
            backend._model_id = POLICY
        self._backend, self._prepare = backend, _prepares()
        self._one_at_a_time = asyncio.Lock()  # as in the process of the Tinker engine
        backend._ensure_inference_engines()

    async def sample(self, request: messages.SampleRequest) -> messages.Generation:
        """Raises SkyRL's errors, and TinkerError for one that SkyRL returns."""
        with raw.aside():
            async with self._one_at_a_time:
                answers = await asyncio.to_thread(self._sample, request)
        found = answers[REQUEST]
        if hasattr(found, "error"):
            raise TinkerError(found.error)
        return messages.Generation(
            response_ids=[[int(token) for token in one.tokens] for one in found.sequences],
            responses=None,
            stop_reasons=[one.stop_reason for one in found.sequences],
            response_logprobs=[one.logprobs for one in found.sequences],
            prompt_logprobs=found.prompt_logprobs,
            topk_prompt_logprobs=getattr(found, "topk_prompt_logprobs", None),
        )

    def _sample(self, request: messages.SampleRequest) -> Any:
        asked = (POLICY if request.tinker == "policy" else "", _input_of(request))
        return self._backend.sample(self._prepare({REQUEST: asked}))


def _input_of(request: messages.SampleRequest) -> Any:
    """The request as the Tinker API stores it. Raises pydantic's error for a prompt that it cannot hold."""
    from skyrl.tinker import types

    return types.SampleInput.model_validate(body_of(request, NAMES) | {"checkpoint_id": ""})


def body_of(request: messages.SampleRequest, names: Mapping[str, str]) -> dict[str, Any]:
    """A sample request in Tinker's words. `names`: vLLM's name of a sampling parameter → the body's, where they differ."""
    image = [] if request.image is None else [{"type": "image", "data": request.image, "format": "png"}]
    params = {names.get(name, name): value for name, value in request.sampling_params.items() if name != "logprobs"}
    return {
        "prompt": {"chunks": [*image, {"type": "encoded_text", "tokens": request.prompt_token_ids}]},
        "sampling_params": params,
        "num_samples": request.num_samples,
        "prompt_logprobs": request.prompt_logprobs,
        "topk_prompt_logprobs": request.topk_prompt_logprobs,
        "sampling_session_id": request.session_id,
        "seq_id": None if request.session_id is None else 0,
    }


def _prepares() -> Any:
    """SkyRL's function that makes a batch of requests, out of its module's source."""
    from skyrl.tinker import types

    return taken(ENGINE, [PREPARES], {"types": types})[PREPARES]
