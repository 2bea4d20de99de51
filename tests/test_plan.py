"""The rollout plan: the shipped plan is complete, and a malformed one is refused by name."""

from __future__ import annotations

import pytest

from harness import __version__
from harness.contract.errors import UsageError
from harness.running.catalogue import declared
from harness.suite.plan import load_plan, published

GOOD = """
[[task]]
number = 0
wave = 1
title = "contract"
[[task.bullet]]
id = "0.1"
slug = "results-in-order"
level = "must"
source = "an API reference"
since = "0.1.0"
text = "order"
scenarios = ["ordering.test_rows", "weights.test_sync@colocated"]
"""
ANOTHER = """[[task.bullet]]
id = "0.0"
slug = "results-in-order"
level = "may"
source = "an API reference"
since = "0.1.0"
text = "the same id twice"
scenarios = []
[[task.bullet]]"""


def test_every_promise_has_an_id_that_is_published_and_no_published_id_disappears():
    slugs = [bullet.slug for bullet in load_plan().bullets]
    assert len(set(published())) == len(published())
    assert sorted(slugs) == sorted(published()), "a new promise needs a line in promises.txt; a published one stays"


def test_no_promise_is_younger_than_the_suite():
    def numbers(release: str) -> list[int]:
        return [int(part) for part in release.split(".")]

    assert all(numbers(bullet.since) <= numbers(__version__) for bullet in load_plan().bullets)


def test_the_shipped_plan_has_the_fifteen_tasks_of_the_issue_and_the_contract():
    plan = load_plan()
    assert [task.number for task in plan.task] == list(range(16))
    assert [task.wave for task in plan.task] == [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 6, 6, 6]


def test_every_scenario_of_the_plan_exists_in_the_topology_that_it_names():
    scenarios_by_name = declared()
    for bullet in load_plan().bullets:
        for named in bullet.scenarios:
            name, _, where = named.partition("@")
            assert name in scenarios_by_name, f"bullet {bullet.id} names {name}, which does not exist"
            assert not where or where in scenarios_by_name[name].topologies, f"{bullet.id}: {named}"


def test_every_scenario_gives_evidence_for_some_bullet():
    named = {name.partition("@")[0] for bullet in load_plan().bullets for name in bullet.scenarios}
    assert sorted(set(declared()) - named) == []


def test_a_good_plan_loads(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(GOOD)
    assert [b.id for b in load_plan(file).bullets] == ["0.1"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("number = 0", "number = 1", "numbered"),
        ("wave = 1", "wave = 7", "wave 7"),
        ('title = "contract"', 'title = " "', "no title"),
        ('title = "contract"', 'title = "contract"\ncolour = "red"', "colour"),
        ('id = "0.1"', 'id = "0.2"', "0.2"),
        ('text = "order"', 'text = ""', "0.1 has no text"),
        ('slug = "results-in-order"\n', "", "slug"),
        ("results-in-order", "0.1 Order", "0.1 has the slug"),
        ('level = "must"', 'level = "shall"', "level"),
        ("an API reference", "", "0.1 has no source"),
        ('since = "0.1.0"', 'since = "today"', "since 'today'"),
        ("[[task.bullet]]", ANOTHER, "several bullets have the slug results-in-order"),
        ("ordering.test_rows", "ordering.rows", "ordering.rows"),
        ("@colocated", "@moon", "@moon"),
        ('"ordering.test_rows", ', '"weights.test_sync@colocated", ', "twice"),
        ("scenarios = [", "scenarios = [3, ", "scenarios"),
        ("[[task]]", "[[task]", "TOML"),
    ],
)
def test_a_malformed_plan_is_refused_by_name(tmp_path, old, new, says):
    file = tmp_path / "plan.toml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError, match=says.replace(".", r"\.")) as caught:
        load_plan(file)
    assert caught.value.next_step


def test_a_plan_that_is_not_there_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read the plan"):
        load_plan(tmp_path / "none.toml")
