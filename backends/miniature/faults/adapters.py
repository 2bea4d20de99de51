"""LoRA adapters that are ignored, leak or share a cache; routed experts that are not those of the tokens."""

from __future__ import annotations

from typing import Any

from backends.miniature import model
from backends.miniature.engine import Engine, Output, Request
from backends.miniature.faults.registry import ONE, seeded


@seeded(
    "adapter_ignored",
    "every_server",
    caught_by=["adapter_effect"],
    also=["fresh_adapter_cache", "logprobs.reference", "tokens.greedy"],
)
class AdapterIgnored(Engine):
    """Requests under an adapter are answered by the base model."""

    def network(self, adapter: str | None) -> model.Network:
        self.fired += adapter is not None
        return super().network(None)


@seeded(
    "adapter_ignored",
    "one_server",
    caught_by=["tokens.greedy"],
    also=["fresh_adapter_cache", "logprobs.reference", "same_version_same_output"],
)
class AdapterIgnoredByOne(Engine):
    """One server answers requests under an adapter by the base model."""

    def network(self, adapter: str | None) -> model.Network:
        self.fired += adapter is not None and self.name == ONE
        return super().network(None if self.name == ONE else adapter)


@seeded(
    "adapter_leaks",
    "into_the_base",
    caught_by=["adapter_isolated"],
    also=["adapter_effect", "fresh_adapter_cache", "logprobs.reference", "same_version_same_output", "tokens.greedy"],
)
class AdapterLeaks(Engine):
    """Once an adapter is loaded, requests without one are answered under it."""

    def network(self, adapter: str | None) -> model.Network:
        if adapter is None and self.adapters:
            self.fired += 1
            adapter = next(iter(self.adapters))
        return super().network(adapter)


@seeded(
    "adapter_leaks",
    "into_the_weights",
    caught_by=["adapter_isolated", "every_parameter"],
    also=[
        "fresh_adapter_cache",
        "logprobs.reference",
        "same_version_same_output",
        "same_version_same_parameters",
        "tokens.greedy",
    ],
)
class AdapterMerged(Engine):
    """Loading an adapter merges it into the base model's weights."""

    async def load_lora_adapter(self, *, name: str, factors: dict[str, model.Array]) -> None:
        self.fired += 1
        await super().load_lora_adapter(name=name, factors=factors)
        self.hold(model.with_adapter(self.held_parameters, factors))


@seeded("adapter_cache_reused", "reloaded_name", caught_by=["fresh_adapter_cache"], also=["tokens.greedy"])
class AdapterCacheByName(Engine):
    """An adapter that is loaded over the same name meets the prefix cache of the one before."""

    def cache_key(self, adapter: str | None, tokens: list[int]) -> Any:
        loading = self.loading(adapter)
        self.fired += loading > 1
        return (0 if adapter is None else adapter, tuple(tokens))


@seeded("adapter_cache_reused", "base", caught_by=["fresh_adapter_cache"], also=["adapter_isolated", "tokens.greedy"])
class AdapterCacheOfTheBase(Engine):
    """Adapters and base model share one prefix cache."""

    def cache_key(self, adapter: str | None, tokens: list[int]) -> Any:
        self.fired += adapter is not None
        return (0, tuple(tokens))


@seeded("experts_shifted", "by_a_position", caught_by=["routed_experts"])
class ExpertsOfTheTokenBefore(Engine):
    """Each position has the experts of the one before."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += len(done.experts) > 1
        done.experts = [*done.experts[:1], *done.experts[:-1]]
        return done


@seeded("experts_shifted", "by_an_index", caught_by=["routed_experts"])
class ExpertsCountedFromOne(Engine):
    """Experts are counted from one."""

    def routed(self, chosen: list[list[int]]) -> list[list[int]]:
        self.fired += 1
        return [[expert + 1 for expert in layer] for layer in chosen]


@seeded("experts_shifted", "order", caught_by=["routed_experts"])
class ExpertsInAnotherOrder(Engine):
    """The second expert of each layer is named first."""

    def routed(self, chosen: list[list[int]]) -> list[list[int]]:
        self.fired += 1
        return [layer[::-1] for layer in chosen]


@seeded("experts_empty", "always", caught_by=["routed_experts"])
class ExpertsEmpty(Engine):
    """No experts are named."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += 1
        done.experts = []
        return done


@seeded("experts_empty", "after_a_pause", caught_by=["routed_experts"])
class ExpertsLostInAPause(Engine):
    """Experts that were noted before a pause are lost with it."""

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            self.fired += 1
            request.experts = request.experts[len(request.experts) // 2 :]
        await super().resume_generation()
