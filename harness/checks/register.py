"""An order of writes and reads that explains what each read saw, for registers that one writer writes one after the other.

Each server's weights are such a register: every sync writes all of them, every token reads one. Pure: no recording, no oracle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import accumulate
from operator import attrgetter
from typing import Any

import msgspec

REPLACED = "had been replaced"
NOT_YET = "had not been synced yet"
WENT_BACK = "came before one that had been read already"
"""What is wrong with the version of a read that no order explains."""


class Write(msgspec.Struct, frozen=True, gc=False):
    """One sync. It takes effect on each server once, between its two times (nanoseconds). `to_ns` None: its outcome is unknown, so
    that it may have any effect on any server, until the next write whose outcome is known."""

    version: int
    from_ns: int
    to_ns: int | None


class Read(msgspec.Struct, frozen=True, gc=False):
    """A token, or several that read the same. It was made between its two times (nanoseconds) by one of `versions`. `lines`: the
    server and the session, along which versions go only forward."""

    lines: tuple[Hashable, ...]
    from_ns: int
    to_ns: int
    versions: frozenset[int]
    about: Any = None
    """Not read here."""


class Writes:
    """The writes in the order of their start; the first is there from the beginning."""

    def __init__(self, writes: Iterable[Write]) -> None:
        self.all = sorted(writes, key=attrgetter("from_ns"))
        self._from = [write.from_ns for write in self.all]
        done = sorted((write.to_ns, number) for number, write in enumerate(self.all) if write.to_ns is not None)
        self._done = [to_ns for to_ns, _ in done]
        self._newest = list(accumulate((number for _, number in done), max))
        self.places: dict[int, list[int]] = defaultdict(list)
        """version → the numbers of its writes, in order."""
        for number, write in enumerate(self.all):
            self.places[write.version].append(number)

    def window(self, from_ns: int, to_ns: int) -> tuple[int, int]:
        """The first and the last write that may be in effect at some moment between the two times."""
        done = bisect_right(self._done, from_ns)
        return self._newest[done - 1] if done else 0, (bisect_left(self._from, to_ns) or 1) - 1


def unexplained(writes: Writes, reads: Iterable[Read]) -> list[tuple[Read, str]]:
    """The reads that no order of events explains, each with the reason; empty if there is an order.

    On each line, a read that ended before another began did not see a later write than that one. The earliest write that explains
    a read leaves most to those after it, so one pass over the reads in order of time finds an order if there is one. Takes
    n log n steps for n reads (benchmarks/history.py).
    """
    begun = sorted(reads, key=attrgetter("from_ns"))
    ends = [read.to_ns for read in begun]
    ended = sorted(range(len(begun)), key=ends.__getitem__)
    seen = [0] * len(begun)
    """The write that explains each read, once it is found."""
    floors: dict[Hashable, int] = {}
    """line → the latest write that a read saw which has ended."""
    found, over, window, places = [], 0, writes.window, writes.places
    for number, read in enumerate(begun):
        from_ns = read.from_ns
        while over < number and ends[ended[over]] <= from_ns:
            last = seen[ended[over]]
            for line in begun[ended[over]].lines:
                if last > floors.get(line, 0):
                    floors[line] = last
            over += 1
        first, last = window(from_ns, read.to_ns)
        least = max(first, *(floors.get(line, 0) for line in read.lines))
        best = last + 1
        for version in read.versions:
            its = places[version]
            at = bisect_left(its, least)
            if at < len(its) and its[at] < best:
                best = its[at]
        if best <= last:
            seen[number] = best
            continue
        its = [one for version in read.versions for one in places[version]]
        if any(first <= one <= last for one in its):
            found.append((read, WENT_BACK))
        else:
            found.append((read, REPLACED if any(one < first for one in its) else NOT_YET))
    return found
