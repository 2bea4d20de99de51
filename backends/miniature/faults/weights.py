"""Weight syncs that miss, corrupt or delay parameters; caches that outlive them; wrong quantization."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from backends.miniature import model
from backends.miniature.client import Client
from backends.miniature.engine import Engine, Output, Request
from backends.miniature.faults.registry import ONE, seeded
from harness.contract.faults import Fact
from harness.contract.messages import Layout, Training


@seeded("stale_prefix_cache", "every_server", caught_by=["weight_history"], corrupts=Fact.POLICY)
class CacheNeverForgotten(Engine):
    """reset_prefix_cache() reports success and drops nothing."""

    def forget(self) -> None:
        self.fired += bool(self.cache)


@seeded("stale_prefix_cache", "one_server", caught_by=["weight_history"], corrupts=Fact.POLICY)
class CacheOfOneNeverForgotten(Engine):
    """reset_prefix_cache() reports success, but one server drops nothing."""

    def forget(self) -> None:
        if self.name == ONE:
            self.fired += bool(self.cache)
        else:
            super().forget()


@seeded("stale_prefix_cache", "synchronous_worker", caught_by=["weight_history"], corrupts=Fact.POLICY)
class SynchronousWorkerKeepsTheCache(Client):
    """The worker of synchronous training sends parameters and drops no cache."""

    keeps: Training = "synchronous"

    async def sent_by_worker(self, training: Training) -> None:
        if training == self.keeps:
            self.fired += 1
        else:
            await super().sent_by_worker(training)


@seeded("stale_prefix_cache", "asynchronous_worker", caught_by=["weight_history"], corrupts=Fact.POLICY)
class AsynchronousWorkerKeepsTheCache(SynchronousWorkerKeepsTheCache):
    """The worker of fully asynchronous training sends parameters and drops no cache."""

    keeps: Training = "asynchronous"


class _Syncing(Engine):
    """Changes the tensors of a sync before they take effect."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        raise NotImplementedError

    def quantized(self, tensors: dict[str, model.Array]) -> model.Parameters:
        return super().quantized(self.changed(dict(tensors)))


@seeded("unfit_parameter_left_out", caught_by=["errors.named"], corrupts=Fact.POLICY)
class UnfitParameterLeftOut(Engine):
    """What a sync brings and the model does not have is left out, and nobody is told."""

    async def update_weights(self, *, names: list[str], tensors: dict[str, model.Array]) -> None:
        fitting = {name: tensors[name] for name in names if self.fits(name, tensors[name])}
        self.fired += len(fitting) < len(names)
        await super().update_weights(names=list(fitting), tensors=fitting)


