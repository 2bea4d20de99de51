"""A candidate several times slower is a regression; a slightly slower one is not, and little evidence gives no verdict."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract.errors import Blame
from harness.contract.topology import topology
from harness.judging import pace
from harness.judging.pace import FAR, LEAST_PAIRS, Pace
from harness.records.recording import Call, Event, ScenarioTrace
from harness.records.verdict import Judgement, Parity
from harness.running import run
from tests import recordings, traces

TODAY = datetime.date(2026, 1, 1)
NONE = Pace(pairs=0, ratio=0.0)


def calls(seconds: float, count: int = LEAST_PAIRS, tokens: int = 8) -> list[Call]:
    return [
        traces.generate([[n]], [[1] * tokens], params={}, started_ns=0, ended_ns=int(seconds * 1e9))
        for n in range(count)
    ]


def trace(seconds: float, **about: int) -> ScenarioTrace:
    return traces.trace(*calls(seconds, **about))


def judged(found: Pace, twin: Pace = NONE):
    about = {"baseline": "old", "candidate": "new", "topology": "disaggregated", "wave": 1}
    return pace.verdict(found, twin, **about)


@pytest.mark.parametrize(
    ("times", "status", "red"),
    [(0.1, Parity.PARITY, False), (1, Parity.PARITY, False), (4.9, Parity.PARITY, False),
     (5.1, Parity.REGRESSION, True), (10, Parity.REGRESSION, True)],
)  # fmt: skip
def test_only_several_times_slower_is_a_regression(times: float, status: Parity, red: bool):
    found = pace.ratio([trace(0.2)], [trace(0.2 * times)])
    assert found == Pace(pairs=LEAST_PAIRS, ratio=pytest.approx(times))
    verdict = judged(found)
    assert (verdict.status, verdict.red, verdict.facts) == (status, red, LEAST_PAIRS)
    assert (verdict.blame == Blame.STACK) == red
    assert found.far() == red


def test_few_pairs_are_no_verdict():
    found = pace.ratio([trace(1, count=LEAST_PAIRS - 1)], [trace(100, count=LEAST_PAIRS - 1)])
    assert not found.far()
    assert (judged(found).status, judged(found).blame) == (Parity.UNTESTABLE, Blame.HARNESS)
    assert judged(NONE).status == Parity.UNTESTABLE


def test_what_the_baseline_differs_from_itself_is_allowed_and_no_more():
    slow, noisy = Pace(pairs=20, ratio=6.0), Pace(pairs=20, ratio=1 / 7)
    assert judged(slow, noisy).status == Parity.PARITY
    assert judged(slow, msgspec.structs.replace(noisy, pairs=3)).status == Parity.REGRESSION
    hopeless = judged(Pace(pairs=20, ratio=1.0), Pace(pairs=20, ratio=12.0))
    assert (hopeless.status, hopeless.blame) == (Parity.UNTESTABLE, Blame.ENVIRONMENT)


def test_a_few_slow_calls_decide_nothing():
    subject = traces.trace(*calls(1)[:6], *calls(100)[6:])
    assert pace.ratio([trace(1)], [subject]).ratio == 1


def test_short_failed_and_unlike_calls_are_left_out():
    short, other = trace(1, tokens=7), traces.trace(*calls(1), scenario="module.test_other")
    failed = traces.trace(*(msgspec.structs.replace(c, result=None, error=traces.error()) for c in calls(1)))
    for subject in (short, other, failed):
        assert pace.ratio([trace(1)], [subject]).pairs == 0


def test_chat_and_completion_count_what_their_usage_says():
    def body(tokens: object) -> list[Call]:
        usage = {"usage": {"completion_tokens": tokens}}
        return [
            traces.openai(m, {"n": n}, usage, started_ns=0, ended_ns=8) for m in ("completion", "chat_completion") for n in range(5)
        ]  # fmt: skip

    assert pace.ratio([traces.trace(*body(8))], [traces.trace(*body(16))]) == Pace(pairs=10, ratio=0.5)
    assert pace.ratio([traces.trace(*body("8"))], [traces.trace(*body(None))]).pairs == 0


@given(st.floats(0.05, 20), st.integers(0, 30))
def test_a_uniformly_slower_subject_has_that_ratio(times: float, count: int):
    found = pace.ratio([trace(1, count=count)], [trace(times, count=count)])
    assert found.pairs == count
    assert not count or found.ratio == pytest.approx(times, rel=1e-6)
    assert found.far() == (count >= LEAST_PAIRS and found.ratio > FAR)


# --- in a run


NAMES = [f"module.test_{letter}" for letter in "abcd"]


def slower(by: int):
    def change(event: Event) -> Event:
        if not isinstance(event, Call):
            return event
        return msgspec.structs.replace(event, ended_ns=event.started_ns + by * (event.ended_ns - event.started_ns))

    return change


def in_a_run(path: Path, monkeypatch: pytest.MonkeyPatch, *, by: int, **info) -> Judgement:
    found = {name: recordings.declared(name) for name in NAMES}
    monkeypatch.setattr(run, "declared", lambda: found)
    (path / "ledger.toml").write_text("")
    recordings.run_folder(path / "run", NAMES, change=slower(by), **info)
    return run.judge_run(path / "run", ledger=path / "ledger.toml", today=TODAY)


@pytest.mark.parametrize(("by", "status"), [(1, Parity.PARITY), (10, Parity.REGRESSION)])
def test_a_whole_wave_has_its_pace_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: int, status: Parity):
    judgement = in_a_run(tmp_path, monkeypatch, by=by, whole_waves=[1])
    (verdict,) = [v for v in judgement.verdicts if v.check == pace.CHECK]
    assert (verdict.id, verdict.status) == ("run.pace@disaggregated::pace[stack:old~stack:new]", status)
    assert verdict.facts == 12
    floors = [floor for floor in judgement.noise if floor.check == pace.CHECK]
    assert [floor.weakest_fault for floor in floors] == ([10.0] if by == 1 else [])


@pytest.mark.parametrize(("least", "told"), [(LEAST_PAIRS, [Parity.PARITY]), (1000, [Parity.UNTESTABLE])])
def test_a_topology_in_which_little_was_driven_has_none(tmp_path, monkeypatch, least, told):
    colocated = topology("colocated")
    monkeypatch.setattr(pace, "LEAST_PAIRS", least)
    monkeypatch.setattr(run, "declared", lambda: {name: recordings.declared(name) for name in NAMES})
    (tmp_path / "ledger.toml").write_text("")
    folder = recordings.run_folder(tmp_path / "run", NAMES, whole_waves=[1])
    for target in ("stack:old", "stack:new"):
        recordings.write(folder.recording(target, colocated), target, NAMES[:1], about={"topology": colocated})
    judgement = run.judge_run(folder.path, ledger=tmp_path / "ledger.toml", today=TODAY)
    assert [v.status for v in judgement.verdicts if v.check == pace.CHECK] == told


def test_a_part_of_a_wave_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    judgement = in_a_run(tmp_path, monkeypatch, by=10)
    assert not [v for v in judgement.verdicts if v.check == pace.CHECK]
