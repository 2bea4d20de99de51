"""What a scenario is: one asynchronous test function, a promise, the abilities it needs and the checks that judge it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar, final

import msgspec

from harness.capability import Capability
from harness.checks.base import Check
from harness.topology import Placement, Quantization, Topology


@final
class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration beside a scenario's function. `name` is "module.function", the same on every stack."""

    name: str
    wave: int
    task: int
    """Task of the rollout plan (SkyRL #1014)."""
    promise: str
    needs: frozenset[Capability]
    checks: tuple[Check, ...]
    placements: frozenset[Placement]
    deadline_s: float
    source: str
    """The function's docstring: where the promise is written."""
    quantization: Quantization | None = None
    """Engines hold their weights so: a start of its own."""

    @property
    def spoils(self) -> bool:
        """Does it break the stack, so that the next one has to wait for a fresh start?"""
        return Capability.KILL_SERVER in self.needs

    def topologies(self, engines: int, placements: Iterable[Placement]) -> list[Topology]:
        """Where it is driven, of these placements."""
        return [
            Topology(engines=engines, placement=p, quantization=self.quantization)
            for p in placements
            if p in self.placements
        ]

    def belongs(self, topology: str) -> bool:
        """Is it driven in a topology of that name?"""
        return (
            Topology.placement_of(topology) in self.placements
            and Topology.quantization_of(topology) == self.quantization
        )


F = TypeVar("F", bound=Callable[..., Awaitable[None]])

ATTRIBUTE = "__scenario__"


def scenario(
    *,
    task: int,
    promise: str,
    checks: Iterable[Check],
    needs: Iterable[Capability] = (),
    placements: Iterable[Placement] = (Placement.DISAGGREGATED,),
    quantization: Quantization | None = None,
    deadline_s: float = 60.0,
) -> Callable[[F], F]:
    """Declare a test function as a scenario.

    `task` is the plan's task that it belongs to, `promise` one sentence, `checks` what judges its recording (at
    least one), `needs` the capabilities without which it is `missing`, `placements` where it is driven, `quantization`
    in which the engines are to hold their weights, `deadline_s` how long driving may take in all. The function's
    docstring names the source of the promise.

    Raises ValueError for a scenario without checks, docstring or placement: it could not go red.
    """
    judged_by = tuple(checks)
    placed = frozenset(placements)

    def declare(function: F) -> F:
        name = f"{function.__module__.rpartition('.')[2].removeprefix('test_')}.{function.__name__}"
        source = inspect.cleandoc(function.__doc__ or "")
        if not judged_by:
            raise ValueError(f"scenario {name} has no checks: it could not go red")
        if not source:
            raise ValueError(f"scenario {name} has no docstring: say where the promise is written")
        if not placed:
            raise ValueError(f"scenario {name} is driven in no placement")
        names = [check.name for check in judged_by]
        if len(set(names)) != len(names):
            raise ValueError(f"scenario {name} names a check twice: {names}")
        wave = int(function.__module__.split(".wave")[1][0]) if ".wave" in function.__module__ else 0
        setattr(
            function,
            ATTRIBUTE,
            Scenario(
                name=name,
                wave=wave,
                task=task,
                promise=promise,
                needs=frozenset(needs),
                checks=judged_by,
                placements=placed,
                deadline_s=deadline_s,
                source=source,
                quantization=quantization,
            ),
        )
        return function

    return declare


def declaration(function: Any) -> Scenario | None:
    """The scenario that a function was declared as, or None."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Scenario) else None
