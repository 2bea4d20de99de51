"""What became of the fields of requests, and of arguments in other forms, on two stacks side by side. Pure.

Only what is right on both sides is compared here. What one of them drops, changes or cannot bear is red by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks import bad_rows, call_forms, http_fields, http_routes, request_fields
from harness.checks.base import Evidence
from harness.checks.request_fields import PAIR
from harness.judging.causes import Why
from harness.judging.pairing import identity
from harness.judging.sides import Facet
from harness.records.recording import Call
from harness.records.verdict import Concern, Effect, FieldEffect
from harness.records.wire import as_openai

EFFECTS = "requests.effects"
CAUSES = {Effect.NO_ROUTE: Why.NO_ROUTE, Effect.REFUSED: Why.VALUE_REFUSED}
"""What became of a case on one stack → the cause of the difference."""
OF_FORMS = {Effect.REFUSED: Why.FORM_REFUSED}
"""The same of arguments in other forms."""
RIGHT = frozenset({Effect.TOOK_EFFECT, Effect.AS_USUAL, Effect.REFUSED, Effect.NO_ROUTE})


def _of_forms(evidence: Evidence) -> bool:
    """True if a scenario asks for other forms of arguments: they are labelled as fields are, and told by a call of their own."""
    return bool(evidence.calls("form"))


def _effects(evidence: Evidence) -> list[tuple[Call, FieldEffect]]:
    """A scenario asks for one kind of case."""
    if _of_forms(evidence):
        return call_forms.effects(evidence)
    kinds = (
        request_fields.effects,
        http_routes.effects,
        http_fields.effects,
        bad_rows.effects,
    )
    return next((found for effects in kinds if (found := effects(evidence))), [])


def _paired(baseline: Evidence, candidate: Evidence) -> Iterator[tuple[str, tuple[Call, Call], tuple[Effect, Effect]]]:
    """(field and value, its calls, what became of it) for each that both stacks were asked for: baseline, candidate. Values of one
    name may differ: they were drawn from two schemas."""
    theirs = {(one.field, one.given, _asked(call, candidate)): (call, one.effect) for call, one in _effects(candidate)}
    for call, one in _effects(baseline):
        if (found := theirs.get((one.field, one.given, _asked(call, baseline)))) is not None:
            yield f"{one.field}: {one.given}", (call, found[0]), (one.effect, found[1])


def _asked(call: Call, evidence: Evidence) -> tuple[str, str | None, bytes]:
    return identity(as_openai(call), evidence.trace)


def apart(baseline: Evidence, candidate: Evidence) -> tuple[set[Concern], set[Concern]]:
    """The calls of each side whose field, or one of whose two fields, became something else on the other side. They differ in what
    follows from it too."""
    cases = [*_paired(baseline, candidate)]
    other = {place for place, _, (ours, theirs) in cases if ours != theirs}
    calls = [both for place, both, _ in cases if place in other or not other.isdisjoint(_alone(place))]
    return {(left.id, None) for left, _ in calls}, {(right.id, None) for _, right in calls}


def _alone(place: str) -> list[str]:
    """The two cases of which a pair is made: "n: one" and "seed: big" of "n + seed: one + big"."""
    fields, _, given = place.partition(": ")
    return [f"{one}: {value}" for one, value in zip(fields.split(PAIR), given.split(PAIR), strict=False)]


def compare(baseline: Evidence, candidate: Evidence) -> dict[str, Facet]:
    """The facet by its name; empty if the scenario asks for no fields."""
    facet = Facet()
    causes = OF_FORMS if _of_forms(baseline) else CAUSES
    for place, (call, _), effects in _paired(baseline, candidate):
        if RIGHT.issuperset(effects):
            cause = next((why for effect, why in causes.items() if effect in effects), Why.FIELD_IGNORED)
            facet.compare(place, effects, (cause,), noisy=False, call=call)
    return {EFFECTS: facet} if facet.facts else {}
