"""The miniature's language model: a small recurrent mixture of experts whose probabilities are an explicit function.

The state after a token is tanh(recur · state + embed[token] + a code of the position); half of its numbers are mixed with their old
values. Each layer adds the weighted output of the two most probable of its four experts. The logits are out · features. The model
has thirteen named parameters, so that faults can lose, mix up or leave behind single ones. Version k of the policy and version k of
a LoRA adapter are functions of name and k.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from harness.records.reference import ExpertShard

VOCABULARY = 512
HIDDEN = 16
LAYERS = 2
EXPERTS = 4
TOP_K = 2
LONGEST = 2048
RANK = 2
LARGEST = {"int8": 127, "fp8": 448}
"""Quantized value of a tensor's largest number: the top of int8 and of fp8 (E4M3)."""
STRENGTH = 0.5
"""Standard deviation of a policy version's change, in units of the parameter's own (as in `backends.policies.versions`)."""

Array = NDArray[Any]
Parameters = Mapping[str, Array]

SPREAD = {"embed": 1.0, "recur": 0.25, "out": 0.55} | {
    f"layers.{layer}.{name}": 0.4
    for layer in range(LAYERS)
    for name in ("gate", *(f"experts.{expert}" for expert in range(EXPERTS)))
}
"""Parameter → standard deviation, in the order in which a trainer sends them."""


def _shape(name: str) -> tuple[int, int]:
    rows = VOCABULARY if name in ("embed", "out") else EXPERTS if name.endswith("gate") else HIDDEN
    return (rows, HIDDEN)


