"""`--budget`: which share of its cases a scenario drives, and what the report says of the rest."""

from __future__ import annotations

import msgspec
import pytest

from harness.contract.messages import StartRequest
from harness.contract.topology import Topology
from harness.driving.stack import Stack
from harness.records.recorder import Recorder
from harness.records.recording import ENUMERATED
from reports.view import left_out
from tests.synthetic import judgement


class Kept(Recorder):
    def __init__(self) -> None:
        self.events = []

    def add(self, event) -> None:
        self.events.append(event)


def stack(budget: float) -> Stack:
    made = Stack(object(), StartRequest(target="toy", topology=Topology(), model_path="", scratch="", logs=""))  # type: ignore[arg-type]
    made.budget = budget
    made.record_to(Kept())
    return made


@pytest.mark.parametrize(("budget", "driven"), [(0.001, 1), (0.2, 20), (1, 100), (5, 100)])
@pytest.mark.asyncio
async def test_the_budget_chooses_a_share_in_order_and_records_the_rest(budget, driven):
    one = stack(budget)
    chosen = one.within_budget(range(100))
    assert (len(chosen), chosen) == (driven, sorted(chosen))
    assert chosen == stack(budget).within_budget(range(100))
    [mark] = one._recorder.events
    assert (mark.name, mark.numbers) == (ENUMERATED, {"driven": driven, "left_out": 100 - driven})


@pytest.mark.asyncio
async def test_the_first_cases_are_those_of_a_sequence():
    assert stack(0.2).within_budget("abcdefghij", first=True) == ["a", "b"]


@pytest.mark.parametrize(("budget", "times"), [(0.1, 1), (1, 3), (5, 15)])
def test_what_can_be_made_without_end_grows_with_the_budget(budget, times):
    assert stack(budget).times(3) == times


def test_the_report_names_the_scenarios_whose_cases_were_left_out():
    whole = judgement()
    assert left_out(whole) == []
    first, *rest = whole.verdicts
    told = msgspec.structs.replace(whole, verdicts=[msgspec.structs.replace(first, left_out=80), *rest])
    assert left_out(told) == [f"the budget left out 80 cases of 1 scenario: {first.scenario} 80"]
