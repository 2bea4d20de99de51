"""Scenarios get the vocabulary from the model, and everything that a model lacks has a name."""

from __future__ import annotations

import msgspec
import pytest

from backends.miniature import tokenizer
from fixtures.prompts import Prompts
from harness.contract.errors import Blame, ModelLacks
from harness.contract.vocabulary import BYTES, TINY, Vocabulary, read

PIECES = ["<s>", "</s>", "<0xE2>", "<0xFF>", *"ab", "the"]


def decode(ids: list[int]) -> str:
    return "".join("\N{REPLACEMENT CHARACTER}" if PIECES[token].startswith("<0x") else PIECES[token] for token in ids)


@pytest.fixture
def poor() -> Vocabulary:
    """A vocabulary of few characters, with a fallback to bytes."""
    ids = {piece: token for token, piece in enumerate(PIECES)}
    return read(size=7, ids=ids, decode=decode, special=[1, 0], eos=1, ends=[1, 0], template="", named={}, sampling={})


def test_the_miniature_has_the_vocabulary_of_the_tiny_models():
    assert tokenizer.VOCABULARY == TINY


def test_facts_of_a_vocabulary_with_a_fallback_to_bytes(poor: Vocabulary):
    assert (poor.special, poor.eos, poor.ends) == ((0, 1), 1, (0, 1))
    assert poor.characters == {"a": 4, "b": 5}
    assert poor.byte_ids == {0xE2: 2, 0xFF: 3}
    assert poor.ordinary == (2, 3, 4, 5, 6)
    assert poor.cut == 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda of: of.plain,
        lambda of: of.spelled("abc"),
        lambda of: of.some_special(3),
        lambda of: of.one_space,
        lambda of: Prompts("a", of).one(),
        lambda of: msgspec.structs.replace(of, byte_ids={}).parts,
        lambda of: msgspec.structs.replace(of, byte_ids={0xA1: 2}).cut,
    ],
)
def test_what_a_model_lacks_is_named_and_the_setups_business(poor: Vocabulary, ask):
    with pytest.raises(ModelLacks, match="the model has not") as raised:
        ask(poor)
    assert raised.value.blame == Blame.SETUP


def test_plain_text_is_spelled_and_read_back():
    assert TINY.text([3, 4, 96]) == '!"~'
    assert TINY.spelled('!"~') == [3, 4, 96]
    assert len(TINY.plain) == 94
    assert [TINY.byte_ids[byte] for byte in BYTES] == TINY.parts


def test_a_share_of_a_large_vocabulary_is_of_its_frequent_ids():
    large = msgspec.structs.replace(TINY, size=49152)
    assert TINY.scattered(range(100, 300)) == list(range(100, 300))
    assert len(large.scattered(range(100, 300))) == 8 * 200


def test_facts_travel_in_json():
    assert msgspec.json.decode(msgspec.json.encode(TINY), type=Vocabulary) == TINY


def test_a_template_is_rendered_with_a_prompt_to_answer():
    said = [{"role": "user", "content": "hi"}]
    assert TINY.rendered(said) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
