"""Batches with a bad row: refused by name, and nothing beside them is harmed."""

from __future__ import annotations

import pytest

from harness.checks.bad_rows import BAD_ROWS, OTHERS
from harness.records.verdict import Effect
from tests.checks.scene import Scene
from tests.traces import error


def scene(refused, beside=None) -> Scene:
    made = Scene()
    for label, failed in (("row: empty", refused), (OTHERS, beside)):
        made.generate([[10, 11, 12]], label=label)
        if failed is not None:
            made.change(made.calls[-1], result=None, error=failed)
    return made


@pytest.mark.parametrize(
    ("refused", "effect", "reason"),
    [
        (error("ValueError", "a prompt cannot be empty"), Effect.REFUSED, ""),
        (None, Effect.DROPPED, "generate() answers a batch with a bad row (empty)"),
        (
            error("ServerError", "prompt", status=500),
            Effect.BROKE,
            "generate() breaks at a batch with a bad row (empty): ServerError 500: prompt",
        ),
        (
            error("ValueError", "bad"),
            Effect.REFUSED_NAMELESS,
            "generate() does not say what is wrong with a bad row (empty): ValueError: bad",
        ),
    ],
)
def test_what_became_of_a_batch(refused, effect, reason):
    found = scene(refused).judge(BAD_ROWS)
    assert ([one.effect for one in found.effects], found.reason) == ([effect], reason)


def test_a_neighbour_that_fails():
    found = scene(error("ValueError", "an empty prompt"), error("RuntimeError", "the batch was dropped")).judge(
        BAD_ROWS
    )
    assert (
        found.reason == "generate() fails beside or after a batch with a bad row: RuntimeError: the batch was dropped"
    )


def test_nothing_is_told_without_a_batch_or_a_neighbour():
    lone = Scene()
    lone.generate([[10, 11, 12]], label="row: empty")
    assert lone.judge(BAD_ROWS).status == "untestable"


def test_a_row_that_its_engine_keeps():
    made = scene(error("ValueError", "an empty prompt"))
    made.seen = [seen for seen in made.seen if seen.kind != "finish" or seen.at_ns < made.calls[-1].started_ns]
    assert made.judge(BAD_ROWS).reason == "an engine's frontend keeps a row of a batch that was refused"
