"""The end of `parity shrink`, for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from harness.running.shrink import Shrunk

WIDTH = 160
"""Characters of a case or a piece of evidence."""


def lines(found: Shrunk, arguments: Sequence[str]) -> list[str]:
    """`arguments`: those of the command, without its cases."""
    kept = len(found.cases)
    first = {
        "fewest": f"{kept} of {found.enumerated} cases are enough, and none of them can be left out",
        "out of drives": f"{kept} of {found.enumerated} cases are enough; --drives ended the search",
        "interrupted": f"{kept} of {found.enumerated} cases are enough so far; the search was interrupted",
    }[found.outcome]
    if not kept:
        first = f"red without any of the {found.enumerated} cases: what the scenario does beside them is enough"
    again = "red again when driven once more" if found.again else "NOT red when driven once more: it depends on chance"
    driven = f"{found.drives} drives" + (f"; {again}" if found.outcome != "interrupted" else "")
    numbers = ",".join(map(str, found.cases))
    repeat = shlex.join(["parity", *arguments, *(["--cases", numbers] if kept else [])])
    return [
        f"{found.check} on {found.seat}: {found.reason}",
        f"{first} ({driven})",
        *(f"  {number:>4}  {_short(case)}" for number, case in found.cases.items()),
        *(f"  evidence: {_short(one)}" for one in found.evidence[:2]),
        f"again: {repeat}",
    ]


def _short(thing: Any) -> str:
    text = " ".join(str(thing).split())
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
