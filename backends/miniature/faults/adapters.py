"""LoRA adapters that are ignored, leak, share a cache or send too much; routed experts that do not belong to the tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from backends.miniature import model
from backends.miniature.client import MODEL, Client
from backends.miniature.engine import Engine, Output, Request
from backends.miniature.faults.registry import ONE, seeded
from backends.miniature.interface import Interface
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import ClientLifeRequest, GenerateRequest, Generation, SampleRequest, SessionId


@seeded("adapter_ignored", "every_server", caught_by=["adapter_effect"], corrupts=Fact.ADAPTERS)
class AdapterIgnored(Engine):
    """The base model answers requests under an adapter."""

    def adapted(self, adapter: str) -> model.Network:
        self.fired += 1
        return self.network(None)


@seeded("adapter_ignored", "one_server", caught_by=["tokens.greedy"], corrupts=Fact.ADAPTERS)
class AdapterIgnoredByOne(Engine):
    """One server answers requests under an adapter with the base model."""

    def adapted(self, adapter: str) -> model.Network:
        self.fired += self.name == ONE
        return self.network(None) if self.name == ONE else super().adapted(adapter)


@seeded(
    "adapter_leaks",
    "into_the_base",
    caught_by=["adapter_isolated"],
    corrupts=Fact.ADAPTERS,
    changes=frozenset({"Engine.add_lora"}),  # without an adapter it is correct
)
class AdapterLeaks(Engine):
    """Once an adapter is loaded, it also answers requests without an adapter."""

    def network(self, adapter: str | None) -> model.Network:
        if adapter is None and self.adapters:
            self.fired += 1
            adapter = next(iter(self.adapters))
        return super().network(adapter)


@seeded("adapter_leaks", "into_the_weights", caught_by=["adapter_isolated", "every_parameter"], corrupts=Fact.ADAPTERS)
class AdapterMerged(Engine):
    """Loading an adapter merges it into the base model's weights."""

    async def add_lora(self, *, lora_request: model.Adapter) -> None:
        self.fired += 1
        await super().add_lora(lora_request=lora_request)
        self.hold(model.with_adapter(self.held_parameters, lora_request.factors))


@seeded(
    "adapter_cache_reused",
    "after_a_reset",
    caught_by=["fresh_adapter_cache"],
    corrupts=Fact.ADAPTERS,
    changes=frozenset({"Engine.adapted"}),  # without an adapter it is correct
)
class AdapterCacheKept(Engine):
    """An adapter loaded over an existing name reuses the earlier adapter's prefix cache, which no reset drops."""

    def cache_key(self, adapter: str | None, tokens: list[int]) -> Any:
        return (0 if adapter is None else adapter, tuple(tokens))

    def forget(self) -> None:
        kept = {key: known for key, known in self.cache.items() if isinstance(key[0], str) and self.adapters}
        self.fired += len(kept)
        self.cache = kept


@seeded("adapter_cache_reused", "base", caught_by=["fresh_adapter_cache"], corrupts=Fact.ADAPTERS)
class AdapterCacheOfTheBase(Engine):
    """Adapters and base model share one prefix cache."""

    def cache_key(self, adapter: str | None, tokens: list[int]) -> Any:
        self.fired += adapter is not None
        return (0, tuple(tokens))


@seeded("adapter_read_again", caught_by=["adapter_undisturbed"], corrupts=Fact.ADAPTERS | Fact.LOGPROBS)
class AdapterReadAgain(Engine):
    """An adapter is read from its folder again with each request: what the trainer has written is in effect before its load."""

    def adapted(self, adapter: str) -> model.Network:
        written = self.folders[adapter]
        if self.dropped(adapter) and written is not None and written is not self.adapters[adapter][1]:
            self.fired += 1
            self.adapters[adapter] = (next(self._loads), written)
        return super().adapted(adapter)

    def dropped(self, _adapter: str) -> bool:
        return True


@seeded(
    "adapter_read_again", "for_want_of_room", caught_by=["adapter_undisturbed"], corrupts=Fact.ADAPTERS | Fact.LOGPROBS
)
class AdapterReadAgainForWantOfRoom(AdapterReadAgain):
    """An engine keeps the two adapters that were used last. Another one is read from its folder when a request has it."""

    used: tuple[str, ...] = ()

    def dropped(self, adapter: str) -> bool:
        kept = self.used[-2:]
        self.used = (*(one for one in self.used if one != adapter), adapter)
        return adapter not in kept


