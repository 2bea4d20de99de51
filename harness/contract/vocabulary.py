"""What scenarios may know about a model's vocabulary, from its own tokenizer, configuration and chat template.

The oracle reads it once per model (`read`). Every recording's header keeps it. Scenarios find it as `stack.vocabulary`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from harness.contract.errors import ModelLacks
from harness.contract.messages import Message

TINY_SIZE = 512
"""Number of ids of the tiny models (`fixtures/models.py`)."""
TINY_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{t | tojson}}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{m['role']}}\n"
    "{% if m['reasoning_content'] %}<think>{{m['reasoning_content']}}</think>{% endif %}{{m['content'] or ''}}"
    "{% for c in m['tool_calls'] or [] %}<call>{{c['function']['name']}} {{c['function']['arguments'] | tojson}}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template of the tiny models. It shows tools, their calls and earlier reasoning, as templates of models for agents do."""
TINY_SAMPLING = {"temperature": 0.7}
"""Sampling parameters that the tiny models recommend, as checkpoints for chats do. Others would reshape requests that are not about
them: a caller who names the temperature rarely names the rest."""
LLAMA_SAMPLING = {**TINY_SAMPLING, "max_tokens": 12}
"""Sampling parameters that the tiny Llama recommends: it has a length, which would cut chats of other scenarios."""
RECOMMENDED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Key of a generation_config.json → the sampling parameter that vLLM takes from it (vLLM, ModelConfig.get_diff_sampling_param)."""
SPACES = ("Ġ", "▁")
"""How vocabularies spell a space: byte-level ones, and those of SentencePiece."""
PRINTABLE = range(ord("!"), ord("~") + 1)
BYTES = (*range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes beyond ASCII that a byte-level vocabulary shows as the Latin-1 character of the same number."""
PAIR = "in"
"""Two letters that most vocabularies have as one token."""
LEAD = 0xC2
"""No byte from this one on ends a character (UTF-8)."""
SCATTER = 512
FREQUENT = 4096
"""Most answers contain ids below this one: vocabularies number their pieces by frequency."""


