"""`parity shrink`: the fewest cases that keep a check red, and what it says where there are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.commands import cli
from harness.contract.errors import UsageError
from harness.contract.states import FIRST, STEPS, Step, after, allowed
from harness.machine.progress import silent
from harness.running import shrink as running
from harness.running.session import Options
from harness.running.shrink import Order, fewest, shrink
from reports.shrunk import lines
from scenarios.sequences import legal

SEQUENCE = "sequences.test_all_asleep_1"
FAULT = "pause_ended_early/by_wake_up"


def order(folder, **more) -> Order:
    options = Options(
        baseline="miniature",
        candidate="miniature",
        stacks=["miniature"],
        engine="cpu",
        run_dir=folder / "run",
        twin=False,
        fault_taps="fault" in more,
        record=False,
    )
    return Order(**{"options": options, "scenario": SEQUENCE} | more)


@given(st.integers(1, 60), st.data())
def test_the_cases_that_it_takes_are_found_and_no_others(count, data):
    cases = list(range(1, count + 1))
    needed = data.draw(st.sets(st.sampled_from(cases)))
    asked = []

    def red(some):
        asked.append(tuple(some))
        return needed <= set(some)

    assert fewest(cases, red) == sorted(needed)
    assert tuple(cases) not in asked, "all cases are known to be red"


@given(st.sets(st.frozensets(st.integers(1, 12), max_size=4), min_size=1))
def test_none_of_what_is_left_can_be_left_out(ways):
    """Several sets of cases turn it red, and a case beside them may turn it green again."""

    def red(some):
        return any(way <= set(some) for way in ways) and (len(some) % 5 != 3 or len(some) == 12)

    left = fewest(range(1, 13), red) if red(range(1, 13)) else []
    assert not any(red([one for one in left if one != gone]) for gone in left)


def test_the_steps_of_a_sequence_that_a_fault_takes(tmp_path):
    told = []
    found = shrink(order(tmp_path, fault=FAULT), silent, told.append)
    assert [step.split()[0] for step in found.cases.values()] == ["pause", "wake_up", "is_paused"]
    assert (found.outcome, found.again, found.exit_status) == ("fewest", True, 0)
    assert (found.check, found.enumerated) == ("as_the_state_says", 20)
    assert len(told) == found.drives - 1, (
        "the first drive and the last have no line of their own, but the check has one"
    )
    shown = "\n".join(lines(found, ["shrink", SEQUENCE, "--stack", "miniature"]))
    assert "3 of 20 cases are enough, and none of them can be left out" in shown
    numbers = ",".join(map(str, found.cases))
    assert f"again: parity shrink {SEQUENCE} --stack miniature --cases {numbers}" in shown
    alone = shrink(order(tmp_path / "alone", fault=FAULT, cases=tuple(found.cases)), silent, told.append)
    assert alone.cases == found.cases


def test_a_request_among_many_that_a_fault_takes(tmp_path):
    asked = order(tmp_path, scenario="call_forms.test_generate", fault="argument_form/refused")
    found = shrink(asked, silent, lambda line: None)
    assert found.outcome == "fewest"
    assert len(found.cases) == 1 < found.enumerated


def test_what_needs_none_of_the_cases(tmp_path):
    """Every sequence ends with a sync."""
    found = shrink(
        order(tmp_path, fault="sync_missed/every_server", check="every_parameter"), silent, lambda line: None
    )
    assert (found.cases, found.exit_status) == ({}, 0)
    shown = lines(found, ["shrink", SEQUENCE])
    assert shown[1].startswith("red without any of the 20 cases")
    assert shown[-1] == f"again: parity shrink {SEQUENCE}"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "no check is red"),
        ({"check": "fan_out", "fault": FAULT}, "fan_out is not red"),
        ({"scenario": "ordering.nothing"}, "there is no scenario"),
        ({"scenario": "errors.test_an_empty_batch"}, "enumerates no cases"),
        ({"cases": (3, 99)}, "has no case 99"),
        ({"fault": "nothing"}, "has no fault nothing"),
    ],
)
def test_what_cannot_be_shrunk_is_refused_by_name(tmp_path, more, said):
    with pytest.raises(UsageError, match=said):
        shrink(order(tmp_path, **more), silent, lambda line: None)


def test_a_search_that_is_cut_short_shows_the_fewest_so_far(tmp_path):
    found = shrink(order(tmp_path, fault=FAULT, drives=6), silent, lambda line: None)
    assert (found.outcome, found.exit_status) == ("out of drives", 1)
    assert 3 < len(found.cases) < 20
    assert "--drives ended the search" in "\n".join(lines(found, []))


def test_ctrl_c_shows_the_fewest_so_far(tmp_path):
    def say(line: str) -> None:
        if line.startswith("drive 6"):
            raise KeyboardInterrupt

    found = shrink(order(tmp_path, fault=FAULT), silent, say)
    assert (found.outcome, found.again, found.exit_status) == ("interrupted", False, 2)
    assert 3 < len(found.cases) < 20
    assert "interrupted" in "\n".join(lines(found, []))


def test_what_is_green_when_driven_once_more_is_said_to_depend_on_chance(tmp_path, monkeypatch):
    shipped = running.Shrinking._take

    def take(self, cases):
        made, verdicts = shipped(self, cases)
        return made, [] if self._driven.get(tuple(cases or ())) else verdicts

    monkeypatch.setattr(running.Shrinking, "_take", take)
    found = shrink(order(tmp_path, fault=FAULT), silent, lambda line: None)
    assert (found.again, found.exit_status) == (False, 1)
    assert "NOT red when driven once more" in "\n".join(lines(found, []))


@given(st.lists(st.sampled_from(STEPS), max_size=30))
def test_any_steps_become_a_sequence_that_the_contract_allows(steps):
    state = FIRST
    for step in legal(steps):
        assert allowed(state, step)
        state = after(state, step)


def test_a_legal_sequence_stays_as_it_is():
    steps = (Step("send", "generate"), Step("pause", "keep"), Step("is_paused"), Step("resume"), Step("finish"))
    assert legal(steps) == steps
    assert legal(steps[1:]) == steps[1:-1]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["shrink", "a.b", "--cases", "1,2", "--stack", "s"], ["shrink", "a.b", "--stack", "s"]),
        (["shrink", "a.b", "--cases=1,2", "--run-dir", "there"], ["shrink", "a.b"]),
        (["shrink", "a.b"], ["shrink", "a.b"]),
    ],
)
def test_the_command_that_repeats_has_one_list_of_cases(arguments, kept):
    assert cli._without(arguments, "--cases", "--run-dir") == kept


def test_a_list_of_cases_is_read_or_refused():
    assert cli._numbers("--cases", "3, 4,9") == (3, 4, 9)
    assert cli._numbers("--cases", "") == ()
    with pytest.raises(UsageError, match="no list of numbers"):
        cli._numbers("--cases", "3-9")
