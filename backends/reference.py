"""The oracle: Hugging Face forward pass, full context each step, no cache, no batching, float32, eager attention.

It shares no code with the adapters. Policy versions and the model come from `fixtures`, as for everybody.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from typing import Any

from backends.vllm.probes import tensor_digest
from fixtures import policy
from harness.capability import Capability
from harness.contract import Description, Empty, StartRequest
from harness.errors import NotOffered
from harness.reference import (
    DecodeRequest,
    EncodeRequest,
    ExpectedDigests,
    ExpectedDigestsRequest,
    Next,
    NextRequest,
    RenderRequest,
    Score,
    ScoreRequest,
    Text,
    Tokens,
)

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's fused parameter → the Hugging Face parameters that it is made of, in order, along the first dimension (vLLM, Qwen2)."""

UNKNOWN = {"adapter": Capability.LORA, "quantization": Capability.QUANTIZED}
"""What may be asked and is not modelled here: refused by name, not answered for the plain model."""


class Reference:
    """Scores any tokens under any policy version."""

    def __init__(self) -> None:
        self._request: StartRequest
        self._model: Any = None
        self._tokenizer: Any = None
        self._version: int | None = None
        self._one_at_a_time = asyncio.Lock()

    async def start(self, request: StartRequest) -> Description:
        self._request = request
        await asyncio.to_thread(self._load)
        return await self.describe(Empty())

    async def describe(self, _request: Empty) -> Description:
        packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        return Description(
            target=self._request.target,
            topology=self._request.topology,
            start=self._request.start,
            capabilities=self._request.capabilities,
            servers=[],
            packages=packages,
        )

    async def teardown(self, _request: Empty) -> Empty:
        return Empty()

    async def score(self, request: ScoreRequest) -> Score:
        return await self._run(self._score, request)

    async def next(self, request: NextRequest) -> Next:
        return await self._run(self._next, request)

    async def expected_digests(self, request: ExpectedDigestsRequest) -> ExpectedDigests:
        return await self._run(self._expected_digests, request)

    async def render(self, request: RenderRequest) -> Tokens:
        ids = self._tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, tokenize=True)
        return Tokens(tokens=[int(t) for t in ids])

    async def decode(self, request: DecodeRequest) -> Text:
        text = self._tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens)
        return Text(text=text)

    async def encode(self, request: EncodeRequest) -> Tokens:
        ids = self._tokenizer.encode(request.text, add_special_tokens=request.add_special_tokens)
        return Tokens(tokens=[int(t) for t in ids])

    async def _run(self, function: Any, request: Any) -> Any:
        for field, capability in UNKNOWN.items():
            if getattr(request, field, None) is not None:
                raise NotOffered(capability, self._request.target)
        async with self._one_at_a_time:
            return await asyncio.to_thread(function, request)

    def _load(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._tokenizer = AutoTokenizer.from_pretrained(self._request.model_path)
        self._model = AutoModelForCausalLM.from_pretrained(
            self._request.model_path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._version = 0

    def _at(self, version: int) -> Any:
        """The model under a policy version."""
        if version != self._version:
            tensors = policy.version(self._request.model_path, version, self._request.policies)
            self._model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
            self._version = version
        return self._model

    def _logprobs(self, version: int, tokens: list[int]) -> Any:
        """Rows: positions of `tokens`; columns: log-probabilities of the token after it."""
        import torch

        with torch.no_grad():
            return self._at(version)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)

    def _score(self, request: ScoreRequest) -> Score:
        import torch

        if not request.tokens:
            return Score(logprobs=[], ranks=[], margins=[])
        rows = self._logprobs(request.version, request.prompt + request.tokens)[len(request.prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        best = rows.topk(2, dim=1).values
        return Score(
            logprobs=chosen.tolist(),
            ranks=(rows > chosen[:, None]).sum(1).tolist(),
            margins=(best[:, 0] - best[:, 1]).tolist(),
        )

    def _next(self, request: NextRequest) -> Next:
        return Next(logprobs=self._logprobs(request.version, request.prompt)[-1].tolist())

    def _expected_digests(self, request: ExpectedDigestsRequest) -> ExpectedDigests:
        import torch

        dtype = getattr(torch, self._request.dtype)
        made = policy.version(self._request.model_path, request.version, self._request.policies)
        tensors = {n: t.to(dtype) for n, t in made.items()}
        return ExpectedDigests(digests={n: tensor_digest(t) for n, t in _fused(tensors).items()})


def _fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """Parameters by vLLM's names, fused as vLLM fuses them for dense Llama-like models at TP=1."""
    import torch

    fused = dict(tensors)
    for whole, parts in FUSED.items():
        for name in [n for n in tensors if f".{parts[0]}." in n]:
            pieces = [fused.pop(name.replace(parts[0], part)) for part in parts]
            fused[name.replace(parts[0], whole)] = torch.cat(pieces)
    return fused
