"""The miniature's oracle: its model's exact probabilities in double precision, the whole sequence each time.

No engine, no cache, no batch, no float32: it has the model in common with the stack, and nothing else.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from backends.miniature import model, tokenizer
from harness.capability import Capability
from harness.contract import Description, Empty, StartRequest
from harness.reference import (
    DecodeRequest,
    EncodeRequest,
    ExpectedDigests,
    ExpectedDigestsRequest,
    Experts,
    ExpertsRequest,
    Next,
    NextRequest,
    RenderRequest,
    Score,
    ScoreRequest,
    Text,
    Tokens,
    Weights,
)


@lru_cache(maxsize=64)
def _network(version: int, adapter: int | None, quantization: str | None) -> model.Network:
    base = model.dequantize(model.quantize(model.policy(version), quantization))
    factors = None if adapter is None else model.adapter(adapter)
    return model.Network(model.with_adapter(base, factors), np.float64)


def _states(weights: Weights, tokens: list[int]) -> tuple[model.Network, model.Array]:
    """The network, and its states after each token: positions × hidden."""
    network = _network(weights.version, weights.adapter, weights.quantization)
    states, state = [], network.start
    for position, token in enumerate(tokens):
        state = network.feed(state, token, position)
        states.append(state)
    return network, np.array(states)


class MiniatureReference:
    """Answers every question of `harness.reference.QUERIES` about the miniature's model."""

    declared = frozenset({Capability.SCORE})

    async def start(self, request: StartRequest) -> Description:
        self._request = request
        return await self.describe(Empty())

    async def describe(self, _request: Empty) -> Description:
        request = self._request
        return Description(
            target=request.target,
            topology=request.topology,
            start=request.start,
            capabilities=sorted(self.declared),
            servers=[],
        )

    async def teardown(self, _request: Empty) -> Empty:
        return Empty()

    async def score(self, request: ScoreRequest) -> Score:
        if not request.tokens:
            return Score(logprobs=[], ranks=[], margins=[])
        network, states = _states(request, (request.prompt + request.tokens)[:-1])
        rows, _, _ = network.read(states[len(request.prompt) - 1 :])
        chosen = rows[np.arange(len(request.tokens)), request.tokens]
        best = -np.partition(-rows, 1, axis=1)[:, :2]
        return Score(
            logprobs=chosen.tolist(),
            ranks=(rows > chosen[:, None]).sum(axis=1).tolist(),
            margins=(best[:, 0] - best[:, 1]).tolist(),
        )

    async def next(self, request: NextRequest) -> Next:
        network, states = _states(request, request.prompt)
        return Next(logprobs=network.read(states[-1:])[0][0].tolist())

    async def experts(self, request: ExpertsRequest) -> Experts:
        network, states = _states(request, request.tokens)
        _, chosen, margins = network.read(states)
        return Experts(indices=chosen.tolist(), margins=margins.tolist(), count=model.EXPERTS)

    async def expected_digests(self, request: ExpectedDigestsRequest) -> ExpectedDigests:
        held = model.quantize(model.policy(request.version), getattr(request, "quantization", None))
        return ExpectedDigests(digests={name: model.digest(tensor) for name, tensor in held.items()})

    async def render(self, request: RenderRequest) -> Tokens:
        return Tokens(tokens=tokenizer.render(request.messages))

    async def decode(self, request: DecodeRequest) -> Text:
        return Text(text=tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens))

    async def encode(self, request: EncodeRequest) -> Tokens:
        return Tokens(tokens=tokenizer.encode(request.text))