def _noise(name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")).normal(size=shape)


@lru_cache(maxsize=64)
def policy(version: int) -> Parameters:
    """Policy version `version`: parameter → float32 tensor. 0 is the checkpoint."""
    made = {}
    for name, spread in SPREAD.items():
        tensor = spread * _noise(name, _shape(name))
        if version:
            tensor = tensor + STRENGTH * spread * _noise(f"{name}:{version}", tensor.shape)
        made[name] = tensor.astype(np.float32)
    return made


@lru_cache(maxsize=64)
def adapter(version: int) -> Parameters:
    """Version `version` of the LoRA adapter: two pairs of low-rank factors, for `recur` and `out`."""
    made = {}
    for name in ("recur", "out"):
        rows, columns = _shape(name)
        made[f"{name}.lora_a"] = _noise(f"{name}:lora_a:{version}", (RANK, columns)).astype(np.float32)
        made[f"{name}.lora_b"] = (0.2 * _noise(f"{name}:lora_b:{version}", (rows, RANK))).astype(np.float32)
    return made


@final
class Adapter:
    """A LoRA adapter on its way to an engine: its factors under a name."""

    def __init__(self, name: str, factors: Parameters) -> None:
        self.name, self.factors = name, factors

    @property
    def shown(self) -> dict[str, Any]:
        """The adapter as the tap records it: its name, and tensor → bytes."""
        return {"name": self.name, "tensors": {name: tensor.nbytes for name, tensor in self.factors.items()}}


def with_adapter(parameters: Parameters, factors: Parameters | None) -> Parameters:
    """A model's parameters with a LoRA adapter merged in."""
    if factors is None:
        return parameters
    added = {name: factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"] for name in ("recur", "out")}
    return {name: tensor + added[name] if name in added else tensor for name, tensor in parameters.items()}


def quantize(parameters: Parameters, kind: str | None) -> Parameters:
    """Full-precision tensors as an engine holds them: unchanged, or in int8 or fp8 with one scale per tensor."""
    return dict(parameters) if kind is None else in_steps(parameters, kind)


def in_steps(parameters: Parameters, kind: str) -> Parameters:
    """Tensors in int8 or fp8, each with one scale."""
    held: dict[str, Array] = {}
    for name, tensor in parameters.items():
        scale = np.float32(np.abs(tensor).max() / LARGEST[kind])
        steps = tensor / scale
        held[name] = np.round(steps).astype(np.int8) if kind == "int8" else e4m3(steps)
        held[f"{name}.scale"] = np.array([scale], dtype=np.float32)
    return held


def e4m3(numbers: Array) -> NDArray[np.float32]:
    """The nearest fp8 (E4M3) numbers, as float32: three bits after the leading one, and evenly spaced below 2⁻⁶."""
    exponent = np.floor(np.log2(np.maximum(np.abs(numbers), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return (np.round(numbers / step) * step).astype(np.float32)


_EXPERT = re.compile(r".+\.experts\.(\d+)(\.scale)?")


def experts(held: Parameters) -> Parameters:
    """The tensors that belong to a layer's experts."""
    return {name: tensor for name, tensor in held.items() if _EXPERT.fullmatch(name)}


def shard(held: Parameters, tensor_parallel: int, rank: int, share: ExpertShard | None = None) -> Parameters:
    """The tensors of worker `rank`: its rows of every tensor that splits evenly, and all other tensors whole. If it has a share of
    the experts, it holds that instead."""
    apart = {} if share is None else experts(held)
    split = {
        name: np.split(tensor, tensor_parallel)[rank] if _is_split(tensor, tensor_parallel) else tensor
        for name, tensor in held.items()
        if name not in apart
    }
    return {**split, **({} if share is None else shared(apart, share))}


def shared(some: Parameters, share: ExpertShard) -> Parameters:
    """A worker's share of these experts."""
    if not share.whole:
        return {name: np.array_split(tensor, share.workers)[share.rank] for name, tensor in some.items()}
    own = np.array_split(range(EXPERTS), share.workers)[share.rank]
    return {name: tensor for name, tensor in some.items() if (e := _EXPERT.fullmatch(name)) and int(e[1]) in own}


def joined(shards: Sequence[Parameters], whole: Parameters, *, spread: bool) -> Parameters:
    """The workers' shards joined, in the shapes of `whole`. If experts are `spread` over the workers of an engine, perhaps on other
    servers, they are taken from `whole`."""
    apart = experts(whole) if spread else {}
    return {
        name: apart[name]
        if name in apart
        else np.concatenate([one[name] for one in shards])
        if _is_split(tensor, len(shards))
        else shards[0][name]
        for name, tensor in whole.items()
    }


def _is_split(tensor: Array, tensor_parallel: int) -> bool:
    return tensor_parallel > 1 and tensor.shape[0] >= HIDDEN and tensor.shape[0] % tensor_parallel == 0


def dequantize(held: Parameters) -> Parameters:
    """The tensors that an engine computes with."""
    return {
        name: tensor.astype(np.float32) * held[f"{name}.scale"] if f"{name}.scale" in held else tensor
        for name, tensor in held.items()
        if not name.endswith(".scale")
    }


def digest(tensor: Array) -> str:
    """ "sha256-prefix:shape:dtype" of a tensor, as in `harness.contract.messages.DigestsResult`."""
    return f"{hashlib.sha256(tensor.tobytes()).hexdigest()[:16]}:{tensor.shape}:{tensor.dtype}"


_FREQUENCY = np.sqrt(np.arange(2, HIDDEN + 2))
POSITION = 0.7 * np.sin(np.outer(np.arange(LONGEST), _FREQUENCY))
"""Positions × hidden. No two positions are alike, so no output runs in circles."""


_KEPT = np.where(np.arange(HIDDEN) < HIDDEN // 2, 0.0, 0.95)
"""Share of each number of the state that stays from token to token: half of the state lasts for some dozen tokens."""
_TAKEN = np.sqrt(1 - _KEPT**2)


class Node:
    """A network's state (hidden) after some tokens. The fields about the next token are computed on demand."""

    __slots__ = ("after", "best", "experts", "logprob", "network", "position", "row", "state")

    def __init__(self, network: Network, state: Array, position: int) -> None:
        self.network = network
        self.state = state
        self.position = position
        """Number of tokens fed so far."""
        self.after: dict[int, Node] = {}
        self.best = -1
        """The most probable next token, whose log-probability is `logprob`; -1 before `Network.look`."""
        self.logprob = 0.0
        self.experts: list[list[int]] = []
        """Experts of the newest token: layers × top_k; empty before `Network.look` or `Network.route`."""
        self.row: Array | None = None
        """Log-probabilities of the next token (vocabulary); None before `Network.row`."""


MOST_NODES = 1_000_000
"""Nodes of a tree, each of some 700 bytes."""
ROUNDING, MOST_ROUNDING = 0.07, 0.3
"""What 16 bits do to a log-probability, in nats: the deviation, and the most (the tiny model's in bfloat16: 0.08 and 0.6)."""


def rounded(row: Array, dice: np.random.Generator) -> NDArray[np.float64]:
    """Log-probabilities as an engine in 16 bits may compute them."""
    moved = row + np.clip(dice.normal(0, ROUNDING, size=len(row)), -MOST_ROUNDING, MOST_ROUNDING)
    found: NDArray[np.float64] = moved - np.log(np.exp(moved).sum())
    return found


class Network:
    """The parameters in one precision, ready for computation. A tree of nodes keeps every result."""

    def __init__(self, parameters: Parameters, dtype: type[np.floating[Any]] = np.float32) -> None:
        ready = {name: np.asarray(tensor, dtype=dtype) for name, tensor in parameters.items()}
        self._position = POSITION.astype(dtype)
        self._kept, self._taken = _KEPT.astype(dtype), _TAKEN.astype(dtype)
        self._embed, self._recur, self._out = ready["embed"], ready["recur"].T, ready["out"].T
        self._gates = [ready[f"layers.{layer}.gate"].T for layer in range(LAYERS)]
        self._experts = [
            np.stack([ready[f"layers.{layer}.experts.{expert}"] for expert in range(EXPERTS)])
            for layer in range(LAYERS)
        ]
        self._start = np.zeros(HIDDEN, dtype=dtype)
        self._nodes = 0
        self._root = Node(self, self._start, 0)

    @property
    def root(self) -> Node:
        """The node before the first token. A tree that has grown too large is replaced; requests keep nodes of the old one."""
        if self._nodes > MOST_NODES:
            self._root, self._nodes = Node(self, self._start, 0), 0
        return self._root

    def adopt(self, node: Node) -> Node:
        """The node itself, or a new node of this network with its state: as keys and values of other weights, read by these."""
        return node if node.network is self else Node(self, node.state, node.position)

    def feed(self, node: Node, token: int) -> Node:
        """The node after one more token."""
        after = node.after.get(token)
        if after is None:
            fed = np.tanh(node.state @ self._recur + self._embed[token] + self._position[node.position])
            state = self._kept * node.state + self._taken * fed
            after = node.after[token] = Node(self, state, node.position + 1)
            self._nodes += 1
        return after

    def look(self, nodes: Sequence[Node]) -> None:
        """Fill in the most probable next token of these nodes, and the experts of their newest token."""
        new = [node for node in nodes if node.best < 0]
        if not new:
            return
        rows, chosen, _ = self.read(np.stack([node.state for node in new]))
        best = rows.argmax(axis=1)
        logprobs = rows[np.arange(len(new)), best].tolist()
        for node, token, logprob, experts in zip(new, best.tolist(), logprobs, chosen.tolist(), strict=True):
            node.best, node.logprob, node.experts = token, logprob, experts

    def route(self, nodes: Sequence[Node]) -> None:
        """Fill in the experts of these nodes' newest tokens. Unlike `look` it computes no probabilities."""
        new = [node for node in nodes if not node.experts]
        if new:
            chosen = self.through_the_layers(np.stack([node.state for node in new]))[1]
            for node, experts in zip(new, chosen.tolist(), strict=True):
                node.experts = experts

    def row(self, node: Node) -> Array:
        """Log-probabilities of the token after a node, by token id (vocabulary)."""
        if node.row is None:
            node.row = self.read(node.state[None])[0][0]
        return node.row

    def read(self, states: Array) -> tuple[Array, NDArray[np.int64], Array]:
        """From states (positions × hidden): log-probabilities of the next token (positions × vocabulary), each layer's experts
        (positions × layers × top_k), and the margin of that choice (positions × layers)."""
        features, chosen, margins = self.through_the_layers(states)
        logits = features @ self._out
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits, chosen, margins

    def through_the_layers(self, states: Array) -> tuple[Array, NDArray[np.int64], Array]:
        """From states (positions × hidden): the output layer's input (positions × hidden), then experts and margins as in `read`."""
        features, every = states, np.arange(len(states))[:, None]
        chosen = np.empty((len(states), LAYERS, TOP_K), dtype=np.int64)
        margins = np.empty((len(states), LAYERS), dtype=states.dtype)
        for layer, (gate, experts) in enumerate(zip(self._gates, self._experts, strict=True)):
            scores = features @ gate
            order = (-scores).argsort(axis=1, kind="stable")
            best = order[:, :TOP_K]
            picked = scores[every, order]
            weights = np.exp(picked[:, :TOP_K] - picked[:, :1])
            made = np.tanh(np.matmul(experts[best], features[:, None, :, None])[..., 0])
            features = features + np.matmul(weights[:, None, :], made)[:, 0] / weights.sum(axis=1)[:, None]
            chosen[:, layer] = best
            margins[:, layer] = picked[:, TOP_K - 1] - picked[:, TOP_K]
        return features, chosen, margins


@lru_cache(maxsize=256)
def _network(_digests: tuple[str, ...], parameters: _ByContent, dtype: type) -> Network:
    return Network(parameters.tensors, dtype)


class _ByContent:
    """Parameters that compare equal to any others, so that the cache key depends on their digests only."""

    def __init__(self, tensors: Parameters) -> None:
        self.tensors = tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByContent)

    def __hash__(self) -> int:
        return 0


def network(parameters: Parameters, dtype: type[np.floating[Any]] = np.float32) -> Network:
    """The network of these parameters. Engines with the same parameters share it."""
    return _network(tuple(digest(parameters[name]) for name in sorted(parameters)), _ByContent(parameters), dtype)  # type: ignore[arg-type]  # a class is hashable
