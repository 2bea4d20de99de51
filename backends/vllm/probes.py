"""Methods that the harness adds to vLLM's workers, to read their state inside the worker's process.

The adapter calls them by vLLM's `collective_rpc`. All but `parity_forget_adapters` only read. No stack's worker extension changes.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import operator
import os
import re
from typing import Any

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Environment variable of every process of an engine. The adapter sets it to "1" or "0"."""
CACHE_SCALES = ("attn._k_scale", "attn._q_scale", "attn._v_scale", "attn._prob_scale")
"""Parameters that quantized engines define for a quantized cache. No engine here has one, so no checkpoint or sync sets them."""
PLACES = re.compile(
    r"_.*|model|tokenizer|served_model_name|distributed_executor_backend|worker_.*cls|mamba_ssm_cache_dtype"
    r"|.*_(port|ip|addr(ess)?|path|dir|rank|id|token)"
)
"""Options that name a place, a process or a secret, that `parity_worker` tells, or that the harness or vLLM chooses for a CPU."""


def tensor_digest(tensor: Any) -> str:
    """ "sha256-prefix:shape:dtype" of a tensor. Equal digests mean equal bytes, shape and type."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{hashlib.sha256(data).hexdigest()[:16]}:{tuple(tensor.shape)}:{str(tensor.dtype).removeprefix('torch.')}"


def parity_digests(worker: Any) -> dict[str, str]:
    """parameter → digest, for every parameter of the model that this worker runs. Parameters of layers that vLLM wrapped for
    adapters keep their original names; vLLM 0.30 nests experts in a layer `routed_experts`, which is left out."""
    named = worker.model_runner.model.named_parameters()
    return {
        name.replace(".base_layer.", ".").replace(".experts.routed_experts.", ".experts."): tensor_digest(parameter)
        for name, parameter in named
        if not name.endswith(CACHE_SCALES)
    }


def parity_forget_adapters(worker: Any) -> int:
    """Remove every LoRA adapter from this worker; returns their number."""
    held = list(worker.list_loras())
    for adapter in held:
        worker.remove_lora(adapter)
    return len(held)


def parity_whoami(worker: Any, name: str) -> dict[str, Any]:
    """The worker's process and rank, and how it computes. `name` is the adapter's name for this server; the tap pairs it with the
    engine."""
    return {
        "name": name,
        "pid": os.getpid(),
        "rank": int(worker.rank),
        "cuda_graphs": worker.vllm_config.compilation_config.cudagraph_mode.name != "NONE",
        "batch_invariant": os.environ.get(BATCH_INVARIANT) == "1",
    }


SETTINGS = {
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "enable_expert_parallel": "parallel_config.enable_expert_parallel",
    "model": "model_config.model",
    "dtype": "model_config.dtype",
    "max_model_len": "model_config.max_model_len",
    "enforce_eager": "model_config.enforce_eager",
    "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "max_num_seqs": "scheduler_config.max_num_seqs",
}
"""Argument of an engine → its place in vLLM's configuration."""


def parity_worker(worker: Any) -> dict[str, Any]:
    """How weights reach the worker (`WorkerDescription`): the classes outside vLLM among its bases, and the transport of its
    receiver, which is SkyRL's or vLLM's own. And the settings of its engine."""
    extensions = [
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in type(worker).__mro__
        if not kind.__module__.startswith(("vllm.", "builtins", "typing", "abc"))
    ]
    receiver = getattr(worker, "_weight_receiver", None) or getattr(worker, "weight_transfer_engine", None)
    transport = None if receiver is None else "ipc" if "ipc" in type(receiver).__name__.lower() else "broadcast"
    read = {name: operator.attrgetter(path)(worker.vllm_config) for name, path in SETTINGS.items()}
    settings = {name: str(value).removeprefix("torch.") for name, value in read.items()}
    return {"rank": int(worker.rank), "extensions": extensions, "transport": transport, "settings": settings}


def parity_options(worker: Any) -> dict[str, str]:
    """What this engine runs with, as text that is the same from start to start: "engine.seed" → its value, for every option of
    vLLM's `EngineArgs`. Not vLLM's environment variables: SkyRL's prepare_runtime_environment() sets those of both stacks."""
    from vllm.engine.arg_utils import EngineArgs

    options = {field.name for field in dataclasses.fields(EngineArgs)}
    parts = [part for part in vars(worker.vllm_config).values() if hasattr(part, "__dict__")]
    found = {name: value for part in parts for name, value in vars(part).items() if name in options}
    return {
        f"engine.{name}": repr(value.value if isinstance(value, enum.Enum) else value)
        for name, value in found.items()
        if isinstance(value, bool | int | float | str | enum.Enum | None) and not PLACES.fullmatch(name)
    }


def parity_device_memory(worker: Any) -> dict[str, Any]:
    """Memory of the worker's device (`harness.contract.messages.WorkerMemory`), and the part that vLLM's sleep mode manages."""
    import torch

    if worker.device.type != "cuda":
        return {"rank": int(worker.rank)}
    free, total = torch.cuda.mem_get_info(worker.device)
    uuid = str(torch.cuda.get_device_properties(worker.device).uuid)
    return {"rank": int(worker.rank), "device": uuid, "total": total, "free": free, "pool": _sleep_pool()}


def _sleep_pool() -> dict[str, int]:
    """tag → bytes of this process's sleep pool, mapped or released (vLLM, CuMemAllocator). Empty without sleep mode."""
    from vllm.device_allocator.cumem import CuMemAllocator

    pool: dict[str, int] = {}
    if CuMemAllocator.instance is not None:
        for allocation in CuMemAllocator.instance.pointer_to_data.values():
            _device, size, *_ = allocation.handle
            pool[allocation.tag] = pool.get(allocation.tag, 0) + size
    return pool


def install() -> None:
    """Add the methods to every worker class of this process."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.parity_digests = parity_digests
    WorkerBase.parity_forget_adapters = parity_forget_adapters
    WorkerBase.parity_whoami = parity_whoami
    WorkerBase.parity_worker = parity_worker
    WorkerBase.parity_options = parity_options
    WorkerBase.parity_device_memory = parity_device_memory
