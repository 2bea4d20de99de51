"""With the ledger on, a fault beside a known divergence stays red. An entry whose reason is too wide swallows it: red."""

from __future__ import annotations

import datetime

import msgspec
import pytest

from harness.contract.faults import Fact, Fault
from harness.judging import ledger as ledgers
from harness.judging.ledger import Entry, Ledger
from harness.machine.progress import silent
from harness.proving import prove
from harness.proving.entries import LedgerProof, Stays, to_try
from harness.proving.kill_matrix import Lap
from harness.proving.prove import Request, started_laps
from harness.proving.swallowed import prove_entries
from harness.running import catalogue
from reports import kill_matrix_terminal
from reports.kill_matrix import write_all
from tests import recordings
from tests.kill_matrices import FAULTS, READS, TARGET, Script, planned, verdict

A, B = sorted(name for name in catalogue.declared() if name.startswith("ordering."))[:2]
TODAY = datetime.date(2026, 5, 1)
PLACE = "disaggregated"
KNOWN = verdict(A, "routing", "fail", "a session moved: its id is 0", target=TARGET)
CONTROL = [KNOWN, verdict(A, "tokens"), verdict(B, "routing")]


def entry(**changes) -> Entry:
    about = {"scenario": A, "check": "routing", "targets": [TARGET], "reason": "a session moved: its id is 0", "cap": 1}
    return recordings.entry(id="zero", **(about | changes))


def beside(*laps: Lap, control=CONTROL, **changes) -> LedgerProof:
    correct = Lap(fault=None, verdicts=list(control), driven=2, beside=PLACE)
    tried = {PLACE: {A: {"moves"}}}
    return prove_entries(Ledger(entries=(entry(**changes),)), TARGET, tried, [correct, *laps], TODAY)


def under(*reds, error: str = "") -> Lap:
    return Lap(fault="moves", verdicts=list(reds), driven=1, fired=1, error=error, beside=PLACE)


OTHER = verdict(A, "routing", "fail", "a session moved: its id is a plain text")


@pytest.mark.parametrize(
    ("reason", "stays"), [("a session moved: its id is 0", Stays.RED), ("a session moved.*", Stays.SWALLOWED)]
)
def test_an_entry_with_a_wide_reason_swallows_a_fault_and_a_narrow_one_does_not(reason, stays):
    found = beside(under(OTHER), reason=reason)
    assert [(one.entry, one.known, [f.stays for f in one.faults]) for one in found.entries] == [("zero", 1, [stays])]
    swallowed = f"ledger entry zero swallows moves: routing in {A}: {OTHER.reason}"
    assert found.problems == [swallowed] * (stays == Stays.SWALLOWED)


def test_what_is_as_without_the_fault_is_unseen_and_another_check_shows_it():
    assert beside(under(KNOWN)).count(Stays.UNSEEN) == 1
    assert beside(under(KNOWN, verdict(A, "tokens", "fail"))).count(Stays.RED) == 1
    assert beside(under(KNOWN, verdict(B, "routing", "fail"))).count(Stays.UNSEEN) == 1, "another scenario's"


def test_more_than_the_cap_stays_red():
    wide = {"scenario": "ordering.*", "cap": 1}
    both = [KNOWN, msgspec.structs.replace(KNOWN, scenario=B)]
    assert beside(under(*both), **wide).problems == [], "the second one is red for itself"


@pytest.mark.parametrize(
    ("laps", "control", "said"),
    [
        ([], CONTROL, "ledger entry zero under moves: not driven: the run ended before"),
        ([under(error="StackError: it died")], CONTROL, "under moves: not driven: StackError: it died"),
        ([under(OTHER)], [*CONTROL, verdict(B, "tokens", "fail")], f"the correct stack is red: tokens in {B}"),
    ],
)
def test_what_was_not_driven_or_is_red_without_a_fault_is_red(laps, control, said):
    [problem] = beside(*laps, control=control).problems
    assert said in problem


def test_an_entry_is_tried_under_the_faults_that_may_turn_its_check_red(monkeypatch):
    declared = [catalogue.declared()[name] for name in (A, B)]
    named = Fault(name="named", breaks="…", caught_by=frozenset({"routing"}))
    corrupting = Fault(name="corrupting", breaks="…", caught_by=frozenset({"x"}), corrupts=Fact.ROUTES)
    neither = Fault(name="neither", breaks="…", caught_by=frozenset({"x"}))

    def tried(**changes):
        found = Ledger(entries=(entry(check="routing:late", **changes),))
        reads = {"routing": Fact.ROUTES}
        places = to_try(found, TARGET, [named, corrupting, neither], declared, reads=reads, engines=2)
        return {place.name: names for place, names in places}

    assert tried() == tried(topology=PLACE) == {PLACE: {A: {"named", "corrupting"}}}
    assert tried(scenario="ordering.*")[PLACE].keys() == {A, B}
    assert tried(targets=["another"]) == tried(topology="remote") == {}


def test_the_entries_are_driven_after_the_faults_and_shown_in_every_format(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(catalogue, "facts_read", lambda: READS)
    monkeypatch.setattr(ledgers, "load", lambda: Ledger(entries=(entry(reason="a session moved.*"),)))
    reds = {"moves": [OTHER, verdict(B, "routing", "fail")]}

    def says(fault: str | None, scenario: str):
        return [
            next((red for red in reds.get(fault or "", []) if (red.scenario, red.check) == (v.scenario, v.check)), v)
            for v in CONTROL
            if v.scenario == scenario
        ]

    [moves] = [fault for fault in FAULTS if fault.id == "moves"]
    whole = planned([A, B], [moves], inline=False)
    plan = msgspec.structs.replace(whole, entries=((whole.seats[0][0], {A: {"moves"}}),))
    script = Script(says)
    assert [(lap.fault, lap.driven, lap.beside) for lap in started_laps(plan, script)] == [
        (None, 2, ""),
        ("moves", 2, ""),
        (None, 1, PLACE),
        ("moves", 1, PLACE),
    ]
    matrix = prove.prove(
        Request(run_dir=tmp_path, ledger=True), [plan], silent, lambda *_: None, Script(says).begin
    ).matrix
    [swallowed] = [problem for problem in matrix.problems if "swallows" in problem]
    assert swallowed.startswith("toy: ledger entry zero swallows moves")
    kill_matrix_terminal.show(matrix)
    shown = capsys.readouterr().out
    page = write_all(matrix, tmp_path)["kill_matrix.html"].read_text()
    assert "1 swallowed" in shown
    assert "Ledger × fault" in page
