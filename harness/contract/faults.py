"""A seeded fault: what is broken on purpose, which checks must catch it, and which must not.

The faults themselves live beside what they break (`backends/miniature/faults/`, `backends/taps/tap.py`); the kill matrix
(`harness/proving/prove.py`) drives scenarios under each and compares what turned red with what is said here.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Flag, auto
from typing import final

import msgspec

DRIVEN = "driven"
"""In place of a scenario's checks where it ended with a named error of the stack (a call that hung, a stack that died):
a fault may name it, and no fault has to."""


class Fact(Flag):
    """What a fault can falsify and a check can read."""

    ANSWERS = auto()
    """The tokens and rows that a caller gets back."""
    TEXT = auto()
    """The text of answers, and what is made from text."""
    LOGPROBS = auto()
    """The log-probabilities of answers."""
    POLICY = auto()
    """The weights in the workers, and which policy version answers come from."""
    ADAPTERS = auto()
    """Which LoRA adapter answers come from."""
    CHANCE = auto()
    """Random draws and their seeds."""
    PAUSES = auto()
    """When engines stand still, and what becomes of requests meanwhile."""
    ROUTES = auto()
    """Which server answers."""
    ERRORS = auto()
    """What a stack says about failures and its own health."""
    TOKENIZER = auto()
    """Token ids of a text, and back."""


NOTHING = Fact(0)


@final
class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One way to break a stack. Checks are named without their label ("tokens.greedy", not "tokens.greedy:late").

    `caught_by` are the checks that exist for it: each must turn red. Another check may turn red only if it reads a fact
    that the fault `corrupts`: any other red is a false alarm.
    """

    name: str
    """What it breaks, the same name on every stack: "session_moves"."""
    variant: str = ""
    """How: "one_server", "under_load", "second_time", "a_little", …"""
    breaks: str
    """One sentence for the report."""
    caught_by: frozenset[str]
    corrupts: Fact = NOTHING
    """Facts that become false for other checks as well. Nothing: only the checks in `caught_by` may turn red."""
    scenarios: frozenset[str] = frozenset()
    """Drive only these; empty is every scenario of the suite."""
    changes: frozenset[str] = frozenset()
    """Functions that behave otherwise under it, by their qualified names ("Engine.draw"): a scenario in which the correct stack calls
    none of them is the same under the fault, and is not driven. Empty: unknown, every scenario is driven."""

    @property
    def id(self) -> str:
        return f"{self.name}/{self.variant}" if self.variant else self.name


def by_id(faults: Iterable[Fault]) -> dict[str, Fault]:
    """id → fault. Raises ValueError for an id given twice and for a fault that nothing is to catch."""
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
