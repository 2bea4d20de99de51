"""A policy version as Megatron-core holds it: real GPTModels on four ranks, TP2×PP2, exported for a weight sync.

`backends/policies/megatron.py` defines each parameter's place; a name that the layout or Megatron-core lacks is an error. SkyRL's
`MegatronWeightExtractor` reads them through Megatron-Bridge, which maps and gathers. Runs in a stack's environment, on a CPU.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

from backends.policies import megatron, ranks

TENSOR_PARALLEL, PIPELINE_PARALLEL = 2, 2
BUCKET_GB = 1e-4
"""Size of SkyRL's buckets (GB): small enough that a tiny model fills several."""
NEEDS_CUDA: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": "2.10.0"},
    "transformer_engine.pytorch": {"Linear": object, "ops": types.SimpleNamespace(Sequential=object)},
    "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": object},
    "transformer_engine.pytorch.optimizers": {},
    "transformer_engine.pytorch.optimizers.fused_adam": {"FusedAdam": object},
    "flash_attn": {},
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": None},
}
"""Modules that Megatron-Bridge (for LoRA) and SkyRL's Megatron worker (for training) import and that an export does not use."""


def one_rank(held: ranks.Held, rank: int) -> dict[str, Any]:
    """Returns the exported parameters of the policy version, by Hugging Face's names, on every rank."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronWeightExtractor

    parallel_state.initialize_model_parallel(TENSOR_PARALLEL, PIPELINE_PARALLEL)
    bridge = AutoBridge.from_hf_pretrained(held.model_path)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = TENSOR_PARALLEL, PIPELINE_PARALLEL
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.use_cpu_initialization = True
    provider.masked_softmax_fusion = provider.bias_activation_fusion = provider.gradient_accumulation_fusion = False
    provider.transformer_layer_spec = layer
    provider.finalize()
    model = provider.provide(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    )
    tensors = held.tensors()
    configuration = json.loads((Path(held.model_path) / "config.json").read_text())
    sharding = megatron.llama_like(
        configuration, tensors, tensor_parallel=TENSOR_PARALLEL, pipeline_parallel=PIPELINE_PARALLEL
    )
    mine = megatron.to_ranks(tensors, sharding, torch.cat)[rank]
    if odd := set(mine) ^ {name for name, _ in model.named_parameters()}:
        raise ValueError(f"not both the layout and Megatron-core have {', '.join(sorted(odd)[:3])}")
    # Its other state is empty.
    model.load_state_dict({name: shard.float() for name, shard in mine.items()}, strict=False)
    extractor = MegatronWeightExtractor(
        bridge, [model], enable_bucketing=True, bucket_size_threshold_GB=BUCKET_GB, training_dtype=torch.float32
    )
    return {
        name: tensor
        for chunk in extractor.extract_weights(torch.float32)
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
    }


def layer(_provider: Any) -> Any:
    """Megatron-core's own layer, with each norm inside the linear layer that follows it: Transformer Engine keeps it there, and
    Megatron-Bridge looks for it there. The layer only holds parameters and never runs."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):
        """Replaces Transformer Engine's class, which needs CUDA. Its name tells Megatron-Bridge that ranks have the whole norm."""

        def __init__(self, input_size: int, output_size: int, **given: Any) -> None:
            super().__init__(input_size, output_size, **given)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attention.submodules.linear_qkv = TELayerNormColumnParallelLinear
    parts.mlp.submodules.linear_fc1 = TELayerNormColumnParallelLinear
    return spec


def main() -> None:
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401 - before the placeholders, or it would use them

    ranks.place(NEEDS_CUDA)
    import skyrl.backends.skyrl_train.workers.megatron.megatron_worker  # noqa: F401 - imported once, before the ranks fork

    ranks.main(TENSOR_PARALLEL * PIPELINE_PARALLEL, one_rank)


if __name__ == "__main__":
    main()
