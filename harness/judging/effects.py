"""What became of the fields of requests on two stacks, side by side. Pure.

Only what is right on both sides is compared here. What one of them drops, changes or cannot bear is red by itself.
"""

from __future__ import annotations

from harness.checks import request_fields
from harness.checks.base import Evidence
from harness.judging.causes import Why
from harness.judging.sides import Facet
from harness.records.verdict import Concern, Effect

EFFECTS = "requests.effects"
RIGHT = frozenset({Effect.TOOK_EFFECT, Effect.AS_USUAL, Effect.REFUSED})


def apart(baseline: Evidence, candidate: Evidence) -> tuple[set[Concern], set[Concern]]:
    """The calls of each side whose field became something else on the other side. They differ in what follows from it too."""
    theirs = {(one.field, one.given): (call, one.effect) for call, one in request_fields.effects(candidate)}
    found: tuple[set[Concern], set[Concern]] = (set(), set())
    for call, one in request_fields.effects(baseline):
        other, effect = theirs.get((one.field, one.given), (None, one.effect))
        if other is not None and effect != one.effect:
            found[0].add((call.id, None))
            found[1].add((other.id, None))
    return found


def compare(baseline: Evidence, candidate: Evidence) -> dict[str, Facet]:
    """The facet by its name; empty if the scenario asks for no fields."""
    theirs = {(one.field, one.given): one.effect for _, one in request_fields.effects(candidate)}
    facet = Facet()
    for call, one in request_fields.effects(baseline):
        other = theirs.get((one.field, one.given))
        if other in RIGHT and one.effect in RIGHT:
            cause = Why.VALUE_REFUSED if Effect.REFUSED in (one.effect, other) else Why.FIELD_IGNORED
            facet.compare(f"{one.field}: {one.given}", (one.effect, other), (cause,), noisy=False, call=call)
    return {EFFECTS: facet} if facet.facts else {}
