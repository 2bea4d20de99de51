"""Tokens and text: one character a token, special tokens by name. Ids 3 to 96 are the printable ASCII characters."""

from __future__ import annotations

from collections.abc import Iterable

from fixtures.prompts import rendered

SPECIAL = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}


def decode(tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """One character a token, "!" to "~" for 3 to 96 as in the tiny models; special tokens by name or not at all."""
    return "".join(("" if skip_special_tokens else SPECIAL[t]) if t in SPECIAL else chr(t + _shift(t)) for t in tokens)


def _shift(token: int) -> int:
    """From token id to code point: printable ASCII first, a plane nobody types for other ids, then everything else."""
    return 30 if token < 97 else 0x10000 if token < 1000 else -1000


def _token(character: str) -> int:
    point = ord(character)
    if 33 <= point < 127:
        return point - 30
    return point - 0x10000 if 0x10000 + 97 <= point < 0x10000 + 1000 else point + 1000


def encode(text: str) -> list[int]:
    """The inverse of `decode(…, skip_special_tokens=False)`."""
    tokens: list[int] = []
    while text:
        for token, name in SPECIAL.items():
            if text.startswith(name):
                tokens.append(token)
                text = text.removeprefix(name)
                break
        else:
            tokens.append(_token(text[0]))
            text = text[1:]
    return tokens


def render(messages: list[dict[str, str]]) -> list[int]:
    """The tiny models' chat template, with the generation prompt."""
    return encode(rendered(messages))
