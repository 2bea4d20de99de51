"""The kept sequences follow the rules, end where the next scenario can begin, and the report shows what they visited."""

from __future__ import annotations

import msgspec
import pytest

from harness.contract.capability import Capability
from harness.contract.states import FIRST, STEPS, State, Step, after, allowed, closing, forbidden, needs, reachable
from harness.records.verdict import Visit
from reports.view import sequence_tables
from scenarios.sequences import chosen, kept
from tests import synthetic


@pytest.mark.parametrize("one", kept(), ids=lambda one: one.name)
def test_a_kept_sequence_is_allowed_from_step_to_step(one):
    state = FIRST
    for step in one.sequence:
        assert step in STEPS
        assert allowed(state, step), f"{step} while {state}, {state.requests}"
        state = after(state, step)


def test_closing_brings_every_state_back():
    for found in reachable():
        state = found
        for step in closing(found):
            assert forbidden(state, step) is None, f"{step} while {state}"
            state = after(state, step)
        assert state.pending == ()
        assert found.dead or str(state) == "running"


def test_weights_that_a_sleep_discarded_come_back_with_a_sync_only():
    state = FIRST
    for step in (Step("sleep", "2"), Step("wake_up")):
        state = after(state, step)
    assert str(state) == "weights lost"
    assert forbidden(state, Step("generate"))
    assert str(after(state, Step("sync_weights", "1"))) == "running"


def test_pauses_freeze_or_cut_short_what_they_meet():
    state = after(FIRST, Step("send", "generate"))
    assert after(state, Step("pause", "keep")).requests == "frozen"
    assert after(state, Step("pause", "abort")).requests == "cut short"
    assert after(state, Step("pause", "wait")).requests == "no request"
    assert forbidden(after(state, Step("pause", "keep")), Step("pause", "wait"))


def test_needs():
    assert needs(Step("send", "sample")) == {Capability.SAMPLE}
    assert needs(Step("send", "generate")) == set()
    assert Capability.RESET_RUNNING_REQUESTS in needs(Step("reset_prefix_cache", "running"))
    assert needs(Step("pause", "wait")) == {Capability.PAUSE_WAIT}


def test_those_are_chosen_that_visit_most():
    short, wide = (Step("health"),), (Step("health"), Step("pause", "keep"), Step("health"))
    visited = set()
    assert chosen([short, wide], 1, visited) == [wide]
    assert ("health", "paused (keep)", "no request") in visited


def test_the_report_has_a_cell_for_each_step_and_state():
    visit = Visit(step="pause keep", state="running", requests="no request")
    judgement = synthetic.judgement()
    first = msgspec.structs.replace(judgement.verdicts[0], scenario="sequences.test_common_1", visits=[visit])
    columns, rows, reasons = sequence_tables(msgspec.structs.replace(judgement, verdicts=[first]))[first.target]
    cells = dict(rows)["pause keep"]
    assert cells[columns.index("running")] == "no request (common_1); not driven: in flight"
    asleep = cells[columns.index("asleep (level 1)")]
    assert reasons[int(asleep.strip("[]")) - 1] == forbidden(State(asleep=("weights",)), Step("pause", "keep"))
