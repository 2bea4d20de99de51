"""Which red verdict explains which others, within one scenario on one stack. Pure.

A check declares the facts that are false if it fails (`Check.falsifies`), and names the calls and rows that it found wrong
(`Verdict.concerns`). A consequence stays red and counted: reports show it below its cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import final

import msgspec

from harness.checks.base import Check
from harness.contract.faults import NOTHING, ROWS, Fact
from harness.records.recording import Call
from harness.records.verdict import Concern, Conformance, Verdict

OF_ROWS = ROWS | Fact.ERRORS
"""Facts of single rows. A check that falsifies no others says something only about the rows that it found wrong."""


@final
class _Red(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    check: Check
    verdict: Verdict
    wrong: frozenset[Concern]
    """Concerns with the ids of calls in place of labels. A call of several turns is one: checks count its rows in different ways."""
    order: tuple[bool, int, int]
    """What falsifies more facts than it reads comes first; a verdict that is not the check's own finding comes last."""

    def explains(self, other: _Red) -> bool:
        if self.order >= other.order:
            return False
        alike = self.verdict.reason == other.verdict.reason
        own = self.verdict.status == Conformance.FAIL and self.verdict.cause is None
        false = self.check.falsifies & other.check.reads if own else NOTHING
        if self.covers(other.wrong):
            return alike or bool(false)
        if alike and not self.wrong and not other.wrong:
            return True
        of_the_stack = bool(self.check.falsifies & ~OF_ROWS)
        return of_the_stack and bool(false) and self.order[:2] < other.order[:2]

    def covers(self, wrong: frozenset[Concern]) -> bool:
        """True if there is something in `wrong`, and this verdict found all of it wrong too; of a whole call, a row of it."""
        calls = {call for call, _ in self.wrong}
        return bool(wrong) and all(
            {(call, row), (call, None)} & self.wrong or (row is None and call in calls) for call, row in wrong
        )


def with_causes(judged: Sequence[tuple[Check, Verdict]], calls: Iterable[Call] = ()) -> list[Verdict]:
    """The verdicts of one scenario on one stack, in their order; `because` names the check that explains a red one.

    `calls` are the scenario's, to find those that a label stands for. A failed check explains what reads a fact that it
    falsifies: about the same rows, or anywhere if the check is about the whole stack. Of red verdicts with one reason about the same
    things, the first explains the others. An explained verdict explains nothing: its own cause does.
    """
    named: dict[int | str, list[Call]] = defaultdict(list)
    for call in calls:
        for name in {call.id, call.label or call.id}:
            named[name].append(call)
    reds = sorted(
        (
            _Red(check=check, verdict=verdict, wrong=_placed(verdict, named), order=_order(check, verdict, at))
            for at, (check, verdict) in enumerate(judged)
            if verdict.status != Conformance.PASS
        ),
        key=lambda red: red.order,
    )
    because: dict[str, str] = {}
    for red in reds:
        cause = next((other for other in reds if other.explains(red)), None)
        if cause is not None:
            because[red.check.name] = because.get(cause.check.name, cause.check.name)
    return [msgspec.structs.replace(verdict, because=because.get(check.name)) for check, verdict in judged]


def _placed(verdict: Verdict, named: dict[int | str, list[Call]]) -> frozenset[Concern]:
    return frozenset(
        (call.id, None if call.method == "gym_generate" else row)
        for name, row in verdict.concerns
        for call in named.get(name, ())
    )


def _order(check: Check, verdict: Verdict, at: int) -> tuple[bool, int, int]:
    own = verdict.cause is None
    return not own, len(check.reads) - len(check.falsifies) if own else 0, at
