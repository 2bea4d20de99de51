"""Where the suite gives way because a stack differs, as data: ``scenarios/concessions.toml``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from harness.contract import data
from harness.contract.errors import UsageError
from harness.records.verdict import Concession

EVERY_STACK = "*"
"""In `Concession.stacks`: every stack but the inline ones."""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    concession: list[Concession]


def load(path: Path | None = None) -> list[Concession]:
    """All concessions of a file; None means the one shipped with the scenarios. Raises `UsageError` for a malformed file."""
    found = data.read(path, "concessions.toml", _File, holds="concessions").concession
    ids = [one.id for one in found]
    if twice := sorted({one for one in ids if ids.count(one) > 1}):
        raise UsageError(
            f"{path or 'concessions.toml'} names {', '.join(twice)} twice",
            next_step="give each concession an id of its own",
        )
    return found


def of_stacks(concessions: Iterable[Concession], stacks: Iterable[str]) -> list[Concession]:
    """Those that are for any of these stacks; none for no stack."""
    wanted = set(stacks)
    return [one for one in concessions if wanted and (wanted | {EVERY_STACK}) & set(one.stacks)]
