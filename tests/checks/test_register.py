"""Random histories of one register: what an exhaustive search explains, and nothing else, is explained."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks.register import NOT_YET, REPLACED, WENT_BACK, Read, Write, Writes, unexplained

VERSIONS = st.integers(0, 3)
LINE = ("server",)


@st.composite
def written(draw: st.DrawFn, most: int = 4) -> list[Write]:
    """Syncs one after the other, some of unknown outcome."""
    writes, now = [Write(0, 0, 0)], 0
    for _ in range(draw(st.integers(0, most))):
        begun = now + draw(st.integers(1, 3))
        now = begun + draw(st.integers(1, 3))
        writes.append(Write(draw(VERSIONS), begun, draw(st.sampled_from([now, now, None]))))
    return writes


@st.composite
def read(draw: st.DrawFn) -> Read:
    begun = draw(st.integers(1, 20))
    versions = draw(st.frozensets(VERSIONS, min_size=1, max_size=2))
    return Read(LINE, begun, begun + draw(st.integers(1, 6)), versions)


def explains(writes: list[Write], reads: list[Read]) -> bool:
    """By trying every write for every read."""

    def fits(read: Read, number: int) -> bool:
        over = any(w.to_ns is not None and w.to_ns <= read.from_ns for w in writes[number + 1 :])
        return (
            writes[number].version in read.versions
            and not over
            and (number == 0 or writes[number].from_ns < read.to_ns)
        )

    def tried(chosen: list[int]) -> bool:
        if len(chosen) == len(reads):
            return True
        now = reads[len(chosen)]
        for number in range(len(writes)):
            before = all(not (r.to_ns <= now.from_ns and n > number) for r, n in zip(reads, chosen, strict=False))
            behind = all(not (now.to_ns <= r.from_ns and number > n) for r, n in zip(reads, chosen, strict=False))
            if fits(now, number) and before and behind and tried([*chosen, number]):
                return True
        return False

    return tried([])


@given(written(), st.lists(read(), min_size=1, max_size=6))
@settings(deadline=None)
def test_exactly_the_histories_with_an_order_are_explained(writes, reads):
    assert (not unexplained(Writes(writes), reads)) == explains(writes, reads)


@given(written(most=60), st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_long_random_histories_of_a_right_server_are_explained_and_a_token_of_no_place_is_found(writes, seed):
    """Each sync takes effect at a moment within it, a failed one perhaps; a token reads what is in effect at a moment within it."""
    random, moments = Random(seed), [(0.0, 0)]
    for write, following in pairwise([*writes, Write(0, writes[-1].from_ns + 9, None)]):
        end = following.from_ns if write.to_ns is None else write.to_ns
        if write.to_ns is not None or random.random() < 0.5:
            moments.append((random.uniform(write.from_ns, end), write.version))
    reads = []
    for _ in range(300):
        made = random.uniform(0, writes[-1].from_ns + 9)
        version = max((moment for moment in moments if moment[0] <= made), key=lambda moment: moment[0])[1]
        reads.append(Read(LINE, made - random.random(), made + random.random(), frozenset({version})))
    assert unexplained(Writes(writes), reads) == []
    wrong = Read(LINE, 1, 2, frozenset({9}))
    assert unexplained(Writes(writes), [*reads, wrong]) == [(wrong, NOT_YET)]


def test_what_is_wrong_is_named():
    writes = Writes([Write(0, 0, 0), Write(1, 10, 20), Write(2, 30, None)])

    def why(*reads: tuple[int, int]) -> list[str]:
        """Of reads (time, version)."""
        return [said for _, said in unexplained(writes, [Read(LINE, at, at + 1, frozenset({v})) for at, v in reads])]

    assert why((5, 0), (15, 1), (25, 1), (35, 1), (40, 2)) == []
    assert why((25, 0)) == [REPLACED]
    assert why((5, 1)) == [NOT_YET]
    assert why((12, 1), (14, 0)) == [WENT_BACK]
    assert why((35, 2), (40, 1)) == [WENT_BACK], "a sync that failed was there"


def test_servers_are_apart_and_a_session_joins_them():
    writes = Writes([Write(0, 0, 0), Write(1, 10, 20)])
    new = Read(("server-0", "session"), 11, 12, frozenset({1}))
    old = Read(("server-1",), 13, 14, frozenset({0}))
    assert unexplained(writes, [new, old]) == []
    joined = Read(("server-1", "session"), 13, 14, frozenset({0}))
    assert unexplained(writes, [new, joined]) == [(joined, WENT_BACK)]
