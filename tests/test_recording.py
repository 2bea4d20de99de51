"""A recording, or a book of reference answers, is complete or refused by name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract.errors import RecordingError
from harness.records import index as indexing
from harness.records import recording
from harness.records.recorder import Recorder
from harness.records.recording import Call, CallError, Footer, Observation, ScenarioEnd, ScenarioStart
from tests import recordings, traces


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.jsonl"
    recordings.write(path, "stack:old", ["module.test_a", "module.test_b"], takes=2, calls=1, rows=1, tokens=1)
    return path


def _all_loaded(path: Path) -> None:
    found = indexing.index(path)
    for name, take in found.spans:
        found.trace(name, take)


READERS: list[Callable[[Path], object]] = [
    lambda path: list(recording.read(path)),
    lambda path: list(recording.traces(path)),
    _all_loaded,
]


@pytest.mark.parametrize("reader", READERS, ids=["read", "traces", "index"])
def test_a_recording_cut_off_at_any_byte_is_refused_by_name(tmp_path: Path, reader):
    cut = tmp_path / "cut.jsonl"
    recordings.write(cut, "stack:old", ["module.test_a"], calls=0)
    for length in reversed(range(cut.stat().st_size)):
        os.truncate(cut, length)
        with pytest.raises(RecordingError, match=r"cut\.jsonl"):
            reader(cut)


def test_the_index_loads_what_reading_in_order_gives(whole: Path):
    in_order = list(recording.traces(whole))
    found = indexing.index(whole)
    assert [found.trace(name, take) for name, take in found.spans] == in_order
    assert found.scenarios == ["module.test_a", "module.test_b"]
    assert found.takes("module.test_b") == [1, 2]
    calls_only = found.trace("module.test_b", 2, observations=False)
    assert calls_only.calls == in_order[-1].calls
    assert calls_only.observations == ()


def test_a_recording_is_readable_while_it_is_written(tmp_path: Path):
    recorder = Recorder(tmp_path / "live.jsonl").open(traces.header())
    events = list(recordings.events(calls=1, rows=1, tokens=1))
    for number, event in enumerate(events, start=1):
        recorder.add(event)
        assert [*recording.read(recorder.path, live=True)][1:] == events[:number]
    with pytest.raises(RecordingError, match="no footer"):
        list(recording.read(recorder.path))
    content = recorder.path.read_bytes()
    recorder.path.write_bytes(content[:-1])
    assert [*recording.read(recorder.path, live=True)][1:] == events[:-1], "a line that is being written is left alone"
    recorder.close()


def test_a_recording_is_never_overwritten(whole: Path):
    before = whole.read_bytes()
    with pytest.raises(RecordingError, match="exists already"):
        Recorder(whole).open(traces.header())
    assert whole.read_bytes() == before


def test_a_line_that_is_gone_or_doubled_does_not_pass_the_footer(whole: Path):
    lines = whole.read_bytes().splitlines(keepends=True)
    for damaged in (lines[:2] + lines[3:], [*lines[:3], *lines[2:]]):
        whole.write_bytes(b"".join(damaged))
        for reader in READERS[::2]:
            with pytest.raises(RecordingError):
                reader(whole)


def test_a_damaged_line_is_named_by_its_number_when_it_is_loaded(whole: Path):
    lines = whole.read_bytes().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines, start=1) if line.startswith(b'{"event":"call"'))
    lines[at - 1] = lines[at - 1].replace(b'"method":', b'"nothing":')
    whole.write_bytes(b"".join(lines))
    for reader in READERS:
        with pytest.raises(RecordingError, match=rf":{at}: not a line of a recording"):
            reader(whole)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([("start", "a", 1), ("start", "b", 1)], "has no end before b starts"),
        ([("start", "a", 1), ("end", "b", 1)], "which did not start"),
        ([("start", "a", 1), ("end", "a", 1), ("start", "a", 1), ("end", "a", 1)], "recorded twice"),
        ([("start", "a", 1)], "was cut off"),
    ],
)
def test_scenarios_that_do_not_begin_and_end_in_turn_are_refused(tmp_path: Path, events, message):
    with Recorder(tmp_path / "odd.jsonl").open(traces.header()) as recorder:
        for kind, name, take in events:
            if kind == "start":
                recorder.add(ScenarioStart(scenario=name, take=take, at_ns=1))
            else:
                recorder.add(ScenarioEnd(scenario=name, take=take, outcome="completed", at_ns=1))
    with pytest.raises(RecordingError, match=message):
        indexing.index(tmp_path / "odd.jsonl")


def test_a_recording_of_another_format_is_refused(tmp_path: Path):
    Recorder(tmp_path / "old.jsonl").open(traces.header(format=recording.FORMAT + 1)).close()
    with pytest.raises(
        RecordingError, match=f"has format {recording.FORMAT + 1}, this harness reads {recording.FORMAT}"
    ):
        list(recording.read(tmp_path / "old.jsonl"))


def test_the_footer_says_how_the_recording_ended(tmp_path: Path):
    with pytest.raises(KeyError), Recorder(tmp_path / "failed.jsonl").open(traces.header()):
        raise KeyError
    assert [*recording.read(tmp_path / "failed.jsonl")][-1] == Footer(events=0, outcome="failed")


# --- properties

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=8), json_values, max_size=3)
errors = st.builds(CallError, kind=st.text(max_size=9), message=st.text(), status=st.none() | st.integers(100, 599))
times = st.integers(0, 2**62)
calls = st.builds(
    Call,
    id=st.integers(0, 2**31),
    method=st.sampled_from(["generate", "pause"]),
    request=objects,
    result=st.none() | objects,
    error=st.none() | errors,
    started_ns=times,
    ended_ns=times,
    phase=st.sampled_from(["clean_room", "scenario"]),
    label=st.none() | st.text(max_size=9),
)
seen = st.builds(Observation, kind=st.text(max_size=9), server=st.text(max_size=9), at_ns=times, data=objects)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(calls | seen, max_size=4), st.none() | errors), max_size=4))
def test_whatever_is_recorded_is_read_back_as_it_was(tmp_path_factory, drawn):
    """Reads in order by `traces`, and one by one through the index: texts of any characters, numbers of any size."""
    path = tmp_path_factory.mktemp("drawn") / "recording.jsonl"
    given_events, takes = [], Counter()
    with Recorder(path).open(traces.header()) as recorder:
        for name, events, error in drawn:
            takes[name] += 1
            outcome = "completed" if error is None else "failed"
            scenario = [
                ScenarioStart(scenario=name, take=takes[name], at_ns=1),
                *events,
                ScenarioEnd(scenario=name, take=takes[name], outcome=outcome, error=error, at_ns=2),
            ]
            for event in scenario:
                recorder.add(event)
            given_events += scenario
    _, *lines, footer = recording.read(path)
    assert lines == given_events
    assert footer == Footer(events=len(given_events), outcome="completed")
    in_order = list(recording.traces(path))
    assert [list(t.calls) for t in in_order] == [[e for e in events if isinstance(e, Call)] for _, events, _ in drawn]
    found = indexing.index(path)
    assert [found.trace(name, take) for name, take in found.spans] == in_order


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "Broken 500"),
        ("port 40123 of http://127.0.0.1:40123/x is gone", "Broken 500: port … of … is gone"),
        ("no such file: /tmp/run-7/logs/a.log", "Broken 500: no such file: …"),
        ("request cmpl-0a1b2c3d4e5f6071 took 1.25 s\n\n  too long", "Broken 500: request cmpl-… took … s too long"),
        ("word " * 40, "Broken 500: " + ("word " * 16).strip() + " …"),
        ("no answer within 60 s\n  next: read /tmp/host.log", "Broken 500: no answer within … s"),
        ("deadbeef and decade are words", "Broken 500: deadbeef and decade are words"),
    ],
)
def test_what_an_error_says_is_the_same_from_run_to_run(message, said):
    assert CallError(kind="Broken", message=message, status=500).said == said
