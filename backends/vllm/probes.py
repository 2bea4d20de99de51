"""Methods that the harness adds to vLLM's workers: what a worker holds, read where it is held.

They are called through vLLM's own `collective_rpc` and read only. No worker extension of a stack is replaced.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any


def tensor_digest(tensor: Any) -> str:
    """ "sha256-prefix:shape:dtype" of a tensor's bytes. Equal digests: equal bytes, shape and type."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{hashlib.sha256(data).hexdigest()[:16]}:{tuple(tensor.shape)}:{str(tensor.dtype).removeprefix('torch.')}"


def parity_digests(worker: Any) -> dict[str, str]:
    """parameter → digest, for every parameter of the model that this worker runs."""
    return {name: tensor_digest(parameter) for name, parameter in worker.model_runner.model.named_parameters()}


def parity_whoami(worker: Any, name: str) -> dict[str, Any]:
    """The worker's process and rank. `name` is what the adapter calls this server: the tap pairs it with the engine."""
    return {"name": name, "pid": os.getpid(), "rank": int(worker.rank)}


def install() -> None:
    """Give the methods to every worker class of this process."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.parity_digests = parity_digests  # type: ignore[attr-defined]
    WorkerBase.parity_whoami = parity_whoami  # type: ignore[attr-defined]
