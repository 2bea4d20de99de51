"""In which order a run asks the reference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.records.reference import EncodeRequest, NextRequest
from harness.running.session import _longest_first


def test_questions_about_the_same_weights_are_asked_together():
    queries = [NextRequest(version=version, prompt=[row]) for row in range(3) for version in (0, 1)]
    assert [query.version for query in _longest_first(queries)] == [1, 1, 1, 0, 0, 0]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=20))
def test_a_prompt_is_asked_right_before_its_own_beginnings(prompts):
    other = EncodeRequest(text="first", add_special_tokens=False)
    queries = [*(NextRequest(version=1, prompt=prompt) for prompt in prompts), other]
    ordered = _longest_first(queries)
    assert ordered[0] == other
    assert sorted(map(repr, ordered)) == sorted(map(repr, queries))
    read: list[int] = []
    passes = []
    for query in ordered[1:]:
        if read[: len(query.prompt)] != query.prompt:
            read = query.prompt
            passes.append(read)
    longest = {
        tuple(one) for one in prompts if not any(more[: len(one)] == one and len(more) > len(one) for more in prompts)
    }
    assert sorted(map(tuple, passes)) == sorted(longest)
