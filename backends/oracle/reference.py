"""The oracle: a Hugging Face forward pass in float32 with eager attention, unbatched, over the full context each step.

It uses a cache only if a request asks about a cache that outlived its weights. It shares no code with the adapters; policy versions
and quantized weights come from `backends.policies`, as for the stacks. For a quantized engine it computes what the kernels
approximate. Weights are 8-bit steps times a scale per output channel, inputs of the same layers are rounded to steps of a scale per
token, and all products and sums are in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.metadata
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from backends.policies import lora, quantized
from backends.policies import versions as policy
from backends.vllm.bare import Asked
from backends.vllm.probes import tensor_digest
from harness.contract import vocabulary
from harness.contract.capability import Capability
from harness.contract.errors import NotOffered
from harness.contract.messages import Description, Empty, StartRequest
from harness.contract.topology import Quantization
from harness.contract.vocabulary import Vocabulary
from harness.records.reference import (
    WIDER,
    DecodeRequest,
    EncodeRequest,
    ExpectedDigests,
    ExpectedDigestsRequest,
    Experts,
    ExpertShard,
    ExpertsRequest,
    Moved,
    Next,
    NextRequest,
    Noise,
    NoiseRequest,
    RenderRequest,
    Score,
    ScoreRequest,
    Text,
    Tokens,
    Weights,
    key,
)

T = TypeVar("T")
SPLIT = {
    0: ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"),
    1: ("o_proj.weight", "down_proj.weight"),
}
"""Dimension → the parameters that tensor-parallel workers split along it (Megatron-LM's column- and row-parallel layers; vLLM,
linear.py). Every worker holds all other parameters whole."""
VOCABULARY_BLOCK = 64
"""vLLM pads the rows of embedding and output layer to a multiple of this (vocab_parallel_embedding.py)."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's fused parameter → its Hugging Face parameters, joined in this order along the first dimension (vLLM, Qwen2)."""

EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")
"""A Hugging Face parameter of one expert (Qwen3-MoE, OLMoE)."""

NOT_ROUNDED = (-1, None, None)
"""`_holds` while the model has the checkpoint's unrounded weights. It matches no request, so the next request loads weights."""
DECIMALS = 6
"""Of log-probabilities in a whole distribution, whose text is half as long then."""
DRAWS = 4
"""How often a score of quantized weights is computed again with activations moved at random (`Score.rounding`)."""
AT_A_BOUNDARY = 1e-3
"""Each activation is moved by at most this many quantization steps before it is rounded. Float32 arithmetic moves it by about 1e-6
of a token's largest number, or 1e-4 steps of int8: every activation that may round differently in an engine may do so here."""


