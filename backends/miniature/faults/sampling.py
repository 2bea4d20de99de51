"""Engines that do not follow their sampling parameters."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from backends.miniature.client import Client
from backends.miniature.engine import BadRequest, Engine, Output, Request
from backends.miniature.faults.registry import seeded
from harness.contract.faults import NOTHING, Fact
from harness.contract.messages import ENGINE_PLACES, Generation, SampleRequest, SessionId


class _Ignores(Engine):
    """Reports the given sampling parameters, and samples under others."""

    instead: ClassVar[dict[str, Any]] = {}

    async def generate(self, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        self.fired += any(params.get(name) not in (None, value) for name, value in self.instead.items())
        return await super().generate(prompt, params, **more)

    def effective(self, request: Request) -> dict[str, Any]:
        told = dict(request.params)
        request.params.update({name: value for name, value in self.instead.items() if name in request.params})
        request.random = random.Random(f"{request.params.get('seed')} {request.prompt}")
        return told


def _ignoring(name: str, variant: str, caught_by: list[str], corrupts: Fact = NOTHING, **instead: Any) -> None:
    """Register an engine fault that samples under `instead` if the request gives these parameters."""
    told = ", ".join(f"{field} {value}" for field, value in instead.items())
    body = {"instead": instead, "__doc__": f"Engines are given sampling parameters and sample with {told}."}
    given = frozenset(f"sampling_params.{field}" for field in instead)
    part = type(f"Ignores_{name}_{variant}", (_Ignores,), body)
    seeded(name, variant, caught_by=caught_by, corrupts=corrupts, changes=given)(part)


_ignoring("parameter_ignored", "temperature", ["tokens.greedy"], corrupts=Fact.ANSWERS, temperature=1.0)
_ignoring("parameter_ignored", "top_k", ["sampling.filters"], top_k=0)
_ignoring("parameter_ignored", "top_p", ["sampling.filters"], corrupts=Fact.LOGPROBS, top_p=1.0)
_ignoring("parameter_ignored", "min_p", ["sampling.filters"], min_p=0.0)
_ignoring("parameter_ignored", "seed", ["tokens.same"], corrupts=Fact.CHANCE, seed=None)
_ignoring("parameter_ignored", "other_seeds", ["tokens.differ"], corrupts=Fact.CHANCE, seed=1)
_ignoring("parameter_ignored", "max_tokens", ["stopping"], corrupts=Fact.ANSWERS, max_tokens=24)
_ignoring("parameter_ignored", "min_tokens", ["stopping"], min_tokens=0)
_ignoring("parameter_ignored", "stop", ["stopping"], corrupts=Fact.ANSWERS, stop=[])
_ignoring("parameter_ignored", "stop_token_ids", ["stopping"], stop_token_ids=[])
_ignoring("parameter_ignored", "ignore_eos", ["stopping"], ignore_eos=False)
_ignoring(
    "parameter_ignored", "stop_string_kept", ["stopping.text"], corrupts=Fact.TEXT, include_stop_str_in_output=False
)
_ignoring("parameter_ignored", "special_tokens", ["text"], skip_special_tokens=True)


@seeded("parameter_dropped", "seed", caught_by=["echo"], corrupts=Fact.CHANCE)
class SeedDropped(Client):
    """The seed is lost on the way to the engine."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        self.fired += "seed" in params
        return await super().row(session, prompt, {k: v for k, v in params.items() if k != "seed"}, **more)


@seeded("sampling_tempered", "a_third", caught_by=["sampling.distribution"], corrupts=Fact.LOGPROBS)
class SampledTooCold(Engine):
    """Engines sample at 0.7 times the temperature."""

    def draw(self, request: Request, row: Any) -> int:
        self.fired += 1
        return super().draw(request, row / 0.7)


@seeded("samples_alike", "one_seed", caught_by=["sampling.independent"])
class SamplesShareASeed(Client):
    """All samples of a seeded call share one seed."""

    async def sample(self, request: SampleRequest) -> Generation:
        if request.sampling_params.get("seed") is None or request.num_samples < 2:
            return await super().sample(request)
        self.fired += 1
        params = request.sampling_params
        engine = self.router.server_of(request.session_id)
        calls = [self.row(None, request.prompt_token_ids, params, engine=engine) for _ in range(request.num_samples)]
        return self.generation(await self.gather(calls))


@seeded("samples_refused", "beyond_places", caught_by=["all_complete", "sampling.independent", "stopping"])
class NoMoreSamplesThanPlaces(Client):
    """A call for more samples than an engine runs at once is refused."""

    async def sample(self, request: SampleRequest) -> Generation:
        if request.num_samples > ENGINE_PLACES:
            self.fired += 1
            raise BadRequest(f"num_samples must be at most {ENGINE_PLACES}")
        return await super().sample(request)


@seeded("samples_alike", "one_chance", caught_by=["sampling.independent"], corrupts=Fact.CHANCE | Fact.ROUTES)
class UnseededRowsAlike(Engine):
    """Requests without a seed draw the same random numbers if their prompts are equally long."""

    def chance(self, request: Request) -> float:
        if request.params.get("seed") is not None:
            return super().chance(request)
        self.fired += 1
        return hash((len(request.prompt), len(request.tokens))) % 1009 / 1009
