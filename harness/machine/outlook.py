"""Forecast of a run: its starts, their time and memory, and what this machine cannot hold.

The estimates come from measurements of the tiny model on CPU. No verdict rests on them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import final

import msgspec

from harness.contract import devices
from harness.contract.runtime import GIB
from harness.contract.topology import Topology
from harness.machine.memory import available_and_total

START_CPU_S = {"ray": 60.0, "fork": 20.0}
"""CPU seconds of a start without its workers: imports from kept bytecode, Ray's daemons. The first start of an environment compiles
that bytecode, and takes twice as long."""
WORKER_CPU_S = {"ray": 20.0, "fork": 10.0}
SCENARIO_S = 1.6
"""Mean seconds per take of a scenario."""
TREE_BYTES = {"ray": int(2.5 * GIB), "fork": int(0.8 * GIB)}
"""Bytes of a start's process tree, without workers (proportional set size)."""
WORKER_BYTES = GIB
"""Bytes of one worker with the tiny model and 256 cache blocks."""
ORACLE_BYTES = int(0.7 * GIB)


@final
class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a stack in a topology, and the scenarios that are driven on it."""

    target: str
    topology: Topology
    scenarios: int
    takes: int
    """Takes per scenario. Scenarios that spoil the stack are driven once."""
    spoiling: int = 0
    """Number of scenarios that spoil the stack. A fresh start follows all but the last."""
    kind: str
    """ "ray", "fork", or "inline": nothing is started."""

    @property
    def seconds(self) -> float:
        if self.kind == "inline":
            return 0.05 * self.scenarios * self.takes
        work = START_CPU_S[self.kind] + WORKER_CPU_S[self.kind] * self.topology.world_size
        starts = max(1, self.spoiling)
        drives = self.spoiling + (self.scenarios - self.spoiling) * self.takes
        return starts * work / min(4, os.cpu_count() or 1) + SCENARIO_S * drives

    @property
    def bytes(self) -> int:
        return 0 if self.kind == "inline" else TREE_BYTES[self.kind] + WORKER_BYTES * self.topology.world_size

    def lacks(self, engine: str, gpus: int, models: int = 1) -> str:
        """What this machine lacks for it; empty if nothing. `models` counts the oracles that run by that time, one per model."""
        if self.kind == "inline":
            return ""
        if engine == "cuda" and (needed := devices.needed(self.topology)) > gpus:
            return f"needs {needed} GPUs, there are {gpus}"
        free, _ = available_and_total()
        needed_bytes = self.bytes + models * ORACLE_BYTES
        if engine == "cpu" and needed_bytes > free:
            return f"needs {needed_bytes / GIB:.1f} GiB of memory, {free / GIB:.1f} are free"
        return ""


def lines(starts: Sequence[Start], engine: str, gpus: int) -> Iterator[str]:
    """The outlook in words: the total, then one line per start, and a line for what this machine lacks."""
    minutes = sum(start.seconds for start in starts) / 60
    yield f"{len(starts)} starts, about {max(1, round(minutes))} min, one after the other:"
    models = set()
    for start in starts:
        models.add(start.topology.model)
        shape = f"{start.topology.engines} engines" if start.topology.engines > 1 else "1 engine"
        each = start.topology.world_size // start.topology.engines
        shape += f" of {each} workers" if each > 1 else ""
        about = f"{start.scenarios} scenarios" + (f" × {start.takes}" if start.takes > 1 else "")
        about += (
            f", {start.spoiling - 1} more starts after scenarios that spoil the stack" if start.spoiling > 1 else ""
        )
        size = f", {start.bytes / GIB:.1f} GiB" if start.bytes else ""
        yield f"  {start.target}@{start.topology.name}: {shape}, {about}{size}, {max(1, round(start.seconds / 60))} min"
        if missing := start.lacks(engine, gpus, len(models)):
            yield f"    this machine cannot hold it: {missing}"
