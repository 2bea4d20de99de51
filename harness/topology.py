"""Where engines live: how many, how parallel, and how they share the machine with the trainer."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, get_args

import msgspec

Quantization = Literal["int8", "fp8"]


class Placement(StrEnum):
    """How inference shares the machine with training (SkyRL #1014, tasks 1 to 3)."""

    COLOCATED = "colocated"
    """Engines and trainer share one placement group; engines sleep while the trainer works (task 1)."""
    DISAGGREGATED = "disaggregated"
    """Engines have their own accelerators and never sleep (task 2)."""
    REMOTE = "remote"
    """Servers were started on their own; the stack only connects to them (task 3)."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """engines × (tensor × pipeline × data) parallelism, in one placement. All sizes are counts of workers."""

    engines: int = 2
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    placement: Placement = Placement.DISAGGREGATED
    quantization: Quantization | None = None
    """In which the engines hold the weights that they are given in full precision (SkyRL #1014, task 12)."""

    @property
    def name(self) -> str:
        """Short, stable and fit for a file name: ``disaggregated-2x1``."""
        workers = f"{self.engines}x{self.tensor_parallel}"
        extra = "".join(
            f"-{label}{size}"
            for label, size in (("pp", self.pipeline_parallel), ("dp", self.data_parallel))
            if size > 1
        )
        quantized = f"-{self.quantization}" if self.quantization else ""
        return f"{self.placement}-{workers}{extra}{quantized}"

    @staticmethod
    def placement_of(name: str) -> Placement:
        """The placement in a topology's name."""
        return Placement(name.partition("-")[0])

    @staticmethod
    def quantization_of(name: str) -> str | None:
        """The quantization in a topology's name; None for full precision."""
        last = name.rpartition("-")[2]
        return last if last in get_args(Quantization) else None

    @property
    def world_size(self) -> int:
        """Inference workers over all engines (SkyRL #1014, task 8: servers × TP)."""
        return self.engines * self.tensor_parallel * self.pipeline_parallel * self.data_parallel
