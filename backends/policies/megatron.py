"""Converts a trainer's parameters to the layout of Megatron-core's ranks and back: TP2×PP2, tensors cut, fused and interleaved.

`to_ranks` and `from_ranks` are pure and exact inverses. They slice tensors and join them with a given function, so they work
on NumPy's arrays and PyTorch's tensors. The place of each parameter is data (`Rule`). This module has Megatron's layout, not its
code. `backends/policies/megatron_core.py` loads the layout into real Megatron-core models, and Megatron-Bridge exports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

Tensors = dict[str, Any]
Join = Callable[[list[Any], int], Any]
"""`numpy.concatenate` or `torch.cat`: takes tensors and the dimension along which to join them."""


class Rule(NamedTuple):
    """The place of one Megatron parameter. In names, `*` is the number of a layer."""

    name: str
    """Megatron's name; layers are numbered within their pipeline stage."""
    parts: tuple[str, ...]
    """Hugging Face's names of the parameters that Megatron fuses into it; layers are numbered within the model."""
    along: int | None = 0
    """Dimension along which the tensor-parallel ranks split it: 0 is column-parallel, 1 row-parallel. None: each has a copy."""
    groups: int = 1
    """Number of row groups in each part. The fused tensor has the first group of every part, then the second, and so on."""
    shares: tuple[int, ...] = (1,)
    """Relative number of rows that each part has in a group."""
    vocabulary: int | None = None
    """Number of rows that are tokens. Appended rows of zeros make the number divisible."""
    last: bool = False
    """True if a parameter outside of layers is on the last pipeline stage; otherwise it is on the first."""


class Place(NamedTuple):
    """One parameter of one layer on one pipeline stage."""

    rule: Rule
    layer: int
    """Number within the model; -1 outside of layers."""
    stage: int
    name: str
    parts: tuple[str, ...]


