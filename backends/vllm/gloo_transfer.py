"""Transfers weights over gloo, in place of vLLM's NCCL weight transfer, on machines without a GPU.

The HTTP surface (`/init_weight_transfer_engine`, `/update_weights`), the ranks and the payloads stay as vLLM defines them
(vLLM documentation, Weight Transfer); only the bytes travel by gloo. As in vLLM's packed broadcast, parameters are packed into
buffers in the order of `names`, and each buffer is loaded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

from backends.vllm import gloo
from backends.vllm.gloo import GlooGroup


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's weight transfer engine over gloo. From vLLM 0.26 on it also begins and ends an update, as its base class does."""

    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def receive_weights(
        self, update_info: Any, load_weights: Callable[[list[tuple[str, torch.Tensor]]], None] | None = None
    ) -> None:
        """`load_weights`: None from vLLM 0.26 on, where the engine loads into its own model."""
        assert self._group is not None, "init_transfer_engine comes first"
        load = load_weights or self.model.load_weights
        gloo.receive(self._group, update_info.names, update_info.dtype_names, update_info.shapes, load)

    def shutdown(self) -> None:
        self._group = None

    @staticmethod
    def trainer_init(init_info: dict[str, Any]) -> GlooGroup:
        """The trainer's side; SkyRL's BroadcastTransferStrategy calls it."""
        return GlooGroup(init_info["master_address"], init_info["master_port"], 0, init_info["world_size"])

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: dict[str, Any] | NCCLTrainerSendWeightsArgs
    ) -> None:
        args = trainer_args if isinstance(trainer_args, dict) else trainer_args.__dict__
        gloo.send(args["group"], (tensor for _, tensor in iterator))


def use_in_trainer() -> None:
    """Make the trainer's side of `NCCLWeightTransferEngine` use gloo in this process."""
    NCCLWeightTransferEngine.trainer_init = staticmethod(GlooWeightTransferEngine.trainer_init)
    NCCLWeightTransferEngine.trainer_send_weights = staticmethod(GlooWeightTransferEngine.trainer_send_weights)
