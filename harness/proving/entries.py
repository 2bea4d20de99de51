"""What `parity prove --ledger` tries on a stack's known divergences, and what comes out. Pure; `swallowed.py` judges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import final

import msgspec

from harness.contract.faults import NOTHING, Fact, Fault, family
from harness.contract.topology import Topology
from harness.judging.ledger import Entry, Ledger
from harness.suite.scenario import Scenario

Tried = Mapping[str, Set[str]]
"""Scenario → ids of the faults under which it is driven."""


class Stays(StrEnum):
    """What becomes of a fault in an entry's scenario with the ledger on."""

    RED = "red"
    """It turned a verdict red that no entry explains."""
    SWALLOWED = "swallowed"
    """The entry explains a verdict that the fault turned red. Red."""
    UNSEEN = "unseen"
    """The scenario gives the same verdicts without the fault."""
    NOT_DRIVEN = "not driven"
    """Red."""


@final
class UnderFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in the scenarios of one entry."""

    fault: str
    stays: Stays
    said: str = ""
    """What was swallowed, or why it was not driven."""


@final
class EntryProof(msgspec.Struct, frozen=True, kw_only=True):
    """One entry in one topology."""

    entry: str
    topology: str
    known: int
    """Number of verdicts that it explains on the correct stack."""
    faults: list[UnderFault]

    def count(self, stays: Stays) -> int:
        """Number of faults with this result."""
        return sum(one.stays == stays for one in self.faults)


@final
class LedgerProof(msgspec.Struct, frozen=True, kw_only=True):
    """All entries about one stack that share a scenario with a fault."""

    entries: list[EntryProof]
    untried: list[str]
    """Entries with no fault that may turn their check red, or whose scenario ends the stack, is not selected, or is driven in
    another topology."""
    problems: list[str]
    """Everything that is red."""

    def count(self, stays: Stays) -> int:
        """Number of pairs of entry and fault with this result."""
        return sum(entry.count(stays) for entry in self.entries)


def to_try(
    ledger: Ledger,
    target: str,
    faults: Sequence[Fault],
    scenarios: Iterable[Scenario],
    *,
    reads: Mapping[str, Fact],
    engines: int,
) -> list[tuple[Topology, dict[str, set[str]]]]:
    """The scenarios of the entries about a target, by topology, each with the faults that may turn an entry's check red there.

    `scenarios`: those that the target can drive. Each is driven in its first topology, as under its own faults. Scenarios that
    end the stack are left out.
    """
    found: dict[str, tuple[Topology, dict[str, set[str]]]] = {}
    for scenario in (one for one in scenarios if not one.once):
        for entry in ledger.entries:
            place = scenario.driven_in(engines)[0]
            ids = {fault.id for fault in faults if _may_turn(fault, entry, reads)}
            if ids and entry.at(scenario.name, place.name, target):
                names = found.setdefault(place.name, (place, {}))[1]
                names.setdefault(scenario.name, set()).update(ids)
    return list(found.values())


def _may_turn(fault: Fault, entry: Entry, reads: Mapping[str, Fact]) -> bool:
    """True if the fault names the entry's check, or corrupts a fact that it reads."""
    named = any(fnmatchcase(check, family(entry.check)) for check in fault.caught_by)
    return named or bool(reads.get(family(entry.check), NOTHING) & fault.corrupts)
