"""`parity shrink`: the fewest cases of a scenario that still turn a check red on one stack.

Cases are what a scenario enumerates: fields, forms, broken hops, the steps of a sequence. All else of the scenario is driven as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from harness.contract.errors import UsageError
from harness.contract.faults import Fault
from harness.contract.topology import topology as placed
from harness.driving.stack import Stack
from harness.machine.progress import Progress
from harness.machine.targets import known
from harness.records.verdict import Verdict
from harness.running import catalogue
from harness.running.session import Options, Seat, Session

MOST_DRIVES = 200
"""Default for the most drives of one command."""

Say = Callable[[str], None]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is shrunk, and where."""

    options: Options
    scenario: str
    topology: str = ""
    """Empty: the scenario's first."""
    check: str = ""
    """Empty: the first red one that no other explains."""
    cases: tuple[int, ...] = ()
    """Numbers of the cases to begin with, from 1; empty: all."""
    fault: str = ""
    """A seeded fault of the stack."""
    drives: int = MOST_DRIVES


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a search."""

    seat: str
    """Stack and topology."""
    check: str
    reason: str
    cases: dict[int, str]
    """Number → case. None of them can be left out, if the outcome is "fewest"."""
    enumerated: int
    """Cases of the whole scenario."""
    drives: int
    outcome: Literal["fewest", "out of drives", "interrupted"]
    again: bool
    """True if the check was red once more with these cases."""
    evidence: list[dict[str, Any]]

    @property
    def exit_status(self) -> int:
        if self.outcome == "interrupted":
            return 2
        return 0 if self.again and self.outcome == "fewest" else 1


class _Narrowing:
    """Chooses cases by their numbers (`Stack.narrow`), and keeps all that it was given."""

    def __init__(self, only: Iterable[int] | None) -> None:
        self._only = None if only is None else frozenset(only)
        self.given: list[Any] = []

    def __call__(self, cases: list[Any]) -> list[Any]:
        first = len(self.given) + 1
        self.given += cases
        return [case for number, case in enumerate(cases, first) if self._only is None or number in self._only]


def fewest(cases: Sequence[int], red: Callable[[Sequence[int]], bool]) -> list[int]:
    """A part of `cases` that is red, of which no single case can be left out. `cases` as a whole has to be red.

    Delta debugging (Zeller and Hildebrandt 2002) by what is left out: halves, quarters, …, single cases until none goes.
    """
    left, size = list(cases), max(1, (len(cases) + 1) // 2)
    while True:
        before, start = len(left), 0
        while start < len(left):
            rest = left[:start] + left[start + size :]
            if red(rest):
                left = rest
            else:
                start += size
        if size == 1 and len(left) == before:
            return left
        size = max(1, size // 2)


class _OutOfDrives(Exception):
    pass


class Shrinking:
    """One stack, driven until the fewest cases are found."""

    def __init__(self, order: Order, progress: Progress, say: Say) -> None:
        self.order, self._say = order, say
        declared = catalogue.declared()
        if order.scenario not in declared:
            raise UsageError(f"there is no scenario {order.scenario}", next_step="`parity contract` lists them")
        self.scenario = declared[order.scenario]
        target = known(order.options.candidate)
        if missing := sorted(self.scenario.needs - target.capabilities):
            raise UsageError(
                f"{target.name} does not declare {', '.join(missing)}", next_step="choose another stack or scenario"
            )
        self.fault = _seeded(target.seeded(), order.fault)
        place = placed(order.topology, order.options.engines) if order.topology else None
        self.seat = Seat(target=target.name, topology=place or self.scenario.driven_in(order.options.engines)[0])
        self.drives = 0
        self._session = Session(order.options, progress)
        self._driven: dict[tuple[int, ...], Verdict | None] = {}
        self._given: list[Any] = []
        self._check, self._reason = order.check, ""
        self._best: list[int] = []

    def run(self) -> Shrunk:
        """Raises UsageError for a scenario that enumerates nothing, a case that it does not have, and a check that is not red."""
        outcome: Literal["fewest", "out of drives", "interrupted"] = "interrupted"
        again = False
        try:
            if self.fault is not None:
                self._session.inject(self.seat, self.fault)
            self._whole()
            with suppress(KeyboardInterrupt):  # the fewest so far are of use
                found = self._search()
                again = self._drive(self._best) is not None
                outcome = found
        finally:
            self._session.close("interrupted" if outcome == "interrupted" else "completed")
        told = self._driven[tuple(self._best)]
        return Shrunk(
            seat=self.seat.name,
            check=self._check,
            reason=self._reason,
            cases={number: str(self._given[number - 1]) for number in self._best},
            enumerated=len(self._given),
            drives=self.drives,
            outcome=outcome,
            again=again,
            evidence=told.evidence if told is not None else [],
        )

    def _search(self) -> Literal["fewest", "out of drives"]:
        try:
            fewest(self._best, self._is_red)
        except _OutOfDrives:
            return "out of drives"
        return "fewest"

    def _whole(self) -> None:
        """Drive the cases to begin with, and choose check and reason."""
        cases = self.order.cases or None
        narrowing, verdicts = self._take(cases)
        self._given = narrowing.given
        if not self._given:
            raise UsageError(
                f"{self.scenario.name} enumerates no cases", next_step="choose one of fields, forms, hops or sequences"
            )
        if wrong := [number for number in cases or () if not 1 <= number <= len(self._given)]:
            raise UsageError(
                f"{self.scenario.name} has no case {wrong[0]}", next_step=f"give numbers from 1 to {len(self._given)}"
            )
        red = [verdict for verdict in verdicts if verdict.red and self.order.check in ("", verdict.check)]
        if not red:
            what = self.order.check or "no check"
            raise UsageError(
                f"{what} is {'not ' * bool(self.order.check)}red in {self.scenario.name} on {self.seat.name}",
                next_step="take stack, topology, seed and check from a red line of a report",
            )
        first = next((verdict for verdict in red if verdict.because is None), red[0])
        self._check, self._reason = first.check, first.each_reason[0]
        self._best = sorted(set(cases or range(1, len(self._given) + 1)))
        self._driven[tuple(self._best)] = first
        self._say(f"{self._check} is red with {len(self._best)} cases: {self._reason}")

    def _is_red(self, cases: Sequence[int]) -> bool:
        key = tuple(cases)
        if key not in self._driven:
            if self.drives >= self.order.drives:
                raise _OutOfDrives
            self._driven[key] = self._drive(cases)
            colour = "not red" if self._driven[key] is None else "red"
            self._say(f"drive {self.drives}: {len(cases)} of {len(self._best)} cases: {colour}")
        if self._driven[key] is not None:
            self._best = list(cases)
        return self._driven[key] is not None

    def _drive(self, cases: Iterable[int]) -> Verdict | None:
        """The verdict that is red for the same reason; None if there is none."""
        _, verdicts = self._take(cases)
        return next(
            (one for one in verdicts if one.red and one.check == self._check and self._reason in one.each_reason), None
        )

    def _take(self, cases: Iterable[int] | None) -> tuple[_Narrowing, list[Verdict]]:
        made = _Narrowing(cases)
        whole = catalogue.body(self.scenario.name, self.order.options.seed)

        async def body(stack: Stack) -> None:
            nonlocal made
            made = stack.narrow = _Narrowing(cases)
            await whole(stack)

        self.drives += 1
        if not self._session.living(self.seat):
            self._session.renew(self.seat)
        verdicts = self._session.drive(self.scenario, self.seat, body)
        if (error := self._session.not_started.get(self.seat.name)) is not None:
            raise UsageError(f"{self.seat.name} did not start: {error.message}", next_step="run `parity doctor`")
        return made, verdicts


def _seeded(faults: dict[str, Fault], name: str) -> Fault | None:
    """Raises UsageError for a fault that the stack does not have."""
    if name and name not in faults:
        raise UsageError(f"the stack has no fault {name}", next_step="`parity prove` names them in its report")
    return faults[name] if name else None


def shrink(order: Order, progress: Progress, say: Say) -> Shrunk:
    """Start the stack and search. Raises what `Shrinking` raises."""
    return Shrinking(order, progress, say).run()
