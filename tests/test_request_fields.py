"""Values for the fields of requests: of every kind that the schema admits, of every other type, the same each time."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from backends.skyrl.base import in_python
from fixtures.request_fields import UNKNOWN, in_pairs, of_its_type, of_other_types
from harness.driving.stack import Stack
from scenarios import requests
from tests.miniature import bench

SCHEMA = {
    "properties": {
        "count": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}]},
        "ratio": {"type": "number"},
        "words": {"type": "array", "items": {"type": "string"}},
        "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        "level": {"enum": ["low", "high"]},
        "record": {"$ref": "#/$defs/Record"},
        "map": {"type": "object", "additionalProperties": {"type": "number"}},
        "free": {},
    },
    "$defs": {
        "Record": {
            "type": "object",
            "properties": {"size": {"type": "integer"}, "again": {"$ref": "#/$defs/Record"}},
            "required": ["size"],
        }
    },
}


def values(field, cases=of_its_type):
    return {case.kind: case.values[field] for case in cases(SCHEMA) if case.field == field}


def test_the_ends_of_a_type_and_values_of_it():
    found = values("count")
    assert {"null", "zero", "one", "negative", "huge"} < found.keys()
    drawn = [value for kind, value in found.items() if kind.startswith("drawn")]
    assert drawn
    assert all(isinstance(value, int) and 1 <= value <= 9 for value in drawn)


def test_a_union_has_the_ends_of_each_type():
    assert {"empty string", "short string", "empty array"} < values("either").keys()


def test_records_have_what_they_require():
    drawn = [value for kind, value in values("record").items() if kind.startswith("drawn")]
    assert drawn
    assert all(isinstance(value["size"], int) for value in drawn)


def test_an_enumeration_has_its_values():
    assert {"low", "high"} <= {str(value) for value in values("level").values()}


@pytest.mark.parametrize(
    ("field", "kinds"),
    [
        ("count", {"string", "number", "boolean", "array", "object"}),
        ("ratio", {"string", "boolean", "array", "object"}),
        ("words", {"string", "number", "boolean", "object"}),
        ("either", {"number", "boolean", "object"}),
        ("free", set()),
    ],
)
def test_values_of_every_other_type(field, kinds):
    found = values(field, of_other_types)
    assert found.keys() - {"written as text"} == {f"of type {kind}" for kind in kinds}
    assert found.get("written as text") == ("1" if field in ("count", "ratio") else None)


def test_the_same_each_time_and_without_what_is_left_out():
    assert list(of_its_type(SCHEMA)) == list(of_its_type(SCHEMA))
    assert {case.field for case in of_its_type(SCHEMA, frozenset(SCHEMA["properties"]))} == {UNKNOWN}


def test_every_two_fields_meet_with_mild_values_that_are_asked_for_alone():
    singles, pairs = in_pairs(SCHEMA, frozenset({"free"}), 1)
    names = set(SCHEMA["properties"]) - {"free"}
    assert {frozenset(case.values) for case in pairs} == {frozenset(two) for two in itertools.combinations(names, 2)}
    alone = {(case.field, case.kind): case.values[case.field] for case in singles}
    for case in pairs:
        kinds = case.kind.split(" + ")
        assert case.values == {name: alone[name, kind] for name, kind in zip(case.values, kinds, strict=True)}
    assert not {None, -1, 2**31} & {value for value in alone.values() if not isinstance(value, (dict, list))}


def test_more_meetings_are_more_values():
    once, often = (len(in_pairs(SCHEMA, frozenset(), meetings)[1]) for meetings in (1, 3))
    assert once < often


def without_one_more(listed):
    """What a stack lists, without one of the fields or forms in the middle."""

    async def fewer(stack, *asked, **options):
        found = await listed(stack, *asked, **options)
        if isinstance(found, list):
            return found[:5] + found[6:]
        return {
            call: {**schema, "properties": {name: of for name, of in schema["properties"].items() if name != "top_k"}}
            for call, schema in found.items()
        }

    return fewer


@pytest.mark.parametrize(
    ("scenario", "method"),
    [
        ("request_fields.test_generate", "request_schemas"),
        ("request_fields.test_completion_in_pairs", "request_schemas"),
        ("call_forms.test_sample", "form"),
    ],
)
def test_a_case_is_asked_alike_whichever_other_fields_or_forms_a_stack_has(scenario, method, tmp_path, monkeypatch):
    def asked(folder):
        with bench(folder) as stacks:
            stacks.drive(scenario)
            calls = stacks.trace(scenario).own_calls
        return {call.label: call.request for call in calls if call.label and call.method != "form"}

    whole = asked(tmp_path / "whole")
    monkeypatch.setattr(Stack, method, without_one_more(getattr(Stack, method)))
    fewer = asked(tmp_path / "fewer")
    assert len(whole) > len(fewer) > 20
    assert {label: whole[label] for label in fewer} == fewer


def test_once_a_late_request_has_ended_others_are_alone_again(monkeypatch):
    monkeypatch.setattr(requests, "PATIENCE_S", 0.02)
    at_once: list[int] = []

    async def drive() -> None:
        ends = asyncio.Event()
        running: set[int] = set()

        async def quick(number: int) -> None:
            running.add(number)
            at_once.append(len(running))
            if number == 2:
                ends.set()  # the late one ends while this one runs
            await asyncio.sleep(0.005)
            running.remove(number)

        stack = SimpleNamespace(give_up=lambda: pytest.fail("nothing hangs"))
        await requests.one_by_one(stack, [ends.wait(), *map(quick, range(8))])

    asyncio.run(drive())
    assert at_once == [1] * 8


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_stack_that_leaves_many_requests_unanswered_is_given_up(at_once, monkeypatch):
    monkeypatch.setattr(requests, "PATIENCE_S", 0.01)
    given_up: list[int] = []
    asked: list[int] = []

    async def drive() -> None:
        async def hangs(number: int) -> None:
            asked.append(number)
            await asyncio.Event().wait()

        stack = SimpleNamespace(give_up=lambda: given_up.append(len(asked)))
        await requests.one_by_one(stack, (hangs(number) for number in range(100)), at_once)

    asyncio.run(drive())
    assert given_up == [requests.MOST_LATE + at_once]


@pytest.mark.parametrize(
    ("sent", "given"),
    [
        ({"5": 1.0, "-1": 2.0}, {5: 1.0, -1: 2.0}),
        ({"5": 1.0, "--1": 2.0}, {"5": 1.0, "--1": 2.0}),
        ([5], [5]),
        (None, None),
    ],
)
def test_the_tokens_of_a_bias_are_numbers_to_a_client_in_python(sent, given):
    assert in_python({"top_k": 5, "logit_bias": sent}) == {"top_k": 5, "logit_bias": given}
