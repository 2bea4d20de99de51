"""The rule of the scenarios' gym environment, as a pure function that the environment and the checks share.

It does not import skyrl-gym, so the checks can recompute rewards and observations from the engines' output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ENV_CLASS = "rollout_parity_letters"
"""The name under which the environment is registered (`backends/skyrl/gym_env.py`)."""
LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
SPECIAL = re.compile(r"<\|?/?[a-z0-9_]+\|?>|\[/?[A-Z]+\]")
"""Special tokens as they appear in text: "<|im_end|>", "</s>", "<repo_name>", "[INST]"."""
LEVELS = 16
"""Number of possible rewards: 1/16, 2/16, … 1."""
CHAT_TEMPLATE = "qwen3_with_thinking"
"""The chat template of SkyRL's own that `pieces` knows (SkyRL, CUSTOM_CHAT_TEMPLATES)."""


class Step(NamedTuple):
    """The environment's reply to an answer. The observation is a user message, also after the last turn."""

    reward: float
    done: bool
    observation: str


def step(text: str, turn: int, extras: dict[str, Any], max_turns: int) -> Step:
    """The environment's reply to the policy's text of turn `turn`, counted from 1.

    `extras` may hold "turns" (number of turns), "until" (letters; any of them ends the trajectory) and "fails" (a turn that raises
    RuntimeError). Only ASCII letters
    count, so invalid bytes make no difference. Letters of special tokens count only if "strict" is set: an unwanted special
    token then changes the reward.
    """
    if extras.get("fails") == turn:
        raise RuntimeError(f"the environment breaks in turn {turn}")
    if not extras.get("strict"):
        text = SPECIAL.sub("", text)
    letters = [character for character in text if character in LETTERS]
    reward = (1 + sum(map(ord, letters)) % LEVELS) / LEVELS
    met = bool(set(extras.get("until") or "") & set(letters))
    done = met or turn >= min(max_turns, int(extras.get("turns") or max_turns))
    return Step(reward, done, f"turn {turn}: {len(letters)} letters. Go on.")


def pieces(messages: Sequence[dict[str, str]]) -> Iterator[tuple[str, bool]]:
    """The text of messages under `CHAT_TEMPLATE`, piece by piece; True for a piece that the policy is trained on.

    The template has no generation prompt.
    """
    for message in messages:
        start, rest = f"<|im_start|>{message['role']}\n", f"{message['content']}<|im_end|>"
        if message["role"] == "assistant":
            yield from ((start, False), (rest, True), ("\n", False))
        else:
            yield f"{start}{rest}\n", False


def templated(messages: Sequence[dict[str, str]]) -> str:
    """The text of messages under `CHAT_TEMPLATE`."""
    return "".join(text for text, _ in pieces(messages))