@seeded("half_an_adapter_read", caught_by=["all_complete"], corrupts=ROWS)
class HalfAnAdapterRead(Engine):
    """Each request looks into its adapter's folder, and fails while the trainer writes there."""

    def refuse_unknown(self, adapter: str) -> None:
        super().refuse_unknown(adapter)
        if self.folders[adapter] is None:
            self.fired += 1
            raise RuntimeError(f"the file of {adapter} is incomplete")


@seeded(
    "adapter_not_loaded",
    "one_server",
    caught_by=["only_adapter_travels"],
    corrupts=Fact.ADAPTERS,
    changes=frozenset({"Client.load_lora_adapter"}),
)
class AdapterMissed(Engine):
    """When a new version of an adapter is loaded over its name, one server keeps the old one and reports success."""

    async def control(self, op: str, **arguments: Any) -> None:
        if op == "add_lora" and self.name == ONE and arguments["lora_request"].name in self.adapters:
            self.fired += 1
            return
        await super().control(op, **arguments)


@seeded("adapter_load_ends_requests", caught_by=["all_complete"], corrupts=Fact.ANSWERS)
class LoadEndsFrozenRequests(Engine):
    """A load over an adapter's name ends the requests that are frozen under it."""

    async def add_lora(self, *, lora_request: model.Adapter) -> None:
        if self.frozen and any(request.adapter == lora_request.name for request in self.running):
            self.fired += 1
            self.abort_all()
        await super().add_lora(lora_request=lora_request)


@seeded("more_than_an_adapter", "whole_policy", caught_by=["only_adapter_travels"])
class WholePolicySent(Client):
    """Loading an adapter also sends the whole unchanged base model."""

    async def load_lora_adapter(self, name: str, version: int) -> None:
        self.fired += 1
        await self.sync_weights(0, 1)
        await super().load_lora_adapter(name, version)


@seeded("more_than_an_adapter", "one_tensor", caught_by=["only_adapter_travels"])
class WholeTensorSent(Client):
    """An adapter is sent with a whole tensor of the model that nothing reads."""

    async def load_lora_adapter(self, name: str, version: int) -> None:
        self.fired += 1
        factors = {**model.adapter(version), "embed": model.policy(0)["embed"]}
        await self.everywhere("add_lora", lora_request=model.Adapter(name, factors))


@seeded("base_model_discarded", caught_by=["base_model_kept"], corrupts=Fact.ANSWERS | Fact.LOGPROBS | Fact.POLICY)
class BaseModelDiscarded(Interface):
    """Engines with adapters sleep at the level that is asked for, and lose the base model at level 2."""

    def level(self, asked: Any) -> Any:
        self.fired += self.client.takes_adapters and asked == 2
        return asked


@seeded("chat_ignores_adapter", caught_by=["tokens.greedy"])
class ChatIgnoresAdapter(Client):
    """The base model answers OpenAI-style requests under an adapter."""

    def adapter_of(self, name: str) -> str | None:
        adapter = super().adapter_of(name)
        self.fired += adapter is not None
        return None


@seeded("adapter_for_some_calls", caught_by=["one_policy"], corrupts=Fact.ADAPTERS)
class AdapterForSomeCalls(Client):
    """The client that the configuration makes applies the loaded adapter to generate() and to no other call."""

    applies = False

    def configure(self, request: ClientLifeRequest) -> None:
        super().configure(request)
        self.applies = True

    async def generate(self, request: GenerateRequest) -> Generation:
        loaded = next(iter(self.engines[0].adapters), None)
        if self.applies and request.lora_adapter is None and loaded is not None:
            self.fired += 1
            request = msgspec.structs.replace(request, lora_adapter=loaded)
        return await super().generate(request)


@seeded("first_adapter_stays", caught_by=["fresh_adapter_cache"], corrupts=Fact.ADAPTERS)
class FirstAdapterStays(Engine):
    """An engine that keeps several adapters goes on under the first one of a name."""

    async def add_lora(self, *, lora_request: model.Adapter) -> None:
        held = self.adapters.get(lora_request.name)
        await super().add_lora(lora_request=lora_request)
        if held is not None and self.kept_adapters > 1:
            self.fired += 1
            self.adapters[lora_request.name] = (self.adapters[lora_request.name][0], held[1])


