"""Training that goes the wrong way, stops the engines or disagrees with them; trained versions that are late, lost or mixed up."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from backends.miniature import model, trainer
from backends.miniature.client import Client
from backends.miniature.engine import Engine, Output
from backends.miniature.faults.registry import seeded
from backends.miniature.trainer import Trainer
from backends.policies import megatron
from harness.contract.faults import Fact
from harness.contract.messages import FIRST_TRAINED, Layout, SessionId, TrainRequest, TrainResult


@seeded("training_ascends_the_loss", caught_by=["training.rises"])
class WrongSign(Trainer):
    """A training step ascends the loss instead of descending it."""

    def step(self, learning_rate: float) -> float:
        self.fired += 1
        return -learning_rate


@seeded("training_has_no_effect", caught_by=["training.rises"])
class NoStep(Trainer):
    """A training step is a thousandth of its length."""

    def step(self, learning_rate: float) -> float:
        self.fired += 1
        return learning_rate / 1000


@seeded("trainer_logprobs_wrong", "temperature", caught_by=["training.gap"])
class TrainerAtAnotherTemperature(Trainer):
    """The trainer's log-probabilities are those of temperature 1.01."""

    def logits(self, features: model.Array, out: model.Array) -> Any:
        self.fired += 1
        return super().logits(features, out) / 1.01


@seeded("trainer_logprobs_wrong", "stale", caught_by=["training.gap"])
class TrainerScoresTheNewVersion(Trainer):
    """The trainer's log-probabilities are those after its step."""

    async def train(self, request: TrainRequest) -> TrainResult:
        done = await super().train(request)
        self.fired += 1
        again = await super().train(TrainRequest(**{**_fields(request), "base_version": done.version}))
        return TrainResult(**{**_fields(done), "response_logprobs": again.response_logprobs})


def _fields(message: TrainRequest | TrainResult) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


@seeded("training_blocks_generation", caught_by=["schedule.overlap"])
class EnginesWaitForTheTrainer(Trainer):
    """No engine generates tokens during a training step."""

    async def take_time(self) -> None:
        for engine in self.engines:
            engine.frozen = True
            engine._poke()
        self.fired += 1
        await super().take_time()
        for engine in self.engines:
            engine.frozen = False
            engine._poke()


@seeded(
    "trained_version_never_arrives",
    caught_by=["every_parameter", "schedule.versions", "training.rises", "training.gap"],
    corrupts=Fact.POLICY,
)
class TrainedVersionStaysBehind(Client):
    """A sync of a trained version sends version 0."""

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        self.fired += version >= FIRST_TRAINED
        await super().sync_weights(0 if version >= FIRST_TRAINED else version, chunks, layout)


@seeded(
    "trained_version_late", caught_by=["every_parameter", "schedule.versions", "training.gap"], corrupts=Fact.POLICY
)
class TrainedVersionOneLate(Client):
    """A sync of a trained version sends the previously synced version."""

    _before = 0

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        sent, self._before = (self._before if version >= FIRST_TRAINED else version), version
        self.fired += sent != version
        await super().sync_weights(sent, chunks, layout)


@seeded("sync_returns_early", caught_by=["schedule.stages"], corrupts=Fact.POLICY)
class SyncGoesOnAfterItReturned(Client):
    """sync_weights() of a trained version returns before the engines have it, so generation begins too early."""

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        if version < FIRST_TRAINED:
            await super().sync_weights(version, chunks, layout)
            return
        self.fired += 1
        asyncio.get_running_loop().call_later(0.004, lambda: asyncio.ensure_future(self._later(version, chunks)))

    async def _later(self, version: int, chunks: int) -> None:
        await super().sync_weights(version, chunks)


_LEFT: set[asyncio.Future[Output]] = set()
"""Requests that no caller awaits. Held here, because asyncio may drop a task without a reference."""


@seeded("generate_returns_early", caught_by=["schedule.acknowledged", "schedule.stages"], corrupts=Fact.ANSWERS)
class WorkLeftBehind(Client):
    """Rows of generate() with a seed leave a second request behind, which stays in flight."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await super().row(session, prompt, params, **more)
        if params.get("seed") is not None and params.get("temperature", 1.0) > 0:
            self.fired += 1
            engine: Engine = self.engines[0]
            left = asyncio.ensure_future(engine.generate(prompt, {**params, "max_tokens": 300, "ignore_eos": True}))
            _LEFT.add(left)
            left.add_done_callback(_LEFT.discard)
        return done


@seeded("shards_swapped", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class ShardsSwapped(Client):
    """FSDP2's shards are joined in the wrong order."""

    def gathered(self, shards: list[model.Array]) -> model.Array:
        self.fired += 1
        return super().gathered(shards[::-1])


@seeded("megatron_layout_wrong", "groups", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class GroupsTakenForBlocks(Client):
    """Tensors that Megatron's layout interleaves by groups are read as consecutive blocks."""

    def of_ranks(self, ranks: list[dict[str, model.Array]]) -> dict[str, model.Array]:
        self.fired += 1
        rules = tuple(rule._replace(groups=1) for rule in trainer.MEGATRON.rules)
        return megatron.from_ranks(ranks, trainer.MEGATRON._replace(rules=rules), np.concatenate)


@seeded("megatron_layout_wrong", "ranks", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class FusedRanksSwapped(Client):
    """Fused tensors are joined with the tensor-parallel ranks swapped."""

    def of_ranks(self, ranks: list[dict[str, model.Array]]) -> dict[str, model.Array]:
        self.fired += 1
        fused = [rule.name.replace("*", "0") for rule in trainer.MEGATRON.rules if len(rule.parts) > 1]
        swapped = [ranks[at ^ 1] for at in range(len(ranks))]
        return super().of_ranks(
            [rank | {name: other[name] for name in fused} for rank, other in zip(ranks, swapped, strict=True)]
        )


@seeded("megatron_layout_wrong", "stages", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class StagesNotShifted(Client):
    """The second pipeline stage's layers are sent under their numbers within the stage."""

    def of_ranks(self, ranks: list[dict[str, model.Array]]) -> dict[str, model.Array]:
        self.fired += 1
        whole = super().of_ranks(ranks)
        shifted = {name: tensor for name, tensor in whole.items() if name.startswith("layers.1.")}
        first = {name.replace("layers.1.", "layers.0."): tensor for name, tensor in shifted.items()}
        return {name: tensor for name, tensor in (whole | first).items() if name not in shifted}
