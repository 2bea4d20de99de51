"""Assigns GPUs to the workers and the trainer. Pure: the caller passes the number of GPUs."""

from __future__ import annotations

from typing import final

import msgspec

from harness.contract.topology import Placement, Topology

VISIBLE = "CUDA_VISIBLE_DEVICES"


@final
class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs by their index among those that the process may use."""

    workers: tuple[int, ...]
    """One entry per worker, engine by engine."""
    trainer: int
    workers_per_gpu: int = 1
    """If above 1, engines share a GPU. Only engines with one worker can."""

    @property
    def share(self) -> float:
        """Fraction of a GPU that Ray gives each worker."""
        return round(1 / self.workers_per_gpu, 3)

    def of_engine(self, index: int, engines: int) -> tuple[int, ...]:
        """The GPUs of engine `index` of `engines`."""
        each = len(self.workers) // engines
        return self.workers[index * each : (index + 1) * each]

    def visible(self, index: int, engines: int, within: str | None) -> dict[str, str]:
        """The environment variable that limits engine `index` of `engines` to its own GPUs.

        `within` is the variable's present value: a job that was given some GPUs of a machine counts these from 0.
        """
        names = within.split(",") if within else None
        own = self.of_engine(index, engines)
        return {VISIBLE: ",".join(str(gpu) if names is None else names[gpu] for gpu in own)}


def needed(topology: Topology) -> int:
    """The fewest GPUs that can hold a topology.

    A colocated trainer uses its engines' GPUs. Colocated engines of one worker can share one GPU: weights travel by CUDA IPC.
    Otherwise each worker and the trainer need a GPU of their own: NCCL refuses two ranks on one device.
    """
    if topology.placement is not Placement.COLOCATED:
        return topology.world_size + 1
    return 1 if topology.world_size == topology.engines else topology.world_size


def assign(topology: Topology, gpus: int) -> Devices:
    """The devices of a topology on a machine with `gpus` GPUs. Raises ValueError for fewer than `needed`."""
    if gpus < needed(topology):
        raise ValueError(f"{topology.name} needs {needed(topology)} GPUs, there are {gpus}")
    used = min(gpus, topology.world_size)
    workers = tuple(worker % used for worker in range(topology.world_size))
    trainer = 0 if topology.placement is Placement.COLOCATED else topology.world_size
    return Devices(workers=workers, trainer=trainer, workers_per_gpu=-(-topology.world_size // used))
