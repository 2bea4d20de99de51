"""Weights over gloo, in place of vLLM's NCCL weight transfer, on machines without a GPU.

The HTTP surface (`/init_weight_transfer_engine`, `/update_weights`), the ranks and the payloads stay as vLLM defines them
(vLLM documentation, Weight Transfer); only the bytes travel by gloo. One broadcast a parameter, in the order of `names`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerSendWeightsArgs,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

TIMEOUT = timedelta(seconds=60)
"""How long a broadcast waits for a peer that does not come."""


class GlooGroup:
    """Trainer (rank 0) and workers (rank 1 …), apart from any default process group."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("parity", store), rank, world_size, TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


class GlooWeightTransferEngine(WeightTransferEngine[NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo]):
    """vLLM's weight transfer engine with gloo beneath it."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def receive_weights(
        self,
        update_info: NCCLWeightTransferUpdateInfo,
        load_weights: Callable[[list[tuple[str, torch.Tensor]]], None],
    ) -> None:
        assert self._group is not None, "init_transfer_engine comes first"
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(list(shape), dtype=getattr(torch, dtype), device="cpu")
            self._group.broadcast(tensor)
            load_weights([(name, tensor)])

    def shutdown(self) -> None:
        self._group = None

    @staticmethod
    def trainer_init(init_info: dict[str, Any]) -> GlooGroup:
        """The trainer's side, called by SkyRL's BroadcastTransferStrategy."""
        return GlooGroup(init_info["master_address"], init_info["master_port"], 0, init_info["world_size"])

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: dict[str, Any] | NCCLTrainerSendWeightsArgs
    ) -> None:
        args = trainer_args if isinstance(trainer_args, dict) else trainer_args.__dict__
        for _, tensor in iterator:
            args["group"].broadcast(tensor.detach().cpu().contiguous())


def use_in_trainer() -> None:
    """Let the trainer's side of `NCCLWeightTransferEngine` speak gloo in this process."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    NCCLWeightTransferEngine.trainer_init = staticmethod(GlooWeightTransferEngine.trainer_init)
    NCCLWeightTransferEngine.trainer_send_weights = staticmethod(GlooWeightTransferEngine.trainer_send_weights)
