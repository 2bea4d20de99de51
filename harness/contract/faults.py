"""A seeded fault: what is broken on purpose, which checks must catch it, and which must not.

The faults themselves live beside what they break (`backends/miniature/faults/`, `backends/taps/tap.py`); the kill matrix
(`harness/proving/prove.py`) drives scenarios under each fault and compares the red checks with its declaration.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Flag, auto
from typing import final

import msgspec

DRIVEN = "driven"
"""Stands for a scenario's checks if a named error of the stack ended it (a call that hung, a stack that died). A fault may
name it in `caught_by` but need not."""


class Fact(Flag):
    """What a fault can falsify and a check can read."""

    ANSWERS = auto()
    """The tokens and rows that a caller gets back."""
    TEXT = auto()
    """The text of answers, and data derived from text."""
    LOGPROBS = auto()
    """The log-probabilities of answers."""
    POLICY = auto()
    """The workers' weights, and the policy version behind each answer."""
    ADAPTERS = auto()
    """The LoRA adapter behind each answer."""
    CHANCE = auto()
    """Random draws and their seeds."""
    PAUSES = auto()
    """When engines stop, and what happens to requests meanwhile."""
    ROUTES = auto()
    """Which server answers."""
    ERRORS = auto()
    """A stack's reports of failures and of its own health."""
    TOKENIZER = auto()
    """Token ids of a text, and back."""


NOTHING = Fact(0)
ROWS = Fact.ANSWERS | Fact.TEXT | Fact.LOGPROBS | Fact.CHANCE
"""What is false about a row that is another one's, or that was changed on the way."""


@final
class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One way to break a stack. Checks are named without their label ("tokens.greedy", not "tokens.greedy:late").

    Each check in `caught_by` must turn red. Another check may turn red only if it reads a fact that the fault `corrupts`:
    any other red is a false alarm.
    """

    name: str
    """What it breaks, with the same name on every stack: "session_moves"."""
    variant: str = ""
    """How it breaks: "one_server", "under_load", "second_time", "a_little", …"""
    breaks: str
    """One sentence for the report."""
    caught_by: frozenset[str]
    corrupts: Fact = NOTHING
    """Facts that become false for other checks as well. If `NOTHING`, only the checks in `caught_by` may turn red."""
    exact: bool = False
    """True if it is smaller than what rounding does in 16 bits: it is driven in float32 only, and the matrix names it otherwise."""
    scenarios: frozenset[str] = frozenset()
    """Drive only these scenarios; if empty, drive all of the suite."""
    changes: frozenset[str] = frozenset()
    """Qualified names of the functions that it changes ("Engine.draw"), or the sampling parameters that it ignores
    ("sampling_params.top_k"). If it acts like the correct stack until a certain function is called or parameter given, these are
    named instead. A scenario in which the correct stack meets none of them is not driven: the fault cannot change it. If empty, they
    are unknown and every scenario is driven."""

    @property
    def id(self) -> str:
        return f"{self.name}/{self.variant}" if self.variant else self.name


def by_id(faults: Iterable[Fault]) -> dict[str, Fault]:
    """id → fault. Raises ValueError for a duplicate id and for a fault with an empty `caught_by`."""
    found: dict[str, Fault] = {}
    for fault in faults:
        if fault.id in found:
            raise ValueError(f"two faults are called {fault.id}")
        if not fault.caught_by:
            raise ValueError(f"fault {fault.id} names no check that must catch it")
        found[fault.id] = fault
    return found


def family(check: str) -> str:
    """The name of a check without its label: "tokens.greedy:late" → "tokens.greedy"."""
    return check.partition(":")[0]
