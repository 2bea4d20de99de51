"""A small trainer: one optimizer step of a policy gradient makes a policy version, in float32 on a CPU.

It runs in a stack's environment, in the host. It writes each version to a file that the oracle reads too. Engines get the version
only through the stack's own weight sync.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from backends.policies import versions as policy
from harness.contract.messages import TrainRequest, TrainResult

STEP_S = 0.75
"""Minimum duration of a step (seconds). A real policy's step takes longer, on devices that are not the engines'."""
NO_GRADIENT = 1e-9
"""A gradient shorter than this has no direction."""
MOST_KL = 6.0
"""Nats per token. A step is halved until it moves the policy by at most this much on its own rollouts. A tiny model, whose weights
are random, learns only by steps of several nats."""
MOST_KL_OF_TRAINED = 0.3
"""The same for a trained model, which larger steps would ruin: SmolLM2 learns by these, its reward doubles in two steps."""
MOST_HALVINGS = 12
TOGETHER = 8
"""Responses in one pass of the model: for 64 of a real model's at once, their logits and gradients take 10 GB."""


class PolicyTrainer:
    """Holds one model and takes one step at a time. Plain gradient descent keeps no state: a step depends on its request alone."""

    def __init__(self, model_path: str, policies: str) -> None:
        self._model_path, self._policies = model_path, policies
        self._model: Any = None
        self._one_at_a_time = threading.Lock()

    def train(self, request: TrainRequest) -> TrainResult:
        """Raises FileNotFoundError for an untrained base version, ValueError if the request's rows differ in number."""
        with self._one_at_a_time:
            done = time.monotonic() + STEP_S
            trained = self._train(request)
            time.sleep(max(0.0, done - time.monotonic()))
            return trained

    def _train(self, request: TrainRequest) -> TrainResult:
        import torch

        tensors = policy.version(self._model_path, request.base_version, self._policies)
        model = self._at(tensors)
        model.zero_grad(set_to_none=True)
        masks = request.loss_masks or [[1] * len(row) for row in request.response_ids]
        count = max(1, sum(map(sum, masks)))
        loss, logprobs = torch.zeros(()), list[Any]()
        asked = zip(self._logprobs(request), masks, request.advantages, strict=True)
        # One pass of the model at a time: backward() frees its graph.
        for together in iter(lambda: list(itertools.islice(asked, TOGETHER)), []):
            losses = [-a * (row * torch.tensor(mask, dtype=row.dtype)).sum() / count for row, mask, a in together]
            part = torch.stack(losses).sum()
            part.backward()
            loss += part.detach()
            logprobs += [row.detach() for row, _, _ in together]
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        step = request.learning_rate / norm if norm > NO_GRADIENT else 0.0
        gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

        def after(halvings: int) -> dict[str, Any]:
            return {
                name: (tensor.float() - step / 2**halvings * gradient[name]).to(tensor.dtype).contiguous()
                if name in gradient
                else tensor.contiguous()
                for name, tensor in tensors.items()
            }

        most = MOST_KL_OF_TRAINED if policy.is_trained(tensors) else MOST_KL
        fewest = bisect.bisect_left(
            range(MOST_HALVINGS), True, key=lambda halvings: self._moved(request, after(halvings), logprobs) <= most
        )
        trained = after(fewest)
        return TrainResult(
            version=policy.keep(self._policies, trained),
            response_logprobs=[row.tolist() for row in logprobs],
            loss=loss.item(),
            grad_norm=norm.item(),
        )

    def _moved(self, request: TrainRequest, trained: dict[str, Any], logprobs: list[Any]) -> float:
        """The Kullback-Leibler divergence of the trained policy from the policy before the step, in nats per token: the mean of
        r - 1 - log r, where r is the ratio of probabilities (Schulman, "Approximating KL Divergence")."""
        import torch

        self._at(trained)
        with torch.no_grad():
            moved = torch.cat([*self._logprobs(request)]) - torch.cat(logprobs)
        return float((moved.expm1() - moved).mean())

    def _at(self, tensors: dict[str, Any]) -> Any:
        """The model with these weights."""
        import torch
        from transformers import AutoModelForCausalLM

        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(
                self._model_path, dtype=torch.float32, attn_implementation="eager"
            ).train()
        self._model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
        return self._model

    def _logprobs(self, request: TrainRequest) -> Iterator[Any]:
        """One row of log-probabilities per response, at temperature 1. Shorter sequences are padded at the end: causal attention
        hides the padding."""
        import torch

        both = list(zip(request.prompt_token_ids, request.response_ids, strict=True))
        longest = max(len(prompt) + len(response) for prompt, response in both)
        for group in (both[at : at + TOGETHER] for at in range(0, len(both), TOGETHER)):
            ids = torch.zeros((len(group), longest), dtype=torch.long)
            for row, (prompt, response) in enumerate(group):
                ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
            rows = self._model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            for row, (prompt, response) in enumerate(group):
                chosen = rows[row, len(prompt) - 1 : len(prompt) + len(response) - 1]
                yield chosen.gather(1, torch.tensor(response)[:, None])[:, 0]
