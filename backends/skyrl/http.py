"""SkyRL's new HTTP stack: ServerGroup + router + RemoteInferenceClient (SkyRL #899, #904). Written for skyrl 0.1.0 to 0.4.0."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import os
import pickle
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx

from backends.skyrl import endpoint, entry, forwarding, lives
from backends.skyrl.base import ENTRY, PACKAGE, SkyRLStack
from backends.skyrl.forked import ForkedServers, WithoutSockets, warm_up
from backends.skyrl.remote import RemoteServers
from backends.taps.tap import FaultProxy
from backends.vllm import patches
from backends.vllm.stack import installed
from harness.contract import messages
from harness.contract.capability import Capability
from harness.contract.errors import StartFailed
from harness.driving import probing, raw
from harness.machine import ports

TINKER_NAMES = {"stop": "stop_strings", "stop_token_ids": "stop_tokens"}
"""vLLM's name of a sampling parameter → its name in the Tinker-style sample request, where they differ."""


NOT_ON_EXTERNAL = frozenset({Capability.WORLD_SIZE, Capability.WEIGHT_SYNC})

HEALTHY_S = 15.0
"""Seconds that the entry point waits for a router that a scenario may have kept from its servers. SkyRL waits for 600."""
KEEP_ALIVE_S = 75
KEEP_ALIVE_PATCH = {
    "name": "keep-alive",
    "reason": "InferenceRouter closes idle connections after 5 s, and its own pool keeps them exactly as long as vLLM's servers do: a "
    f"request that meets the closing is reset, or answered 500. All keep them for {KEEP_ALIVE_S} s here, or runs would not repeat",
    "version": "skyrl 0.1.0",
}

CAP_NOTE = f"SKYRL_GENERATE_CONCURRENCY_PER_ENGINE is {messages.REQUEST_CAP} instead of 512, so that scenarios meet the client's cap"

