"""Methods that the harness adds to vLLM's workers: what a worker holds, read where it is held.

They are called through vLLM's own `collective_rpc` and read only. No worker extension of a stack is replaced.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Environment variable of every process of an engine. The adapter sets it: "1" or "0"."""
CACHE_SCALES = ("attn._k_scale", "attn._q_scale", "attn._v_scale", "attn._prob_scale")
"""Parameters that quantized engines have for a quantized cache, which none here has: no checkpoint and no sync brings them."""


def tensor_digest(tensor: Any) -> str:
    """ "sha256-prefix:shape:dtype" of a tensor's bytes. Equal digests: equal bytes, shape and type."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{hashlib.sha256(data).hexdigest()[:16]}:{tuple(tensor.shape)}:{str(tensor.dtype).removeprefix('torch.')}"


def parity_digests(worker: Any) -> dict[str, str]:
    """parameter → digest, for every parameter of the model that this worker runs. A layer that vLLM has wrapped so that it takes
    adapters keeps its parameters, under its own name."""
    named = worker.model_runner.model.named_parameters()
    return {
        name.replace(".base_layer.", "."): tensor_digest(parameter)
        for name, parameter in named
        if not name.endswith(CACHE_SCALES)
    }


def parity_forget_adapters(worker: Any) -> int:
    """Take every LoRA adapter out of this worker; how many there were."""
    held = list(worker.list_loras())
    for adapter in held:
        worker.remove_lora(adapter)
    return len(held)


def parity_whoami(worker: Any, name: str) -> dict[str, Any]:
    """The worker's process and rank, and how it computes. `name` is what the adapter calls this server: the tap pairs it with the
    engine."""
    return {
        "name": name,
        "pid": os.getpid(),
        "rank": int(worker.rank),
        "cuda_graphs": worker.vllm_config.compilation_config.cudagraph_mode.name != "NONE",
        "batch_invariant": os.environ.get(BATCH_INVARIANT) == "1",
    }


def parity_worker(worker: Any) -> dict[str, Any]:
    """By what the worker takes weights (`WorkerDescription`): classes of others in its bases, and the receiver that it has:
    SkyRL's, or vLLM's own."""
    extensions = [
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in type(worker).__mro__
        if not kind.__module__.startswith(("vllm.", "builtins", "typing", "abc"))
    ]
    receiver = getattr(worker, "_weight_receiver", None) or getattr(worker, "weight_transfer_engine", None)
    transport = None if receiver is None else "ipc" if "ipc" in type(receiver).__name__.lower() else "broadcast"
    return {"rank": int(worker.rank), "extensions": extensions, "transport": transport}


def parity_device_memory(worker: Any) -> dict[str, Any]:
    """Memory of the worker's device (`harness.contract.messages.WorkerMemory`), and what vLLM's sleep mode manages of it."""
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
    """Give the methods to every worker class of this process."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.parity_digests = parity_digests
    WorkerBase.parity_forget_adapters = parity_forget_adapters
    WorkerBase.parity_whoami = parity_whoami
    WorkerBase.parity_worker = parity_worker
    WorkerBase.parity_device_memory = parity_device_memory
