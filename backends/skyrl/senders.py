"""How a trainer's weights reach the engines: by SkyRL's transfer strategy, or from 0.4.0 on by vLLM's trainer engine.

Each class makes the group of trainer and workers as SkyRL's own worker does (init_weight_sync_state), sends, and leaves the group.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

Pieces = Iterator[dict[str, Any]]
"""Tensors by name, a part of all at a time."""


class TrainerFailed(RuntimeError):
    """The trainer failed in the middle of a sync, as requested."""


class Sender(Protocol):
    """A trainer in a group of workers."""

    engine: Any
    """vLLM's trainer engine, or None."""

    async def send(
        self, tensors: dict[str, Any], chunks: int, fail_after_chunks: int | None, label: str | None = None
    ) -> None:
        """Send all tensors in `chunks` pieces. Raises TrainerFailed after `fail_after_chunks` of them, unless that is None.
        `label` names the weights for the servers."""

    def leave(self) -> None:
        """Leave the group, as when the process ends."""

    async def settled(self, deadline_s: float) -> None:
        """Wait for what a failed sync has left behind, because a server may still be in the update. Raises TimeoutError."""


def _pieces(tensors: dict[str, Any], device: str, dtype: str, count: int, fail_after: int | None) -> Pieces:
    import torch

    names = list(tensors)
    size = -(-len(names) // count)
    parts = (names[start : start + size] for start in range(0, len(names), size))
    for part in parts if fail_after is None else itertools.islice(parts, fail_after):
        yield {name: tensors[name].to(device, getattr(torch, dtype)) for name in part}
    if fail_after is not None:
        raise TrainerFailed(f"the trainer failed after {fail_after} chunks")


def _on_device(device: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call `function` with the trainer's device as the current one. SkyRL's senders use that, and each thread has its own."""
    if device != "cpu":
        import torch

        torch.cuda.set_device(device)
    return function(**arguments)


class ByStrategy:
    """SkyRL's transfer strategy (`get_transfer_strategy_cls`). On a CPU the configuration asks for gloo."""

    engine = None

    def __init__(self, sender: Any, dtype: str, device: str, packed: bool) -> None:
        self._sender = sender
        self._dtype = dtype
        self._device = device
        self._packed = packed

    @classmethod
    async def join(cls, client: Any, cfg: Any, world_size: int | None, device: str, *, packed: bool) -> ByStrategy:
        """`packed` is False for SkyRL 0.1.0, which broadcasts one parameter per chunk and refuses larger chunks."""
        from skyrl.backends.skyrl_train.weight_sync import get_transfer_strategy_cls

        engines = cfg.generator.inference_engine
        strategy = get_transfer_strategy_cls(engines.weight_sync_backend, cfg.trainer.placement.colocate_all)
        info = strategy.create_init_info(engines, inference_world_size=world_size)
        sender, _ = await asyncio.gather(
            asyncio.to_thread(_on_device, device, strategy.create_sender, init_info=info, inference_client=client),
            client.init_weight_update_communicator(info),
        )
        return cls(sender, engines.model_dtype, device, packed)

    async def send(
        self, tensors: dict[str, Any], chunks: int, fail_after_chunks: int | None, label: str | None = None
    ) -> None:
        assert label is None, "SkyRL's transfer strategy sends no label"
        if not self._packed:
            await self._sender.send_chunks(self._chunks(tensors, len(tensors), fail_after_chunks))
            return
        metadata = {
            "names": list(tensors),
            "dtype_names": [self._dtype] * len(tensors),
            "shapes": [list(t.shape) for t in tensors.values()],
        }
        pieces = self._chunks(tensors, chunks, fail_after_chunks)
        await _on_device(self._device, self._sender.send_chunks, chunks=pieces, weight_metadata=metadata)

    def _chunks(self, tensors: dict[str, Any], count: int, fail_after: int | None) -> Iterator[Any]:
        from skyrl.backends.skyrl_train.weight_sync import WeightChunk

        for piece in _pieces(tensors, self._device, self._dtype, count, fail_after):
            moved = list(piece.values())
            shapes = [list(t.shape) for t in moved]
            yield WeightChunk(names=list(piece), dtypes=[self._dtype] * len(piece), shapes=shapes, tensors=moved)

    def leave(self) -> None:
        """SkyRL's sender leaves a torch group itself; of any other it only drops the reference."""
        group = getattr(self._sender, "_model_update_group", None)
        self._sender.teardown()
        if group is not None and hasattr(group, "close"):
            group.close()

    async def settled(self, deadline_s: float) -> None:
        left = {t for t in asyncio.all_tasks() if getattr(t.get_coro(), "__qualname__", "").endswith(UPDATES)}
        if left:
            ended, pending = await asyncio.wait(left, timeout=deadline_s)
            for task in ended:
                task.exception()  # retrieved, because it is expected
            if pending:
                raise TimeoutError(f"{len(pending)} updates go on {deadline_s:.0f} s after the trainer failed")


UPDATES = ("update_named_weights", "update_weights_nccl")
"""Coroutines of SkyRL's clients that a failed sender leaves behind."""


class ByEngine:
    """vLLM's trainer engine, made by SkyRL's `build_trainer_engine` (0.4.0)."""

    def __init__(self, dtype: str, device: str) -> None:
        self._dtype = dtype
        self._device = device
        self.engine: Any = None
        self._next: tuple[dict[str, Any], int, int | None]
        """What the engine reads when it sends: tensors, number of chunks, number of chunks until a requested failure."""
        self._label: str | None = None
        """Name of the weights that are sent next."""
        self._quiet = threading.Event()
        self._quiet.set()

    @classmethod
    async def join(cls, client: Any, cfg: Any, world_size: int | None, device: str, model_path: str) -> ByEngine:
        from skyrl.backends.skyrl_train.weight_sync.weight_senders import build_trainer_engine

        made = cls(cfg.generator.inference_engine.model_dtype, device)
        source = made._source()
        made.engine = await asyncio.to_thread(
            _on_device,
            device,
            build_trainer_engine,
            ie_cfg=cfg.generator.inference_engine,
            colocate_all=cfg.trainer.placement.colocate_all,
            rank=0,
            inference_world_size=world_size,
            source_factory=lambda _dtype, _backend: source,
            draft_source_factory=lambda _dtype: None,
            server_urls=list(client.server_urls),
            data_parallel_size=int(client.data_parallel_size),
            base_model_path=model_path,
        )
        made._watch(made.engine.client)
        return made

    def _source(self) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        sender = self

        class Source(WeightSource):
            """The version that is sent next."""

            def metadata(self) -> list[Any]:
                import torch

                dtype = getattr(torch, sender._dtype)
                return [ParamMeta(name, dtype, tuple(tensor.shape)) for name, tensor in sender._next[0].items()]

            def __iter__(self) -> Iterator[tuple[str, Any]]:
                tensors, chunks, fail_after = sender._next
                for piece in _pieces(tensors, sender._device, sender._dtype, chunks, fail_after):
                    yield from piece.items()

        return Source()

    def _watch(self, client: Any) -> None:
        """`_quiet` is clear while the engine's own client waits for servers to take an update. At its end the client passes on
        the label, which vLLM's engine does not give it."""
        update, finish = client.update_weights, client.finish_weight_update

        def update_weights(info: Any) -> None:
            self._quiet.clear()
            try:
                update(info)
            finally:
                self._quiet.set()

        client.update_weights = update_weights
        client.finish_weight_update = lambda: finish(self._label)

    async def send(
        self, tensors: dict[str, Any], chunks: int, fail_after_chunks: int | None, label: str | None = None
    ) -> None:
        self._next, self._label = (tensors, chunks, fail_after_chunks), label
        await asyncio.to_thread(_on_device, self._device, self.engine.send_weights)

    def leave(self) -> None:
        group: Any = getattr(self.engine, "model_update_group", None)
        self.engine.model_update_group = None
        if hasattr(group, "close"):
            group.close()

    async def settled(self, deadline_s: float) -> None:
        if not await asyncio.to_thread(self._quiet.wait, deadline_s):
            raise TimeoutError(f"updates go on {deadline_s:.0f} s after the trainer failed")