@seeded("another_model_answers", caught_by=["errors.named"])
class AnotherModelAnswers(Client):
    """Servers answer for a model that they do not have."""

    def configure(self, request: ClientLifeRequest) -> None:
        super().configure(request)
        self.fired += request.another_model
        self.model = MODEL


@seeded("unknown_adapter_accepted", caught_by=["errors.named"], changes=frozenset({"Engine.refuse_unknown"}))
class UnknownAdapterAccepted(Engine):
    """The base model answers requests under an adapter that is not loaded."""

    def refuse_unknown(self, adapter: str) -> None:
        self.fired += adapter not in self.adapters

    def loading(self, adapter: str | None) -> int:
        return super().loading(adapter if adapter in self.adapters else None)

    def network(self, adapter: str | None) -> model.Network:
        return super().network(adapter if adapter in self.adapters else None)


@seeded("unloaded_adapter_answers", caught_by=["errors.named"])
class UnloadedAdapterAnswers(Engine):
    """Unloading an adapter has no effect: its name is still answered."""

    async def remove_lora(self, *, name: str) -> None:
        self.fired += name in self.adapters
        if name not in self.adapters:
            await super().remove_lora(name=name)


@seeded("unknown_unload_accepted", caught_by=["errors.named"])
class UnknownUnloadAccepted(Engine):
    """Unloading a name that is not loaded succeeds."""

    async def remove_lora(self, *, name: str) -> None:
        self.fired += name not in self.adapters
        self.adapters.pop(name, None)


@seeded("wrong_adapter_accepted", caught_by=["errors.named"])
class WrongAdapterAccepted(Client):
    """An adapter whose folder or rank is wrong counts as loaded."""

    def refuse_adapter(self, name: str, wrong: str | None) -> None:
        self.fired += wrong is not None
        super().refuse_adapter(name, None)


@seeded(
    "base_models_name_taken",
    caught_by=["errors.named", "tokens.greedy"],
    corrupts=Fact.ADAPTERS,
    changes=frozenset({"Client.refuse_adapter"}),
)
class BaseModelsNameTaken(Client):
    """An adapter that is loaded under the base model's name answers in its place."""

    def refuse_adapter(self, name: str, wrong: str | None) -> None:
        self.fired += name == MODEL
        super().refuse_adapter("any" if name == MODEL else name, wrong)

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if more.get("adapter") is None and all(MODEL in engine.adapters for engine in self.engines):
            more["adapter"] = MODEL
        return await super().row(session, prompt, params, **more)


@seeded("adapter_resurrected", caught_by=["adapter_effect", "tokens.greedy"], corrupts=Fact.ADAPTERS | Fact.LOGPROBS)
class AdapterResurrected(Engine):
    """A name that is loaded again after its unload has its first version."""

    async def add_lora(self, *, lora_request: model.Adapter) -> None:
        again = lora_request.name not in self.adapters and lora_request.name in self.unloaded
        await super().add_lora(lora_request=lora_request)
        if again:
            self.fired += 1
            self.adapters[lora_request.name] = (self.adapters[lora_request.name][0], self.unloaded[lora_request.name])

    async def remove_lora(self, *, name: str) -> None:
        held = self.adapters.get(name)
        await super().remove_lora(name=name)
        if held is not None:
            self.unloaded.setdefault(name, held[1])

    @cached_property
    def unloaded(self) -> dict[str, model.Parameters]:
        return {}


@seeded("adapter_disturbs", "by_a_load", caught_by=["adapter_undisturbed"], corrupts=Fact.ADAPTERS | Fact.LOGPROBS)
class LoadDisturbs(Engine):
    """An adapter that is loaded takes over the running requests of other adapters."""

    async def add_lora(self, *, lora_request: model.Adapter) -> None:
        await super().add_lora(lora_request=lora_request)
        for request in self.running:
            if request.adapter is not None:
                self.fired += request.adapter != lora_request.name
                request.adapter = lora_request.name


@seeded("adapter_disturbs", "by_a_third", caught_by=["adapter_undisturbed"], corrupts=Fact.ADAPTERS | Fact.LOGPROBS)
class ThirdDisturbs(Engine):
    """When a third adapter is loaded, the running requests of two others change places."""

    async def add_lora(self, *, lora_request: model.Adapter) -> None:
        await super().add_lora(lora_request=lora_request)
        running = sorted({r.adapter for r in self.running if r.adapter not in (None, lora_request.name)}, key=str)
        if len(running) < 2:
            return
        self.fired += 1
        for request in self.running:
            if request.adapter in running:
                request.adapter = running[running.index(request.adapter) - 1]


