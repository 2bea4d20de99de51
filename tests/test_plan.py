"""The rollout plan: the shipped plan is complete, and a malformed one is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import PROJECT, __version__
from harness.contract.errors import UsageError
from harness.machine.git import run_git
from harness.running.catalogue import declared
from harness.suite import plan
from harness.suite.plan import WITHDRAWN, load_plan, published

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


def test_every_promise_has_an_id_that_is_published_and_was_not_withdrawn():
    slugs = [bullet.slug for bullet in load_plan().bullets]
    kept = [slug for slug, withdrawn in published().items() if not withdrawn]
    assert sorted(slugs) == sorted(kept), "a new promise needs a line in promises.txt, a withdrawn one its reason there"


def test_no_id_that_was_ever_published_disappears():
    """By the history of promises.txt, as far as the clone has it."""
    log = run_git(PROJECT, "log", "--format=", "--patch", "--unified=0", "--", "scenarios/promises.txt").stdout.decode()
    before = {line[1:].partition(WITHDRAWN)[0] for line in log.splitlines() if re.match(r"[-+][a-z0-9]", line)}
    assert before <= published().keys(), "put the line back, with the reason why the promise was withdrawn"


def test_a_withdrawn_promise_keeps_its_id_and_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "promises.txt"
    monkeypatch.setattr(plan, "files", lambda _: tmp_path)
    file.write_text(f"# ids\none\ntwo{WITHDRAWN}nobody relies on it\n")
    assert published() == {"one": "", "two": "nobody relies on it"}
    file.write_text(f"two{WITHDRAWN}nobody relies on it\ntwo\n")
    with pytest.raises(UsageError, match="has an id twice"):
        published()


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
