"""A scenario: one asynchronous test function, a promise, the capabilities it needs and the checks that judge it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast, final

import msgspec

from harness.checks.base import Check
from harness.contract.capability import Capability
from harness.contract.faults import Fault, family
from harness.contract.topology import Topology, colocated, in_order, started_by_default, topology

MARKS = ("bulk", "spoils")
"""What a run leaves out by default, since it takes long. Each is a mark of pytest and a field of `Scenario`."""


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
    topologies: tuple[str, ...]
    """Where it is driven: names of ``scenarios/topologies.toml``, in their order there."""
    deadline_s: float
    source: str
    """The function's docstring: where the promise is written."""
    fixed_placement: bool = False
    """True if the promise is about where the engines live: `--colocate` does not move it."""
    spoils: bool = False
    """True if it breaks the stack, so that the next scenario needs a fresh start. It is not driven by default; where it is, last
    and once."""
    bulk: bool = False
    """True if it sends hundreds of requests for a check of its own, or starts other stacks. It is not driven by default, and
    `parity prove` drives it under that check's faults only."""

    @property
    def marks(self) -> list[str]:
        """Words that choose it beside its name: those of `MARKS` that are true of it."""
        return [mark for mark in MARKS if getattr(self, mark)]

    @property
    def once(self) -> bool:
        """True if it is driven last, and without a twin."""
        return bool(self.marks)

    def by_default(self, topology: str) -> bool:
        """True if a run drives it there without being asked for more than its wave."""
        return topology in self.topologies and not self.once and started_by_default(topology, self.wave)

    def proves(self, fault: Fault) -> bool:
        """True if `parity prove` drives it under this fault."""
        chosen = not fault.scenarios or self.name in fault.scenarios
        return chosen and (not self.bulk or bool({family(check.name) for check in self.checks} & fault.caught_by))

    def driven_in(self, engines: int, wanted: Iterable[str] = (), *, colocate: bool = False) -> list[Topology]:
        """Its topologies, or only the wanted ones. `engines` is the number of engines if the table leaves it open.

        `colocate`: True if colocated engines replace disaggregated ones.
        """
        places = [topology(name, engines) for name in self.topologies]
        if colocate and not self.fixed_placement:
            places = list({place.name: place for place in map(colocated, places)}.values())
        chosen = set(wanted)
        return [place for place in places if not chosen or place.name in chosen]


F = TypeVar("F", bound=Callable[..., Awaitable[None]])

ATTRIBUTE = "__scenario__"


def scenario(
    *,
    task: int,
    promise: str,
    checks: Iterable[Check],
    needs: Iterable[Capability] = (),
    topologies: Iterable[str] = ("disaggregated",),
    deadline_s: float = 60.0,
    fixed_placement: bool = False,
    spoils: bool = False,
    bulk: bool = False,
) -> Callable[[F], F]:
    """Declare a test function as a scenario.

    `task` is its task of the plan, `promise` one sentence. `checks` judge its recording (at least one). On a stack
    without the capabilities `needs` it is `missing`. `topologies` are where it is driven (names of
    ``scenarios/topologies.toml``); `fixed_placement`: True if the promise is about these places. `deadline_s` limits
    driving as a whole. `spoils`: True if the next scenario needs a fresh start (always with `KILL_SERVER`). `bulk` as in
    `Scenario`. The function's docstring names the source of the promise.

    Raises ValueError for a scenario without checks, docstring or topology, which could not go red, or with a check
    twice; UsageError for an unknown topology.
    """
    judged_by = tuple(checks)
    placed = tuple(topologies)
    needed = frozenset(needs)
    for one in placed:
        topology(one)

    def declare(function: F) -> F:
        name = f"{function.__module__.rpartition('.')[2].removeprefix('test_')}.{function.__name__}"
        source = inspect.cleandoc(function.__doc__ or "")
        if not judged_by:
            raise ValueError(f"scenario {name} has no checks: it could not go red")
        if not source:
            raise ValueError(f"scenario {name} has no docstring: say where the promise is written")
        if not placed:
            raise ValueError(f"scenario {name} is driven in no topology")
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
                needs=needed,
                checks=judged_by,
                topologies=tuple(in_order(placed)),
                deadline_s=deadline_s,
                source=source,
                fixed_placement=fixed_placement,
                spoils=spoils or Capability.KILL_SERVER in needed,
                bulk=bulk,
            ),
        )
        return function

    return declare


def variants(cases: Mapping[str, Mapping[str, Any]], **common: Any) -> Callable[[F], F]:
    """Declare scenarios that differ only in arguments: one function for all, and a case for each.

    `cases` has the name of each scenario's function, with the values of the function's keyword-only parameters and with
    arguments of `scenario` that the case does not share (`common`). `source` replaces the function's docstring.
    """

    def declare(function: F) -> F:
        assert isinstance(function, FunctionType)
        parameters = {
            name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY
        }
        for name, case in cases.items():
            of_scenario = {"source": function.__doc__, **common, **case}
            own = FunctionType(function.__code__, function.__globals__, name, closure=function.__closure__)
            own.__kwdefaults__ = {parameter: of_scenario.pop(parameter) for parameter in parameters}
            own.__doc__ = of_scenario.pop("source")
            function.__globals__[name] = scenario(**of_scenario)(own)
        return function

    return declare


LATE_SEED = 1


def under_delays(function: F) -> F:
    """The same scenario under an adverse schedule, as one more scenario: messages to the engines wait, each for its own time.

    It is driven in the first of its topologies. Assign it in the module of `function`, under that name with "_under_delays"."""

    @wraps(function)
    async def late(stack: Any, prompts: Any) -> None:
        await stack.delay(LATE_SEED)
        await function(stack=stack, prompts=prompts)

    too = "also if messages reach the servers late, each by another time"
    declared: Scenario = getattr(function, ATTRIBUTE)
    return _also(cast(F, late), "under_delays", too, needs=Capability.DELAYS, topologies=declared.topologies[:1])


def by_deltas(function: F) -> F:
    """The same scenario where weights come by a shared disk, as one more scenario. Assign it in the module of `function`, under that
    name with "_by_deltas"."""

    @wraps(function)
    async def again(stack: Any, prompts: Any) -> None:
        await function(stack=stack, prompts=prompts)

    too = "also if weights come as changes to a checkpoint, by a disk that all share"
    return _also(cast(F, again), "by_deltas", too, needs=Capability.DELTA_SYNC, topologies=("deltas",))


def _also(function: F, how: str, too: str, *, needs: Capability, topologies: tuple[str, ...]) -> F:
    declared: Scenario = getattr(function, ATTRIBUTE)
    function.__name__ = f"{function.__name__}_{how}"
    changed = msgspec.structs.replace(
        declared,
        name=f"{declared.name}_{how}",
        promise=f"{declared.promise}; {too}",
        needs=declared.needs | {needs},
        topologies=topologies,
    )
    setattr(function, ATTRIBUTE, changed)
    return function


def declaration(function: Any) -> Scenario | None:
    """The scenario that a function was declared as, or None."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Scenario) else None
