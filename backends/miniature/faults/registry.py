"""Registers the miniature's faults. A fault is a part that replaces the one it inherits from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import getattr_static
from types import FunctionType
from typing import Any, TypeVar

import msgspec

from backends.miniature.client import Client, RetryingClient
from backends.miniature.endpoint import Endpoint
from backends.miniature.engine import Engine
from backends.miniature.generator import Generator
from backends.miniature.interface import Interface
from backends.miniature.launcher import Launcher
from backends.miniature.router import Router
from backends.miniature.runs import Run
from backends.miniature.staleness import StalenessManager
from backends.miniature.trainer import Trainer
from harness.contract.faults import NOTHING, Fact, Fault

Part = (
    type[Engine]
    | type[Router]
    | type[Client]
    | type[Interface]
    | type[Trainer]
    | type[Generator]
    | type[Endpoint]
    | type[StalenessManager]
    | type[Run]
    | type[Launcher]
)
T = TypeVar("T", bound=Part)

FAULTS: list[Fault] = []
RETRY_FAULTS: list[Fault] = []
_PARTS: dict[str, Part] = {}

ONE = "server-1"
"""The server that one-server variants break."""
MANY = 6
"""Number of requests that count as load on a server."""

REFUSED = frozenset({"BadRequest.__init__"})
"""`Fault.changes` of faults that are correct until a request is refused."""
PAUSED = frozenset({"Engine.pause_generation"})
"""The same, until a pause."""
RECOMPUTED = frozenset({"Engine.recompute"})
"""The same, until running requests lose their cache."""


def seeded(
    name: str,
    variant: str = "",
    *,
    caught_by: Iterable[str],
    corrupts: Fact = NOTHING,
    changes: frozenset[str] = frozenset(),
) -> Callable[[T], T]:
    """Register a part as a fault; its docstring says what breaks. A `RetryingClient` breaks the miniature that retries.

    `changes` is as in `Fault`; if empty, it is the functions that the part replaces.
    """

    def register(part: T) -> T:
        fault = Fault(
            name=name,
            variant=variant,
            breaks=" ".join((part.__doc__ or "").split()),
            caught_by=frozenset(caught_by),
            corrupts=corrupts,
            changes=changes or _changes(part),
        )
        (RETRY_FAULTS if issubclass(part, RetryingClient) else FAULTS).append(fault)
        _PARTS[fault.id] = part
        return part

    return register


def registered(name: str, part: T) -> T:
    """Make a part known that breaks no promise, so that `parts` finds it."""
    _PARTS[name] = part
    return part


def _changes(part: Part) -> frozenset[str]:
    """Functions of the correct part that the fault replaces. Empty if it changes anything else, such as the constructor."""
    correct = next(base for base in part.__mro__ if not base.__module__.startswith(__package__))
    own = [item for base in part.__mro__[: part.__mro__.index(correct)] for item in vars(base).items()]
    replaced = {name for name, value in own if isinstance(value, FunctionType) or not name.startswith("__")}
    originals = [getattr_static(correct, name, None) for name in replaced]
    there = [original for original in originals if original is not None]
    if not all(isinstance(original, FunctionType) and original.__name__ != "__init__" for original in there):
        return frozenset()
    return frozenset(original.__code__.co_qualname for original in there)


def parts(fault: str, correct: Any) -> Any:
    """The correct parts with one replaced by this fault. Raises KeyError for an unknown fault."""
    broken = _PARTS[fault]
    kinds: dict[str, Part] = {"engine": Engine, "router": Router, "client": Client, "interface": Interface}
    kinds |= {"trainer": Trainer, "generator": Generator, "endpoint": Endpoint, "staleness": StalenessManager}
    kinds |= {"run": Run, "launcher": Launcher}
    for field, kind in kinds.items():
        if issubclass(broken, kind):
            return msgspec.structs.replace(correct, **{field: broken})
    raise TypeError(f"{broken} replaces no part")
