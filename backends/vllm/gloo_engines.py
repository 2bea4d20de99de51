"""Weight transfer over gloo for vLLM 0.28 and later, whose trainer has an engine of its own.

SkyRL 0.4.0 derives its classes from vLLM's NCCL classes, so these are changed in place. Ranks and payloads stay as vLLM defines
them (vLLM documentation, Weight Transfer).
"""

from __future__ import annotations

from typing import Any

import vllm.distributed.weight_transfer.nccl_engine as nccl

from backends.vllm import gloo
from backends.vllm.gloo import GlooGroup


def use_in_engine() -> None:
    """Make the receiving class speak gloo in this process."""

    def init_transfer_engine(self: Any, init_info: Any) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self.model_update_group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def receive_weights(self: Any, update_info: Any) -> None:
        assert self.model_update_group is not None, "init_transfer_engine comes first"
        about = update_info.names, update_info.dtype_names, update_info.shapes
        gloo.receive(self.model_update_group, *about, self.model.load_weights)

    nccl.NCCLWeightTransferEngine.init_transfer_engine = init_transfer_engine
    nccl.NCCLWeightTransferEngine.receive_weights = receive_weights


def use_in_trainer() -> None:
    """Make the trainer's class speak gloo in this process."""

    def broadcast(self: Any, source: Any, meta: Any) -> None:
        gloo.send(self.model_update_group, (tensor for _, tensor in self._checked_iter(source, meta)))

    nccl.open_trainer_endpoint = lambda info: GlooGroup(info.master_address, info.master_port, 0, info.world_size)
    nccl.NCCLTrainerWeightTransferEngine._broadcast = broadcast
    nccl.NCCLTrainerWeightTransferEngine._post_send_sync = lambda *_args, **_kwargs: None
