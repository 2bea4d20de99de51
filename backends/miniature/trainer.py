"""The miniature's trainer: one exact policy-gradient step on the output layer, kept as a small file for the oracle to read.

It trains only `out`. The logits are out · features, so the gradient is a sum over tokens of the loss's derivative by the logits
times the features. A step takes the time of `STEPS` engine steps.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from backends.miniature import deltas, model
from backends.miniature.engine import STEP_S, BadRequest, Engine
from backends.policies import versions as policy
from backends.policies.megatron import Rule, Sharding
from harness.contract.messages import FIRST_TRAINED, TrainRequest, TrainResult

STEPS = 40
"""Duration of a training step, in engine steps: long enough for rollouts to overlap it."""
NO_GRADIENT = 1e-9
"""A gradient shorter than this has no direction."""
EXPERTS = tuple(f"layers.*.experts.{expert}" for expert in range(model.EXPERTS))
MEGATRON = Sharding(
    rules=(
        Rule("embedding", ("embed",)),
        Rule("recurrence", ("recur",), 1),
        Rule("layers.*.router", ("layers.*.gate",), None),
        Rule("layers.*.experts", EXPERTS, groups=4, shares=(1,) * model.EXPERTS),
        Rule("output", ("out",), last=True),
    ),
    layers=model.LAYERS,
)
"""Layout of the model in a TP2×PP2 trainer. A layer's experts are fused and interleaved, as Megatron-core's query groups are."""


def parameters(version: int, policies: str) -> model.Parameters:
    """Any policy version: by rule, or trained and read from the folder `policies`. Raises FileNotFoundError if it is not there."""
    return model.policy(version) if version < FIRST_TRAINED else _trained(version, policies)


@lru_cache(maxsize=64)
def _trained(version: int, policies: str) -> model.Parameters:
    with np.load(_file(policies, version)) as kept:
        return {name: kept[name] for name in model.SPREAD}


def _file(policies: str, version: int) -> Path:
    return Path(policies) / f"{version}.npz"


def keep(tensors: model.Parameters, policies: str) -> int:
    """Write a trained version to its file atomically; returns its number."""
    number = policy.number_of((name, tensors[name].tobytes()) for name in sorted(tensors))
    file = _file(policies, number)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{number}.{os.getpid()}.unfinished")
        with unfinished.open("wb") as to:
            np.savez(to, allow_pickle=False, **dict(tensors))
        unfinished.replace(file)
    return number


class Publisher:
    """What a trainer writes to a disk that it shares with the servers, each of which has the checkpoint that it began with."""

    def __init__(self, checkpoint: model.Parameters) -> None:
        self.published = dict(checkpoint)
        """What the servers' checkpoints hold."""

    def publish(self, pieces: Sequence[model.Parameters]) -> deltas.Deltas:
        """The next version. Raises BadRequest for a tensor that the checkpoint does not have, or has in another shape."""
        found: deltas.Deltas = []
        for piece in pieces:
            for name, tensor in piece.items():
                if name not in self.published or self.published[name].shape != tensor.shape:
                    raise BadRequest(f"no parameter {name} of shape {tensor.shape}")
            found.append({name: deltas.between(self.published[name], tensor) for name, tensor in piece.items()})
        for piece in pieces:
            self.published.update(piece)
        return found


class Trainer:
    """Makes policy versions from rollouts."""

    def __init__(self) -> None:
        self.policies = ""
        self.engines: list[Engine] = []
        """The servers of the same stack. A correct trainer does not touch them."""
        self.fired = 0

    async def train(self, request: TrainRequest) -> TrainResult:
        """One training step. The engines continue meanwhile."""
        await self.take_time()
        base = parameters(request.base_version, self.policies)
        logprobs, loss, gradient = self.gradient(request, base)
        norm = float(np.sqrt((gradient**2).sum()))
        step = self.step(request.learning_rate) / norm if norm > NO_GRADIENT else 0.0
        trained = {**base, "out": (base["out"] - step * gradient).astype(np.float32)}
        return TrainResult(version=keep(trained, self.policies), response_logprobs=logprobs, loss=loss, grad_norm=norm)

    async def take_time(self) -> None:
        await asyncio.sleep(STEPS * STEP_S)

    def step(self, learning_rate: float) -> float:
        """Length of the step down the gradient."""
        return learning_rate

    def logits(self, features: model.Array, out: model.Array) -> Any:
        """Logits at temperature 1: positions × vocabulary."""
        return features @ out.T

    def gradient(self, request: TrainRequest, base: model.Parameters) -> tuple[list[list[float]], float, Any]:
        """Log-probabilities of all response tokens, the loss, and its gradient by `out`, in double precision."""
        network = model.network(base, np.float64)
        out = np.asarray(base["out"], dtype=np.float64)
        masks = request.loss_masks or [[1] * len(row) for row in request.response_ids]
        count = max(1, sum(map(sum, masks)))
        found, loss, gradient = [], 0.0, np.zeros_like(out)
        rows = zip(request.prompt_token_ids, request.response_ids, masks, request.advantages, strict=True)
        for prompt, response, mask, advantage in rows:
            features = _features(network, prompt, response)
            logits = self.logits(features, out)
            logits = logits - logits.max(axis=1, keepdims=True)
            logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            every = np.arange(len(response))
            chosen = logprobs[every, response]
            weights = -advantage * np.array(mask) / count
            loss += float((weights * chosen).sum())
            of_logits = -np.exp(logprobs) * weights[:, None]
            of_logits[every, response] += weights
            gradient += of_logits.T @ features
            found.append(np.minimum(chosen, 0.0).tolist())
        return found, loss, gradient


def _features(network: model.Network, prompt: Sequence[int], response: Sequence[int]) -> model.Array:
    """The output layer's input before each response token: positions × hidden."""
    node, states = network.root, []
    for token in (*prompt, *response[:-1]):
        node = network.feed(node, token)
        states.append(node.state)
    return network.through_the_layers(np.stack(states[len(prompt) - 1 :]))[0]
