"""A policy version as FSDP2 holds it: two ranks hold one shard each, and SkyRL's code gathers them for a weight sync.

PyTorch's `fully_shard` makes the shards. SkyRL's `FSDPWeightExtractor` reads them (0.4.0: `FsdpWeightSource`).
Runs in a stack's environment, on a CPU.
"""

from __future__ import annotations

from typing import Any

from backends.policies import ranks

WORLD = 2
NEEDS_CUDA: dict[str, dict[str, Any]] = {
    "flash_attn": {},
    "flash_attn.bert_padding": {"pad_input": None, "unpad_input": None},
}
"""Modules that SkyRL's FSDP module imports and that reading the shards does not use."""


def one_rank(held: ranks.Held, _rank: int) -> dict[str, Any]:
    """Returns the gathered parameters of the policy version, by Hugging Face's names, on every rank."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    tensors = held.tensors()
    model = AutoModelForCausalLM.from_pretrained(held.model_path, dtype=torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gathered = _gathered(model)
    return {name: gathered[name] for name in tensors}


def _gathered(model: Any) -> dict[str, Any]:
    import torch

    try:
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPWeightExtractor
    except ImportError:  # SkyRL 0.4.0
        from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource

        return dict(FsdpWeightSource(model, torch.float32))
    return {
        name: tensor
        for chunk in FSDPWeightExtractor(model).extract_weights(torch.float32)
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
    }


def main() -> None:
    ranks.place(NEEDS_CUDA)
    import skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker  # noqa: F401 - imported once, before the ranks fork

    ranks.main(WORLD, one_rank)


if __name__ == "__main__":
    main()
