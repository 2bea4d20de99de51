"""Open differences of a run by cause, and the entries of ``scenarios/open_differences.toml``. Pure but for `load`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from harness.contract import data
from harness.contract.errors import UsageError
from harness.judging.causes import Why
from harness.judging.sources import SOURCE, OfPairs
from harness.records.verdict import UNEXPLAINED, OpenCause, Parity, Verdict

BY_FIELD = (Why.FIELD, Why.HEADER, Why.PARAMETER)


class Entry(OfPairs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cause that a pair of stacks is known to have."""

    cause: Why
    fields: list[str] = msgspec.field(default_factory=list)
    """For the causes in `BY_FIELD`: the fields, headers or parameters. Each is a cause of its own."""

    @property
    def causes(self) -> list[str]:
        """The names of the causes, as `OpenCause` has them."""
        return [f"{self.cause}:{field}" for field in self.fields] or [str(self.cause)]


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    difference: list[Entry]


def load(path: Path | None = None) -> list[Entry]:
    """All entries of a file; None means the one shipped with the scenarios. Raises `UsageError` for a malformed file."""
    listed = data.read(path, "open_differences.toml", _File, holds="open differences").difference
    found = [one for entry in listed for one in entry.each]
    keys = [(cause, one.pair) for one in found for cause in one.causes]
    if bare := sorted({one.pair for one in found if (one.cause in BY_FIELD) != bool(one.fields)}):
        raise UsageError(
            f"{path or 'open_differences.toml'}: an entry of {', '.join(bare)} names no field, or another cause's fields",
            next_step=f"give `fields` to an entry with cause {' or '.join(BY_FIELD)}, and to no other",
        )
    if wrong := [str(one.cause) for one in found if not SOURCE.fullmatch(one.source)]:
        raise UsageError(
            f"{path or 'open_differences.toml'}: no file and line in the source of {', '.join(wrong)}",
            next_step="see the head of that file",
        )
    if twice := sorted({f"{cause} of {pair}" for cause, pair in keys if keys.count((cause, pair)) > 1}):
        raise UsageError(
            f"{path or 'open_differences.toml'} has {', '.join(twice)} twice", next_step="keep one of the two"
        )
    return found


def by_cause(
    verdicts: Iterable[Verdict], entries: Sequence[Entry], released: Mapping[str, str | None] | None = None
) -> list[OpenCause]:
    """One line per pair and cause: unexplained differences first, then causes without an entry, then by number of verdicts.

    `released`: target → the released target that it is under another name. Entries about that one hold for it.
    """
    names = released or {}
    sources = {(one.pair, cause): one.source for one in entries for cause in one.causes}
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for verdict in verdicts:
        if verdict.status == Parity.OPEN:
            for cause, places in (verdict.causes or {UNEXPLAINED: 1}).items():
                found.setdefault((f"{verdict.baseline}~{verdict.target}", cause), []).append((verdict.scenario, places))
    lines = [
        OpenCause(
            pair=pair,
            cause=cause,
            verdicts=len(places),
            places=sum(count for _, count in places),
            scenarios=sorted({scenario for scenario, _ in places}),
            source=sources.get(("~".join(names.get(side) or side for side in pair.split("~")), cause), ""),
        )
        for (pair, cause), places in found.items()
    ]
    return sorted(
        lines, key=lambda one: (one.cause != UNEXPLAINED, bool(one.source), -one.verdicts, one.pair, one.cause)
    )
