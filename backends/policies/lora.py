"""LoRA adapters by version: version k is a deterministic function of a checkpoint and k, in PEFT's own file format.

Rank 8 on every linear layer of attention and MLP, without the experts of a mixture (PEFT documentation, checkpoint format; no PEFT
is needed to write it). Runs in a stack's environment.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from backends.policies import versions as policy

RANK = 8
ALPHA = 16
SCALE = ALPHA / RANK
"""Factor of the product B · A (PEFT documentation, LoraConfig)."""
STRENGTH = 0.5
"""Standard deviation of an adapter's change, in units of the weight's own: large enough that greedy output must change."""
WEIGHTS = "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _factor(name: str, version: int, shape: tuple[int, int], spread: float) -> Any:
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{name}:{version}".encode()).digest()[:8], "big") % 2**63
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def factors(weights: dict[str, Any], version: int, rank: int = RANK) -> dict[str, tuple[Any, Any]]:
    """Adapter version `version` of a checkpoint: weight → (A: rank × in, B: out × rank), float32."""
    made = {}
    for name, weight in weights.items():
        if ".experts." in name or not name.endswith(tuple(f".{target}.weight" for target in TARGETS)):
            continue
        spread = math.sqrt(STRENGTH * float(weight.float().std()) / (SCALE * math.sqrt(RANK)))
        rows, columns = weight.shape
        made[name] = (
            _factor(f"{name}:lora_A", version, (rank, columns), spread),
            _factor(f"{name}:lora_B", version, (rows, rank), spread),
        )
    return made


def merged(weights: dict[str, Any], checkpoint: dict[str, Any], version: int, dtype: Any) -> dict[str, Any]:
    """A model's weights with the adapter merged in: W + SCALE · B · A, float32, from factors that an engine holds in `dtype`.

    The adapter was made from `checkpoint`.
    """
    whole = {name: tensor.float() for name, tensor in weights.items()}
    for name, (down, up) in factors(checkpoint, version).items():
        whole[name] = whole[name] + SCALE * up.to(dtype).float() @ down.to(dtype).float()
    return whole


def write(folder: Path, model_path: str, version: int, rank: int = RANK) -> None:
    """Write adapter version `version` as a PEFT folder. Replaces an existing one. Each file is complete or absent."""
    from safetensors.torch import save_file

    tensors = {}
    for name, (down, up) in factors(policy.checkpoint(model_path), version, rank).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = down, up
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{os.getpid()}.unfinished"
    save_file(tensors, str(unfinished))
    unfinished.replace(folder / WEIGHTS)
    unfinished.write_text(json.dumps(configuration, indent=2), encoding="utf-8")
    unfinished.replace(folder / "adapter_config.json")


def cut(folder: Path) -> None:
    """Take the second half of the weights' file away, as if it were being written in place."""
    weights = folder / WEIGHTS
    os.truncate(weights, weights.stat().st_size // 2)
