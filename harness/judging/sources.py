"""Where an entry's cause stands in a release: "file.py:123: what the code does there". Pure."""

from __future__ import annotations

import re
from typing import Self

import msgspec

SOURCE = re.compile(r"([\w./-]+\.\w+:\d+)(: .*\S)", re.DOTALL)
"""A file and line of the released source, and words about it."""
PLACE = re.compile(SOURCE.pattern + "?", re.DOTALL)
"""A file and line of another release, with words only if they differ."""


def moved(source: str, place: str) -> str:
    """The source as it is in another release: that place, with the words of `source` if it has none."""
    own, there = PLACE.fullmatch(source), PLACE.fullmatch(place)
    return place + (own[2] or "") if own and there and not there[2] else place


class OfPairs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry about pairs of stacks."""

    pair: str
    """"baseline~candidate"."""
    source: str
    also: dict[str, str] = {}
    """Other pairs with the same cause → its place there."""

    @property
    def each(self) -> list[Self]:
        """The entry for each of its pairs."""
        return [msgspec.structs.replace(self, also={})] + [
            msgspec.structs.replace(self, pair=pair, source=moved(self.source, place), also={})
            for pair, place in self.also.items()
        ]
