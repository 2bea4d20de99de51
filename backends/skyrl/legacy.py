"""SkyRL's legacy stack: InferenceEngineClient over engines in Ray actors. Written for skyrl 0.1.0 and 0.2.0."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import httpx

from backends.skyrl import arguments, endpoint, entry, exposed, forked, lives, lora, tinker
from backends.skyrl.base import ENTRY, PACKAGE, SkyRLStack, in_python
from backends.skyrl.release import EXPERTS
from backends.skyrl.remote import RemoteServers
from backends.skyrl.results import generation
from backends.taps.tap import FaultyEngine
from backends.vllm import patches
from harness.contract import messages
from harness.contract.capability import Capability
from harness.contract.errors import NotOffered
from harness.driving import probing, raw
from harness.machine import ports

ENDPOINTS = ("/init_weight_update_communicator", "/update_weights_skyrl", "/destroy_weights_update_group")
"""Endpoints that RemoteInferenceEngine calls in addition to those of both clients."""


ABORT_GRACE_S = 0.1
ABORT_GRACE_PATCH = {
    "name": "short-abort-grace",
    "reason": f"ABORT_GENERATION_GRACE_PERIOD_SECONDS is {ABORT_GRACE_S} instead of 5: a tiny model is done after five seconds",
    "version": "skyrl 0.1.0",
}


class LegacyStack(SkyRLStack):
    """The contract on `InferenceEngineClient`."""

    def __init__(self) -> None:
        super().__init__()
        self._engines: list[Any] = []
        self._servers: RemoteServers | None = None
        self._urls: list[str] = []
        self._endpoint: endpoint.InProcess | None = None
        self._left_behind: list[Any] = []
        self._leftovers = lives.Leftovers()
        self._first: Any = None
        """The client that started the endpoint, which ends with this client."""
        self._served: tuple[Any, Any] = (None, None)

    def vllm_patches(self) -> list[patches.Patch]:
        return [*super().vllm_patches(), *([patches.LEGACY_CPU] if self.on_cpu else [])]

    @property
    def fork(self) -> patches.Patch:
        """Threads of this process start several data-parallel ranks at once. A rank forked from it would inherit locks that other
        threads hold: one rank never came up, and the other waited for it in its first collective."""
        return super().fork if self.request.topology.data_parallel == 1 else patches.FORK_RANKS

    def capabilities(self) -> frozenset[Capability]:
        in_process = self.request.start == "fork" and not self.remote
        return super().capabilities() - (
            {Capability.PICKLE_CLIENT, Capability.STACK_ENDS} if in_process else frozenset()
        )

    # --- lifecycle

    def _prepare_process(self) -> None:
        super()._prepare_process()
        if self.release.legacy_pause_aborts:
            self._abort_soon()

    def _abort_soon(self) -> None:
        """0.1.0 waits five seconds before it aborts requests in flight; a tiny model finishes them sooner."""
        from skyrl.backends.skyrl_train.inference_engines import inference_engine_client as shipped

        shipped.ABORT_GENERATION_GRACE_PERIOD_SECONDS = ABORT_GRACE_S
        self.patches.append(ABORT_GRACE_PATCH)

    async def _start_engines(self) -> None:
        engine_cfg = self.cfg.generator.inference_engine
        if self.request.start == "fork":
            self._endpoint = endpoint.InProcess()
            self.notes.append(endpoint.IN_PROCESS_NOTE)
        if self.remote:
            self._servers = RemoteServers(self.request, self.on_cpu)
            self._urls = await self._servers.start()
            await self.list_what_lacks(self._servers, ENDPOINTS)
            engine_cfg.run_engines_locally = False
            engine_cfg.remote_urls = [url.removeprefix("http://") for url in self._urls]
        if self.as_shipped:
            self.client = await asyncio.to_thread(self._client_as_shipped)
            self._engines = self.client.engines
        else:
            self._engines = await asyncio.to_thread(self._engines_in_process)
            self.client = await asyncio.to_thread(self._make_client, self._tapped(self._engines), engine_cfg)
        if self._endpoint is not None:
            self._endpoint.serve(self.client)  # as the client that starts it, before any later one is made
        self._first, self._served = self.client, endpoint.served()
        if self.sleeps_at_start:
            self.notes.append(entry.SLEEP_NOTE)
            await self.client.wake_up()

    def _client_as_shipped(self) -> Any:
        import skyrl.backends.skyrl_train.inference_engines.ray_wrapped_inference_engine as wrapped
        import skyrl.backends.skyrl_train.inference_engines.vllm.vllm_engine as shipped
        from skyrl.backends.skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient

        from backends.skyrl.actors import probed_engine_actor

        raw.watch(InferenceEngineClient)
        shipped.AsyncVLLMRayActor = probed_engine_actor()
        wrapped.create_ray_wrapped_inference_engines = entry.given(
            wrapped.create_ray_wrapped_inference_engines,
            inference_engine_enable_sleep=self.colocated and not self.on_cpu,
            sleep_level=entry.SLEEP_LEVEL,
            enforce_eager=self.cfg.generator.inference_engine.enforce_eager,
        )
        return self.experiment().get_inference_client()

    def _make_client(self, engines: list[Any], engine_cfg: Any) -> Any:
        from skyrl.backends.skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient

        raw.watch(InferenceEngineClient)
        lora_cfg = self.cfg.trainer.policy.model.lora
        return InferenceEngineClient(engines, self.tokenizer, self.engine_model, lora_cfg, engine_cfg)

    @property
    def sleeps_at_start(self) -> bool:
        """True if SkyRL puts its engines to sleep after their start, so that a trainer can use the GPUs first."""
        return self.colocated and not self.on_cpu and self.request.start == "ray"

    def _tapped(self, engines: list[Any]) -> list[Any]:
        """The engines for the client: behind fault taps if the start asked for these."""
        if not self.request.fault_taps:
            return engines
        self.fault_taps = [FaultyEngine(engine, number) for number, engine in enumerate(engines)]
        return list(self.fault_taps)

    def hop_taps(self) -> Sequence[FaultyEngine]:
        if not isinstance(self.client.engines[0], FaultyEngine):
            self.client.engines = [FaultyEngine(engine, number) for number, engine in enumerate(self.client.engines)]
        taps: list[FaultyEngine] = self.client.engines
        return taps

    def unbroken(self) -> None:
        self.client.engines = [tap.engine for tap in self.client.engines]

    def _engines_in_process(self) -> list[Any]:
        """--start fork: hold the engines of the Ray actors in this process; the client sees no difference. Each data-parallel rank
        has its own engine. The ranks come up together, and the first failure ends the start."""
        from vllm.plugins import load_general_plugins

        topology = self.request.topology
        ranks = topology.data_parallel
        if ranks > 1:
            forked.warm_up()
            load_general_plugins()  # otherwise the second thread proceeds while the first still applies our patches
            forked.wait_until_warm(self.request.deadline_s)
        rendezvous = ports.free(topology.engines)
        engines: list[Any] = []
        threads = ThreadPoolExecutor(ranks)
        try:
            for index, port in enumerate(rendezvous):
                starts = [threads.submit(self._engine_in_process, index, port, rank) for rank in range(ranks)]
                ended, _ = wait(starts, return_when=FIRST_EXCEPTION)
                for start in ended:
                    start.result()
                engines += [start.result() for start in starts]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        return engines

    def _engine_in_process(self, index: int, rendezvous: int, rank: int) -> Any:
        """One data-parallel rank of an engine; ranks meet at the port `rendezvous`.

        Engines in separate actors have separate tokenizers. In one process vLLM would share one, and two threads that use a fast
        tokenizer at once fail with "Already borrowed" (vLLM issue 40949).
        """
        from skyrl.backends.skyrl_train.inference_engines.vllm.vllm_engine import AsyncVLLMInferenceEngine
        from vllm.tokenizers.registry import cached_get_tokenizer

        cached_get_tokenizer.cache_clear()
        engine = self.cfg.generator.inference_engine
        ranks = engine.data_parallel_size
        added = {option: getattr(engine, option) for option in self.release.engine_options if option == EXPERTS}
        if ranks > 1:
            added |= {
                "data_parallel_backend": "mp",
                "data_parallel_size": ranks,
                "data_parallel_rank": rank,
                "data_parallel_address": "127.0.0.1",
                "data_parallel_rpc_port": rendezvous,
            }
        return AsyncVLLMInferenceEngine(
            model=self.engine_model,
            served_model_name=engine.served_model_name,
            enforce_eager=engine.enforce_eager,
            worker_extension_cls="skyrl.backends.skyrl_train.inference_engines.vllm.vllm_engine.WorkerWrap",
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
            enable_expert_parallel=engine.expert_parallel_size > 1,
            distributed_executor_backend=self.executor,
            seed=self.cfg.trainer.seed + index * ranks + rank,
            enable_prefix_caching=engine.enable_prefix_caching,
            dtype=engine.model_dtype,
            trust_remote_code=True,
            vllm_v1_disable_multiproc=engine.vllm_v1_disable_multiproc,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            bundle_indices=None,
            num_gpus=1,
            noset_visible_devices=False,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_logprobs=1,
            **added,
            **engine.engine_init_kwargs,
            **lora.engine_arguments(self.cfg),
        )

    async def end(self) -> None:
        """The client's teardown(). Engines and endpoint then end with what refers to them: the stack has no other method."""
        await self.client.teardown()
        self._engines, self.client, self._first = [], None, None

    async def _stop_engines(self) -> None:
        if self._first is not None and self._endpoint is None:
            await asyncio.to_thread(endpoint.close, self.cfg.generator.inference_engine, self._served)
        if self._servers is not None:
            await asyncio.to_thread(self._servers.stop)
        elif self.request.start == "fork":
            for engine in self._engines:
                engine._get_engine().shutdown()

    def roles(self) -> dict[str, int]:
        return {} if self._servers is None else self._servers.pids()

    def url_of(self, server: str) -> str | None:
        return dict(zip((f"server-{i}" for i in range(len(self._urls))), self._urls, strict=True)).get(server)

    async def _rpc(self, index: int, method: str, arguments: dict[str, Any]) -> list[Any]:
        if self._servers is not None:
            async with httpx.AsyncClient(timeout=self.direct_s) as direct:
                answer = await direct.post(
                    f"{self._urls[index]}/collective_rpc", json={"method": method, "kwargs": arguments}
                )
            answer.raise_for_status()
            found: list[Any] = answer.json()["results"]
        elif self.request.start == "fork":
            found = await self._engines[index]._get_engine().collective_rpc(method, kwargs=arguments)
        else:
            found = await self._engines[index].inference_engine_actor.parity_rpc.remote(method, arguments)
        return found

    async def on_workers(self, method: str, **arguments: Any) -> dict[str, list[Any]]:
        return {f"server-{i}": await self._rpc(i, method, arguments) for i in range(len(self._engines))}

    async def introduce(self) -> dict[str, list[dict[str, Any]]]:
        return {
            f"server-{i}": await self._rpc(i, "parity_whoami", {"name": f"server-{i}"})
            for i in range(len(self._engines))
        }

    def addresses(self, direct: httpx.AsyncClient) -> Sequence[probing.Address]:
        servers = [self.address(f"server-{index}", url, direct) for index, url in enumerate(self._urls)]
        if self._endpoint is None:
            return [self.address("endpoint", self.configured_address, direct, data_plane=True), *servers]
        return [
            probing.Address(
                name="endpoint",
                data_plane=True,
                ask=functools.partial(self._endpoint.http, self.client),
                routes=exposed.ROUTES,
                pickles=exposed.PICKLES,
            ),
            *servers,
        ]

    # --- data plane

    async def http(self, request: messages.HttpRequest) -> messages.HttpResponse:
        """SkyRL's HTTP endpoint (enable_http_endpoint)."""
        if self._endpoint is not None:
            return await self._endpoint.http(self.client, request)
        async with httpx.AsyncClient() as direct:
            return await endpoint.passed_on(direct, self.configured_address, request)

    def package(self) -> str:
        return f"{PACKAGE}.inference_engines"

    def reads_configuration(self) -> Sequence[str]:
        return (
            f"{PACKAGE}.inference_engines.inference_engine_client",
            f"{ENTRY}:create_ray_wrapped_inference_engines_from_config",
            f"{ENTRY}:create_remote_inference_engines_from_config",
            f"{ENTRY}:BasePPOExp._get_legacy_inference_client",
        )

    def engines_of_tinker(self, cfg: Any) -> AbstractContextManager[Any]:
        """The backend starts no engines: it gets these. Forked ones work in this process's loop alone."""
        cfg.generator.inference_engine.enable_http_endpoint = False
        engines = list(self.client.engines)
        if self.request.start == "fork":
            loop = asyncio.get_running_loop()
            engines = [tinker.InLoop(engine, loop) for engine in engines]
        return mock.patch(f"{tinker.MODULE}.create_ray_wrapped_inference_engines_from_config", return_value=engines)

    async def sample(self, request: messages.SampleRequest) -> messages.Generation:
        """An image is an argument that the client does not have."""
        if request.tinker is not None:
            return await self.tinker_sample(request)
        return generation(
            await self.client.sample(
                prompt_token_ids=request.prompt_token_ids,
                num_samples=request.num_samples,
                sampling_params=in_python(request.sampling_params),
                session_id=request.session_id,
                **({} if request.image is None else {"image": request.image}),
            )
        )

    # --- adapters

    async def load_lora_adapter(self, request: messages.LoadLoraRequest) -> None:
        from skyrl.backends.skyrl_train.weight_sync import LoraLoadRequest

        folder = await asyncio.to_thread(self.adapters.written, request.name, request.version, wrong=request.wrong)
        await self.client.update_named_weights(LoraLoadRequest(lora_path=folder))

    # --- control plane

    async def pause(self, request: messages.PauseRequest) -> None:
        """Pause in the only mode of the release. Raises NotOffered for another one, or to clear the cache."""
        if request.mode != ("abort" if self.release.legacy_pause_aborts else "keep"):
            raise NotOffered(f"pause_{request.mode}")
        if request.clear_cache:
            raise NotOffered(Capability.PAUSE_CLEAR_CACHE)
        await self.client.pause_generation()

    async def resume(self, _request: messages.Empty) -> None:
        await self.client.resume_generation()

    async def reset_prefix_cache(self, request: messages.ResetPrefixCacheRequest) -> None:
        if request.reset_running_requests:
            raise NotOffered(Capability.RESET_RUNNING_REQUESTS)
        await self.client.reset_prefix_cache()

    async def client_life(self, request: messages.ClientLifeRequest) -> messages.ClientLifeResult:
        """A client in the first one's place has no endpoint: that one's port is taken. teardown() would end the engines."""
        self._leftovers.watch(asyncio.get_running_loop())
        if request.life in ("made again", "collected", "as configured"):
            engine_cfg = copy.copy(self.cfg.generator.inference_engine)
            engine_cfg.enable_http_endpoint = False
            as_configured = functools.partial(self._client_as_configured, request)
            make = as_configured if request.life == "as configured" else self._make_client
            made = functools.partial(make, self._first.engines, engine_cfg)
            client = made() if request.in_loop else await asyncio.to_thread(made)
            self._left_behind += [] if request.life == "collected" else [self.client]
            self.client = client
        elif request.life == "beside":
            engine_cfg = copy.copy(self.cfg.generator.inference_engine)
            endpoint.open_on_loopback(engine_cfg)
            made = functools.partial(self._client_as_configured, request, self._first.engines[:1], engine_cfg)
            self._left_behind.append(await asyncio.to_thread(made))
        elif request.life == "alone":
            gc.collect()
        return messages.ClientLifeResult(left=self._leftovers.take())

    def _client_as_configured(self, request: messages.ClientLifeRequest, engines: list[Any], engine_cfg: Any) -> Any:
        """A client as SkyRL's entry point makes it, over engines that are there already."""
        configured = self.configuration_of(request)
        configured.generator.inference_engine = engine_cfg
        create = f"{ENTRY}.create_ray_wrapped_inference_engines_from_config"
        made: Any = mock.patch(create, return_value=engines)
        if request.names == "another's":
            url = f"http://{messages.NOBODY}"
            entry.name_servers(configured, {"external_proxy_url": url, "external_server_urls": [url]})
            made = mock.patch(create, side_effect=entry.OwnEnginesError)
        elif request.names == "nobody's":
            ours = {"run_engines_locally": False, "remote_urls": [messages.NOBODY], "num_engines": 1}
            entry.name_servers(configured, ours)
        experiment = entry.experiment(configured, entry.no_group)
        taken = endpoint.taken() if request.port_taken else nullcontext()
        with made, mock.patch.dict(os.environ, request.variables), taken as port:
            if port is not None:
                engine_cfg.enable_http_endpoint, engine_cfg.http_endpoint_host = True, endpoint.HOST
                engine_cfg.http_endpoint_port = port
            return experiment.get_inference_client()

    def engine_arguments_of(self, cfg: Any) -> Any:
        return arguments.of_engine(cfg, self.tokenizer)[0]

    def sync_backend_of(self, cfg: Any) -> str:
        from skyrl.backends.skyrl_train.weight_sync import BroadcastTransferStrategy

        return str(BroadcastTransferStrategy.create_init_info(cfg.generator.inference_engine).backend)

    def serving_arguments_of(self, cfg: Any) -> dict[str, Any]:
        """An option is shown by each of its names: SkyRL makes one of two (vllm/utils.py, pop_openai_kwargs)."""
        made = arguments.of_engine(cfg, self.tokenizer)[1]
        return made | {other: made[name] for name, other in arguments.OTHER_NAMES.items() if name in made}

    async def pickle_client(self, _request: messages.Empty) -> None:
        """Actor handles need Ray's serialization, which SkyRL uses to hand the client to its workers."""
        import ray

        self.replaced_client = self.client
        if self.request.start == "ray":
            self.client = await asyncio.to_thread(lambda: ray.get(ray.put(self.client)))
        else:
            self.client = pickle.loads(pickle.dumps(self.client))
        self._engines = self.client.engines
