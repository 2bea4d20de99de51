"""The adapter: the miniature behind the contract, built from parts that a fault may replace."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any, ClassVar

import msgspec
import numpy as np

from backends.miniature import faults, model, tokenizer
from backends.miniature.client import MODEL, Client, RetryingClient
from backends.miniature.endpoint import Endpoint
from backends.miniature.engine import DEVICE_BYTES, Engine
from backends.miniature.generator import Generator
from backends.miniature.interface import Interface
from backends.miniature.launcher import Launcher
from backends.miniature.parameters import PARAMETERS
from backends.miniature.router import PICKLES, ROUTES, Router
from backends.miniature.runs import Run
from backends.miniature.staleness import StalenessManager
from backends.miniature.trainer import Trainer
from harness.contract import messages
from harness.contract.capability import Capability
from harness.contract.topology import KEY, Placement, Topology
from harness.driving import census, probing, raw
from harness.records.reference import ExpertShard


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The classes of a miniature's parts."""

    engine: type[Engine] = Engine
    router: type[Router] = Router
    client: type[Client] = Client
    interface: type[Interface] = Interface
    generator: type[Generator] = Generator
    endpoint: type[Endpoint] = Endpoint
    trainer: type[Trainer] = Trainer
    staleness: type[StalenessManager] = StalenessManager
    run: type[Run] = Run
    launcher: type[Launcher] = Launcher


