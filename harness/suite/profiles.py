"""What a step from one stack to another needs, as data: ``scenarios/profiles.toml``. The file's head explains the fields."""

from __future__ import annotations

from pathlib import Path
from typing import final

import msgspec

from harness.contract import data
from harness.contract.errors import UsageError
from harness.machine.targets import Step


@final
class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which objections stand against a step. Each boolean is one rule of `harness/judging/gate.py`."""

    name: str
    about: str
    default_for: Step
    baseline_faults: bool
    whole_plan: bool
    unnamed_differences: bool
    client_changes: bool
    shared_concessions: bool


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    profile: list[Profile]


def load(path: Path | None = None) -> list[Profile]:
    """All profiles of a file; None means the one shipped with the scenarios.

    Raises `UsageError` for a malformed file, and unless each step has one default and each name is given once.
    """
    found = data.read(path, "profiles.toml", _File, holds="profiles").profile
    steps, names = [one.default_for for one in found], [one.name for one in found]
    if sorted(steps) != sorted(Step) or len(set(names)) < len(names):
        raise UsageError(
            f"{path or 'profiles.toml'} has the profiles {', '.join(names)}, for {', '.join(steps)}",
            next_step=f"give each a name of its own, and one to each step: {', '.join(Step)}",
        )
    return found


def named(name: str) -> Profile:
    """The shipped profile of that name. Raises `UsageError` for an unknown name."""
    found = load()
    profile = next((one for one in found if one.name == name), None)
    if profile is None:
        known = "; ".join(f"{one.name} (the default for {one.default_for})" for one in found)
        raise UsageError(f"there is no profile {name!r}", next_step=f"known are {known}")
    return profile


def default_for(step: Step) -> Profile:
    """The shipped profile of a step for which none was named."""
    return next(one for one in load() if one.default_for == step)
