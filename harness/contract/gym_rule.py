"""What the gym environment of the scenarios does, as a pure function: the environment and the checks both ask it.

It knows no skyrl-gym, so that rewards and observations can be worked out again from what the engines made.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

ENV_CLASS = "rollout_parity_letters"
"""The name under which the environment is registered (`backends/skyrl/gym_env.py`)."""
LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
SPECIAL = re.compile(r"<\|?/?[a-z0-9_]+\|?>|\[/?[A-Z]+\]")
"""Special tokens as a text shows them: "<|im_end|>", "</s>", "<repo_name>", "[INST]"."""
LEVELS = 16
"""A reward is one of so many sixteenths above zero."""


class Step(NamedTuple):
    """What the environment says to an answer. The observation is a user's message, also after the last turn."""

    reward: float
    done: bool
    observation: str


def step(text: str, turn: int, extras: dict[str, Any], max_turns: int) -> Step:
    """The environment's answer to the policy's text of turn `turn`, counted from 1.

    `extras` may hold "turns", after so many it ends, and "until", letters of which any ends it. Only ASCII letters count, so
    that bytes which are no character make no difference, and those of special tokens only if "strict" is set: then a text
    that holds what it should not has another reward.
    """
    if not extras.get("strict"):
        text = SPECIAL.sub("", text)
    letters = [character for character in text if character in LETTERS]
    reward = (1 + sum(map(ord, letters)) % LEVELS) / LEVELS
    met = bool(set(extras.get("until") or "") & set(letters))
    done = met or turn >= min(max_turns, int(extras.get("turns") or max_turns))
    return Step(reward, done, f"turn {turn}: {len(letters)} letters. Go on.")
