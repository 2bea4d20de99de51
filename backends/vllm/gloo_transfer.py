"""Transfers weights over gloo, in place of vLLM's NCCL weight transfer, on machines without a GPU.

The HTTP surface (`/init_weight_transfer_engine`, `/update_weights`), the ranks and the payloads stay as vLLM defines them
(vLLM documentation, Weight Transfer); only the bytes travel by gloo. As in vLLM's packed broadcast, parameters are packed into
buffers in the order of `names`, and each buffer is loaded at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from vllm.distributed.utils import create_tcp_store
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerSendWeightsArgs,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

TIMEOUT = timedelta(seconds=60)
"""How long a broadcast waits for a missing peer."""
PACKED_BYTES = 256 * 1024
"""A buffer is sent once it holds more bytes. vLLM's default is a gigabyte: a whole tiny model would fit into one buffer."""

T = TypeVar("T")


def packed(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Items by buffer, as vLLM packs them: the item that takes a buffer over `PACKED_BYTES` is its last."""
    buffer: list[T] = []
    held = 0
    for item in items:
        buffer.append(item)
        held += size(item)
        if held > PACKED_BYTES:
            yield buffer
            buffer, held = [], 0
    if buffer:
        yield buffer


class GlooGroup:
    """The group of trainer (rank 0) and workers (rank 1 …), separate from any default process group."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        first = rank == 0
        bound = (
            socket.create_server((host, port)) if first else None
        )  # as vLLM does: TCPStore would bind every interface
        store = create_tcp_store(
            host, port, bound, world_size=world_size, is_master=first, timeout=TIMEOUT, use_libuv=False
        )
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("parity", store), rank, world_size, TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        assert self._group is not None, "the group is closed"
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Leave the group, as when the process ends. The connections close, and waiting peers get an error."""
        self._group = None


class GlooWeightTransferEngine(WeightTransferEngine[NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo]):
    """vLLM's weight transfer engine over gloo."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def receive_weights(
        self, update_info: NCCLWeightTransferUpdateInfo, load_weights: Callable[[list[tuple[str, torch.Tensor]]], None]
    ) -> None:
        assert self._group is not None, "init_transfer_engine comes first"
        about = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        expected = ((name, torch.empty(list(shape), dtype=getattr(torch, dtype))) for name, dtype, shape in about)
        for buffer in packed(expected, lambda item: item[1].nbytes):
            flat = torch.empty(sum(tensor.nbytes for _, tensor in buffer), dtype=torch.uint8)
            self._group.broadcast(flat)
            parts = flat.split([tensor.nbytes for _, tensor in buffer])
            for (_, tensor), part in zip(buffer, parts, strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
            load_weights(buffer)

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
        for buffer in packed(
            (tensor.detach().cpu().contiguous() for _, tensor in iterator), lambda tensor: tensor.nbytes
        ):
            args["group"].broadcast(torch.cat([tensor.view(-1).view(torch.uint8) for tensor in buffer]))


def use_in_trainer() -> None:
    """Make the trainer's side of `NCCLWeightTransferEngine` use gloo in this process."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    NCCLWeightTransferEngine.trainer_init = staticmethod(GlooWeightTransferEngine.trainer_init)
    NCCLWeightTransferEngine.trainer_send_weights = staticmethod(GlooWeightTransferEngine.trainer_send_weights)