class Sharding(NamedTuple):
    """A model sharded over tensor_parallel × pipeline_parallel ranks.

    Tensor-parallel ranks are neighbours (Megatron-core, `initialize_model_parallel`: order "tp-cp-ep-dp-pp"). Every stage has the
    same number of layers (`get_num_layers_to_build`, without an uneven first or last stage).
    """

    rules: tuple[Rule, ...]
    layers: int
    tensor_parallel: int = 2
    pipeline_parallel: int = 2

    def places(self) -> Iterator[Place]:
        """All parameters of all stages. Raises ValueError if the stages cannot share the layers equally."""
        if self.layers % self.pipeline_parallel:
            raise ValueError(f"{self.layers} layers on {self.pipeline_parallel} pipeline stages")
        for rule in self.rules:
            if "*" not in rule.name:
                yield Place(rule, -1, self.pipeline_parallel - 1 if rule.last else 0, rule.name, rule.parts)
                continue
            for layer in range(self.layers):
                stage, local = divmod(layer, self.layers // self.pipeline_parallel)
                parts = tuple(part.replace("*", str(layer)) for part in rule.parts)
                yield Place(rule, layer, stage, rule.name.replace("*", str(local)), parts)

    def ranks_of(self, stage: int) -> range:
        return range(stage * self.tensor_parallel, (stage + 1) * self.tensor_parallel)


def llama_like(
    configuration: Mapping[str, Any], names: Collection[str], *, tensor_parallel: int = 2, pipeline_parallel: int = 2
) -> Sharding:
    """Sharding of a dense model with Llama's names (Llama, Qwen2, Qwen3). `configuration` is Hugging Face's config.json. `names`
    are the state dict's: they show whether it has biases, query and key norms, and a separate output layer.

    Sources: Megatron-Bridge, Qwen2Bridge and Qwen3Bridge (names), QKVMapping (query groups), GatedMLPMapping (each rank has its
    part of gate, then its part of up); Megatron-core, GPTModel (parameters of the first and the last stage), TransformerConfig
    (ValueError for query groups that are neither a multiple nor a divisor of the tensor-parallel ranks).
    """
    heads, layers = configuration["num_attention_heads"], configuration["num_hidden_layers"]
    tokens: int = configuration["vocab_size"]
    groups: int = configuration.get("num_key_value_heads") or heads
    if groups % tensor_parallel and tensor_parallel % groups:
        raise ValueError(
            f"{groups} query groups are no multiple and no divisor of {tensor_parallel} tensor-parallel ranks"
        )
    interleaved: dict[str, Any] = {"groups": groups, "shares": (heads // groups, 1, 1)}
    side_by_side: dict[str, Any] = {"groups": tensor_parallel, "shares": (1, 1)}
    embedding = ("model.embed_tokens.weight",)
    attention, mlp = "decoder.layers.*.self_attention", "decoder.layers.*.mlp"
    of_attention, of_mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    query, key, value = (f"{of_attention}.{which}_proj" for which in "qkv")
    every = (
        Rule("embedding.word_embeddings.weight", embedding, vocabulary=tokens),
        Rule(f"{attention}.linear_qkv.layer_norm_weight", ("model.layers.*.input_layernorm.weight",), None),
        Rule(f"{attention}.linear_qkv.weight", (f"{query}.weight", f"{key}.weight", f"{value}.weight"), **interleaved),
        Rule(f"{attention}.linear_proj.weight", (f"{of_attention}.o_proj.weight",), 1),
        Rule(f"{mlp}.linear_fc1.layer_norm_weight", ("model.layers.*.post_attention_layernorm.weight",), None),
        Rule(f"{mlp}.linear_fc1.weight", (f"{of_mlp}.gate_proj.weight", f"{of_mlp}.up_proj.weight"), **side_by_side),
        Rule(f"{mlp}.linear_fc2.weight", (f"{of_mlp}.down_proj.weight",), 1),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), None, last=True),
    )
    some = (
        Rule("output_layer.weight", ("lm_head.weight",), vocabulary=tokens, last=True),
        Rule(f"{attention}.linear_qkv.bias", (f"{query}.bias", f"{key}.bias", f"{value}.bias"), **interleaved),
        Rule(f"{attention}.q_layernorm.weight", (f"{of_attention}.q_norm.weight",), None),
        Rule(f"{attention}.k_layernorm.weight", (f"{of_attention}.k_norm.weight",), None),
    )
    given = tuple(rule for rule in some if rule.parts[0].replace("*", "0") in names)
    if "lm_head.weight" not in names and pipeline_parallel > 1:
        # Tied: a copy for the last stage.
        given += (Rule("output_layer.weight", embedding, vocabulary=tokens, last=True),)
    return Sharding((*given, *every), layers, tensor_parallel, pipeline_parallel)


def padded(vocabulary: int, tensor_parallel: int) -> int:
    """Rows of an embedding, padded to a multiple of `make_vocab_size_divisible_by` × ranks (Megatron-Bridge,
    `calculate_padded_vocab_size`). The first factor is the largest power of two up to 128 that divides the vocabulary."""
    multiple = gcd(vocabulary, 128) * tensor_parallel
    return -(-vocabulary // multiple) * multiple


def to_ranks(tensors: Mapping[str, Any], sharding: Sharding, join: Join) -> list[Tensors]:
    """Hugging Face's state dict → each rank's. Raises ValueError for a tensor that the ranks cannot share equally and for a
    parameter without a place, KeyError for a missing parameter."""
    ranks: list[Tensors] = [{} for _ in range(sharding.tensor_parallel * sharding.pipeline_parallel)]
    placed: set[str] = set()
    for rule, _, stage, name, parts in sharding.places():
        placed.update(parts)
        whole = _fused([tensors[part] for part in parts], rule, join)
        if rule.vocabulary is not None:
            missing = padded(rule.vocabulary, sharding.tensor_parallel) - rule.vocabulary
            whole = join([whole, *[whole[:1] * 0] * missing], 0)
        copies = sharding.tensor_parallel
        shards = [whole] * copies if rule.along is None else _cut(whole, rule.along, copies)
        for rank, shard in zip(sharding.ranks_of(stage), shards, strict=True):
            ranks[rank][name] = shard
    _nothing_left(set(tensors) - placed)
    return ranks


def from_ranks(ranks: Sequence[Mapping[str, Any]], sharding: Sharding, join: Join) -> Tensors:
    """Each rank's state dict → Hugging Face's. Raises KeyError for a parameter that a rank lacks, ValueError for one without a
    place. A parameter with two places (tied embeddings) is read from the place of its last rule."""
    tensors: Tensors = {}
    left = [set(rank) for rank in ranks]
    for rule, _, stage, name, parts in sharding.places():
        shards = [ranks[rank][name] for rank in sharding.ranks_of(stage)]
        whole = shards[0] if rule.along is None else join(shards, rule.along)
        tensors.update(zip(parts, _apart(whole[: rule.vocabulary], rule, join), strict=True))
        for rank in sharding.ranks_of(stage):
            left[rank].discard(name)
    _nothing_left(set().union(*left))
    return tensors


def _fused(parts: list[Any], rule: Rule, join: Join) -> Any:
    """Joins the parts' first groups, then their second groups, … (Megatron-core, SelfAttention.get_query_key_value_tensors:
    "weights are interleaved in the following manner: q1 q2 k1 v1 | q3 q4 k2 v2 | …")."""
    if len(parts) == 1:
        return parts[0]
    groups = zip(*(_cut(part, 0, rule.groups) for part in parts), strict=True)
    return join([piece for group in groups for piece in group], 0)


def _apart(whole: Any, rule: Rule, join: Join) -> list[Any]:
    """The parts of a fused tensor: the inverse of `_fused`."""
    if len(rule.parts) == 1:
        return [whole]
    period = sum(rule.shares)
    pieces = _cut(whole, 0, rule.groups * period)
    found, start = [], 0
    for share in rule.shares:
        found.append(join([piece for at, piece in enumerate(pieces) if start <= at % period < start + share], 0))
        start += share
    return found


def _cut(tensor: Any, along: int, count: int) -> list[Any]:
    """Cuts a tensor into `count` equal pieces. Raises ValueError if its size is not divisible."""
    size, over = divmod(tensor.shape[along], count)
    if over:
        raise ValueError(f"a tensor of {tuple(tensor.shape)} cannot be cut along dimension {along} into {count}")
    before = (slice(None),) * along
    return [tensor[(*before, slice(at * size, (at + 1) * size))] for at in range(count)]


def _nothing_left(names: set[str]) -> None:
    if names:
        raise ValueError(f"no place in Megatron's layout for {', '.join(sorted(names)[:3])}")
