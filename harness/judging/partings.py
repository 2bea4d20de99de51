"""Where rounding makes outputs of two right stacks diverge. Pure.

After the first different token two right answers differ in everything, so only the place where they part can be judged: greedy
rows by the reference's distance between the two tokens, seeded ones by how seldom noise changes a draw.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from harness.checks.answers import Answer, answers, trouble
from harness.checks.base import Evidence
from harness.checks.sampling import draws_repeat
from harness.checks.tokens import is_greedy
from harness.contract.messages import CHOICES, LISTS
from harness.judging.facets import deterministic
from harness.judging.pairing import pair
from harness.records.differing import common_prefix
from harness.records.recording import Call, Header
from harness.records.reference import Query, UnansweredQuery

ANSWERED = (*LISTS, *CHOICES)
_ROW = re.compile(r"row (\d+)|choices\[(\d+)\]")

Parted = dict[int, frozenset[int]]
"""Id of the baseline's call → its rows that part where rounding decides."""


def row_of(place: str) -> int | None:
    """The row of a place in a facet: "row 3", "choices[3].text". None if the place is of the whole call."""
    found = _ROW.match(place)
    return int(found[1] or found[2]) if found else None


def explains(parted: Parted, call: Call, place: str) -> bool:
    """True if a parting of the place's row explains a difference there; for a place of the whole call, a parting of any row."""
    rows = parted.get(call.id, frozenset())
    row = row_of(place)
    return bool(rows) if row is None else row in rows


def of_rounding(baseline: Evidence, candidate: Evidence, pairs: Iterable[tuple[Call, Call]]) -> Parted:
    """The rows of paired calls that part where rounding decides, without rows that the reference was not asked about. Empty for two
    stacks of batch-invariant engines, which round alike."""
    if _round_alike(baseline.header, candidate.header):
        return {}
    found: dict[int, set[int]] = {}
    drawn: list[tuple[Answer, Answer]] = []
    for left, right in ((left, right) for left, right in pairs if left.method in ANSWERED):
        for one, other in _rows(baseline, candidate, left, right):
            if not is_greedy(one):
                drawn.append((one, other))
            elif _near_tie(baseline, candidate, one, other):
                found.setdefault(left.id, set()).add(one.index)
    if drawn and not baseline.exact:
        margin = draws_repeat([(one.tokens, other.tokens) for one, other in drawn], baseline.noise.rms)
        if margin.measured <= margin.bound:
            for one, other in drawn:
                if one.tokens != other.tokens:
                    found.setdefault(one.call.id, set()).add(one.index)
    return {call: frozenset(rows) for call, rows in found.items()}


def queries(baseline: Evidence, candidate: Evidence) -> Iterator[Query]:
    """What `of_rounding` has to know of greedy rows that part. A scenario's own checks need not ask of a row that a stack repeats."""
    if _round_alike(baseline.header, candidate.header):
        return
    for left, right in pair(baseline.trace, candidate.trace).pairs:
        if left.method in ANSWERED:
            for one, other in _rows(baseline, candidate, left, right):
                if is_greedy(one) and _parting(one, other) is not None:
                    yield one.score
                    yield other.score


def _round_alike(one: Header, other: Header) -> bool:
    return one.batch_invariant and other.batch_invariant and one.cuda_graphs == other.cuda_graphs


def _rows(baseline: Evidence, candidate: Evidence, left: Call, right: Call) -> list[tuple[Answer, Answer]]:
    if not deterministic(left) or any(trouble([call], (), ANSWERED) for call in (left, right)):
        return []
    try:
        ours, theirs = (
            {answer.index: answer for answer in answers(evidence, [call])}
            for evidence, call in ((baseline, left), (candidate, right))
        )
    except UnansweredQuery:
        return []
    return [(ours[index], theirs[index]) for index in ours.keys() & theirs.keys()]


def _near_tie(baseline: Evidence, candidate: Evidence, one: Answer, other: Answer) -> bool:
    at = _parting(one, other)
    if at is None:
        return False
    try:
        scores = [(side, side.reference.score(row.score)) for side, row in ((baseline, one), (candidate, other))]
    except UnansweredQuery:
        return False
    return all(score.gaps[at] < side.near(score) for side, score in scores)


def _parting(one: Answer, other: Answer) -> int | None:
    """Where the rows have different tokens first; None if they have none, or one of them ends before."""
    if one.tokens == other.tokens:
        return None
    at = common_prefix(one.tokens, other.tokens)
    return None if at == min(len(one.tokens), len(other.tokens)) else at
