"""The trainer's side: makes policy versions by optimizer steps, and sends them as the release does (`senders`).

It runs in the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from backends.policies import ranks
from backends.policies import versions as policy
from backends.policies.trainer import PolicyTrainer
from backends.skyrl.senders import ByEngine, ByStrategy, Sender, TrainerFailed
from harness.contract.messages import Layout, TrainRequest, TrainResult, Unfit, unfitting
from harness.driving import allowance

HELD: Mapping[Layout, Callable[[str, int, str], dict[str, Any]]] = {
    "single": policy.version,
    "fsdp2": partial(ranks.gather, "backends.policies.fsdp2"),
    "megatron": partial(ranks.gather, "backends.policies.megatron_core"),
}
"""Layout in which the trainer holds a policy version → function from (model path, version, policies folder) to whole tensors."""

SYNC_DEADLINE_S = 50
"""Deadline for a broadcast of the tiny model (seconds). Without it, a broadcast that a server has left waits half an hour."""


class NotJoined(RuntimeError):
    """The trainer cannot sync because it is in no group of workers."""


class Trainer:
    """A single trainer process (rank 0) that holds policy versions and broadcasts them."""

    def __init__(self, model_path: str, policies: str, device: str, *, packed: bool, by_engine: bool) -> None:
        """`policies` is the folder of trained versions. `packed` as in `ByStrategy.join`; `by_engine`: see `ByEngine`."""
        self._packed = packed
        self._by_engine = by_engine
        self._model_path = model_path
        self._policies = policies
        self._deadline_s = SYNC_DEADLINE_S + allowance.for_weights(model_path)
        self._learner = PolicyTrainer(model_path, policies)
        self._device = device
        self._sender: Sender | None = None

    @property
    def engine(self) -> Any:
        """vLLM's trainer engine; None if SkyRL's transfer strategy sends, or before the trainer has joined."""
        return self._sender.engine if self._sender is not None else None

    async def join(self, client: Any, cfg: Any, world_size: int | None) -> None:
        """Create the group of trainer and workers. Does nothing if the trainer is in a group already."""
        if self._sender is not None:
            return
        _join_own_group()
        if self._by_engine:
            self._sender = await ByEngine.join(client, cfg, world_size, self._device, self._model_path)
        else:
            self._sender = await ByStrategy.join(client, cfg, world_size, self._device, packed=self._packed)

    async def send(
        self,
        version: int,
        chunks: int,
        layout: Layout = "single",
        *,
        fail_after_chunks: int | None = None,
        sparse: bool = False,
        unfit: Unfit | None = None,
        label: str | None = None,
    ) -> None:
        """Send policy version `version`, held in this layout, in `chunks` pieces of about equal numbers of parameters. `sparse`: every
        second parameter only. `unfit`: as in `SyncWeightsRequest`. `label`: name of the weights for the servers, None unless the
        release takes one.

        A trainer whose sync fails leaves the group, as its process does when it ends: waiting peers get an error, and `join`
        creates a new group. Raises TrainerFailed for a requested failure, TimeoutError for a broadcast that hangs, NotJoined
        without a group, and the errors of SkyRL's sender.
        """
        if self._sender is None:
            raise NotJoined("the trainer is in no group of workers, or has left it: prepare_weight_sync() joins it")
        sender = self._sender
        tensors = await asyncio.to_thread(HELD[layout], self._model_path, version, self._policies)
        if sparse:
            tensors = {name: tensors[name] for name in list(tensors)[::2]}
        if unfit is not None:
            tensors = unfitting(tensors, unfit)
        try:
            async with asyncio.timeout(self._deadline_s):
                await sender.send(tensors, chunks, fail_after_chunks, label)
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
        await sender.settled(self._deadline_s)
        raise TrainerFailed(failure)

    def _leave(self) -> None:
        sender, self._sender = self._sender, None
        assert sender is not None, "the trainer is in a group"
        sender.leave()

    async def train(self, request: TrainRequest) -> TrainResult:
        """One optimizer step, in its own thread, so that rollouts go on meanwhile."""
        return await asyncio.to_thread(self._learner.train, request)


def _join_own_group() -> None:
    """Create a default group of one, because SkyRL's strategies ask for the trainer's rank. Its store needs no socket."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
