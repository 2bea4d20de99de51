"""Prompts are the same for every stack, and no two scenarios share one."""

from __future__ import annotations

import pytest

from fixtures.prompts import Prompts
from harness.contract.messages import MAX_MODEL_LEN


def everything(prompts: Prompts) -> list[list[int]]:
    return [*prompts.unique(8, 4), *prompts.unique(8, 4), *prompts.ragged(64), *prompts.long(4), prompts.over_long()]


def test_another_seed_gives_other_prompts_and_none_gives_those_of_before():
    assert everything(Prompts("a", seed=0)) == everything(Prompts("a"))
    assert not set(map(tuple, everything(Prompts("a", seed=1)))) & set(map(tuple, everything(Prompts("a"))))


def test_the_same_scenario_gets_the_same_prompts():
    assert everything(Prompts("a")) == everything(Prompts("a"))
    assert Prompts("a").conversations(4) == Prompts("a").conversations(4)


def test_no_prompt_comes_twice_within_or_across_scenarios():
    given = [tuple(p) for name in "abc" for p in everything(Prompts(name))]
    assert len(set(given)) == len(given)
    texts = [t for name in "abc" for prompts in [Prompts(name)] for t in prompts.texts(8) + prompts.texts(8)]
    assert len(set(texts)) == len(texts)


def test_order_of_calls_to_other_methods_does_not_matter():
    first, second = Prompts("a"), Prompts("a")
    first.long(2)
    assert first.unique(3) == second.unique(3)


def test_a_case_has_its_prompts_whichever_others_are_asked():
    first, second = Prompts("a", seed=3), Prompts("a", seed=3)
    given = [tuple(p) for case in ("x: null", "y: null") for p in everything(first.of(case))]
    assert len(set(given)) == len(given)
    assert everything(second.of("y: null")) == [list(p) for p in given[len(given) // 2 :]]
    assert not set(given) & {tuple(p) for p in everything(first)}


def test_a_case_that_comes_twice_has_other_prompts_each_time():
    prompts = Prompts("a")
    assert prompts.of("x").unique(3) != prompts.of("x").unique(3)


def test_only_ordinary_tokens_and_lengths_as_asked():
    assert all(2 < token < 512 for prompt in everything(Prompts("a")) for token in prompt)
    lengths = {len(p) for p in Prompts("a").ragged(64)}
    assert min(lengths) >= 3
    assert max(lengths) <= 60
    assert len(lengths) > 20
    assert len(Prompts("a").over_long()) > MAX_MODEL_LEN


def test_running_out_of_prompts_is_an_error_and_no_repetition():
    with pytest.raises(ValueError, match="no fresh prompt"):
        Prompts("a").unique(100, 1)


def test_conversations_end_with_the_user():
    for conversation in Prompts("a").conversations(16):
        assert [m["role"] for m in conversation][::2] == ["user"] * ((len(conversation) + 1) // 2)
        assert conversation[-1]["role"] == "user"