class Vocabulary(Message, frozen=True, kw_only=True, dict=True):
    """A model's token ids by kind. Ids are ascending."""

    size: int
    """Number of ids."""
    special: tuple[int, ...]
    eos: int
    """The id that ends a sequence."""
    ends: tuple[int, ...]
    """All ids that end an answer: `eos`, and those that the model's generation configuration adds."""
    characters: dict[str, int]
    """Printable ASCII character → the id whose text is that character alone, in the order of the characters."""
    byte_ids: dict[int, int]
    """Byte of `BYTES` → the id that is that byte alone, in the order of the bytes."""
    pair: int | None = None
    """The id whose text is `PAIR`; None if there is none."""
    space: int | None = None
    """The id of one space, None if there is none. Llama 2's tokenizer leaves it out at the beginning of a text."""
    cleans: bool = False
    """True if the checkpoint asks for a text without the spaces before punctuation (`clean_up_tokenization_spaces`)."""
    template: str
    """The chat template (Jinja)."""
    named: dict[str, str]
    """A template's variable for a special token → its text ("eos_token": "<|im_end|>")."""
    sampling: dict[str, float] = msgspec.field(default_factory=dict)
    """The sampling parameters of the checkpoint's generation_config.json, by vLLM's names."""

    @cached_property
    def ordinary(self) -> tuple[int, ...]:
        """All ids that are not special."""
        special = set(self.special)
        return tuple(token for token in range(self.size) if token not in special)

    @cached_property
    def plain(self) -> list[int]:
        """Ids of one printable ASCII character each. Raises ModelLacks if fewer than half of the characters have one."""
        if 2 * len(self.characters) < len(PRINTABLE):
            raise ModelLacks("tokens of one character each")
        return list(self.characters.values())

    @property
    def defaults(self) -> dict[str, float]:
        """The sampling parameters that the checkpoint recommends. Raises ModelLacks if there are none."""
        if not self.sampling:
            raise ModelLacks("sampling parameters in its generation_config.json")
        return self.sampling

    @property
    def parts(self) -> list[int]:
        """Ids of one byte each, which are parts of characters. Raises ModelLacks if there are none."""
        if not self.byte_ids:
            raise ModelLacks("tokens of one byte each")
        return list(self.byte_ids.values())

    @property
    def cut(self) -> int:
        """An id that cannot end a text: the first byte of a character. Raises ModelLacks if there is none."""
        leading = [token for byte, token in self.byte_ids.items() if byte >= LEAD]
        if not leading:
            raise ModelLacks("a token that is the first byte of a character")
        return leading[-1]

    @property
    def two_letters(self) -> int:
        """The id whose text is `PAIR`. Raises ModelLacks if there is none."""
        if self.pair is None:
            raise ModelLacks(f"a token for {PAIR!r}")
        return self.pair

    @property
    def one_space(self) -> int:
        """The id of one space. Raises ModelLacks if there is none."""
        if self.space is None:
            raise ModelLacks("a token of one space")
        return self.space

    def some_special(self, count: int) -> list[int]:
        """`count` special ids, including `eos`. Raises ModelLacks if there are fewer."""
        others = [token for token in self.special if token != self.eos]
        if len(others) < count - 1:
            raise ModelLacks(f"{count} special tokens")
        return sorted([*others[: count - 1], self.eos])

    def scattered(self, remainders: range) -> list[int]:
        """Frequent ordinary ids whose remainder modulo 512 is in `remainders`. Most answers contain some of them."""
        return [token for token in self.ordinary if token < FREQUENT and token % SCATTER in remainders]

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of ids of `plain`."""
        return "".join(self._character[token] for token in token_ids)

    def spelled(self, text: str) -> list[int]:
        """The ids of `plain` that spell a text; a tokenizer may choose other ids. Raises ModelLacks for other characters."""
        if lacking := set(text) - self.characters.keys():
            raise ModelLacks(f"tokens of one character each for {' '.join(sorted(lacking))}")
        return [self.characters[character] for character in text]

    def rendered(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation, and the tools that it offers, rendered by the chat template."""
        asked = {"messages": conversation, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return str(_compiled(self.template).render(**asked, **self.named))

    @cached_property
    def _character(self) -> dict[int, str]:
        return {token: character for character, token in self.characters.items()}


@lru_cache
def _compiled(template: str) -> Any:
    """Compile a template as Transformers does."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # keys keep their order
    return environment.from_string(template)


def read(
    *,
    size: int,
    ids: Mapping[str, int],
    decode: Callable[[list[int]], str],
    special: Iterable[int],
    eos: int,
    ends: Iterable[int] = (),
    template: str,
    named: Mapping[str, str],
    sampling: Mapping[str, float],
    cleans: bool = False,
) -> Vocabulary:
    """The facts of a tokenizer. `ids` maps the vocabulary's own spelling of its pieces to their ids, `decode` gives their text.

    Byte-level vocabularies spell a byte as a character; byte-fallback vocabularies spell it as "<0xFF>".
    """

    def alone(spellings: Iterable[str], text: str) -> int | None:
        found = (ids[spelling] for spelling in spellings if spelling in ids)
        return next((token for token in found if decode([token]) == text), None)

    characters = {chr(code): alone([chr(code)], chr(code)) for code in PRINTABLE}
    parts = {byte: alone([chr(byte), f"<0x{byte:02X}>"], "\N{REPLACEMENT CHARACTER}") for byte in BYTES}
    return Vocabulary(
        size=size,
        special=tuple(sorted(special)),
        eos=eos,
        ends=tuple(sorted({eos, *ends})),
        characters={character: token for character, token in characters.items() if token is not None},
        byte_ids={byte: token for byte, token in parts.items() if token is not None},
        pair=alone([PAIR], PAIR),
        space=next((ids[spelling] for spelling in SPACES if spelling in ids), None),
        cleans=cleans,
        template=template,
        named=dict(named),
        sampling=dict(sampling),
    )


TINY = Vocabulary(
    size=TINY_SIZE,
    special=(0, 1, 2),
    eos=2,
    ends=(2,),
    characters={chr(code): token for token, code in enumerate(PRINTABLE, start=3)},
    byte_ids={byte: token for token, byte in enumerate(BYTES, start=3 + len(PRINTABLE))},
    pair=260,
    space=223,
    template=TINY_TEMPLATE,
    named={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    sampling=TINY_SAMPLING,
)
"""The tiny models' vocabulary."""