class Reference:
    """Scores any tokens under any policy version."""

    def __init__(self) -> None:
        self._request: StartRequest
        self._model: Any = None
        self._tokenizer: Any = None
        self._holds: tuple[int, int | None, Quantization | None] | None = None
        """(policy version, adapter version, quantization) of the weights that the model holds."""
        self._routed: Any = None
        """Experts that the model must take, positions × layers × top_k. None: its own choice."""
        self._near_tie = 0.0
        """The model takes `_routed` up to this distance (router logits) from its own choice."""
        self._read: tuple[Any, list[int], Any] = (None, [], None)
        """The weights, tokens and log-probabilities of the last answer about a whole distribution."""
        self._noises: dict[str, Noise] = {}
        """By the key of the query."""
        self._dice: Any = None
        """A torch generator while activations are moved at random before they are rounded; otherwise None."""
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

    async def teardown(self, _request: Empty) -> None:
        """Nothing runs that would have to be stopped."""

    async def score(self, request: ScoreRequest) -> Score:
        return await self._run(self._score, request)

    async def next(self, request: NextRequest) -> Next:
        return await self._run(self._next, request)

    async def expected_digests(self, request: ExpectedDigestsRequest) -> ExpectedDigests:
        return await self._run(self._expected_digests, request)

    async def experts(self, request: ExpertsRequest) -> Experts:
        if not self._is_mixture:
            raise NotOffered(Capability.ROUTED_EXPERTS, self._request.target)
        return await self._run(self._experts, request)

    async def noise(self, request: NoiseRequest) -> Noise:
        return await self._run(self._noise, request)

    async def vocabulary(self, _request: Empty) -> Vocabulary:
        tokenizer, ends = self._tokenizer, self._model.generation_config.eos_token_id
        recommended = self._model.generation_config.to_diff_dict()
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {self._request.model_path} names no end of sequence")
        return vocabulary.read(
            size=min(len(tokenizer), self._model.config.vocab_size),
            ids=tokenizer.get_vocab(),
            decode=tokenizer.decode,
            special=[token for token, added in tokenizer.added_tokens_decoder.items() if added.special],
            eos=tokenizer.eos_token_id,
            ends=[ends] if isinstance(ends, int) else ends or [],
            template=tokenizer.get_chat_template() if tokenizer.chat_template else "",
            named={name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)},
            sampling={
                name: recommended[key]
                for key, name in vocabulary.RECOMMENDED.items()
                if recommended.get(key) is not None
            },
            cleans=bool(tokenizer.clean_up_tokenization_spaces),
        )

    async def render(self, request: RenderRequest) -> Tokens:
        ids = self._tokenizer.apply_chat_template(
            request.messages,
            tools=request.tools or None,
            add_generation_prompt=request.add_generation_prompt,
            tokenize=True,
            return_dict=False,
        )
        return Tokens(tokens=[int(t) for t in ids])

    async def decode(self, request: DecodeRequest) -> Text:
        text = self._tokenizer.decode(
            request.tokens, skip_special_tokens=request.skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return Text(text=text)

    async def encode(self, request: EncodeRequest) -> Tokens:
        ids = self._tokenizer.encode(request.text, add_special_tokens=request.add_special_tokens)
        return Tokens(tokens=[int(t) for t in ids])

    async def _run(self, function: Callable[[Any], T], request: Any) -> T:
        """Runs `function` in a thread, one request at a time. Raises NotOffered for what the oracle does not model: quantized
        weights under an adapter, or in shards."""
        apart = getattr(request, "tensor_parallel", 1) > 1 or getattr(request, "experts", None) is not None
        if getattr(request, "quantization", None) and (apart or getattr(request, "adapter", None) is not None):
            raise NotOffered(Capability.QUANTIZED, self._request.target)
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
        for name, module in self._model.named_modules():
            if quantized.is_quantized(f"{name}.weight"):
                module.register_forward_pre_hook(lambda _module, inputs: (self._rounded(inputs[0]),))
        mixtures = [
            module for module in self._model.modules() if hasattr(module, "gate") and hasattr(module, "experts")
        ]
        for layer, block in enumerate(mixtures):
            block.register_forward_hook(partial(self._as_routed, layer))
        self._holds = (0, None, None) if self._request.dtype == "float32" else None

    def _as_routed(self, layer: int, block: Any, inputs: Any, made: Any) -> Any:
        """What a mixture layer returns, with the experts of `_routed`, weighted by its router. None: no change.

        A layer holds one module per expert and returns (output, router logits). From Transformers 5 on it holds its experts packed,
        and returns the output.
        """
        import torch

        if self._routed is None:
            return None
        packed = not isinstance(made, tuple)
        router = block.gate if packed else block
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        logits = torch.nn.functional.linear(hidden, block.gate.weight)
        given = self._routed[: len(logits), layer]
        every = logits.softmax(-1, dtype=torch.float)
        chosen = every.topk(router.top_k, dim=-1).indices
        ties = _behind(logits[: len(given)], given) <= self._near_tie
        chosen[: len(given)][ties] = given[ties]
        weights = every.gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        if packed:
            return block.experts(hidden, chosen, weights.to(hidden.dtype)).reshape(inputs[0].shape)
        output = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            rows, at = (chosen == number).nonzero(as_tuple=True)
            output[rows] += block.experts[number](hidden[rows]) * weights[rows, at, None].to(hidden.dtype)
        return output.reshape(inputs[0].shape), logits

    @contextlib.contextmanager
    def _following(self, routed: Any, near_tie: float) -> Iterator[None]:
        """Within the block, the model takes these experts, if any are given, up to a near tie."""
        import torch

        self._routed, self._near_tie = torch.as_tensor(routed) if len(routed) else None, near_tie
        try:
            yield
        finally:
            self._routed = None

    def _routing_tie(self, request: ScoreRequest | ExpertsRequest) -> float:
        if not request.routed:
            return 0.0
        return WIDER * self._noise(NoiseRequest(quantization=request.quantization)).router

    def _at(self, weights: Weights) -> Any:
        """The model under a policy version, with an adapter merged into it (PEFT documentation, merge_and_unload) or quantized.

        Weights are rounded to the engines' dtype, as engines hold them. The model computes with them in float32.
        """
        wanted = (weights.version, weights.adapter, weights.quantization)
        if wanted != self._holds:
            path = self._request.model_path
            made = policy.version(path, weights.version, self._request.policies)
            tensors = {name: tensor.to(self._dtype).float() for name, tensor in made.items()}
            if weights.adapter is not None:
                tensors = lora.merged(tensors, policy.checkpoint(path), weights.adapter, self._dtype)
            if weights.quantization is not None:
                tensors = {
                    name: self._dequantized(name, tensor, weights.quantization) for name, tensor in tensors.items()
                }
            _put(tensors, self._model)
            self._holds = wanted
        return self._model

    def _dequantized(self, name: str, tensor: Any, kind: Quantization) -> Any:
        """The values with which a quantized engine computes after it receives this parameter."""
        if not quantized.is_quantized(name):
            return tensor
        steps, scale = quantized.quantize(tensor.to(self._dtype), kind)
        return steps.float() * scale.float()

    def _rounded(self, inputs: Any) -> Any:
        """Inputs of a quantized layer (… × tokens × features) as its kernel sees them."""
        import torch

        assert self._holds is not None
        kind = self._holds[2]
        if kind is None:
            return inputs
        given, inputs = inputs.dtype, inputs.float()
        scale = inputs.abs().amax(-1, keepdim=True) / quantized.LARGEST[kind]
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        numbers = inputs / scale
        step: Any = 1.0
        if kind == "fp8":  # E4M3: three bits after the leading one, evenly spaced below 2^-6
            step = 2.0 ** (numbers.abs().clamp(min=2.0**-6).log2().floor() - 3)
        steps = numbers / step
        if self._dice is not None:
            steps = steps + AT_A_BOUNDARY * (2 * torch.rand(steps.shape, generator=self._dice) - 1)
        return (steps.round() * step * scale).to(given)

    @property
    def _dtype(self) -> Any:
        import torch

        return getattr(torch, self._request.dtype)

    def _logprobs(self, weights: Weights, tokens: list[int]) -> Any:
        """Log-probabilities of the next token: positions of `tokens` × vocabulary."""
        import torch

        with torch.no_grad():
            logits = self._at(weights)(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0].float().log_softmax(-1)

    def _logprobs_on_cache(self, request: ScoreRequest, tokens: list[int]) -> Any:
        """As `_logprobs`, for the positions after the tokens that other versions have read into the cache."""
        import torch

        cache, at = None, 0
        with torch.no_grad():
            for number, version in request.cached:
                ids = torch.tensor([tokens[at : at + number]])
                earlier = self._at(msgspec.structs.replace(request, version=version))
                cache = earlier(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
                at += number
            model = self._at(request)
            logits = model(input_ids=torch.tensor([tokens[at:]]), past_key_values=cache, use_cache=True).logits
        return logits[0].float().log_softmax(-1)

    def _score(self, request: ScoreRequest) -> Score:
        import torch

        if not request.tokens:
            return Score(logprobs=[], ranks=[], margins=[])
        with self._following(request.routed, self._routing_tie(request)):
            rows = self._rows(request)
        chosen = rows.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        best = rows.topk(2, dim=1).values
        behind = best[:, 0] - chosen
        rounding: tuple[float, ...] = ()
        if request.quantization is not None:
            rounding = self._moved_by_rounding(request, chosen)
        elif self._in_doubt(request, float(behind.max())):
            rounding = self._moved_by_dtype(request, rows)
        return Score(
            logprobs=chosen.tolist(),
            ranks=(rows > chosen[:, None]).sum(1).tolist(),
            margins=(best[:, 0] - best[:, 1]).tolist(),
            behind=behind.tolist(),
            rounding=rounding,
        )

    def _in_doubt(self, request: ScoreRequest, behind: float) -> bool:
        """True if 16 bits may have made more of a near tie of this answer than was measured. A mixture whose experts are not given
        may take others when it is rounded, which is no rounding of its log-probabilities."""
        import torch

        if self._dtype is torch.float32 or (self._is_mixture and not request.routed):
            return False
        return behind >= self._noise(NoiseRequest()).near

    def _noise(self, request: NoiseRequest) -> Noise:
        """How far rounding moves log-probabilities. Measured once per query."""
        name = key(request)
        if name not in self._noises:
            self._noises[name] = self._measured(request)
        return self._noises[name]

    def _measured(self, request: NoiseRequest) -> Noise:
        """Compares the model in the engines' dtype, and a bare engine, with the model in higher precision.

        In a 16-bit mixture, the precise model takes its rounded twin's experts. A bare engine reports none, so it is left out.
        """
        import torch

        from backends.oracle import rounding

        model = self._at(Weights(version=request.version, quantization=request.quantization))
        in_float32 = self._dtype is torch.float32
        other = copy.deepcopy(model)
        _compute_in(torch.float64 if in_float32 else self._dtype, other)
        exact, rounded = (other, model) if in_float32 else (model, other)
        rows = request.rows or rounding.contexts(model.config.vocab_size)
        routed_alike = self._is_mixture and not in_float32

        def right(row: list[int]) -> Any:
            with self._following(self._choices(rounded, row) if routed_alike else (), math.inf):
                return _log_softmax(exact, row)

        reference = rounding.of_arithmetic(right, partial(_log_softmax, rounded), rows)
        engine: dict[str, Moved] = {}
        if request.quantization is None and not routed_alike and not request.rows:
            asked = self._for_a_bare_engine(rows)
            engine = rounding.of_engine(right, asked, rounding.bare_engine(asked))
            rounding.check(reference, engine)
        router = 0.0
        for row in rows if self._is_mixture else ():
            with self._following(self._choices(rounded, row) if routed_alike else (), math.inf):
                router = max(router, float((_router_logits(exact, row) - _router_logits(rounded, row)).abs().max()))
        weights = reference.largest + max((moved.largest for moved in engine.values()), default=0.0)
        if request.quantization is None and not in_float32:
            made = policy.version(self._request.model_path, request.version, self._request.policies)
            _put({name: tensor.float() for name, tensor in made.items()}, model)
            self._holds = NOT_ROUNDED
            found = rounding.of_arithmetic(partial(_log_softmax, model), partial(_log_softmax, rounded), rows)
            weights = max([found.largest, *(moved.largest for moved in engine.values())])
        every = {"reference": reference, **engine}
        return Noise(
            numbers=sum(moved.numbers for moved in every.values()),
            largest=max(moved.largest for moved in every.values()),
            rms=max(moved.rms for moved in every.values()),
            quarter=reference.quarter,
            weights=weights,
            router=router,
            measured=every,
        )

    def _for_a_bare_engine(self, rows: list[list[int]]) -> Asked:
        from backends.oracle import rounding

        return Asked(
            model_path=self._request.model_path,
            dtype=self._request.dtype,
            cpu=self._request.engine == "cpu",
            cuda_graphs=self._request.cuda_graphs,
            batch_invariant=self._request.batch_invariant,
            experts=self._is_mixture,
            prompts=rows,
            tokens=rounding.ENGINE_TOKENS,
            best=rounding.ENGINE_BEST,
            answers=str(Path(self._request.scratch) / "bare-engine.json"),
        )

    @property
    def _is_mixture(self) -> bool:
        return bool(getattr(self._model.config, "num_experts", 0))

    @staticmethod
    def _choices(model: Any, tokens: list[int]) -> Any:
        """The experts that a mixture chooses (positions × layers × top_k)."""
        import torch

        logits = _router_logits(model, tokens)
        return logits.softmax(-1, dtype=torch.float).topk(model.config.num_experts_per_tok, dim=-1).indices

    def _rows(self, request: ScoreRequest) -> Any:
        """Log-probabilities at the position of each of the request's tokens: tokens × vocabulary."""
        context = request.prompt + request.tokens
        if request.cached:
            read = sum(number for number, _ in request.cached)
            return self._logprobs_on_cache(request, context)[len(request.prompt) - 1 - read : -1]
        return self._logprobs(request, context)[len(request.prompt) - 1 : -1]

    def _moved_by_rounding(self, request: ScoreRequest, chosen: Any) -> tuple[float, ...]:
        """The most that each of these log-probabilities moves when activations near a rounding boundary move (`Score.rounding`)."""
        import torch

        moved = torch.zeros_like(chosen)
        for draw in range(DRAWS):
            self._dice = torch.Generator().manual_seed(draw)
            try:
                rows = self._rows(request)
            finally:
                self._dice = None
            moved = moved.maximum((rows.gather(1, torch.tensor(request.tokens)[:, None])[:, 0] - chosen).abs())
        return tuple(moved.tolist())

    def _moved_by_dtype(self, request: ScoreRequest, rows: Any) -> tuple[float, ...]:
        """How far the engines' dtype moves the log-probability of each token, or of one of the most probable ones at its place, if
        that is more. `rows`: tokens × vocabulary, of float32."""
        import torch

        from backends.oracle import rounding

        _compute_in(self._dtype, self._model)
        try:
            with self._following(request.routed, self._routing_tie(request)):
                moved = (self._rows(request).float() - rows).abs()
        finally:
            _compute_in(torch.float32, self._model)
            if request.adapter is not None:
                self._holds = None  # merged weights are not of the dtype: they come back rounded
        named = torch.cat([rows.topk(rounding.BEST, dim=1).indices, torch.tensor(request.tokens)[:, None]], dim=1)
        return tuple(moved.gather(1, named).amax(1).tolist())

    def _next(self, request: NextRequest) -> Next:
        """What the model read for a longer prompt tells the distributions after each of its beginnings too."""
        weights, prompt = (request.version, request.adapter, request.quantization), request.prompt
        by, tokens, rows = self._read
        if by != weights or tokens[: len(prompt)] != prompt:
            rows = self._logprobs(request, prompt)
            self._read = weights, prompt, rows
        return Next(logprobs=rows[len(prompt) - 1].double().round(decimals=DECIMALS).tolist())

    def _experts(self, request: ExpertsRequest) -> Experts:
        import torch

        near_tie = self._routing_tie(request)
        model = self._at(request)
        with self._following(request.routed, near_tie):
            logits = _router_logits(model, request.tokens)
        best = logits.topk(model.config.num_experts_per_tok + 1, dim=-1)
        return Experts(
            indices=best.indices[..., :-1].tolist(),
            margins=(best.values[..., :-1] - best.values[..., 1:]).amin(dim=-1).tolist(),
            count=logits.shape[-1],
            behind=_behind(logits, torch.tensor(request.routed)).tolist() if request.routed else [],
        )

    def _expected_digests(self, request: ExpectedDigestsRequest) -> ExpectedDigests:
        made = policy.version(self._request.model_path, request.version, self._request.policies)
        heads = getattr(self._model.config, "num_key_value_heads", None)
        share = request.experts or ExpertShard(rank=request.rank, workers=request.tensor_parallel, whole=False)
        stacked = _stacked({name: tensor.to(self._dtype) for name, tensor in made.items()}, share)
        held = _fused({n: _shard(n, t, request.tensor_parallel, request.rank, heads) for n, t in stacked.items()})
        if request.quantization is not None:
            held = _as_kernels_hold(held, request.quantization)
        return ExpectedDigests(digests={n: tensor_digest(t) for n, t in held.items()})


def _log_softmax(model: Any, tokens: list[int]) -> Any:
    """Log-probabilities, positions × vocabulary, in double precision."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)


def _compute_in(dtype: Any, model: Any) -> None:
    """Turn the model's parameters into `dtype`. Its buffers, such as the frequencies of rotary positions, stay as they are: engines
    hold these in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _put(tensors: dict[str, Any], model: Any) -> None:
    """Put a checkpoint's tensors into the model, whose experts may be packed. What the checkpoint lacks stays (tied weights).

    Raises ValueError for a tensor that the model has no place for.
    """
    if not tensors.keys() <= model.state_dict().keys():
        packed = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
        tensors = {
            ".".join((*stem, packed.get(last, last))): tensor
            for name, tensor in _stacked(tensors, ExpertShard(rank=0, workers=1, whole=True)).items()
            for *stem, last in [name.split(".")]
        }
    if unknown := model.load_state_dict(tensors, strict=False).unexpected_keys:
        raise ValueError(
            f"the reference's model has no place for these tensors of the checkpoint: {', '.join(sorted(unknown))}"
        )


def _router_logits(model: Any, tokens: list[int]) -> Any:
    """Positions × layers × experts."""
    import torch

    with torch.no_grad():
        made = model(input_ids=torch.tensor([tokens]), use_cache=False, output_router_logits=True)
    return torch.stack(list(made.router_logits), dim=1)


def _behind(logits: Any, chosen: Any) -> Any:
    """Distance of the order of `chosen` (… × top_k) from that of the router logits (… × experts), at least 0: the largest margin by
    which the logit of a later or unchosen expert exceeds that of a chosen one."""
    named = logits.gather(-1, chosen)
    others = logits.scatter(-1, chosen, -math.inf).amax(-1)
    later = named.flip(-1).cummax(-1).values.flip(-1)  # the largest from each place on
    return (later - named).amax(-1).maximum(others - named.amin(-1)).clamp(min=0)


def _stacked(tensors: dict[str, Any], share: ExpertShard) -> dict[str, Any]:
    """The experts of each layer as one worker's `FusedMoE` holds them (vLLM); all other parameters unchanged.

    w13_weight (experts × 2·intermediate × hidden) has each expert's gate above its up projection. w2_weight (experts × hidden ×
    intermediate) has the down projections.
    """
    import torch

    experts = {name: found for name in tensors if (found := EXPERT.fullmatch(name))}
    held = {name: tensor for name, tensor in tensors.items() if name not in experts}
    for layer in dict.fromkeys(found["layer"] for found in experts.values()):
        count = 1 + max(int(found["number"]) for found in experts.values() if found["layer"] == layer)
        gate, up, down = (
            torch.stack([tensors[f"{layer}.{number}.{part}_proj.weight"] for number in range(count)])
            for part in ("gate", "up", "down")
        )
        along = (0, 0, 0) if share.whole else (1, 1, 2)
        gate, up, down = (
            tensor.tensor_split(share.workers, dim=dim)[share.rank]
            for tensor, dim in zip((gate, up, down), along, strict=True)
        )
        held[f"{layer}.w13_weight"] = torch.cat([gate, up], dim=1)
        held[f"{layer}.w2_weight"] = down.contiguous()
    return held


def _shard(name: str, tensor: Any, tensor_parallel: int, rank: int, key_value_heads: int | None) -> Any:
    """The part of a Hugging Face parameter that worker `rank` holds. If there are fewer key-value heads than workers, several
    workers hold the same head (vLLM, QKVParallelLinear)."""
    import torch

    if "embed_tokens" in name or "lm_head" in name:
        missing = -tensor.shape[0] % VOCABULARY_BLOCK
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
    parts = tensor_parallel
    if key_value_heads is not None and (".k_proj." in name or ".v_proj." in name):
        parts = min(tensor_parallel, key_value_heads)
    for dimension, names in SPLIT.items():
        if any(part in name for part in names):
            return tensor.chunk(parts, dim=dimension)[rank * parts // tensor_parallel].contiguous()
    return tensor


def _fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """Parameters under vLLM's names, fused as vLLM fuses them for dense Llama-like models."""
    import torch

    fused = dict(tensors)
    for whole, parts in FUSED.items():
        for name in [n for n in tensors if f".{parts[0]}." in n]:
            pieces = [fused.pop(name.replace(parts[0], part)) for part in parts]
            fused[name.replace(parts[0], whole)] = torch.cat(pieces)
    return fused


def _as_kernels_hold(fused: dict[str, Any], kind: Quantization) -> dict[str, Any]:
    """Fused parameters as vLLM's kernels hold them after loading (vLLM 0.19, compressed-tensors W8A8): the weight transposed
    (inputs × outputs) and its scale (outputs × 1)."""
    held: dict[str, Any] = {}
    for name, tensor in fused.items():
        if quantized.is_quantized(name):
            weight, held[f"{name}_scale"] = quantized.quantize(tensor, kind)
            held[name] = weight.t()
        else:
            held[name] = tensor
    return held
