"""The miniature's oracle: its model's exact probabilities in double precision, over the whole sequence each time.

It uses no engine and no batches, and float32 only to say what rounding does to an answer. It shares the model,
tokenizer and trained parameters with the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from backends.miniature import model, tokenizer, trainer
from harness.contract.messages import FIRST_TRAINED, Description, Dtype, Empty, Message, StartRequest
from harness.contract.vocabulary import Vocabulary
from harness.records import reference

NOISE_ROWS, NOISE_TOKENS = 8, 512
"""Contexts, and tokens per context. Rounding grows with the context, so it is as long as a conversation of several turns."""


@lru_cache(maxsize=128)
def _network(
    version: int, adapter: int | None, quantization: str | None, policies: str, single: bool = False
) -> model.Network:
    base = model.dequantize(model.quantize(trainer.parameters(version, policies), quantization))
    factors = None if adapter is None else model.adapter(adapter)
    return model.Network(model.with_adapter(base, factors), np.float32 if single else np.float64)


def _read(
    weights: reference.Weights,
    tokens: list[int],
    policies: str,
    cached: Sequence[tuple[int, int]] = (),
    single: bool = False,
) -> tuple[model.Network, model.Array]:
    """The network, and its state after each token (positions × hidden). `cached` as in `ScoreRequest`. `single`: in
    float32, as the engines compute."""
    states, node, at = [], None, 0
    for number, version in cached:
        earlier = _network(version, weights.adapter, weights.quantization, policies, single)
        node = earlier.root if node is None else earlier.adopt(node)
        for token in tokens[at : at + number]:
            node = earlier.feed(node, token)
            states.append(node.state)
        at += number
    network = _network(weights.version, weights.adapter, weights.quantization, policies, single)
    node = network.root if node is None else network.adopt(node)
    for token in tokens[at:]:
        node = network.feed(node, token)
        states.append(node.state)
    return network, np.array(states)


@lru_cache(maxsize=16_384)
def _answer(raw: bytes, kind: type[reference.Weights], policies: str) -> Message:
    """The answer to a question about the model, cached because the same question comes again under every fault. `policies` is the
    folder of trained versions; empty for all other versions."""
    request = msgspec.json.decode(raw, type=kind)
    match request:
        case reference.ScoreRequest():
            return _score(request, policies)
        case reference.NextRequest():
            network, states = _read(request, request.prompt, policies)
            return reference.Next(logprobs=network.read(states[-1:])[0][0].tolist())
        case reference.ExpertsRequest():
            network, states = _read(request, request.tokens, policies)
            _, chosen, margins = network.through_the_layers(states)
            return reference.Experts(indices=chosen.tolist(), margins=margins.tolist(), count=model.EXPERTS)
        case reference.ExpectedDigestsRequest():
            held = model.quantize(trainer.parameters(request.version, policies), request.quantization)
            shard = model.shard(held, request.tensor_parallel, request.rank, request.experts)
            return reference.ExpectedDigests(digests={name: model.digest(tensor) for name, tensor in shard.items()})
        case _:
            raise TypeError(f"no question about the model: {request}")


def _score(request: reference.ScoreRequest, policies: str) -> reference.Score:
    if not request.tokens:
        return reference.Score(logprobs=[], ranks=[], margins=[])

    def read(*, single: bool = False) -> model.Array:
        network, states = _read(request, (request.prompt + request.tokens)[:-1], policies, request.cached, single)
        return network.read(states[len(request.prompt) - 1 :])[0]

    rows, every = read(), np.arange(len(request.tokens))
    moved = np.abs(read(single=True) - rows)
    own = np.maximum(moved[every, request.tokens], moved[every, rows.argmax(axis=1)])
    chosen = rows[every, request.tokens]
    best = -np.partition(-rows, 1, axis=1)[:, :2]
    return reference.Score(
        logprobs=chosen.tolist(),
        ranks=(rows > chosen[:, None]).sum(axis=1).tolist(),
        margins=(best[:, 0] - best[:, 1]).tolist(),
        behind=tuple((best[:, 0] - chosen).tolist()),
        rounding=tuple(own.tolist()) if own.max() > _noise("float32").largest else (),
    )


@lru_cache(maxsize=2)
def _noise(dtype: Dtype) -> reference.Noise:
    """Differences between the engines' network in this dtype and the exact one, on random contexts."""
    exact, rounded = _network(0, None, None, ""), model.Network(trainer.parameters(0, ""), np.float32)
    dice, moved, router = np.random.default_rng(0), [], 0.0
    for context in dice.integers(tokenizer.VOCABULARY.size, size=(NOISE_ROWS, NOISE_TOKENS)).tolist():
        both = []
        for network in (exact, rounded):
            node, states = network.root, []
            for token in context:
                node = network.feed(node, token)
                states.append(node.state)
            both.append(network.read(np.array(states)))
        (rows, _, margins), (others, _, other_margins) = both
        found = others if dtype == "float32" else [model.rounded(row, dice) for row in others]
        moved.append(found - rows)
        router = max(router, float(np.abs(other_margins - margins).max()))
    every = np.array(moved, dtype=np.float64)
    sizes = np.abs(every)
    measured = reference.Moved(
        numbers=every.size,
        largest=float(sizes.max()),
        rms=float(np.sqrt((every**2).mean())),
        quarter=float(np.quantile(sizes, 0.25)),
    )
    return reference.Noise(
        **msgspec.structs.asdict(measured),
        weights=measured.largest,
        router=router,
        measured={"reference": measured},
    )


class MiniatureReference:
    """Answers every question of `harness.records.reference.QUERIES` about the miniature's model."""

    async def start(self, request: StartRequest) -> Description:
        self._request = request
        return await self.describe(Empty())

    async def describe(self, _request: Empty) -> Description:
        request = self._request
        return Description(
            target=request.target,
            topology=request.topology,
            start=request.start,
            capabilities=request.capabilities,
            servers=[],
        )

    async def teardown(self, _request: Empty) -> None:
        """Nothing runs that would have to be stopped."""

    async def score(self, request: reference.Weights | reference.ExpectedDigestsRequest) -> Message:
        versions = [request.version, *(version for _, version in getattr(request, "cached", ()))]
        policies = self._request.policies if max(versions) >= FIRST_TRAINED else ""
        return _answer(msgspec.json.encode(request), type(request), policies)

    next = experts = expected_digests = score
    """Every question about the model is answered in the same way."""

    async def noise(self, _request: reference.NoiseRequest) -> reference.Noise:
        """The same for every policy version: what 16 bits do to the miniature does not depend on its weights."""
        return _noise(self._request.dtype)

    async def vocabulary(self, _request: Empty) -> Vocabulary:
        return tokenizer.of(self._request.topology.model)

    async def render(self, request: reference.RenderRequest) -> reference.Tokens:
        tokens = tokenizer.render(
            request.messages, tools=request.tools, add_generation_prompt=request.add_generation_prompt
        )
        return reference.Tokens(tokens=tokens)

    async def decode(self, request: reference.DecodeRequest) -> reference.Text:
        skip, llama = request.skip_special_tokens, self._request.topology.model == "llama"
        return reference.Text(text=tokenizer.decode(request.tokens, skip_special_tokens=skip, first_space=not llama))

    async def encode(self, request: reference.EncodeRequest) -> reference.Tokens:
        begins = request.add_special_tokens and self._request.topology.model == "llama"
        return reference.Tokens(tokens=tokenizer.encode(request.text, begins=begins))
