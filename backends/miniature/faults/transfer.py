"""Syncs that fail in the middle and leave effects behind, and weights that take the wrong transport."""

from __future__ import annotations

from typing import Any

from backends.miniature import model
from backends.miniature.client import Client
from backends.miniature.deltas import Deltas
from backends.miniature.engine import Engine, Output
from backends.miniature.faults.registry import ONE, seeded
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import Layout


class _Left(Engine):
    """Knows whether the last sync was abandoned."""

    @property
    def left(self) -> bool:
        return self._staged is not None


@seeded("failed_sync_poisons_the_next", "leftovers", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class LeftoversOfAFailedSync(_Left):
    """The chunks of an abandoned sync remain, and overwrite those of the next sync."""

    _kept: dict[str, model.Array]

    async def start_weight_update(self) -> None:
        self._kept = dict(self._staged or {})
        self.fired += bool(self._kept)
        await super().start_weight_update()

    async def finish_weight_update(self) -> None:
        assert self._staged is not None
        self._staged.update(self._kept)
        await super().finish_weight_update()


@seeded(
    "failed_sync_poisons_the_next", "one_server", caught_by=["every_parameter", "uniform_servers"], corrupts=Fact.POLICY
)
class LeftoversOnOne(LeftoversOfAFailedSync):
    """At one server, the chunks of an abandoned sync remain, and overwrite those of the next sync."""

    async def start_weight_update(self) -> None:
        if self.name != ONE:
            self._staged = None
        await super().start_weight_update()


@seeded("failed_sync_poisons_the_next", "refused", caught_by=["failed_sync"], corrupts=Fact.POLICY)
class RefusesAfterAFailedSync(_Left):
    """After an abandoned sync, a server refuses every other, because the first stays active."""

    async def start_weight_update(self) -> None:
        if self.left:
            self.fired += 1
            raise RuntimeError("a weight update is active already: finish it first")
        await super().start_weight_update()


@seeded("failed_sync_ends_answers", "one_server", caught_by=["failed_sync"], corrupts=ROWS)
class NoAnswersAfterAFailedSync(_Left):
    """After an abandoned sync, one server refuses requests until a good one has put its weights right."""

    async def generate(self, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if self.left and self.name == ONE:
            self.fired += 1
            raise RuntimeError("the weights are not whole")
        return await super().generate(prompt, params, **more)


@seeded("failed_sync_poisons_the_next", "half_visible", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class HalfOfTheNext(_Left):
    """After an abandoned sync, the next one updates only the parameters that the abandoned one had not sent."""

    _brought: frozenset[str] = frozenset()

    async def start_weight_update(self) -> None:
        self._brought = frozenset(self._staged or {})
        self.fired += bool(self._brought)
        await super().start_weight_update()

    async def finish_weight_update(self) -> None:
        assert self._staged is not None
        for name in self._brought:
            self._staged.pop(name, None)
        self._brought = frozenset()
        await super().finish_weight_update()


@seeded("failed_sync_reported_as_done", caught_by=["failed_sync", "syncs_counted", "weight_labels"])
class FailureHidden(Client):
    """A sync that the trainer abandons is reported as done."""

    async def give_up(self, version: int, chunks: int, layout: Layout, after: int) -> None:
        self.fired += 1
        await self.send(self.pieces(version, chunks, layout)[:after], whole=False)


@seeded("failed_sync_leaves_paused", "one_server", caught_by=["driven"])
class PausedForGood(_Left):
    """After a sync that failed during a pause, one server never resumes."""

    _stuck = False

    async def start_weight_update(self) -> None:
        self._stuck = self._stuck or (self.left and self.name == ONE and self.frozen)
        await super().start_weight_update()

    async def resume_generation(self) -> None:
        if self._stuck:
            self.fired += 1
            return
        await super().resume_generation()


@seeded("failed_sync_ends_the_pause", "one_server", caught_by=["pause_states"])
class PauseEnds(Client):
    """After a failed sync, one server reports that it is no longer paused."""

    _denies = False

    async def give_up(self, version: int, chunks: int, layout: Layout, after: int) -> None:
        self._denies = True
        await super().give_up(version, chunks, layout, after)

    def paused(self) -> dict[str, bool]:
        states = super().paused()
        if self._denies:
            self.fired += states[ONE]
            states[ONE] = False
        return states


@seeded("worker_extension_carries_weights", "one_server", caught_by=["native_transfer"])
class WeightsByRpc(Engine):
    """At one server, a sync calls methods of a worker extension instead of the engine's own."""

    async def control(self, op: str, **arguments: Any) -> None:
        if "weight" in op and self.name == ONE:
            self.fired += 1
            await super().control("collective_rpc", method=op, **arguments)
        else:
            await super().control(op, **arguments)

    async def collective_rpc(self, *, method: str, **arguments: Any) -> None:
        await getattr(self, method)(**arguments)


@seeded(
    "worker_extension_loaded",
    "one_server",
    caught_by=["no_worker_extension"],
    changes=frozenset({"Miniature.workers"}),  # what shows it
)
class WorkerExtended(Engine):
    """At one server, the stack extends the worker's class with its own class."""

    def placed(self, *, colocated: bool) -> None:
        super().placed(colocated=colocated)
        if self.name == ONE:
            self.fired += 1
            self.extensions.append("stack.WorkerExtension")


@seeded("ipc_not_used", "one_server", caught_by=["by_ipc"], changes=frozenset({"Miniature.workers"}))
class BroadcastThough(Engine):
    """One colocated server receives weights by a broadcast."""

    def placed(self, *, colocated: bool) -> None:
        super().placed(colocated=colocated)
        if self.name == ONE:
            self.fired += colocated
            self.transport = "broadcast"


@seeded("deltas_on_another_checkpoint", "joined_again", caught_by=["every_parameter"], corrupts=Fact.POLICY)
class CheckpointsOutliveTheTrainer(Client):
    """A trainer that joins again writes what differs from the checkpoint it was given; servers apply that to their last version."""

    def join(self) -> None:
        held = [getattr(engine, "checkpoint", None) for engine in self.engines]
        super().join()
        for engine, checkpoint in zip(self.engines, held, strict=True):
            if self.deltas and checkpoint:
                self.fired += 1
                engine.checkpoint = checkpoint


@seeded(
    "deltas_on_another_checkpoint",
    "one_server",
    caught_by=["every_parameter", "uniform_servers"],
    corrupts=Fact.POLICY,
)
class DeltaMissed(Engine):
    """One server does not apply the second version that was written."""

    async def load_delta_weights(self, *, delta: dict[str, model.Array]) -> None:
        if self.name == ONE and self.syncs % 3 == 1:
            self.fired += 1
            return
        await super().load_delta_weights(delta=delta)


@seeded("deltas_end_the_pause", caught_by=["pause_states"])
class DeltasEndThePause(Client):
    """A sync by a shared disk pauses the engines itself, and lets them go on at its end, whoever has paused them."""

    async def load(self, deltas: Deltas) -> None:
        await super().load(deltas)
        self.fired += all(self.paused().values())
        await self.everywhere("resume_generation")
