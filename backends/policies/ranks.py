"""A multi-rank trainer that holds a policy version: each rank holds its part, and rank 0 writes the gathered parameters.

One process does the imports, forks the ranks and ends with them. They use gloo on loopback, on a CPU, in a stack's environment.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from backends.policies import versions as policy
from harness.driving import allowance
from harness.machine.processes import kill_trees

GATHER_DEADLINE_S = 240.0
"""Deadline for all ranks together, from their start. Imports take most of it."""
COLLECTIVE_DEADLINE_S = 90.0
"""Deadline for each collective, because another rank may have died."""


class Held(NamedTuple):
    """The policy version that the ranks hold."""

    model_path: str
    version: int
    policies: str
    """The folder of trained versions."""

    def tensors(self) -> dict[str, Any]:
        """The whole version: name → tensor."""
        return policy.version(self.model_path, self.version, self.policies)


OneRank = Callable[[Held, int], dict[str, Any]]
"""The work of a rank that has joined its group: hold its part, and gather. Every rank returns the gathered parameters."""


def gather(module: str, model_path: str, version: int, policies: str) -> dict[str, Any]:
    """Policy version `version`, held by the ranks of `module` and gathered: name → tensor, in the order of export.

    Raises RuntimeError, with the end of the ranks' log, if a rank fails or they take too long (`GATHER_DEADLINE_S`).
    """
    from safetensors.torch import load_file

    deadline_s = GATHER_DEADLINE_S + allowance.for_weights(model_path)
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        log = Path(scratch) / "log"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", module, model_path, str(version), policies, scratch]
        with log.open("wb") as said:
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
            try:
                status: int | str = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                status = f"nothing within {deadline_s:.0f} s"
            finally:
                if process.poll() is None:
                    kill_trees([process.pid])
                    process.wait()
        if status != 0:
            raise RuntimeError(f"{module} ended with {status}: {log.read_text(errors='replace')[-2000:]}")
        tensors = load_file(str(Path(scratch) / "gathered.safetensors"))
        order = (Path(scratch) / "order").read_text().split("\n")
        return {name: tensors[name] for name in order}


def main(world: int, one_rank: OneRank) -> None:
    """The program that `gather` runs. Call it after importing every module that the ranks need."""
    parser = argparse.ArgumentParser(description="Hold a policy version in several ranks and gather it.")
    parser.add_argument("model")
    parser.add_argument("version", type=int)
    parser.add_argument("policies")
    parser.add_argument("scratch", type=Path)
    given = parser.parse_args()
    held = Held(given.model, given.version, given.policies)
    forked = multiprocessing.get_context("fork")
    ranks = [
        forked.Process(target=_be, args=(world, rank, held, given.scratch, one_rank), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    left: dict[Any, Any] = {process.sentinel: process for process in ranks}
    while left:
        for sentinel in wait(list(left)):
            process = left.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                rank = ranks.index(process)
                said = _log(given.scratch, rank).read_text(errors="replace")[-1500:]
                sys.exit(f"rank {rank} of {world} ended with {process.exitcode}: {said}")


def _log(scratch: Path, rank: int) -> Path:
    return scratch / f"rank-{rank}.log"


def _be(world: int, rank: int, held: Held, scratch: Path, one_rank: OneRank) -> None:
    """Runs one rank, from joining the group to leaving it."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    with _log(scratch, rank).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # the device on which SkyRL gathers and Megatron-core makes parameters
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S + allowance.for_weights(held.model_path)),
    )
    gathered = one_rank(held, rank)
    if rank == 0:
        of = held.tensors()
        save_file(
            {name: t.to(of[name].dtype).clone() for name, t in gathered.items()}, str(scratch / "gathered.safetensors")
        )
        (scratch / "order").write_text("\n".join(gathered))
    dist.barrier()
    dist.destroy_process_group()


def place(modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Install placeholders for modules that need CUDA to build, and that the imported code imports without using them here."""
    import transformers.modeling_utils  # noqa: F401 - Transformers looks for the real modules while there are no placeholders

    for name, attributes in modules.items():
        placeholder = types.ModuleType(name)
        placeholder.__spec__ = importlib.machinery.ModuleSpec(name, None)
        placeholder.__dict__.update(attributes)
        sys.modules[name] = placeholder
