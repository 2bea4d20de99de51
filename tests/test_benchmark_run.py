"""The benchmark of a run agrees with the recordings and refuses an incomplete run."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks import run as benchmark
from harness.contract.errors import RecordingError, UsageError
from harness.contract.topology import Topology
from harness.records.recorder import Recorder
from harness.records.recording import Call, ScenarioEnd, ScenarioStart
from harness.records.run_folder import RunFolder
from tests import recordings

SECOND = 1_000_000_000
OLD, NEW = "stack:old", "stack:new"


def call(number: int, start_s: int, end_s: int, phase: str = "scenario") -> Call:
    return Call(
        id=number, method="health", request={}, started_ns=start_s * SECOND, ended_ns=end_s * SECOND, phase=phase
    )


@pytest.fixture
def run(tmp_path):
    """Ten seconds of driving on each stack. Calls are pending for 7 of them on the old stack, for all 10 on the new one."""
    overlapping = [call(1, 1, 3, "clean_room"), call(2, 4, 7), call(3, 5, 9)]
    hung = [call(1, 0, 10), call(2, 2, 3)]
    with RunFolder.create(tmp_path / "run") as folder:
        for target, calls, outcome in ((OLD, overlapping, "completed"), (NEW, hung, "failed")):
            with Recorder(folder.recording(target, Topology())).open(recordings.header(target)) as recorder:
                recorder.add(ScenarioStart(scenario="module.test_it", at_ns=0))
                for one in calls:
                    recorder.add(one)
                recorder.add(ScenarioEnd(scenario="module.test_it", outcome=outcome, at_ns=10 * SECOND))
        folder.write_info(recordings.info(seconds={"environment": 1.0, "start": 9.0, "drive": 20.0}))
        return folder


def test_time_in_which_no_call_was_pending_is_the_harnesss_own(run):
    rows = {row.target: row for row in benchmark.costs(run.path).rows}
    assert (rows[OLD].wall_s, rows[OLD].pending_s, rows[OLD].own_s) == (10, 7, 3)
    assert rows[OLD].own_of_driving == pytest.approx(0.3)
    assert (rows[NEW].pending_s, rows[NEW].own_s) == (10, 0)
    assert (rows["all"].wall_s, rows["all"].own_of_driving) == (20, pytest.approx(0.15))
    assert rows["all"].own_of_run == pytest.approx(0.1)
    assert (rows["all, to their end"].takes, rows["all, to their end"].own_s) == (1, 3)


def test_the_table_names_stages_stacks_and_the_slowest_take(run):
    said = benchmark.show(benchmark.costs(run.path))
    for expected in ("environment", "30.0%", OLD, NEW, "30.00%", "module.test_it"):
        assert expected in said


def test_numbers_are_written_as_json(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "numbers.json"
    monkeypatch.setattr("sys.argv", ["benchmarks.run", str(run.path), "--json", str(out)])
    benchmark.main()
    assert "15.00%" in capsys.readouterr().out
    assert msgspec.json.decode(out.read_bytes(), type=benchmark.Costs) == benchmark.costs(run.path)


def test_a_run_that_is_not_whole_is_refused_by_name(run, tmp_path):
    with pytest.raises(UsageError, match=r"no run\.json"):
        benchmark.costs(tmp_path)
    recording = run.recorded()[0]
    recording.write_bytes(b"".join(recording.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(RecordingError, match="no footer"):
        benchmark.costs(run.path)
