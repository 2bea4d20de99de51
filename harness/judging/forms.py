"""Which methods of its client each stack called, and the forms of what these returned, before an adapter translated it. Pure.

Client methods may have different names: forms are compared by the contract's call. A place that lies within a place that differs is
not compared, and neither is what follows from the content of an answer: the length of its lists, and None in place of a value where
sampling may give both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import final

import msgspec

from harness.contract.messages import DATA_PLANE
from harness.judging.causes import WITH, Why, of_form, of_methods
from harness.judging.facets import NOT_THERE, deterministic, error_of
from harness.records.forms import OR
from harness.records.recording import Call, Raw

FORM = "outputs.form"
METHODS = "client.methods"
Forms = Mapping[str, str]
"""Place → form."""
_ITEMS = ("[]", ".*")
_BY_CHANCE = {"None", "int", "str"}
"""Forms of fields like stop_reason, which an answer has or not."""


@final
class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one pair of calls."""

    facet: str
    place: str
    baseline: str
    candidate: str
    noisy: bool
    """True if the baseline differs from its own twin there."""
    why: tuple[str, ...]
    """Causes, if it differs."""


def compare(left: Call, right: Call, again: Call | None) -> Iterator[Compared]:
    """Every place that is compared, equal or not. None if a recording has no forms, or the call failed before the client was asked.
    `again` is the call of the baseline's twin."""
    ours, theirs = _by_method(left), _by_method(right)
    if ours is None or theirs is None or not (ours or theirs):
        return
    twins = (_by_method(again) if again is not None else None) or {}
    yield Compared(
        facet=METHODS,
        place=left.method,
        baseline=_called(ours),
        candidate=_called(theirs),
        noisy=bool(twins) and _called(twins) != _called(ours),
        why=of_methods(_called(ours), _called(theirs)),
    )
    refused = [error_of(call) is not None for call in (left, right)]
    if any(refused) and not all(refused):
        return  # one side's error: `outputs.errors`
    failure = (Why.ERROR_CLASS,)
    sampled = left.method in DATA_PLANE and not deterministic(left)
    renamed = len(ours) == len(theirs) == 1
    for (name, mine), other in zip(ours.items(), theirs.values(), strict=True) if renamed else _shared(ours, theirs):
        begin = left.method if len(ours) == 1 else f"{left.method}: {name}"
        a, b = _told_apart(mine.forms, other.forms)
        for place in _places(a, b, by_chance=sampled):
            yield Compared(
                facet=FORM,
                place=begin + place,
                baseline=a.get(place, NOT_THERE),
                candidate=b.get(place, NOT_THERE),
                why=failure if any(refused) else of_form(place, a, b),
                noisy=name in twins and twins[name].forms.get(place) != mine.forms.get(place),
            )


def _by_method(call: Call) -> dict[str, Raw] | None:
    """None if nothing is known: the recording has no forms, or the call failed before the client was asked."""
    if call.raw is None or (call.error is not None and not call.raw):
        return None
    return {raw.method: raw for raw in call.raw if raw.forms}


def _called(methods: Mapping[str, Raw]) -> str:
    return ", ".join(f"{raw.method}({', '.join(raw.arguments)})" for raw in methods.values()) or "none"


def _shared(ours: Mapping[str, Raw], theirs: Mapping[str, Raw]) -> list[tuple[tuple[str, Raw], Raw]]:
    return [((name, raw), theirs[name]) for name, raw in ours.items() if name in theirs]


def _told_apart(mine: Forms, other: Forms) -> tuple[Forms, Forms]:
    """The same forms; results that have fields and share none are told apart by their fields."""
    fields = [[place for place in forms if re.fullmatch(r"\.[^.[]+", place)] for forms in (mine, other)]
    if not all(fields) or set(fields[0]) & set(fields[1]):
        return mine, other
    a, b = (
        {**forms, "": f"{forms['']}{WITH}{', '.join(names)}"}
        for forms, names in zip((mine, other), fields, strict=True)
    )
    return a, b


def _places(mine: Forms, other: Forms, *, by_chance: bool) -> Iterator[str]:
    """Places of both sides, outer ones first, without those within a place that differs."""
    closed: set[str] = set()
    for place in sorted({**mine, **other}, key=lambda place: (len(place), place)):
        a, b = mine.get(place), other.get(place)
        if any(place.startswith(outer) and place[len(outer)] in ".[" for outer in closed):
            continue
        if a != b:
            closed.add(place)
        if None in (a, b) and place.endswith(_ITEMS):
            continue  # one side's list is empty
        if a != b and by_chance and _may_be_chance(a, b):
            continue
        yield place


def _may_be_chance(a: str | None, b: str | None) -> bool:
    kinds = {*(a or NOT_THERE).split(OR), *(b or NOT_THERE).split(OR)}
    return "None" in kinds and kinds <= _BY_CHANCE
