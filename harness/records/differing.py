"""Where two sides differ, as evidence shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BEFORE, AFTER = 4, 12
"""Elements that evidence shows before the first difference, and from it on. Of a text, four times as many characters."""
SIDES = (
    ("baseline", "candidate"),
    ("expected", "actual"),
    ("expected", "got"),
    ("wanted", "got"),
    ("reference", "got"),
    ("texts", "got"),
    ("given", "seen"),
    ("given", "engine"),
)
"""Keys of a piece of evidence that are two sides of one thing."""


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common prefix of two sequences."""
    if left == right:
        return len(left)
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def parting(**sides: Sequence[Any]) -> dict[str, Any]:
    """Two lists or texts as evidence: where they part, their lengths, and a few elements before and after on either side."""
    (_, left), (_, right) = sides.items()
    at, unit = common_prefix(left, right), 4 if isinstance(left, str) else 1
    part = slice(max(0, at - BEFORE * unit), at + AFTER * unit)
    shown = {name: side[part] if isinstance(side, str) else list(side[part]) for name, side in sides.items()}
    return {"first difference": at, "lengths": {name: len(side) for name, side in sides.items()}, **shown}


def names_of_sides(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """The keys of the two sides in a piece of evidence; None if it has no two sides."""
    if "first difference" in item:
        one, other = item["lengths"]
        return one, other
    return next((pair for pair in SIDES if pair[0] in item and pair[1] in item), None)


def around_the_difference(item: Mapping[str, Any]) -> dict[str, Any]:
    """A piece of evidence with its two sides cut to where they part. Only lists and texts have such a place."""
    names = names_of_sides(item)
    sides = {name: item[name] for name in names or ()}
    lists, texts = ([isinstance(side, kind) for side in sides.values()] for kind in (list, str))
    if names is None or "first difference" in item or not (all(lists) or all(texts)):
        return dict(item)
    return {key: value for key, value in item.items() if key not in sides} | parting(**sides)
