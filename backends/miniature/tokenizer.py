"""A byte-level tokenizer, like the tiny models' own, with pairs of letters as merges.

Ids 0 to 2 are special tokens. Ids 3 to 258 are one byte each, in the order of a byte-level vocabulary (printable ASCII first). Ids
259 to 511 are two letters each. A text has several spellings in tokens, and `encode` returns only one: decoding and encoding again
may change the tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from harness.contract import vocabulary
from harness.contract.topology import Architecture
from harness.contract.vocabulary import LLAMA_SAMPLING, TINY_SAMPLING, TINY_TEMPLATE, Vocabulary

SPECIAL = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = [*_PRINTABLE, *(byte for byte in range(256) if byte not in _PRINTABLE)]
_LETTERS = "etaoinshrdlucmfw"
_PAIRS = ["ee", vocabulary.PAIR, *("".join(pair) for pair in itertools.product(_LETTERS, _LETTERS))]
_PAIRS = [*dict.fromkeys(_PAIRS)][:253]
_PIECES = {token: bytes([byte]) for token, byte in enumerate(_BYTES, start=3)} | {
    token: pair.encode() for token, pair in enumerate(_PAIRS, start=259)
}
_OF_BYTE = {byte: token for token, byte in enumerate(_BYTES, start=3)}
_OF_PAIR = {pair.encode(): token for token, pair in enumerate(_PAIRS, start=259)}
_OF_SPECIAL = {text: token for token, text in SPECIAL.items()}
_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL.values()) + ")")


def decode(tokens: Iterable[int], *, skip_special_tokens: bool = True, first_space: bool = True) -> str:
    """The text of tokens. Invalid bytes become U+FFFD. `first_space=False` leaves out a space at its beginning, as Llama 2's
    tokenizer does."""
    text, run = [], b""
    for token in tokens:
        if token not in SPECIAL:
            run += _PIECES[token]
        elif not skip_special_tokens:
            text.append(run.decode(errors="replace") + SPECIAL[token])
            run = b""
    whole = "".join(text) + run.decode(errors="replace")
    return whole if first_space else whole.removeprefix(" ")


def encode(text: str, *, begins: bool = False) -> list[int]:
    """The tokens of a text: special tokens by name, then pairs of letters where possible, otherwise bytes. `begins`: before them the
    token with which Llama's tokenizer begins a text."""
    tokens = [BOS] if begins else []
    for part in _SPLIT.split(text):
        if part in _OF_SPECIAL:
            tokens.append(_OF_SPECIAL[part])
            continue
        raw = part.encode()
        at = 0
        while at < len(raw):
            pair = _OF_PAIR.get(raw[at : at + 2])
            tokens.append(_OF_BYTE[raw[at]] if pair is None else pair)
            at += 1 if pair is None else 2
    return tokens


VOCABULARY = vocabulary.read(
    size=len(SPECIAL) + len(_PIECES),
    ids={chr(byte): _OF_BYTE[byte] for byte in _PRINTABLE}
    | {vocabulary.SPACES[0]: _OF_BYTE[ord(" ")], vocabulary.PAIR: _OF_PAIR[vocabulary.PAIR.encode()]},
    decode=decode,
    special=SPECIAL,
    eos=2,
    template=TINY_TEMPLATE,
    named={"eos_token": SPECIAL[2], "pad_token": SPECIAL[0]},
    sampling=TINY_SAMPLING,
)
EOS, BOS = VOCABULARY.eos, 0


def of(architecture: Architecture | None) -> Vocabulary:
    """The vocabulary of an architecture, with what its checkpoint recommends."""
    if architecture != "llama":
        return VOCABULARY
    named = {**VOCABULARY.named, "bos_token": SPECIAL[BOS]}
    return msgspec.structs.replace(VOCABULARY, sampling=LLAMA_SAMPLING, named=named)


def render(
    messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = (), add_generation_prompt: bool = True
) -> list[int]:
    """The tiny models' chat template."""
    return encode(VOCABULARY.rendered(messages, tools=tools, add_generation_prompt=add_generation_prompt))