@seeded("diverged_policy_untold", caught_by=["errors.refused"], corrupts=Fact.ERRORS | Fact.ANSWERS)
class DivergedPolicyUntold(Engine):
    """Requests to a policy of NaN fail, and nobody is told why."""

    async def generate(self, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if not any(np.isnan(tensor).any() for tensor in self.held_parameters.values()):
            return await super().generate(prompt, params, **more)
        self.fired += 1
        raise RuntimeError("Internal Server Error")


@seeded("sparse_sync_clears", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class SparseSyncClears(_Syncing):
    """A sync of some parameters leaves all others empty."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        missing = self.held_parameters.keys() - tensors.keys()
        self.fired += bool(missing)
        return {**{name: np.zeros_like(self.held_parameters[name]) for name in missing}, **tensors}


@seeded("sync_missed", "back_to_the_first", caught_by=["clean_room"], corrupts=Fact.POLICY)
class FirstVersionNeverBack(Client):
    """A weight sync of the first version reaches no server: the next scenario begins on the weights of this one."""

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        self.fired += version == 0
        if version != 0:
            await super().sync_weights(version, chunks, layout)


@seeded("sync_missed", "one_server", caught_by=["every_parameter", "uniform_servers"], corrupts=Fact.POLICY)
class SyncMissesOne(Client):
    """A weight sync never reaches one server."""

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if "weight" in op and engine.name == ONE:
            self.fired += 1
            return
        await super().tell(engine, op, **arguments)


@seeded("sync_missed", "every_server", caught_by=["every_parameter", "forced_effect"], corrupts=Fact.POLICY)
class SyncWithoutEffect(Client):
    """A weight sync reports success and sends nothing."""

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        self.fired += version != 0


@seeded("sync_missed", "second_time", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class SyncOnlyOnce(Client):
    """One server misses every second weight sync."""

    _syncs = 0

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        self._syncs += 1
        await super().sync_weights(version, chunks, layout)

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if "weight" in op and engine.name == ONE and self._syncs % 2 == 0:
            self.fired += 1
            return
        await super().tell(engine, op, **arguments)


@seeded("sync_missed", "compiled_weights", caught_by=["weight_history", "forced_effect"], corrupts=Fact.POLICY)
class OldNetworkKept(Engine):
    """Engines take the new parameters but go on computing with the old ones."""

    def hold(self, held: model.Parameters) -> None:
        networks = dict(self._networks)
        super().hold(held)
        self.fired += bool(networks)
        self._networks.update(networks)


@seeded("serves_before_sync", "one_server", caught_by=["weight_history"], corrupts=Fact.POLICY)
class RestartsOnItsOwn(Engine):
    """After a sync, one server restarts on its own: it serves with the checkpoint's weights until the next sync."""

    _served = 0

    async def finish_weight_update(self) -> None:
        await super().finish_weight_update()
        self._served = 0

    def arrive(self, request: Request) -> None:
        self._served += 1
        if self.name == ONE and self.syncs and self._served == 2:
            self.fired += 1
            self.hold(model.quantize(model.policy(0), self.quantization))
        super().arrive(request)


@seeded("parameter_not_updated", "every_server", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class ParameterSkipped(_Syncing):
    """The gate of the second layer is never updated."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        self.fired += tensors.pop("layers.1.gate", None) is not None
        return tensors


@seeded("parameter_not_updated", "one_server", caught_by=["every_parameter", "uniform_servers"], corrupts=Fact.POLICY)
class ParameterSkippedByOne(_Syncing):
    """One server never updates the gate of the second layer."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        if self.name == ONE:
            self.fired += tensors.pop("layers.1.gate", None) is not None
        return tensors


@seeded("parameter_not_updated", "in_chunks", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class ParameterSkippedInChunks(Client):
    """A sync in chunks loses the last parameter of each chunk."""

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        self._chunked = chunks > 1
        await super().sync_weights(version, chunks, layout)

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        if op == "update_weights" and self._chunked:
            self.fired += 1
            arguments["names"] = arguments["names"][:-1]
        await super().tell(engine, op, **arguments)


@seeded("experts_lost_in_chunks", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class ExpertsLostInChunks(Engine):
    """If chunks split a layer's experts, only those of the last chunk are updated."""

    async def update_weights(self, *, names: list[str], tensors: dict[str, model.Array]) -> None:
        assert self._staged is not None
        for layer in {name.partition(".experts.")[0] for name in names if ".experts." in name}:
            lost = [name for name in self._staged if name.startswith(f"{layer}.experts.")]
            self.fired += bool(lost)
            for name in lost:
                del self._staged[name]
        await super().update_weights(names=names, tensors=tensors)


@seeded("experts_misplaced", "anothers", caught_by=["clean_room", "every_parameter"])
class ExpertsOfAnotherWorker(Engine):
    """With expert parallelism, all workers hold the first one's experts after a sync."""

    def scatter(self, held: model.Parameters) -> list[model.Parameters]:
        shares = [share for share in self.workers if share is not None and share.whole]
        shards = super().scatter(held)
        if not shares or not self.syncs:
            return shards
        self.fired += shares[-1].rank > 0
        firsts = model.shared(model.experts(held), msgspec.structs.replace(shares[0], rank=0))
        return [{n: t for n, t in shard.items() if n not in model.experts(shard)} | dict(firsts) for shard in shards]


@seeded("experts_misplaced", "stale", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class ExpertsOfOneWorkerStale(_Syncing):
    """With expert parallelism, a sync does not reach the last worker's experts."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        share = self.workers[-1]
        if share is None or not share.whole:
            return tensors
        lost = model.shared(model.experts(tensors), msgspec.structs.replace(share, rank=share.workers - 1))
        self.fired += len(lost)
        return {name: tensor for name, tensor in tensors.items() if name not in lost}


@seeded("parameters_differ_between_ranks", caught_by=["uniform_servers"], corrupts=Fact.POLICY)
class RankKeepsItsOwn(_Syncing):
    """The second data-parallel worker never updates the gate of the second layer."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        share = self.workers[0]
        if share is not None and share.rank == 1:
            self.fired += tensors.pop("layers.1.gate", None) is not None
        return tensors


@seeded(
    "sync_not_idempotent",
    "a_little",
    caught_by=["every_parameter", "same_version_same_parameters"],
    corrupts=Fact.POLICY,
)
class SameVersionDrifts(_Syncing):
    """Syncing the same version again changes one parameter by a ten-thousandth."""

    factor = 1.0001
    _last: dict[str, model.Array] | None = None

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        if tensors.keys() != self.held_parameters.keys():
            return tensors  # some parameters alone are no version
        same = self._last is not None and np.array_equal(self._last["out"], tensors["out"])
        self._last = dict(tensors)
        if same:
            self.fired += 1
            tensors["recur"] = (tensors["recur"] * np.float32(self.factor)).astype(np.float32)
        return tensors


@seeded(
    "sync_not_idempotent",
    "a_lot",
    caught_by=["every_parameter", "same_version_same_output", "same_version_same_parameters"],
    corrupts=Fact.POLICY,
)
class SameVersionDriftsFar(SameVersionDrifts):
    """Syncing the same version again changes one parameter by a third."""

    factor = 1.33


@seeded("corruption_from_second_sync", "one_row", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class CorruptedFromTheSecond(_Syncing):
    """From the third sync of a start on, one row of the embedding is lost."""

    def changed(self, tensors: dict[str, model.Array]) -> dict[str, model.Array]:
        if self.syncs > 1 and "embed" in tensors:
            self.fired += 1
            tensors["embed"] = tensors["embed"].copy()
            tensors["embed"][5] = 0
        return tensors


@seeded("half_sync_visible", "for_good", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class LastChunkLost(Engine):
    """The last chunk of a sync in chunks never takes effect."""

    _chunks = 0

    async def start_weight_update(self) -> None:
        self._chunks = 0
        await super().start_weight_update()

    async def update_weights(self, *, names: list[str], tensors: dict[str, model.Array]) -> None:
        self._chunks += 1
        self._last = names
        await super().update_weights(names=names, tensors=tensors)

    async def finish_weight_update(self) -> None:
        if self._chunks > 1 and self._staged is not None:
            self.fired += 1
            for name in self._last:
                self._staged.pop(name, None)
        await super().finish_weight_update()


@seeded("half_sync_visible", "for_a_while", caught_by=["weight_history"], corrupts=Fact.POLICY)
class LastChunkLate(Engine):
    """The last half of a sync takes effect a hundred steps after the sync returned."""

    _late: asyncio.Task[None] | None = None

    async def finish_weight_update(self) -> None:
        assert self._staged is not None
        names = list(self._staged)[len(self._staged) // 2 :]
        late = {name: self._staged.pop(name) for name in names}
        await super().finish_weight_update()
        self._late = asyncio.create_task(self._later(late))

    async def _later(self, late: dict[str, model.Array]) -> None:
        await asyncio.sleep(100 * self.step_s())
        self.fired += 1
        self.hold({**self.held_parameters, **self.quantized(late)})


@seeded("wrong_quantization_scale", "a_lot", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class ScaleWrong(Engine):
    """After a sync, the scales of a quantized engine are a fifth too large."""

    factor = 1.2

    def quantized(self, tensors: dict[str, model.Array]) -> model.Parameters:
        held = dict(super().quantized(tensors))
        scales = {name: tensor for name, tensor in held.items() if name.endswith(".scale")}
        self.fired += len(scales)
        return held | {name: (scale * np.float32(self.factor)).astype(np.float32) for name, scale in scales.items()}


@seeded("wrong_quantization_scale", "a_little", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class ScaleSlightlyWrong(ScaleWrong):
    """After a sync, the scales of a quantized engine are a hundredth too large."""

    factor = 1.01


@seeded("wrong_quantization_scale", "stale", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class ScaleStale(Engine):
    """A sync brings new integers and keeps the old scales."""

    def quantized(self, tensors: dict[str, model.Array]) -> model.Parameters:
        held = dict(super().quantized(tensors))
        scales = [name for name in held if name.endswith(".scale")]
        self.fired += len(scales)
        return {name: tensor for name, tensor in held.items() if name not in scales}


@seeded("wrong_quantization_scale", "cast", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class CastToEightBits(Engine):
    """A sync casts full-precision weights to 8 bits and keeps the old scales, as vLLM's reload does without quantization."""

    def quantized(self, tensors: dict[str, model.Array]) -> model.Parameters:
        cast = {"int8": lambda tensor: np.trunc(tensor).astype(np.int8), "fp8": model.e4m3}
        if self.quantization is None:
            return super().quantized(tensors)
        self.fired += 1
        return {name: cast[self.quantization](tensor) for name, tensor in tensors.items()}


@seeded(
    "quantization_ignored",
    caught_by=["quantization_effect"],
    corrupts=Fact.POLICY,
    changes=frozenset({"in_steps"}),  # what an engine calls to quantize
)
class FullPrecision(Engine):
    """Engines that should quantize hold full precision."""

    def __init__(self, name: str, *, quantization: str | None, **about: Any) -> None:
        super().__init__(name, quantization=None, **about)
        self.fired += quantization is not None


@seeded("sleeps_to_sync", caught_by=["no_sleep"], corrupts=Fact.ANSWERS)
class SleepsToSync(Client):
    """Engines sleep and wake up before each weight sync, under every placement. Sleep cuts requests in flight short."""

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        self.fired += 1
        await self.everywhere("sleep", level=1)
        await self.everywhere("wake_up", tags=None)
        await super().sync_weights(version, chunks, layout)


class _Sharded(Engine):
    """A sync goes wrong between the workers of an engine. An engine with one worker stays correct."""

    def scatter(self, held: model.Parameters) -> list[model.Parameters]:
        shards = super().scatter(held)
        return self.scattered(shards) if self.syncs and len(shards) > 1 else shards

    def scattered(self, shards: list[model.Parameters]) -> list[model.Parameters]:
        raise NotImplementedError


@seeded("sync_missed", "one_rank", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class SyncMissesOneRank(_Sharded):
    """The second worker of each engine keeps its shards in every sync."""

    def scattered(self, shards: list[model.Parameters]) -> list[model.Parameters]:
        self.fired += 1
        return [shards[0], *self.shards[1:]]


@seeded("shards_swapped", "ranks", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class RanksSwapped(_Sharded):
    """After a sync, each worker holds another's shard of the output layer."""

    def scattered(self, shards: list[model.Parameters]) -> list[model.Parameters]:
        self.fired += 1
        turned = [*shards[1:], shards[0]]
        return [{**own, "out": other["out"]} for own, other in zip(shards, turned, strict=True)]
