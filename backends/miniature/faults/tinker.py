"""A backend of the Tinker API that asks the stack for something else than its caller did, or returns something else."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.miniature.client import Client
from backends.miniature.engine import BadRequest
from backends.miniature.faults.registry import seeded
from harness.contract.faults import Fact
from harness.contract.messages import Generation, SampleRequest


class _Asks(Client):
    """Asks for something else in some requests."""

    def instead(self, _request: SampleRequest) -> dict[str, Any]:
        """The fields that are changed; none, if the request is asked as it is."""
        return {}

    async def tinker_sample(self, request: SampleRequest) -> Generation:
        changed = self.instead(request)
        self.fired += bool(changed)
        return await super().tinker_sample(msgspec.structs.replace(request, **changed))


@seeded("tinker_asks_otherwise", "without_session", caught_by=["sticky_sessions"], corrupts=Fact.ROUTES)
class TinkerDropsSessions(_Asks):
    """Tinker's requests lose their sampling session, so that samples of one request run on several servers."""

    def instead(self, request: SampleRequest) -> dict[str, Any]:
        return {"session_id": None} if request.session_id is not None else {}


@seeded("tinker_asks_otherwise", "one_session", caught_by=["sessionless_spread"], corrupts=Fact.ROUTES)
class TinkerHasOneSession(_Asks):
    """Tinker's requests without a sampling session share one."""

    def instead(self, request: SampleRequest) -> dict[str, Any]:
        return {"session_id": "tinker"} if request.session_id is None else {}


@seeded("tinker_asks_otherwise", "without_image", caught_by=["errors.named"], corrupts=Fact.ERRORS | Fact.ANSWERS)
class TinkerDropsImages(_Asks):
    """Tinker's chunks of images are left out of the prompt."""

    def instead(self, request: SampleRequest) -> dict[str, Any]:
        return {"image": None} if request.image is not None else {}


@seeded("tinker_asks_otherwise", "without_prompt_logprobs", caught_by=["logprobs.prompt"], corrupts=Fact.LOGPROBS)
class TinkerDropsPromptLogprobs(_Asks):
    """Tinker's samples come without the prompt's log-probabilities, which were asked for."""

    def instead(self, request: SampleRequest) -> dict[str, Any]:
        return {"prompt_logprobs": False} if request.prompt_logprobs else {}


@seeded("tinker_returns_otherwise", "one_seed", caught_by=["sampling.independent"], corrupts=Fact.CHANCE | Fact.ANSWERS)
class TinkerHasOneSeed(Client):
    """All samples of a request of Tinker's have the same seed."""

    def seeds(self, seed: int, samples: int) -> list[int]:
        self.fired += samples > 1
        return [seed] * samples


@seeded("tinker_returns_otherwise", "reasons", caught_by=["stopping"], corrupts=Fact.ANSWERS)
class TinkerReasonsAreLengths(Client):
    """Every sample of Tinker's has reached its length."""

    async def tinker_sample(self, request: SampleRequest) -> Generation:
        done = await super().tinker_sample(request)
        self.fired += "stop" in done.stop_reasons
        return msgspec.structs.replace(done, stop_reasons=["length"] * len(done.stop_reasons))


@seeded("tinker_returns_otherwise", "zeros", caught_by=["logprobs.reference"], corrupts=Fact.LOGPROBS)
class TinkerFillsWithZeros(Client):
    """Tinker's samples have 0 for every log-probability."""

    async def tinker_sample(self, request: SampleRequest) -> Generation:
        done = await super().tinker_sample(request)
        self.fired += 1
        return msgspec.structs.replace(done, response_logprobs=[[0.0] * len(tokens) for tokens in done.response_ids])


@seeded("tinker_knows_no_base_model", caught_by=["tokens.greedy"], corrupts=Fact.ERRORS)
class TinkerKnowsNoBaseModel(Client):
    """Tinker's samples of the base model are refused."""

    async def tinker_sample(self, request: SampleRequest) -> Generation:
        if request.tinker == "base model":
            self.fired += 1
            raise BadRequest("unknown model")
        return await super().tinker_sample(request)


@seeded("tinker_returns_otherwise", "parts", caught_by=["stopping.cut_short"], corrupts=Fact.ANSWERS)
class TinkerReturnsParts(Client):
    """What a pause cut short of Tinker's samples is returned with the reason "length"."""

    def refuse_parts(self) -> None:
        self.fired += 1

    async def tinker_sample(self, request: SampleRequest) -> Generation:
        done = await super().tinker_sample(request)
        reasons = ["length" if reason == "abort" else reason for reason in done.stop_reasons]
        return msgspec.structs.replace(done, stop_reasons=reasons)
