"""How engines are started and where they live. Topologies are data: ``scenarios/topologies.toml`` names them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from harness.contract.errors import UsageError

Quantization = Literal["int8", "fp8"]
Architecture = Literal["qwen2", "llama", "qwen3_moe", "olmoe"]
DEFAULT_ENGINES = 2
DISAGGREGATED, COLOCATED = "disaggregated", "colocated"
"""Names of two topologies that differ only in their placement."""
KEY = "parity"
"""The key for the engines' API in a keyed topology."""


class Placement(StrEnum):
    """How inference shares the machine with training (SkyRL #1014, tasks 1 to 3)."""

    COLOCATED = "colocated"
    """Engines and trainer share one placement group; engines sleep while the trainer works (task 1)."""
    DISAGGREGATED = "disaggregated"
    """Engines have their own accelerators and never sleep (task 2)."""
    REMOTE = "remote"
    """Servers were started on their own; the stack only connects to them (task 3)."""


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """engines × (tensor × pipeline × data) parallelism, in one placement. All sizes are counts of workers."""

    name: str = DISAGGREGATED
    """Its key in the table: short, stable and fit for a file name."""
    about: str = ""
    engines: int = DEFAULT_ENGINES
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    placement: Placement = Placement.DISAGGREGATED
    quantization: Quantization | None = None
    """Format in which the engines hold weights that they receive in full precision (SkyRL #1014, task 12)."""
    model: Architecture | None = None
    """The architecture that it needs: the run takes the user's checkpoint if that has it, else a tiny model. None: the run takes
    any checkpoint of the user, else a tiny Qwen2."""
    expert_parallel: bool = False
    """True if experts are spread over an engine's tensor- and data-parallel workers (SkyRL #1014, task 10)."""
    lora: bool = False
    """True if engines start with support for adapters (SkyRL #1014, task 11)."""
    kept_adapters: int | None = None
    """Adapters that an engine keeps, in use or not (vLLM documentation, --max-cpu-loras). None: as many as it runs at once."""
    plain: bool = False
    """True if remote servers are started by the engine's own command and not by the stack's server module. No sync reaches them."""
    keyed: bool = False
    """True if all processes of the stack have a key for the engines' API in their environment (vLLM documentation, VLLM_API_KEY)."""
    processed: bool = False
    """True if log-probabilities are those after temperature and filters (vLLM, ModelConfig.logprobs_mode: processed_logprobs)."""
    cache_tokens: int | None = None
    """Tokens that each engine's KV cache holds (vLLM documentation, --num-gpu-blocks-override). None: more than all requests take."""
    deltas: bool = False
    """True if a sync is written to a disk that all share, as what changed since the last one (SkyRL documentation, Delta Weight
    Sync)."""

    @property
    def world_size(self) -> int:
        """Inference workers over all engines (SkyRL #1014, task 8: servers × TP)."""
        return self.engines * self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@lru_cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("scenarios") / "topologies.toml").read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """The names of all topologies, in the order of the table."""
    return tuple(_table())


def started_by_default(name: str, wave: int) -> bool:
    """True if a run starts the topology for scenarios of the wave without being asked for it."""
    return wave in _table()[name].get("waves", [wave])


def topology(name: str, engines: int = DEFAULT_ENGINES) -> Topology:
    """The topology of that name, with `engines` engines unless the table sets a number. Raises UsageError for an unknown name."""
    if name not in _table():
        close = difflib.get_close_matches(name, names(), 1)
        raise UsageError(
            f"unknown topology {name!r}" + (f": did you mean {close[0]}?" if close else ""),
            next_step=f"there are {', '.join(names())} (scenarios/topologies.toml)",
        )
    row = {key: value for key, value in _table()[name].items() if key != "waves"}
    return msgspec.convert({"engines": engines, **row, "name": name}, Topology)


def colocated(one: Topology) -> Topology:
    """The same engines, colocated with the trainer so that one GPU can hold both. Remote servers stay remote."""
    if one.placement is not Placement.DISAGGREGATED:
        return one
    if one.name == DISAGGREGATED:
        return topology(COLOCATED, one.engines)
    return msgspec.structs.replace(one, placement=Placement.COLOCATED)


def in_order(some: Iterable[str]) -> list[str]:
    """These names in the order of the table."""
    wanted = set(some)
    return [name for name in names() if name in wanted]
