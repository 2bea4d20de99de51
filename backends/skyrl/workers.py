"""SkyRL's own policy worker in a weight sync: what it does beside sending. Written for skyrl 0.1.0 to 0.4.0."""

from __future__ import annotations

import copy
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from harness.contract.messages import Training

Send = Callable[[], Awaitable[None]]


async def send(ours: Send, engine: Any, client: Any, cfg: Any, training: Training) -> None:
    """Send by SkyRL's worker (`broadcast_to_inference_engines`), whose parameters `ours` sends. `engine`: see `Trainer.engine`."""
    cfg = copy.deepcopy(cfg)
    if hasattr(cfg.trainer.fully_async, "enabled"):  # 0.1.0 and 0.2.0 have a worker of one kind
        cfg.trainer.fully_async.enabled = training == "asynchronous"
    await _worker()(ours, engine, cfg.trainer).broadcast_to_inference_engines(client, cfg.generator.inference_engine)


@cache
def _worker() -> type[Any]:
    """SkyRL's worker without a model of its own. Its module imports one that needs flash-attn, which does not run on a CPU."""
    with mock.patch.dict(sys.modules, {"skyrl.backends.skyrl_train.workers.model_wrapper": mock.MagicMock()}):
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

    class Worker(FSDPPolicyWorkerBase):
        def __init__(self, ours: Send, engine: Any, cfg: Any) -> None:
            async def send_chunks(*_: Any, **__: Any) -> None:
                await ours()

            self._ours = ours
            self.cfg, self.model, self._is_lora = cfg, SimpleNamespace(model=None), False
            self.weight_extractor = mock.MagicMock()
            self._weight_transfer_sender = SimpleNamespace(send_chunks=send_chunks)
            self._weight_sync_engine = engine

        def _weight_sync_thread(self, *_: Any) -> Awaitable[None]:
            """From 0.4.0 on: in place of `engine.send_weights`."""
            return self._ours()

    return Worker
