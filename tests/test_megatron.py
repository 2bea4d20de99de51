"""Megatron's layout: a small example by hand, and a lossless round trip for any shape."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.policies import megatron
from backends.policies.megatron import from_ranks, llama_like, padded, to_ranks

HEAD = 2
"""Rows per attention head."""


def configuration(*, heads=4, groups=2, layers=2, vocabulary=8):
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }


def state_dict(of, *, hidden=4, intermediate=4, head=HEAD, biases=True, norms=False, tied=False):
    """A Llama-like state dict of this configuration, in which all numbers differ."""
    queries, keys = of["num_attention_heads"] * head, of["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (of["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (of["vocab_size"], hidden)
    for layer in range(of["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for which, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{at}.self_attn.{which}_proj.weight"] = (rows, hidden)
            if biases:
                shapes[f"{at}.self_attn.{which}_proj.bias"] = (rows,)
            if norms and which != "v":
                shapes[f"{at}.self_attn.{which}_norm.weight"] = (head,)
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (hidden, queries),
            f"{at}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{at}.mlp.up_proj.weight": (intermediate, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, intermediate),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    tensors, start = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.float64).reshape(shape)
        start += size
    return tensors


# --- by hand ------------------------------------------------------------------------------------------------------------


def rows(letter, count):
    """A column of names: "q0", "q1", …"""
    return np.array([[f"{letter}{row}"] for row in range(count)])


def by_hand(ranks, name):
    return [rank[name][:, 0].tolist() if name in rank else None for rank in ranks]


@pytest.fixture
def ranks():
    """Four heads of one row in two query groups, one layer per stage, TP2×PP2."""
    of = configuration(heads=4, groups=2, layers=2, vocabulary=3)
    tensors = {
        "model.embed_tokens.weight": rows("e", 3),
        "lm_head.weight": rows("o", 3),
        "model.norm.weight": rows("n", 1),
    }
    for layer, (q, k, v, gate, up) in enumerate((("q", "k", "v", "g", "u"), ("Q", "K", "V", "G", "U"))):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": rows(q, 4),
            f"{at}.self_attn.k_proj.weight": rows(k, 2),
            f"{at}.self_attn.v_proj.weight": rows(v, 2),
            f"{at}.self_attn.o_proj.weight": rows("p", 4).T,
            f"{at}.mlp.gate_proj.weight": rows(gate, 4),
            f"{at}.mlp.up_proj.weight": rows(up, 4),
            f"{at}.mlp.down_proj.weight": rows("d", 4).T,
            f"{at}.input_layernorm.weight": rows("a", 1),
            f"{at}.post_attention_layernorm.weight": rows("b", 1),
        }
    numbers = {name: np.vectorize(code)(tensor) for name, tensor in tensors.items()}
    made = to_ranks(numbers, llama_like(of, numbers), np.concatenate)
    return [{name: np.vectorize(text, otypes=[object])(tensor) for name, tensor in rank.items()} for rank in made]


def code(name):
    """Encodes a name as a number, because padding is zero."""
    return ord(name[0]) * 10 + int(name[1:])


def text(number):
    return f"{chr(number // 10)}{number % 10}" if number else "-"


def test_query_groups_are_interleaved(ranks):
    assert by_hand(ranks, "decoder.layers.0.self_attention.linear_qkv.weight") == [
        ["q0", "q1", "k0", "v0"],
        ["q2", "q3", "k1", "v1"],
        ["Q0", "Q1", "K0", "V0"],
        ["Q2", "Q3", "K1", "V1"],
    ]


def test_gate_and_up_are_fused_within_a_rank(ranks):
    assert by_hand(ranks, "decoder.layers.0.mlp.linear_fc1.weight") == [
        ["g0", "g1", "u0", "u1"],
        ["g2", "g3", "u2", "u3"],
        ["G0", "G1", "U0", "U1"],
        ["G2", "G3", "U2", "U3"],
    ]


def test_what_is_multiplied_second_is_cut_along_its_columns(ranks):
    assert [rank["decoder.layers.0.self_attention.linear_proj.weight"].tolist() for rank in ranks[:2]] == [
        [["p0", "p1"]],
        [["p2", "p3"]],
    ]
    assert [rank["decoder.layers.0.mlp.linear_fc2.weight"].tolist() for rank in ranks[:2]] == [
        [["d0", "d1"]],
        [["d2", "d3"]],
    ]


def test_the_vocabulary_is_padded_and_lies_on_the_outer_stages(ranks):
    assert by_hand(ranks, "embedding.word_embeddings.weight") == [["e0", "e1"], ["e2", "-"], None, None]
    assert by_hand(ranks, "output_layer.weight") == [None, None, ["o0", "o1"], ["o2", "-"]]
    assert by_hand(ranks, "decoder.final_layernorm.weight") == [None, None, ["n0"], ["n0"]]


def test_layers_are_numbered_within_their_stage(ranks):
    assert not any("layers.1." in name for rank in ranks for name in rank)


def test_every_rank_has_the_norms_whole(ranks):
    assert by_hand(ranks, "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight") == [["a0"]] * 4
    assert by_hand(ranks, "decoder.layers.0.mlp.linear_fc1.layer_norm_weight") == [["b0"]] * 4


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "rows"), [(512, 2, 512), (513, 2, 514), (514, 4, 520), (384, 2, 512), (7, 1, 7), (1, 4, 4)]
)
def test_a_vocabulary_is_padded_as_megatron_bridge_does(vocabulary, ranks, rows):
    assert padded(vocabulary, ranks) == rows


# --- any shape ----------------------------------------------------------------------------------------------------------


@st.composite
def models(draw):
    """A state dict and its sharding. Query groups are a multiple or a divisor of the ranks, as Megatron-core requires."""
    tensor_parallel, stages = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    each = draw(st.integers(1, 3)) * max(1, tensor_parallel // groups)
    of = configuration(
        heads=groups * each, groups=groups, layers=stages * draw(st.integers(1, 2)), vocabulary=draw(st.integers(1, 20))
    )
    tensors = state_dict(
        of,
        hidden=draw(st.integers(1, 3)),
        intermediate=draw(st.integers(1, 3)) * tensor_parallel,
        biases=draw(st.booleans()),
        norms=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    return tensors, llama_like(of, tensors, tensor_parallel=tensor_parallel, pipeline_parallel=stages)


@given(models())
def test_there_and_back_is_exact(model):
    tensors, sharding = model
    again = from_ranks(to_ranks(tensors, sharding, np.concatenate), sharding, np.concatenate)
    assert sorted(again) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor, err_msg=name, strict=True)


COPIED = ("norm_weight", "norm.weight")


@given(models())
def test_each_rank_has_its_share(model):
    """A rank has 1/TP of every tensor except the norms, so a stage's ranks hold each tensor once. Two stages share only layers with
    the same number and tied embeddings."""
    tensors, sharding = model
    ranks = to_ranks(tensors, sharding, np.concatenate)
    size = sharding.tensor_parallel
    assert len(ranks) == size * sharding.pipeline_parallel
    held = 0
    for stage in range(sharding.pipeline_parallel):
        of_stage = [ranks[rank] for rank in sharding.ranks_of(stage)]
        for name, first in of_stage[0].items():
            assert {rank[name].shape for rank in of_stage} == {first.shape}
            held += first.size if name.endswith(COPIED) else first.size * size
        assert {frozenset(rank) for rank in of_stage} == {frozenset(of_stage[0])}
    vocabulary, hidden = tensors["model.embed_tokens.weight"].shape
    spare = (padded(vocabulary, size) - vocabulary) * hidden
    copied = (
        padded(vocabulary, size) * hidden if "lm_head.weight" not in tensors and sharding.pipeline_parallel > 1 else 0
    )
    embeddings = 1 + ("lm_head.weight" in tensors)
    assert held == sum(tensor.size for tensor in tensors.values()) + spare * embeddings + copied


@given(models())
def test_layers_of_a_stage_start_at_zero(model):
    tensors, sharding = model
    each = sharding.layers // sharding.pipeline_parallel
    for rank in to_ranks(tensors, sharding, np.concatenate):
        assert {int(name.split(".")[2]) for name in rank if ".layers." in name} == set(range(each))


@given(st.integers(1, 300), st.sampled_from([1, 2, 4, 8]))
def test_padding_is_enough_and_not_more(vocabulary, ranks):
    assert padded(vocabulary, ranks) % (gcd(vocabulary, 128) * ranks) == 0
    assert 0 <= padded(vocabulary, ranks) - vocabulary < 128 * ranks


# --- what does not fit ----------------------------------------------------------------------------------------------------


def test_a_parameter_without_a_place_is_refused():
    of = configuration()
    tensors = state_dict(of) | {"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((2, 2))}
    with pytest.raises(ValueError, match=r"no place .* for model\.layers\.0\.mlp\.experts"):
        to_ranks(tensors, llama_like(of, tensors), np.concatenate)


def test_a_parameter_that_is_missing_is_refused():
    of = configuration()
    tensors = state_dict(of)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(KeyError, match="o_proj"):
        to_ranks(tensors, llama_like(of, tensors), np.concatenate)


def test_a_rank_that_holds_more_or_less_is_refused():
    of = configuration()
    tensors = state_dict(of)
    sharding = llama_like(of, tensors)
    ranks = to_ranks(tensors, sharding, np.concatenate)
    with pytest.raises(ValueError, match="no place"):
        from_ranks(
            [{**ranks[0], "decoder.layers.1.mlp.linear_fc2.weight": np.zeros(1)}, *ranks[1:]], sharding, np.concatenate
        )
    del ranks[3]["output_layer.weight"]
    with pytest.raises(KeyError, match="output_layer"):
        from_ranks(ranks, sharding, np.concatenate)


@pytest.mark.parametrize(
    ("changed", "more", "says"),
    [
        ({"layers": 3}, {}, "3 layers on 2 pipeline stages"),
        ({"heads": 3, "groups": 3}, {}, "3 query groups are no multiple and no divisor of 2"),
        ({}, {"intermediate": 3}, "cannot be cut along dimension 0 into 2"),
        ({"heads": 1, "groups": 1}, {"intermediate": 2, "head": 1}, "cannot be cut along dimension 0 into 2"),
    ],
)
def test_what_cannot_be_shared_equally_is_refused(changed, more, says):
    of = configuration(**changed)
    tensors = state_dict(of, **more)
    with pytest.raises(ValueError, match=says):
        to_ranks(tensors, llama_like(of, tensors), np.concatenate)


def test_the_module_needs_no_torch_to_be_imported():
    assert "torch" not in vars(megatron)