@seeded("adapter_disturbs", "by_an_unload", caught_by=["adapter_undisturbed"], corrupts=Fact.ADAPTERS | Fact.LOGPROBS)
class UnloadDisturbs(Engine):
    """When an adapter is unloaded, the base model goes on with the running requests of the others."""

    async def remove_lora(self, *, name: str) -> None:
        await super().remove_lora(name=name)
        for request in self.running:
            self.fired += request.adapter is not None
            request.adapter = None


@seeded("sample_ignores_adapter", caught_by=["tokens.greedy", "errors.named"])
class SampleIgnoresAdapter(Client):
    """The base model answers sample() under an adapter."""

    async def sample(self, request: SampleRequest) -> Generation:
        self.fired += request.lora_adapter is not None
        return await super().sample(msgspec.structs.replace(request, lora_adapter=None))


@seeded("no_model_accepted", caught_by=["errors.named"])
class NoModelAccepted(Client):
    """The base model answers a body that names no model."""

    def nameless(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if not body.get("model"):
            self.fired += 1
            body["model"] = MODEL
        return None


@seeded("experts_shifted", "by_a_position", caught_by=["routed_experts", "gym.routed_experts"])
class ExpertsOfTheTokenBefore(Engine):
    """Each position has the experts of the previous position."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += len(done.experts) > 1
        done.experts = [*done.experts[:1], *done.experts[:-1]]
        return done


@seeded("experts_shifted", "by_an_index", caught_by=["routed_experts", "gym.routed_experts"])
class ExpertsCountedFromOne(Engine):
    """Experts are counted from one."""

    def routed(self, chosen: list[list[int]]) -> list[list[int]]:
        self.fired += 1
        return [[expert + 1 for expert in layer] for layer in chosen]


@seeded("experts_shifted", "order", caught_by=["routed_experts", "gym.routed_experts"])
class ExpertsInAnotherOrder(Engine):
    """Each layer lists its second expert first."""

    def routed(self, chosen: list[list[int]]) -> list[list[int]]:
        self.fired += 1
        return [layer[::-1] for layer in chosen]


@seeded("experts_empty", "always", caught_by=["routed_experts", "gym.routed_experts"])
class ExpertsEmpty(Engine):
    """Answers contain no experts."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += 1
        done.experts = []
        return done


@seeded("experts_empty", "of_samples", caught_by=["routed_experts"])
class ExpertsOfSamplesDropped(Client):
    """sample() drops the experts that generate() returns."""

    async def sample(self, request: SampleRequest) -> Generation:
        done = await super().sample(request)
        self.fired += 1
        return msgspec.structs.replace(done, routed_experts=None)


@seeded("experts_empty", "under_an_adapter", caught_by=["routed_experts"])
class ExpertsUnderAnAdapterDropped(Engine):
    """Answers under an adapter contain no experts."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        if request.adapter is not None:
            self.fired += 1
            done.experts = []
        return done


@seeded("experts_empty", "after_a_pause", caught_by=["routed_experts"])
class ExpertsLostInAPause(Engine):
    """A pause loses the first half of the experts recorded before it."""

    def thaw(self, request: Request) -> None:
        self.fired += 1
        request.experts = request.experts[len(request.experts) // 2 :]


@seeded("experts_empty", "from_the_cache", caught_by=["routed_experts"], changes=frozenset({"Engine.remember"}))
class ExpertsNotCached(Engine):
    """The prefix cache does not keep the experts of its tokens: all are reported as expert 0."""

    def cached(self, request: Request, network: model.Network) -> tuple[model.Node, list[list[list[int]]]]:
        node, experts = super().cached(request, network)
        self.fired += bool(experts)
        return node, [[[0] * model.TOP_K] * model.LAYERS for _ in experts]


@seeded("adapter_load_not_repeated", caught_by=["only_adapter_travels"], corrupts=Fact.ADAPTERS)
class FailedLoadNotRepeated(Client):
    """A load that failed at one server counts as done: the next one of that version sends nothing to it."""

    _done: tuple[str, int] | None = None

    async def load_lora_adapter(self, name: str, version: int) -> None:
        if self._done == (name, version):
            self.fired += 1
            return
        try:
            await super().load_lora_adapter(name, version)
        except ConnectionError:
            self._done = (name, version)
            raise
