"""The trainer's side: policy versions made by optimizer steps, and sent through SkyRL's own transfer strategy.

It runs in the host. Which strategy is SkyRL's choice (`get_transfer_strategy_cls`); on CPU the configuration asks for gloo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from fixtures import fsdp2, policy
from fixtures.trainer import PolicyTrainer
from harness import ports
from harness.contract import Layout, TrainRequest, TrainResult


class Trainer:
    """A single trainer process (rank 0) that holds policy versions and broadcasts them."""

    def __init__(self, model_path: str, policies: str, device: str, *, one_at_a_time: bool = False) -> None:
        """`policies` is where trained versions are kept. `one_at_a_time`: SkyRL 0.1.0 broadcasts one parameter a chunk, and
        refuses larger ones."""
        self._one_at_a_time = one_at_a_time
        self._model_path = model_path
        self._policies = policies
        self._learner = PolicyTrainer(model_path, policies)
        self._device = device
        self._sender: Any = None
        self._dtype = ""

    async def join(self, client: Any, cfg: Any, world_size: int | None) -> None:
        """Make the group of trainer and workers, as SkyRL's worker does in init_weight_sync_state. Once."""
        if self._sender is not None:
            return
        from skyrl.backends.skyrl_train.weight_sync import get_transfer_strategy_cls

        engine_cfg = cfg.generator.inference_engine
        self._dtype = engine_cfg.model_dtype
        _join_own_group()
        strategy = get_transfer_strategy_cls(engine_cfg.weight_sync_backend, cfg.trainer.placement.colocate_all)
        info = strategy.create_init_info(engine_cfg, inference_world_size=world_size)
        self._sender, _ = await asyncio.gather(
            asyncio.to_thread(strategy.create_sender, init_info=info, inference_client=client),
            client.init_weight_update_communicator(info),
        )

    async def send(self, version: int, chunks: int, layout: Layout = "single") -> None:
        """Send policy version `version`, held in this layout, in `chunks` pieces of about equal numbers of parameters."""
        assert self._sender is not None, "join comes first"
        held = fsdp2.gather if layout == "fsdp2" else policy.version
        tensors = await asyncio.to_thread(held, self._model_path, version, self._policies)
        if self._one_at_a_time:
            await self._sender.send_chunks(self._chunks(tensors, len(tensors)))
            return
        metadata = {
            "names": list(tensors),
            "dtype_names": [self._dtype] * len(tensors),
            "shapes": [list(t.shape) for t in tensors.values()],
        }
        await self._sender.send_chunks(self._chunks(tensors, chunks), weight_metadata=metadata)

    async def train(self, request: TrainRequest) -> TrainResult:
        """One optimizer step, in a thread of its own: rollouts go on meanwhile."""
        return await asyncio.to_thread(self._learner.train, request)

    def _chunks(self, tensors: dict[str, Any], count: int) -> Iterator[Any]:
        import torch
        from skyrl.backends.skyrl_train.weight_sync import WeightChunk

        names = list(tensors)
        size = -(-len(names) // count)
        dtype = getattr(torch, self._dtype)
        for start in range(0, len(names), size):
            part = names[start : start + size]
            moved = [tensors[name].to(self._device, dtype) for name in part]
            yield WeightChunk(
                names=part, dtypes=[self._dtype] * len(part), shapes=[list(t.shape) for t in moved], tensors=moved
            )


def _join_own_group() -> None:
    """SkyRL's strategies ask for the trainer's rank: a default group of one."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    [port] = ports.free(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