class Miniature:
    """The contract on the miniature's parts."""

    parts: ClassVar[Parts] = Parts()

    def __init__(self) -> None:
        self.request: messages.StartRequest
        self.engines: list[Engine] = []
        self.router: Router
        self.client: Client
        self.interface: Interface
        self.generator: Generator
        self.endpoint: Endpoint
        self.trainer: Trainer
        self.staleness: StalenessManager
        self.run: Run
        self.launcher: Launcher

    # --- lifecycle

    async def start(self, request: messages.StartRequest) -> messages.Description:
        self.request = request
        self._build(self.parts)
        return await self.describe(messages.Empty())

    def _build(self, parts: Parts) -> None:
        """Replace all parts by new instances of these classes."""
        request = self.request
        for engine in self.engines:
            engine.stop()
        self.engines = [
            parts.engine(
                f"server-{index}",
                max_model_len=request.max_model_len,
                quantization=request.topology.quantization,
                seed=request.seed,
                dtype=request.dtype,
                workers=_workers(request.topology, index),
            )
            for index in range(request.topology.engines * request.topology.data_parallel)
        ]
        for engine in self.engines:
            engine.placed(colocated=request.topology.placement is Placement.COLOCATED)
            engine.configure(self._configured())
            engine.first_space = request.topology.model != "llama"
            engine.kept_adapters = request.topology.kept_adapters or 1
            engine.processed = request.topology.processed
            engine.cache_tokens = request.topology.cache_tokens or engine.cache_tokens
        self.router = parts.router(self.engines, request.seed)
        raw.watch(parts.client)
        raw.watch(parts.interface)
        self.client = self._replaced = parts.client()
        self._gone: list[Client] = []
        self.client.policies = request.policies
        self.client.takes_adapters = request.topology.lora
        self.client.deltas = request.topology.deltas
        self.client.key = KEY if request.topology.keyed else ""
        for engine in self.engines:
            engine.key = self.client.key
        self.client.recommended = tokenizer.of(request.topology.model).sampling
        self.client.begins_texts = request.topology.model == "llama"
        self.client.connect(self.router, self.engines)
        self.client.join()
        self.interface = parts.interface(self.client)
        raw.watch(parts.generator, "generator")
        self.generator = parts.generator()
        self.endpoint = parts.endpoint()
        self.staleness = parts.staleness()
        self.run = parts.run()
        self.launcher = parts.launcher()
        self.trainer = parts.trainer()
        self.trainer.policies = request.policies
        self.trainer.engines = self.engines

    async def describe(self, _request: messages.Empty) -> messages.Description:
        request = self.request
        return messages.Description(
            target=request.target,
            topology=request.topology,
            start=request.start,
            capabilities=sorted(frozenset(request.capabilities) - self._not_here()),
            servers=[messages.ServerDescription(name=engine.name) for engine in self.engines],
            packages={"numpy": np.__version__},
        )

    def _not_here(self) -> frozenset[Capability]:
        """Capabilities that this start lacks. Only a quantized topology has quantized weights, and only one that says so syncs by
        a shared disk. Only colocated engines have CUDA IPC and device memory."""
        quantized = self.request.topology.quantization is not None
        colocated = self.request.topology.placement is Placement.COLOCATED
        offered = {
            Capability.QUANTIZED: quantized,
            Capability.QUANTIZED_SYNC: quantized,
            Capability.CUDA_IPC: colocated,
            Capability.DEVICE_MEMORY: colocated,
            Capability.DELTA_SYNC: self.request.topology.deltas,
        }
        return frozenset(capability for capability, here in offered.items() if not here)

    async def teardown(self, _request: messages.Empty) -> None:
        await self.interface.teardown()

    def dead(self) -> str | None:
        """For the host: why the stack cannot answer any more; None if it can."""
        return next((engine.crash for engine in self.engines if engine.crash), None)

    # --- breaking it

    async def request_schemas(self, _request: messages.Empty) -> messages.RequestSchemasResult:
        bodies = {"type": "object", "properties": PARAMETERS}
        params = {"type": "object", "properties": {name: one for name, one in PARAMETERS.items() if name != "n"}}
        return messages.RequestSchemasResult(
            calls={"generate": params, "sample": params, "completion": bodies, "chat_completion": bodies}
        )

    async def inject(self, request: messages.InjectRequest) -> messages.InjectResult:
        """Rebuild the stack with this fault's part."""
        others: tuple[Any, ...] = (
            self.router,
            self.client,
            self.interface,
            self.trainer,
            self.generator,
            self.endpoint,
            self.staleness,
            self.run,
            self.launcher,
            *self._gone,
        )
        fired = sum(part.fired for part in (*self.engines, *others))
        parts = self.parts if request.fault is None else faults.parts(request.fault, self.parts)
        self._build(parts)
        return messages.InjectResult(fired=fired)

    async def kill_server(self, request: messages.KillServerRequest) -> None:
        parts = {messages.ROUTER: self.router} | {engine.name: engine for engine in self.engines}
        parts[request.server].kill()

    async def break_hop(self, request: messages.BreakHopRequest) -> messages.BreakHopResult:
        struck, self.router.struck, self.router.broken = len(self.router.struck), [], request.fault
        self.router.over.set()
        self.router.over = asyncio.Event()
        return messages.BreakHopResult(struck=struck)

    async def delay(self, request: messages.DelayRequest) -> None:
        for engine in self.engines:
            engine.follow(request.seed)

    # --- data plane

    async def generate(self, request: messages.GenerateRequest) -> messages.Generation:
        return await self.interface.generate(msgspec.structs.asdict(request))

    async def sample(self, request: messages.SampleRequest) -> messages.Generation:
        if request.tinker is not None:
            return await self.client.tinker_sample(request)
        return await self.interface.sample(
            request.prompt_token_ids,
            request.num_samples,
            request.sampling_params,
            request.session_id,
            lora_adapter=request.lora_adapter,
            prompt_logprobs=request.prompt_logprobs,
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            image=request.image,
        )

    async def chat_completion(self, request: messages.OpenAIRequest) -> messages.OpenAIResponse:
        payload = {"json": dict(request.body), "headers": request.headers}
        return messages.OpenAIResponse(body=await self.interface.chat_completion(payload))

    async def completion(self, request: messages.OpenAIRequest) -> messages.OpenAIResponse:
        return messages.OpenAIResponse(body=await self.interface.completion({"json": dict(request.body)}))

    async def http(self, request: messages.HttpRequest) -> messages.HttpResponse:
        self.endpoint.client = self.client
        if not request.server:
            answer = self.endpoint.configured if request.configured else self.endpoint.http
            return await answer(request)
        engine = next(engine for engine in self.engines if engine.name == request.server)
        return await self.endpoint.at_server(engine, request)

    async def gym_generate(self, request: messages.GymRequest) -> messages.GymOutput:
        self.generator.client = self._replaced if request.earlier_client else self.client
        return await self.generator.generate(request)

    async def render_chat(self, request: messages.RenderChatRequest) -> messages.RenderChatResult:
        return messages.RenderChatResult(token_ids=self.client.render_chat(request.messages))

    async def tokenize(self, request: messages.TokenizeRequest) -> messages.TokenizeResult:
        return messages.TokenizeResult(
            token_ids=self.client.tokenize(request.texts, add_special_tokens=request.add_special_tokens)
        )

    async def detokenize(self, request: messages.DetokenizeRequest) -> messages.DetokenizeResult:
        return messages.DetokenizeResult(texts=self.client.detokenize(request.token_ids))

    # --- control plane

    async def pause(self, request: messages.PauseRequest) -> None:
        await self.interface.pause_generation(mode=request.mode, clear_cache=request.clear_cache)

    async def resume(self, _request: messages.Empty) -> None:
        await self.interface.resume_generation()

    async def sleep(self, request: messages.SleepRequest) -> None:
        await self.interface.sleep(level=request.level, tags=request.tags)

    async def wake_up(self, request: messages.WakeUpRequest) -> None:
        await self.interface.wake_up(tags=request.tags)

    async def reset_prefix_cache(self, request: messages.ResetPrefixCacheRequest) -> None:
        await self.interface.reset_prefix_cache(reset_running_requests=request.reset_running_requests)

    async def health(self, _request: messages.Empty) -> messages.HealthResult:
        return messages.HealthResult(healthy=self.router.healthy())

    async def is_paused(self, _request: messages.Empty) -> messages.IsPausedResult:
        self.router.read_over_hops("is_paused")
        return messages.IsPausedResult(servers=self.client.paused())

    async def world_size(self, _request: messages.Empty) -> messages.WorldSizeResult:
        return messages.WorldSizeResult(world_size=self.client.world_size())

    # --- weights and client

    async def prepare_weight_sync(self, _request: messages.Empty) -> None:
        self.client.join()

    async def sync_weights(self, request: messages.SyncWeightsRequest) -> None:
        if request.sparse:
            await self.client.send_sparse(request.version)
            self.client.synced(request.weight_label)
        elif request.unfit is not None:
            await self.client.send_unfit(request.version, request.unfit)
        elif request.fail_after_chunks is None:
            await self.interface.update_named_weights(request)
            if request.training is not None:
                await self.client.sent_by_worker(request.training)
            self.client.synced(request.weight_label)
        else:
            await self.client.give_up(request.version, request.chunks, request.layout, request.fail_after_chunks)

    async def finish_session(self, request: messages.FinishSessionRequest) -> None:
        self.client.finish_session(request.session_id)

    async def sync_count(self, _request: messages.Empty) -> messages.SyncCountResult:
        return messages.SyncCountResult(count=self.client.syncs)

    async def weight_labels(self, _request: messages.Empty) -> messages.WeightLabelsResult:
        return messages.WeightLabelsResult(servers={engine.name: engine.weight_label for engine in self.engines})

    async def train(self, request: messages.TrainRequest) -> messages.TrainResult:
        return await self.trainer.train(request)

    async def load_lora_adapter(self, request: messages.LoadLoraRequest) -> None:
        self.client.refuse_adapter(request.name, request.wrong)
        await self.client.load_lora_adapter(request.name, request.version)

    async def write_lora_adapter(self, request: messages.WriteLoraRequest) -> None:
        for engine in self.engines:
            engine.folders[request.name] = None if request.half else model.adapter(request.version)

    async def unload_lora_adapter(self, request: messages.UnloadLoraRequest) -> None:
        await self.client.everywhere("remove_lora", name=request.name)

    async def forget_adapters(self, _request: messages.Empty) -> None:
        for engine in self.engines:
            engine.adapters.clear()
            engine.folders.clear()

    async def start_trainer_run(self, request: messages.TrainerRunRequest) -> None:
        await self.run.end()
        self.generator.client = self.client
        self.run.begin(request, self.client, self.generator)

    async def trainer_wants(self, request: messages.TrainerWantsRequest) -> messages.TrainerWants:
        return await self.run.wants(request.within_s)

    async def trainer_goes_on(self, request: messages.TrainerGoesOnRequest) -> None:
        self.run.goes_on(fails=request.fails)

    async def end_trainer_run(self, _request: messages.Empty) -> None:
        await self.run.end()

    async def start_staleness_manager(self, request: messages.StalenessRequest) -> None:
        self.staleness.begin(request)

    async def acquire_slot(self, _request: messages.RolloutRequest) -> None:
        await self.staleness.acquire()

    async def accept_rollout(self, _request: messages.RolloutRequest) -> None:
        await self.staleness.accept()

    async def trained(self, request: messages.TrainedRequest) -> None:
        await self.staleness.trained(request.global_step)

    async def pickle_client(self, _request: messages.Empty) -> None:
        self._replaced = self.client
        self.interface = pickle.loads(pickle.dumps(self.interface))
        self.client = self.interface.client
        self.client.connect(self.router, self.engines)

    async def client_life(self, request: messages.ClientLifeRequest) -> messages.ClientLifeResult:
        """A client that is made again is a copy, as with `pickle_client`. All share the one loop whose time is simulated."""
        if request.life == "closed":
            self.client.close()
        elif request.life == "alone":
            self.client.alone()
        elif request.life == "beside":
            other = pickle.loads(pickle.dumps(self.client))
            other.connect(Router(self.engines[:1], self.request.seed), self.engines[:1])
            self.endpoint.beside(other)
        elif request.life in ("made again", "collected", "in another thread", "as configured"):
            self._gone.append(self.client)
            await self.pickle_client(messages.Empty())
            self.client.closed = False
            self.client.without_tokenizer = request.without_tokenizer
            if request.life == "as configured":
                self.client.configure(request)
                self.client.listen(port_taken=request.port_taken)
            else:
                self.client.model = MODEL
        return messages.ClientLifeResult(left=[said for gone in self._gone for said in gone.left()])

    async def other_stack(self, request: messages.OtherStackRequest) -> messages.OtherStackResult:
        return self.launcher.live(request)

    # --- observation

    async def digests(self, _request: messages.Empty) -> messages.DigestsResult:
        return messages.DigestsResult(
            servers={
                engine.name: [{n: model.digest(tensor) for n, tensor in shard.items()} for shard in engine.shards]
                for engine in self.engines
            }
        )

    async def workers(self, _request: messages.Empty) -> messages.WorkersResult:
        return messages.WorkersResult(
            servers={
                engine.name: [
                    messages.WorkerDescription(
                        rank=rank,
                        extensions=engine.extensions,
                        transport=engine.transport,
                        settings=engine.settings,
                    )
                    for rank in range(len(engine.workers))
                ]
                for engine in self.engines
            },
            configured=self._configured(),
        )

    def _configured(self) -> dict[str, str]:
        request = self.request
        return {"dtype": request.dtype, "max_model_len": str(request.max_model_len)}

    async def engine_arguments(self, request: messages.EngineArgumentsRequest) -> messages.EngineArgumentsResult:
        engine = self.engines[0]
        made = self.client.arguments(engine, request.options, device=request.device)
        asked = {name: value for name, value in made.items() if name in (request.options or made)}
        by = None if request.sync_backend is None else self.client.sync_backend(request.sync_backend)
        return messages.EngineArgumentsResult(arguments=asked, configured=sorted(engine.settings), sync_backend=by)

    async def serving_arguments(self, request: messages.ServingArgumentsRequest) -> messages.ServingArgumentsResult:
        return messages.ServingArgumentsResult(arguments=self.endpoint.arguments(request.options))

    async def override_configuration(self, request: messages.OverrideRequest) -> messages.OverrideResult:
        made = self.client.configuration(request.overrides)
        if request.validated:
            self.client.validate(made)
        named = {key: made[key] for key in request.overrides or made}
        values = {key: value for key, value in named.items() if isinstance(value, messages.Scalar)}
        return messages.OverrideResult(values=values, sampling=self.client.sampling(made))

    async def device_memory(self, _request: messages.Empty) -> messages.DeviceMemoryResult:
        """Workers of the same rank share a simulated device across servers."""
        return messages.DeviceMemoryResult(
            servers={
                engine.name: [
                    messages.WorkerMemory(
                        rank=rank,
                        device=f"device-{rank}",
                        total=DEVICE_BYTES,
                        free=DEVICE_BYTES - sum(other.in_use(rank) for other in self.engines),
                        pool=engine.pool(rank),
                    )
                    for rank in range(len(engine.workers))
                ]
                for engine in self.engines
            }
        )

    async def observe(self, _request: messages.ObserveRequest) -> messages.ObserveResult:
        seen: list[dict[str, Any]] = []
        for engine in self.engines:
            seen += engine.seen
            engine.seen = []
        return messages.ObserveResult(observations=sorted(seen, key=lambda s: s["at_ns"]))

    async def in_flight(self, _request: messages.Empty) -> messages.InFlightResult:
        live = [(e.name, r) for e in self.engines for r in (*e.running, *e.waiting, *e.held)]
        servers: dict[str, int] = {}
        for name, _ in live:
            servers[name] = servers.get(name, 0) + 1
        return messages.InFlightResult(requests=len(live), tokens=sum(len(r.tokens) for _, r in live), servers=servers)

    async def census(self, _request: messages.Empty) -> messages.CensusResult:
        variable = messages.Offer(name="MINIATURE_REQUESTS", kind="variable", default=str(messages.REQUEST_CAP))
        return self.interface._census([*census.keys(Topology, "topology", Topology.__struct_fields__), variable])

    async def probe_security(self, _request: messages.Empty) -> messages.ProbeSecurityResult:
        async def ask(request: messages.HttpRequest) -> messages.HttpResponse:
            return messages.HttpResponse(status=self.router.asked(request), headers=self.router.shared(request))

        with self.router.bound() as listening:
            port = listening.getsockname()[1]
            address = probing.Address(
                name="router", data_plane=True, ask=ask, routes=ROUTES, pickles=[*PICKLES], port=port
            )
            found = await probing.probe([address], scratch=self.request.scratch)
        listeners = [messages.Listener(address="127.0.0.1", port=port, process="router"), *self.router.listeners()]
        return msgspec.structs.replace(found, listeners=listeners)


def _workers(topology: Topology, server: int) -> list[ExpertShard | None]:
    """Each tensor-parallel worker's share of the experts, if these are spread over the engine's workers; otherwise None. A server
    is one data-parallel rank of its engine."""
    tensor, data = topology.tensor_parallel, topology.data_parallel
    if data == 1 and not topology.expert_parallel:
        return [None] * tensor
    first = server % data * tensor
    return [
        ExpertShard(rank=first + worker, workers=tensor * data, whole=topology.expert_parallel)
        for worker in range(tensor)
    ]


class RetryingMiniature(Miniature):
    """A miniature whose client continues requests that pause(abort) ended."""

    parts: ClassVar[Parts] = Parts(client=RetryingClient)