POLICY_NOTE = "the router's policy is {}, by router_init_kwargs; SkyRL's own choice is consistent_hash"
ROUTER_LINES = 8
"""Lines of the router's log in the message about a failed start."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")

CPU_EXECUTOR_PATCH = {
    "name": "cpu-executor",
    "reason": 'VLLMServerActor asks for the executor "ray", which vLLM refuses on CPU',
    "version": "skyrl 0.1.0",
}


class HttpStack(SkyRLStack):
    """The contract on `RemoteInferenceClient`."""

    def __init__(self) -> None:
        super().__init__()
        self._router: Any = None
        self._groups: list[Any] = []
        self._servers: ForkedServers | RemoteServers | None = None
        self._urls: list[str] = []
        self._client_urls: list[str] = []
        self._left_behind: list[Any] = []
        self._threads: list[lives.Thread] = []
        self._leftovers = lives.Leftovers()
        self._closed = False
        """True if a scenario has closed the client."""
        self._hops: list[FaultProxy] = []
        """Taps before, and behind, the second router; empty until a scenario breaks a hop."""
        self._beside: list[Any] = []
        """Routers beside the first."""
        self._proxy = ""
        """URL of the first router, or of its tap."""
        self._forwarding: forwarding.Forwarding | None = None
        self._around: tuple[str, list[str]]
        """URL of router and servers through the taps."""
        self._direct_way: tuple[str, list[str]] | None = None
        """The same without taps, while the client goes through them."""
        self._direct: httpx.AsyncClient
        self._single: Any = None

    # --- lifecycle

    def _prepare_process(self) -> None:
        super()._prepare_process()
        if self.release.own_router:
            os.environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(KEEP_ALIVE_S)
            self.patches.append(KEEP_ALIVE_PATCH)
        else:
            os.environ["SKYRL_GENERATE_CONCURRENCY_PER_ENGINE"] = str(messages.REQUEST_CAP)
            self.notes.append(CAP_NOTE)
        if self.request.start == "fork" and not self.remote:
            warm_up()

    def vllm_patches(self) -> list[patches.Patch]:
        receives = self.on_cpu and self.release.sync_by_extension  # by SkyRL's worker extension, as in legacy
        return [*super().vllm_patches(), *([patches.LEGACY_CPU] if receives else [])]

    def capabilities(self) -> frozenset[Capability]:
        lacking = NOT_ON_EXTERNAL if self.remote and self.release.sync_by_extension else frozenset()
        if self.release.own_router and self.request.start == "fork":
            lacking |= {Capability.STACK_ENDS}  # the router is a thread, and the harness has the servers
        return super().capabilities() - lacking

    async def _start_engines(self) -> None:
        if not self.release.own_router:
            loopback = {"host": "127.0.0.1", "prometheus_host": "127.0.0.1"}
            policy = {} if self.request.router_policy is None else {"policy": self.request.router_policy}
            self.cfg.generator.inference_engine.router_init_kwargs = loopback | policy
            self.cfg.trainer.log_path = str(self._router_logs)
            self.notes += [POLICY_NOTE.format(self.request.router_policy)] if policy else []
        self._router_on_loopback()
        if self.remote:
            self._servers = RemoteServers(self.request, self.on_cpu, extended=self.release.extended_servers)
            self._urls = await self._servers.start()
            await self.list_what_lacks(self._servers, self.release.endpoints)
            self.cfg.generator.inference_engine.external_server_urls = self._urls
        if self.as_shipped:
            self.client = await asyncio.to_thread(self._client_as_shipped)
            if self.colocated:
                self.notes.append(entry.SLEEP_NOTE)
                await self.client.wake_up()
        else:
            topology = self.request.topology
            self._servers = ForkedServers(
                self._cli_arguments(),
                topology.engines,
                data_parallel=topology.data_parallel,
                executor=self.executor,
                deadline_s=self.request.deadline_s,
                devices=self.request.devices,
            )
            self._urls = await asyncio.to_thread(self._servers.start)
            proxy = await asyncio.to_thread(self._start_tapped if self.request.fault_taps else self._start_router)
            self.client = self._make_client(proxy)
        self._proxy = self.client.proxy_url
        self._single = self._make_single(self._proxy)
        # Out-of-band calls and users' requests must not pass the client under test. No connection is reused: a connection that a
        # server is about to close, as 0.1.0's router does after its own errors, would fail a good request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(retries=2, limits=limits)
        self._direct = httpx.AsyncClient(timeout=self.direct_s, transport=transport)

    def _cli_arguments(self) -> Any:
        from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args

        arguments = build_vllm_cli_args(self.cfg)
        arguments.disable_uvicorn_access_log = True
        arguments.uvicorn_log_level = "warning"
        if self.on_cpu:
            arguments.enable_sleep_mode = False
            if self.release.own_groups:
                arguments.distributed_executor_backend = self.executor
                self.patches.append(CPU_EXECUTOR_PATCH)
        return arguments

    def _client_as_shipped(self) -> Any:
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

        raw.watch(RemoteInferenceClient)
        self._servers_on_loopback()
        experiment = self.experiment()
        with self._named_router():
            client = self._client_of(experiment)
        self._router = experiment._inference_router
        self._groups = [experiment._server_group] if self.release.own_groups else experiment._server_groups or []
        self._groups = [group for group in self._groups if group is not None]
        self._urls = list(client.server_urls)
        client.model_name = self.request.model_path  # in 0.2.0 the twin's path, if engines are quantized
        if hasattr(client, "active_lora_name"):
            client.active_lora_name = None  # SkyRL's name for its adapter, also before it is loaded
        return client

    def _client_of(self, experiment: Any) -> Any:
        """The client of SkyRL's entry point, which leaves colocated engines asleep."""
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

        slept = RemoteInferenceClient.sleep
        RemoteInferenceClient.sleep = entry.given(slept, level=entry.SLEEP_LEVEL)
        try:
            return experiment.get_inference_client()
        finally:
            RemoteInferenceClient.sleep = slept

    def _servers_on_loopback(self) -> None:
        """Replace what SkyRL's entry point makes its servers of: their actor, and the arguments of vLLM's command line."""
        import skyrl.backends.skyrl_train.inference_servers.vllm_server_actor as shipped
        from skyrl.train.entrypoints import main_base

        from backends.skyrl.actors import loopback_server_actor

        shipped.VLLMServerActor = loopback_server_actor()
        arguments = self._cli_arguments()
        if self.release.own_groups:
            import skyrl.backends.skyrl_train.inference_servers.server_group as groups

            main_base.build_vllm_cli_args = lambda _cfg: arguments
            ours = {"server_actor_cls": shipped.VLLMServerActor, "start_port": ports.free(1)[0]}
            groups.ServerGroup = entry.given(groups.ServerGroup, **ours)
            return
        from skyrl.backends.skyrl_train.inference_servers import setup

        for module in (main_base, setup):  # the former in 0.2.0, the latter from 0.3.0 on
            module.build_vllm_cli_args = lambda _cfg: arguments

    def _router_on_loopback(self) -> None:
        """Replace what makes SkyRL's router reachable from other machines."""
        if self.release.own_router:
            import skyrl.backends.skyrl_train.inference_servers.router as own

            own.get_node_ip = lambda: "127.0.0.1"
            config = functools.partial(own.uvicorn.Config, timeout_keep_alive=KEEP_ALIVE_S)
            own.uvicorn = SimpleNamespace(Config=config, Server=own.uvicorn.Server)
            shipped = own.InferenceRouter
            own.InferenceRouter = lambda server_urls, host="127.0.0.1", port=None: shipped(
                server_urls, host=host, port=port or ports.free(1)[0]
            )
            return
        import skyrl.backends.skyrl_train.inference_servers.vllm_router as router

        router.get_node_ip = lambda: "127.0.0.1"
        if self.request.start == "fork":
            router.multiprocessing = SimpleNamespace(Process=WithoutSockets)

    def _start_tapped(self) -> str:
        """The router between fault taps: one in front of each server, for router and client, and one in front of the router."""
        behind = [FaultProxy(url, number) for number, url in enumerate(self._urls)]
        self._client_urls = [tap.start() for tap in behind]
        in_front = FaultProxy(self._start_router(), server=None)
        self.fault_taps = [*behind, in_front]
        return in_front.start()

    def hop_taps(self) -> Sequence[FaultProxy]:
        """A second router between taps: what it makes of broken answers does not reach other scenarios."""
        if not self._hops:
            behind = [FaultProxy(url, number) for number, url in enumerate(self._urls)]
            urls = [tap.start() for tap in behind]
            first, self._router = self._router, None
            in_front = FaultProxy(self._start_router(urls), server=None)
            self._beside, self._router = [*self._beside, self._router], first
            self._hops = [*behind, in_front]
            self._around = (in_front.start(), urls)
        self._direct_way = self._direct_way or (self.client.proxy_url, self.client.server_urls)
        self._lead(self._around)
        return self._hops

    def _lead(self, way: tuple[str, list[str]]) -> None:
        """Lead the client's calls, and those of each adapter's own client, to these addresses of router and servers."""
        for client in (self.client, *self.adapters.clients.values()):
            client.proxy_url, client.server_urls = way
            inner = getattr(client, "_generate_client", None)  # of 0.4.0: it keeps the address that it was made with
            if inner is not None:
                inner.proxy_url = way[0]

    def unbroken(self) -> None:
        assert self._direct_way is not None, "hop_taps came before"
        self._lead(self._direct_way)
        self._direct_way = None

    def _start_router(self, urls: list[str] | None = None) -> str:
        """The router over servers that are already up, as SkyRL's entry point makes it for external_server_urls."""
        if self.release.own_router:
            from skyrl.backends.skyrl_train.inference_servers.router import InferenceRouter

            self._router = InferenceRouter(urls or self._servers_of_client)
            return str(self._router.start())
        with self._named_router():
            import skyrl.backends.skyrl_train.inference_servers.vllm_router as shipped
            from skyrl.backends.skyrl_train.inference_servers.utils import build_router_args

            ie_cfg = self.cfg.generator.inference_engine
            arguments = build_router_args(ie_cfg, server_urls=urls or self._servers_of_client)
            self._router = shipped.VLLMRouter(arguments, log_path=str(self._router_logs))
            return str(self._router.start())

    @property
    def _router_logs(self) -> Path:
        return Path(self.request.logs) / "router"

    @contextmanager
    def _named_router(self) -> Iterator[None]:
        """Raises StartFailed for an error of SkyRL's wrapper of the router, with its place and the last lines of the router's log."""
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next(
                (f for f in reversed(frames) if f.filename.endswith("/inference_servers/vllm_router.py")), None
            )
            if place is None:
                raise
            logs = sorted(self._router_logs.glob("*.log"))
            wrote = COLOURS.sub("", logs[-1].read_text(errors="replace")) if logs else ""
            version = installed(("vllm-router",)).get("vllm-router", "without a version")
            raise StartFailed(
                f"{type(error).__name__}: {error}: SkyRL cannot start vllm-router {version} "
                f"(skyrl/{place.filename.rpartition('/skyrl/')[2]}:{place.lineno}: {place.line})"
                + "".join(f"\n  router | {line}" for line in wrote.splitlines()[-ROUTER_LINES:]),
                next_step="name another version with --router, or another policy with --router-policy",
            ) from error

    @property
    def _servers_of_client(self) -> list[str]:
        """URLs under which router and client reach the servers: those of the fault taps, if there are any."""
        return self._client_urls or self._urls

    def _make_client(self, proxy: str) -> Any:
        """The client as SkyRL's entry point makes it, with its local tokenizer."""
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

        raw.watch(RemoteInferenceClient)
        if not self.release.client_tokenizes:
            return RemoteInferenceClient(
                proxy_url=proxy, server_urls=self._servers_of_client, model_name=self.request.model_path
            )
        return RemoteInferenceClient(
            proxy_url=proxy,
            server_urls=self._servers_of_client,
            model_name=self.request.model_path,
            data_parallel_size=self.request.topology.data_parallel,
            enable_return_routed_experts=self.returns_experts,
            tokenizer=self.tokenizer,
            **({"uses_lora_weight_sync": True} if self._names_models else {}),
        )

    def _make_single(self, proxy: str) -> Any:
        """SkyRL's client for single requests; None for a release without one."""
        import skyrl.backends.skyrl_train.inference_servers.remote_inference_client as shipped

        return shipped.RemoteGenerateClient(proxy_url=proxy) if hasattr(shipped, "RemoteGenerateClient") else None

    async def _stop_engines(self) -> None:
        if self._single is not None:
            await self._single.aclose()
        if self._forwarding is not None:
            await self._forwarding.close()
        for client in (*self._left_behind, *self.adapters.clients.values(), self.client):
            if client is not None:
                await client.teardown()
        for thread in self._threads:
            await asyncio.to_thread(thread.stop)
        for router in (self._router, *self._beside):
            if router is not None:
                await asyncio.to_thread(router.shutdown)
        for tap in (*self._hops, *self.fault_taps):
            await asyncio.to_thread(tap.stop)
        for group in self._groups:
            await asyncio.to_thread(group.shutdown)
        if self._servers is not None:
            await asyncio.to_thread(self._servers.stop)

    async def let_go(self) -> None:
        if self._servers is not None:
            await asyncio.to_thread(self._servers.stop)

    def forked_servers(self) -> list[int]:
        return self._servers.pids() if isinstance(self._servers, ForkedServers) else []

    def roles(self) -> dict[str, int]:
        return {} if self.release.own_router else {"router": self._router._process.pid}

    def url_of(self, server: str) -> str | None:
        return self._named_urls()[server]

    def _named_urls(self) -> dict[str, str]:
        return {f"server-{index}": url for index, url in enumerate(self._urls)}

    async def _rpc(self, url: str, method: str, **arguments: Any) -> list[Any]:
        answer = await self._direct.post(f"{url}/collective_rpc", json={"method": method, "kwargs": arguments})
        answer.raise_for_status()
        results: list[Any] = answer.json()["results"]
        return results

    async def on_workers(self, method: str, **arguments: Any) -> dict[str, list[Any]]:
        return {name: await self._rpc(url, method, **arguments) for name, url in self._named_urls().items()}

    async def introduce(self) -> dict[str, list[dict[str, Any]]]:
        return {name: await self._rpc(url, "parity_whoami", name=name) for name, url in self._named_urls().items()}

    def addresses(self, direct: httpx.AsyncClient) -> Sequence[probing.Address]:
        router = self.address("router", self.client.proxy_url, direct, data_plane=True)
        return [router, *(self.address(name, url, direct) for name, url in self._named_urls().items())]

    def shipped_hosts(self) -> dict[int, str]:
        """Port of SkyRL's router → its default host."""
        port = httpx.URL(self.client.proxy_url).port or 0
        if self.release.own_router:
            return {port: inspect.signature(type(self._router)).parameters["host"].default}
        from skyrl.backends.skyrl_train.inference_servers.utils import build_router_args

        unpatched = copy.copy(self.cfg.generator.inference_engine)
        unpatched.router_init_kwargs = {}
        return {port: build_router_args(unpatched, server_urls=self._urls).host}

    def package(self) -> str:
        return f"{PACKAGE}.inference_servers"

    def reads_configuration(self) -> Sequence[str]:
        modules = ["remote_inference_client", "server_group", "utils", *([] if self.release.own_groups else ["setup"])]
        return (
            *(f"{PACKAGE}.inference_servers.{name}" for name in modules),
            f"{ENTRY}:BasePPOExp._get_new_inference_client",
        )

    # --- data plane

    async def generate(self, request: messages.GenerateRequest) -> messages.Generation:
        return await (self._one_by_one(request) if request.single else super().generate(request))

    async def _one_by_one(self, request: messages.GenerateRequest) -> messages.Generation:
        """Every row by SkyRL's client for single requests, all at once."""
        prompts = request.prompt_token_ids or []
        sessions: Sequence[messages.SessionId | None] = request.session_ids or [None] * len(prompts)
        model = self.model_of(request.lora_adapter).get("model", self.client.model_name)
        rows = await asyncio.gather(
            *(
                self._single.generate(
                    prompt_token_ids=prompt,
                    sampling_params=request.sampling_params,
                    session_id=session,
                    model=model,
                    cache_salt=request.cache_salt,
                )
                for prompt, session in zip(prompts, sessions, strict=True)
            )
        )
        asked = request.sampling_params.get("logprobs") is not None
        return messages.Generation(
            response_ids=[[int(t) for t in row.response_ids] for row in rows],
            responses=None,
            stop_reasons=[row.stop_reason for row in rows],
            response_logprobs=[row.response_logprobs for row in rows] if asked else None,
        )

    def engines_of_tinker(self, cfg: Any) -> AbstractContextManager[Any]:
        """The configuration names router and servers, as SkyRL lets a user do, and the backend makes a client of them."""
        engine = cfg.generator.inference_engine
        engine.external_proxy_url, engine.external_server_urls = self._proxy, list(self._servers_of_client)
        return nullcontext()

    async def _forwarded(self, request: messages.SampleRequest) -> messages.Generation:
        if self._forwarding is None:
            model = str(self.cfg.trainer.policy.model.path)
            self._forwarding = await asyncio.to_thread(forwarding.Forwarding, self._proxy, model)
        return await self._forwarding.sample(request)

    async def sample(self, request: messages.SampleRequest) -> messages.Generation:
        if request.forwarded:
            return await self._forwarded(request)
        if request.tinker is not None:
            return await self.tinker_sample(request)
        names = {} if request.as_given else TINKER_NAMES
        image = [] if request.image is None else [{"type": "image", "data": request.image, "format": "png"}]
        body: dict[str, Any] = {
            "prompt": {"chunks": [*image, {"tokens": request.prompt_token_ids}]},
            "num_samples": request.num_samples,
            "sampling_params": {names.get(k, k): v for k, v in request.sampling_params.items()},
        }
        if request.session_id is not None:
            body["session_id"] = request.session_id
        if request.prompt_logprobs:
            body |= {"include_prompt_logprobs": True, "topk_prompt_logprobs": request.topk_prompt_logprobs}
        body |= self.model_of(request.lora_adapter)
        found = await self.client_of(request.lora_adapter).sample({"json": body})
        sequences = found["sequences"]
        return messages.Generation(
            response_ids=[[int(t) for t in s["tokens"]] for s in sequences],
            responses=None,
            stop_reasons=[s["stop_reason"] for s in sequences],
            response_logprobs=[s["logprobs"] for s in sequences],
            prompt_logprobs=found["prompt_logprobs"],
            topk_prompt_logprobs=found["topk_prompt_logprobs"],
        )

    async def http(self, request: messages.HttpRequest) -> messages.HttpResponse:
        """Send the request to the data plane's address, the router, to a server's own, or to the configured one."""
        address = self._named_urls()[request.server] if request.server else self.client.proxy_url
        address = self.configured_address if request.configured else address
        return await endpoint.passed_on(self._direct, address, request)

    async def render_chat(self, request: messages.RenderChatRequest) -> messages.RenderChatResult:
        """As SkyRL's vision generator asks for it."""
        body = {"model": self.client.model_name, "messages": request.messages}
        found = await self.client.render_chat_completion({"json": body})
        return messages.RenderChatResult(token_ids=[int(t) for t in found["token_ids"]])

    async def tokenize(self, request: messages.TokenizeRequest) -> messages.TokenizeResult:
        found = await self.client.tokenize(request.texts, add_special_tokens=request.add_special_tokens)
        return messages.TokenizeResult(token_ids=[[int(t) for t in row] for row in found])

    async def detokenize(self, request: messages.DetokenizeRequest) -> messages.DetokenizeResult:
        return messages.DetokenizeResult(texts=await self.client.detokenize(request.token_ids))

    # --- adapters

    @property
    def _names_models(self) -> bool:
        """True if each call names its model."""
        return self.request.topology.lora and self.release.adapters_in_requests

    def client_of(self, adapter: str | None) -> Any:
        if adapter in (None, getattr(self.client, "active_lora_name", None)) or self._names_models:
            return self.client
        return self.adapters.client(adapter, self.client)

    def model_of(self, adapter: str | None) -> dict[str, str]:
        return {"model": adapter or self.client.model_name} if self._names_models else {}

    async def load_lora_adapter(self, request: messages.LoadLoraRequest) -> None:
        folder = await asyncio.to_thread(self.adapters.written, request.name, request.version, wrong=request.wrong)
        client = self.client_of(request.name)
        if self.release.sync_by_extension:
            from skyrl.backends.skyrl_train.weight_sync import LoraLoadRequest

            # SkyRL's trainer joins the workers' group before its first sync, also with adapters.
            await self.prepare_weight_sync(messages.Empty())
            await client.update_named_weights(LoraLoadRequest(lora_path=folder))
        elif self._names_models:
            await client.load_lora_adapter(request.name, folder)
        else:
            await client.update_lora_from_disk(folder)

    async def unload_lora_adapter(self, request: messages.UnloadLoraRequest) -> None:
        await self.client.unload_lora_adapter(request.name)

    async def forget_adapters(self, request: messages.Empty) -> None:
        """Unload the names through vLLM's own route on each server. A 404 means that the name is not loaded there."""
        for name in self.adapters.names:
            for url in self._urls:
                answer = await self._direct.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name})
                if answer.status_code != httpx.codes.NOT_FOUND:
                    answer.raise_for_status()
        for client in self.adapters.clients.values():
            await client.teardown()
        self.adapters.names.clear()
        self.adapters.clients.clear()
        await super().forget_adapters(request)

    # --- control plane

    async def pause(self, request: messages.PauseRequest) -> None:
        if self.release.pause_modes is not None:
            await self.client.pause(mode=self.release.pause_modes[request.mode])
        else:
            await self.client.pause(mode=request.mode, clear_cache=request.clear_cache)

    async def resume(self, _request: messages.Empty) -> None:
        await self.client.resume()

    async def reset_prefix_cache(self, request: messages.ResetPrefixCacheRequest) -> None:
        await self.client.reset_prefix_cache(reset_running_requests=request.reset_running_requests)

    async def is_paused(self, _request: messages.Empty) -> messages.IsPausedResult:
        """`/is_paused` of every server (SkyRL #899: a mapping from server to state)."""
        answers = await self.client._call_all_servers("/is_paused", json={}, method="GET")
        states = [bool(answers[url]["body"]["is_paused"]) for url in self.client.server_urls]
        return messages.IsPausedResult(servers=dict(zip(self._named_urls(), states, strict=True)))

    async def world_size(self, _request: messages.Empty) -> messages.WorldSizeResult:
        size = await self.client.get_world_size()
        return messages.WorldSizeResult(world_size=size[0] if self.release.sizes else size)

    async def finish_session(self, request: messages.FinishSessionRequest) -> None:
        await self.client.finish_session(request.session_id)

    async def sync_count(self, _request: messages.Empty) -> messages.SyncCountResult:
        return messages.SyncCountResult(count=self.client.weight_version)

    async def weight_labels(self, _request: messages.Empty) -> messages.WeightLabelsResult:
        """vLLM's `/weight_info` of every server, for which SkyRL's client has no call."""
        answers = await self.client._call_all_servers("/weight_info", method="GET")
        labels = [str(answers[url]["body"]["weight_version"]) for url in self.client.server_urls]
        return messages.WeightLabelsResult(servers=dict(zip(self._named_urls(), labels, strict=True)))

    def trainers_client(self) -> Any:
        """A new copy of the client, as SkyRL's trainer process gets. It has no connections that a server has closed."""
        self._left_behind.append(pickle.loads(pickle.dumps(self.client)))
        return self._left_behind[-1]

    def client_of_a_run(self) -> Any:
        """A client of its own for a run in a thread of its own, which tears it down."""
        return self._made_again() if self.runs_in_threads else self.client

    async def pickle_client(self, _request: messages.Empty) -> None:
        self.replaced_client = self.client
        self._left_behind.append(self.client)  # its calls in flight go on
        self.client, self._single = pickle.loads(pickle.dumps((self.client, self._single)))

    async def client_life(self, request: messages.ClientLifeRequest) -> messages.ClientLifeResult:
        self._leftovers.watch(asyncio.get_running_loop())
        match request.life:
            case "made again":
                self._left_behind += (
                    [] if self._closed else [self.client]
                )  # a closed one is dropped: it has to leave nothing
                self.client, self._closed = self._made_again(), False
                if request.without_tokenizer and self.release.client_tokenizes:
                    self.client.tokenizer = None
            case "closed":
                await self.client.teardown()
                self._closed = True
            case "collected":
                self.client = self._made_again()
            case "alone":
                self._groups.clear()
                gc.collect()
            case "as configured":
                make = functools.partial(self._client_as_configured, request)
                made = make() if request.in_loop else await asyncio.to_thread(make)
                self._left_behind.append(self.client)
                self.client = made
                if self.colocated:
                    await self.client.wake_up()
            case "beside":
                aside = messages.ClientLifeRequest(life="as configured", names="servers")
                make = functools.partial(self._client_as_configured, aside, self._servers_of_client[:1])
                self._left_behind.append(await asyncio.to_thread(make))
            case "in another thread" | "in two loops":
                both = request.life == "in two loops"
                self._left_behind += [] if both else [self.client]
                self._threads.append(lives.Thread())
                self._leftovers.watch(self._threads[-1].loop)
                client = self.client if both else self._made_again()
                self.client = lives.InThread(client, self._threads[-1], by_turns=both)
            case "looked at":
                pass
        return messages.ClientLifeResult(left=self._leftovers.take())

    def _client_as_configured(self, request: messages.ClientLifeRequest, servers: Sequence[str] | None = None) -> Any:
        """A client as SkyRL's entry point makes it, told what of its router and servers is there already: all servers, or these."""
        servers = self._servers_of_client if servers is None else servers
        configured = self.configuration_of(request)
        engine = configured.generator.inference_engine
        started: Any = nullcontext()
        if request.names == "another's":
            addresses = [url.removeprefix("http://") for url in self._servers_of_client]
            entry.name_servers(configured, {"run_engines_locally": False, "remote_urls": addresses})
            # Engines begin with a placement group, which 0.1.0 asks for elsewhere.
            first = self.release.own_router
            where, name = ("server_group", "placement_group") if first else ("setup", "ray_placement_group")
            shipped = import_module(f"{self.package()}.{where}")
            started = mock.patch.object(shipped, name, side_effect=entry.OwnEnginesError)
        if request.names in ("proxy and servers", "proxy"):
            engine.external_proxy_url = self._proxy
        named = request.names in ("proxy and servers", "servers")
        engine.external_server_urls = list(servers) if named else None
        nobodys = request.names == "nobody's"
        if nobodys:
            engine.external_server_urls = [f"http://{messages.NOBODY}"]
        if request.answer_limit_s is not None and not self.release.own_router:
            engine.router_init_kwargs |= {"request_timeout_secs": request.answer_limit_s}
        experiment = entry.experiment(configured, entry.no_group)
        taken = endpoint.taken() if request.port_taken else nullcontext()
        briefly = nobodys or bool(request.variables) or request.port_taken
        with (
            self._environment(request.variables, briefly=briefly),
            started,
            taken as port,
            nullcontext() if port is None else self._router_at(port, engine),
        ):
            try:
                return self._client_of(experiment)
            finally:
                self._beside.append(experiment._inference_router)

    @contextmanager
    def _environment(self, variables: Mapping[str, str], *, briefly: bool) -> Iterator[None]:
        """An environment of a scenario's. `briefly`: in it the entry point waits `HEALTHY_S` for its router."""
        with ExitStack() as changed:
            changed.enter_context(mock.patch.dict(os.environ, variables))
            if briefly:
                router = type(self._router)
                waits = functools.partialmethod(router._wait_until_healthy, timeout=HEALTHY_S)
                changed.enter_context(mock.patch.object(router, "_wait_until_healthy", waits))
            yield

    def _router_at(self, port: int, engine: Any) -> AbstractContextManager[Any]:
        """While it is entered, the entry point's router gets this port. No configuration of 0.1.0 names it."""
        if not self.release.own_router:
            engine.router_init_kwargs |= {"port": port}
            return nullcontext()
        own = import_module(f"{self.package()}.router")
        return mock.patch.object(own, "InferenceRouter", functools.partial(own.InferenceRouter, port=port))

    def engine_arguments_of(self, cfg: Any) -> Any:
        """As a server makes them of its command line."""
        from vllm import AsyncEngineArgs

        return AsyncEngineArgs.from_cli_args(self._command_line(cfg))

    def sync_backend_of(self, cfg: Any) -> str:
        """What the servers' command line says: client and trainer ask for the same."""
        return str(self._command_line(cfg).weight_transfer_config.backend)

    def serving_arguments_of(self, cfg: Any) -> dict[str, Any]:
        """The names that a server's command line has. A server reads no others."""
        known = vars(self._command_line(self.cfg))
        return {name: value for name, value in vars(self._command_line(cfg)).items() if name in known}

    def _command_line(self, cfg: Any) -> Any:
        """A server's, as its actor changes it before it starts. Nothing starts: the actor looks for no address and no port."""
        import skyrl.backends.skyrl_train.inference_servers.vllm_server_actor as shipped
        from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
        from skyrl.train.utils import ray_logging

        executor = {"distributed_executor_backend": cfg.generator.inference_engine.distributed_executor_backend}
        with ExitStack() as replaced:
            for where, name, ours in (
                (shipped, "get_node_ip", lambda: "127.0.0.1"),
                (shipped, "find_and_reserve_port", lambda port: (port, None)),
                (ray_logging, "redirect_actor_output_to_file", lambda: None),
            ):
                replaced.enter_context(mock.patch.object(where, name, ours))
            replaced.enter_context(mock.patch.dict(os.environ))  # an actor sets variables of its own process
            return shipped.VLLMServerActor(build_vllm_cli_args(cfg), **executor)._cli_args

    def _made_again(self) -> Any:
        """A new client of the same servers, by the constructor."""
        return self._make_client(self._proxy)
