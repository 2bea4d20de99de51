"""A group of trainer and workers over gloo, and the packing of parameters into buffers, for machines without a GPU."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from vllm.distributed.utils import create_tcp_store

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
        # As vLLM does: TCPStore would bind every interface.
        bound = socket.create_server((host, port)) if first else None
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


def send(group: GlooGroup, tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast tensors from rank 0, packed."""
    whole = (tensor.detach().cpu().contiguous() for tensor in tensors)
    for buffer in packed(whole, lambda tensor: tensor.nbytes):
        group.broadcast(torch.cat([tensor.view(-1).view(torch.uint8) for tensor in buffer]))


def receive(
    group: GlooGroup,
    names: Sequence[str],
    dtype_names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    load: Callable[[list[tuple[str, torch.Tensor]]], Any],
) -> None:
    """The other side of `send`: each buffer is loaded at once."""
    about = zip(names, dtype_names, shapes, strict=True)
    expected = ((name, torch.empty(list(shape), dtype=getattr(torch, dtype))) for name, dtype, shape in about)
    for buffer in packed(expected, lambda item: item[1].nbytes):
        flat = torch.empty(sum(tensor.nbytes for _, tensor in buffer), dtype=torch.uint8)
        group.broadcast(flat)
        parts = flat.split([tensor.nbytes for _, tensor in buffer])
        for (_, tensor), part in zip(buffer, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
        load(buffer)
