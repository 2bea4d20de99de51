"""Several takes give one verdict per check: never better than the worst take, in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judging.takes import merge, widest
from harness.records.verdict import WORST_FIRST, Conformance, Margin, Parity, Verdict
from harness.running.session import Options
from tests import recordings

CHECKS = ("order", "tokens", "echo")
statuses = st.sampled_from(sorted(Conformance))
sizes = st.floats(0, 10)
margins = st.builds(
    Margin,
    unit=st.just("nats"),
    measured=sizes,
    bound=st.just(1.0),
    faults=st.dictionaries(st.sampled_from("ab"), sizes),
    false_alarm_rate=st.none() | sizes,
    power=st.none() | sizes,
)


def verdict(check: str, status: str, margin: Margin | None = None) -> Verdict:
    return recordings.verdict(check=check, status=status, reason=f"it is {status}", margin=margin)


one_take = st.dictionaries(st.sampled_from(CHECKS), statuses, min_size=1).map(
    lambda found: [verdict(check, status) for check, status in found.items()]
)


def summary(merged: list[Verdict]) -> dict[str, tuple[str, int, int]]:
    return {v.check: (v.status, v.alike, v.takes) for v in merged}


@given(st.lists(one_take, min_size=2, max_size=6), st.randoms())
def test_the_worst_take_stands_and_is_counted_in_any_order(takes: list[list[Verdict]], rng: random.Random):
    merged = merge(takes)
    for found in merged:
        of_check = [v.status for take in takes for v in take if v.check == found.check]
        assert found.status == min(of_check, key=WORST_FIRST.index)
        assert (found.takes, found.alike) == (len(takes), of_check.count(found.status))
        assert found.reason == f"it is {found.status}", "the reason is not touched: the ledger matches it"
    assert {v.check for v in merged} == {v.check for take in takes for v in take}
    shuffled = rng.sample(takes, len(takes))
    assert summary(merge(shuffled)) == summary(merged)


@given(one_take)
def test_one_take_is_left_as_it_is(take: list[Verdict]):
    assert merge([take]) == take
    assert all((v.takes, v.alike) == (1, 1) for v in take)


def test_every_status_has_its_place():
    assert set(WORST_FIRST) == set(Conformance) | set(Parity)


@given(st.lists(margins, min_size=1, max_size=5), st.randoms())
def test_margins_of_takes_are_as_wide_as_the_worst_take(found: list[Margin], rng: random.Random):
    whole = widest(found)
    assert all(whole.measured >= one.measured for one in found)
    assert all(whole.faults[name] <= size for one in found for name, size in one.faults.items())
    assert widest(rng.sample(found, len(found))) == whole
    assert widest([whole, *found]) == whole


def test_a_take_that_is_red_keeps_no_margin_of_those_that_passed():
    green = verdict("tokens", "pass", Margin(unit="nats", measured=0.1, bound=1, faults={"a": 2}))
    (merged,) = merge([[green], [verdict("tokens", "fail")]])
    assert (merged.status, merged.margin, merged.alike, merged.takes) == ("fail", None, 1, 2)
    (same,) = merge([[green], [green]])
    assert same.margin == green.margin


@pytest.mark.parametrize(
    ("changes", "driven"),
    [
        ({}, (1, 1)),
        ({"twin": True}, (2, 1)),
        ({"repeat": 20}, (20, 20)),
        ({"twin": False}, (1, 1)),
        ({"stacks": ["old"], "twin": True}, (2, 2)),
        ({"stacks": ["old"], "repeat": 20}, (20, 20)),
    ],
)
def test_takes_that_are_due_in_any_case(changes: dict, driven: tuple[int, int]):
    options = Options(baseline="old", candidate="new", engine="cpu", **changes)
    assert (options.takes("old"), options.takes("new")) == driven
    assert options.takes("old", once=True) == options.repeat, "a twin is not worth a start"
