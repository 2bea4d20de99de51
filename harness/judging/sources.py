"""Where an entry's cause stands in a release: "file.py:123: what the code does there". Pure."""

from __future__ import annotations

import re

SOURCE = re.compile(r"([\w./-]+\.\w+:\d+)(: .*\S)", re.DOTALL)
"""A file and line of the released source, and words about it."""
PLACE = re.compile(SOURCE.pattern + "?", re.DOTALL)
"""A file and line of another release, with words only if they differ."""


def moved(source: str, place: str) -> str:
    """The source as it is in another release: that place, with the words of `source` if it has none."""
    own, there = PLACE.fullmatch(source), PLACE.fullmatch(place)
    return place + (own[2] or "") if own and there and not there[2] else place
