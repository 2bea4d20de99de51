"""The trainer's side: makes policy versions by optimizer steps, and sends them through SkyRL's own transfer strategy.

It runs in the host. SkyRL chooses the strategy (`get_transfer_strategy_cls`); on CPU the configuration asks for gloo.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from backends.policies import ranks
from backends.policies import versions as policy
from backends.policies.trainer import PolicyTrainer
from harness.contract.messages import Layout, TrainRequest, TrainResult
from harness.driving import allowance

HELD: Mapping[Layout, Callable[[str, int, str], dict[str, Any]]] = {
    "single": policy.version,
    "fsdp2": partial(ranks.gather, "backends.policies.fsdp2"),
    "megatron": partial(ranks.gather, "backends.policies.megatron_core"),
}
"""Layout in which the trainer holds a policy version → function from (model path, version, policies folder) to whole tensors."""

SYNC_DEADLINE_S = 50
"""Deadline for a broadcast of the tiny model (seconds). Without it, a broadcast that a server has left waits half an hour."""


class TrainerFailed(RuntimeError):
    """The trainer failed in the middle of a sync, as requested."""


class NotJoined(RuntimeError):
    """The trainer cannot sync because it is in no group of workers."""


class Trainer:
    """A single trainer process (rank 0) that holds policy versions and broadcasts them."""

    def __init__(self, model_path: str, policies: str, device: str, *, one_at_a_time: bool = False) -> None:
        """`policies` is the folder of trained versions. `one_at_a_time` is True for SkyRL 0.1.0, which broadcasts one parameter per
        chunk and refuses larger chunks."""
        self._one_at_a_time = one_at_a_time
        self._model_path = model_path
        self._policies = policies
        self._deadline_s = SYNC_DEADLINE_S + allowance.for_weights(model_path)
        self._learner = PolicyTrainer(model_path, policies)
        self._device = device
        self._sender: Any = None
        self._dtype = ""

    async def join(self, client: Any, cfg: Any, world_size: int | None) -> None:
        """Create the group of trainer and workers, as SkyRL's worker does in init_weight_sync_state. Does nothing if the trainer is
        in a group already."""
        if self._sender is not None:
            return
        from skyrl.backends.skyrl_train.weight_sync import get_transfer_strategy_cls

        engine_cfg = cfg.generator.inference_engine
        self._dtype = engine_cfg.model_dtype
        _join_own_group()
        strategy = get_transfer_strategy_cls(engine_cfg.weight_sync_backend, cfg.trainer.placement.colocate_all)
        info = strategy.create_init_info(engine_cfg, inference_world_size=world_size)
        self._sender, _ = await asyncio.gather(
            asyncio.to_thread(self._on_device, strategy.create_sender, init_info=info, inference_client=client),
            client.init_weight_update_communicator(info),
        )

    def _on_device(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call `function` with the trainer's device as the current one. SkyRL's senders use that, and each thread has its own."""
        if self._device != "cpu":
            import torch

            torch.cuda.set_device(self._device)
        return function(**arguments)

    async def send(
        self, version: int, chunks: int, layout: Layout = "single", *, fail_after_chunks: int | None = None
    ) -> None:
        """Send policy version `version`, held in this layout, in `chunks` pieces of about equal numbers of parameters.

        A trainer whose sync fails leaves the group, as its process does when it ends: waiting peers get an error, and `join`
        creates a new group. Raises TrainerFailed for a requested failure, TimeoutError for a broadcast that hangs, NotJoined
        without a group, and the errors of SkyRL's sender.
        """
        if self._sender is None:
            raise NotJoined("the trainer is in no group of workers, or has left it: prepare_weight_sync() joins it")
        tensors = await asyncio.to_thread(HELD[layout], self._model_path, version, self._policies)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._send(tensors, chunks, fail_after_chunks)
            return
        except TrainerFailed as e:
            failure = str(e)  # not the error itself: its frames hold the group that the trainer leaves
        except TimeoutError:
            self._leave()
            raise TimeoutError(
                f"the broadcast of policy version {version} did not end in {self._deadline_s:.0f} s"
            ) from None
        except BaseException:
            self._leave()
            raise
        self._leave()
        await _end_of_updates(self._deadline_s)
        raise TrainerFailed(failure)

    def _leave(self) -> None:
        """Leave the group. SkyRL's sender leaves a torch group itself; of any other it only drops the reference."""
        sender, self._sender = self._sender, None
        close = getattr(sender._model_update_group, "close", None) if hasattr(sender, "_model_update_group") else None
        sender.teardown()
        if close is not None:
            close()

    async def _send(self, tensors: dict[str, Any], chunks: int, fail_after_chunks: int | None) -> None:
        if self._one_at_a_time:
            await self._sender.send_chunks(_failing(self._chunks(tensors, len(tensors)), fail_after_chunks))
            return
        metadata = {
            "names": list(tensors),
            "dtype_names": [self._dtype] * len(tensors),
            "shapes": [list(t.shape) for t in tensors.values()],
        }
        pieces = _failing(self._chunks(tensors, chunks), fail_after_chunks)
        await self._on_device(self._sender.send_chunks, chunks=pieces, weight_metadata=metadata)

    async def train(self, request: TrainRequest) -> TrainResult:
        """One optimizer step, in its own thread, so that rollouts go on meanwhile."""
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


async def _end_of_updates(deadline_s: float) -> None:
    """Wait for calls that a sender has left behind, because a server may still be in the update. Raises TimeoutError if an update
    does not end."""
    left = {
        t for t in asyncio.all_tasks() if getattr(t.get_coro(), "__qualname__", "").endswith("update_named_weights")
    }
    if left:
        ended, pending = await asyncio.wait(left, timeout=deadline_s)
        for task in ended:
            task.exception()  # retrieved, because it is expected
        if pending:
            raise TimeoutError(f"{len(pending)} updates go on {deadline_s:.0f} s after the trainer failed")


def _failing(pieces: Iterator[Any], after: int | None) -> Iterator[Any]:
    """Yields the pieces. Raises TrainerFailed after `after` of them, unless that is None."""
    if after is None:
        yield from pieces
        return
    yield from itertools.islice(pieces, after)
    raise TrainerFailed(f"the trainer failed after {after} chunks")


def _join_own_group() -> None:
    """Create a default group of one, because SkyRL's strategies ask for the trainer's rank. Its store needs no socket."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
