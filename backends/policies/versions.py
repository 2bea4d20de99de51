"""Policy versions: version k of a model is a deterministic function of its checkpoint and k, or a file that the trainer wrote.

Trainer and reference each build a version themselves; a stack transfers it only by its own means. Runs in a stack's environment.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.contract.messages import FIRST_TRAINED

STRENGTH = 0.5
"""Standard deviation of the change, in units of the parameter's own: large enough that greedy output must change."""

OF_TRAINED = 0.1
"""The same for a trained model: more would leave nothing of what it learned, and rounding then moves its answers far more."""
TRAINED = 10_000_000
"""Parameters from which a model counts as trained. The tiny models have random weights."""


def is_trained(tensors: dict[str, Any]) -> bool:
    """Whether these are the weights of a model that has learned something, told by its size."""
    return bool(sum(tensor.numel() for tensor in tensors.values()) >= TRAINED)


def checkpoint(model_path: str) -> dict[str, Any]:
    """Version 0: the tensors of the checkpoint, by Hugging Face name, in sorted order, on CPU."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        tensors.update(load_file(str(file)))
    return dict(sorted(tensors.items()))


def number_of(parts: Iterable[tuple[str, bytes]]) -> int:
    """The number of a trained version: 48 bits derived from its content, at least `FIRST_TRAINED`. `parts` are the names and bytes
    of its tensors, in sorted order."""
    total = hashlib.sha256()
    for name, content in parts:
        total.update(name.encode())
        total.update(content)
    return FIRST_TRAINED + int.from_bytes(total.digest()[:6], "big") % (2**48 - FIRST_TRAINED)


def keep(policies: str, tensors: dict[str, Any]) -> int:
    """Write a trained version to its file atomically; returns its number."""
    from safetensors.torch import save_file

    number = number_of((name, tensors[name].numpy().tobytes()) for name in sorted(tensors))
    folder = Path(policies)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{number}.{os.getpid()}.unfinished"
    save_file(tensors, str(unfinished))
    unfinished.replace(_file(policies, number))
    return number


def _file(policies: str, number: int) -> Path:
    return Path(policies) / f"{number}.safetensors"


def version(model_path: str, number: int, policies: str = "") -> dict[str, Any]:
    """Policy version `number`: name → tensor, in sorted order, same shapes and types as the checkpoint. 0 is the checkpoint.

    Versions from `FIRST_TRAINED` on are read from the folder `policies`. Raises FileNotFoundError for a version that is not there.
    """
    import torch

    if number >= FIRST_TRAINED:
        from safetensors.torch import load_file

        return dict(sorted(load_file(str(_file(policies, number))).items()))
    tensors = checkpoint(model_path)
    if number == 0:
        return tensors
    strength = OF_TRAINED if is_trained(tensors) else STRENGTH
    changed = {}
    for name, tensor in tensors.items():
        seed = int.from_bytes(hashlib.sha256(f"{name}:{number}".encode()).digest()[:8], "big") % 2**63
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        spread = float(tensor.float().std()) if tensor.numel() > 1 else 0.0
        changed[name] = (tensor.float() + strength * (spread or 0.1) * noise).to(tensor.dtype)
    return changed
