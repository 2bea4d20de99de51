"""Quantizes weights, and writes the quantized twin of a checkpoint that engines load. Runs in a stack's environment.

Each linear layer of a decoder block has symmetric 8-bit weights with one float32 scale per output channel. vLLM quantizes the
layer's input at run time, with one scale per token (compressed-tensors, schemes W8A8 int8 and W8A8 fp8). Embeddings, norms, biases
and the output layer stay in full precision.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.contract.topology import Quantization

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""Quantized value of an output channel's largest weight, or of a token's largest activation: the top of int8 and fp8 (E4M3)."""

_WORDS = {"int8": ("int", "int-quantized"), "fp8": ("float", "float-quantized")}
"""compressed-tensors' words for type and format."""


def is_quantized(name: str) -> bool:
    """True if this parameter is the weight of a linear layer of a decoder block, by Hugging Face's name or vLLM's fused one."""
    return name.endswith("_proj.weight")


def quantize(weight: Any, kind: Quantization) -> tuple[Any, Any]:
    """8-bit weight (outputs × inputs, int8 or float8_e4m3fn) and scale (outputs × 1, float32) of a full-precision weight.

    The scale is a product, which has the same bytes on every device. For a tensor divided by a number, CUDA multiplies by the
    reciprocal and a CPU divides.
    """
    import torch

    largest = LARGEST[kind]
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True) * (1 / largest)).clamp(min=torch.finfo(torch.float32).tiny)
    steps = (weight / scale).clamp(-largest, largest)
    return steps.round().to(torch.int8) if kind == "int8" else steps.to(torch.float8_e4m3fn), scale


def quantized(tensors: Iterable[tuple[str, Any]], kind: Quantization) -> Iterator[tuple[str, Any]]:
    """Full-precision parameters as a quantized checkpoint has them: "….weight" becomes an 8-bit "….weight" and "….weight_scale"."""
    for name, tensor in tensors:
        if is_quantized(name):
            weight, scale = quantize(tensor, kind)
            yield name, weight
            yield f"{name}_scale", scale
        else:
            yield name, tensor


def make_twin(model_path: str, folder: Path, kind: Quantization, dtype: str) -> str:
    """Write the quantized twin of a checkpoint to `folder`, which must not exist yet, and return its path. `dtype` is the engine's:
    weights are rounded to it before they are quantized, as in a sync. The bytes are the same each time."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in sorted(Path(model_path).glob("*.safetensors")):
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(str(file)).items()}
        save_file(dict(quantized(tensors.items(), kind)), str(folder / file.name), metadata={"format": "pt"})
    configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    configuration["quantization_config"] = _configuration(kind)
    (folder / "config.json").write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
    return str(folder)


def _configuration(kind: Quantization) -> dict[str, Any]:
    """`quantization_config` of config.json (compressed-tensors, QuantizationConfig)."""
    word, format_ = _WORDS[kind]
    in_8_bits = {"num_bits": 8, "type": word, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**in_8_bits, "strategy": "channel", "dynamic": False},
                "input_activations": {**in_8_bits, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
    }
