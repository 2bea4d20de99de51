"""The track record: today's judge tells each release that has a fault from one that does not, and is red as soon as it does not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from harness.checks.base import failed, passed
from harness.commands import cli
from harness.contract.errors import UsageError
from harness.records.recording import header_of
from harness.records.run_folder import RunFolder
from harness.running import catalogue, track
from harness.running.track import RECORDS, SIDES, Runs, load, recorded, replay
from tests import recordings

FAULTS = load()
SMALLEST = next(fault for fault in FAULTS if fault.id == "the-request-id-is-lost")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_the_release_that_has_a_fault_is_told_from_one_that_does_not(fault):
    assert replay(fault).problem is None


def test_the_record_is_of_the_four_releases_and_has_no_folder_without_a_row():
    assert len(FAULTS) >= 12
    releases = {target.partition(":")[0] for fault in FAULTS for target in (fault.having, fault.free)}
    assert releases == {f"skyrl-0.{minor}.0" for minor in range(1, 5)}
    assert {folder.name for folder in RECORDS.iterdir()} == {fault.id for fault in FAULTS}


def test_recordings_are_small_and_name_no_path_of_a_machine():
    files = sorted(RECORDS.rglob("*.jsonl"))
    assert len(files) == 4 * len(FAULTS)
    assert sum(file.stat().st_size for file in files) < 5_000_000
    for file in files:
        found = re.search(
            r"(?<![\w.:/])/(?:home|root|tmp|Users|work|opt|mnt|var|usr|data)/|/\.parity/", file.read_text()
        )
        assert found is None, file


@pytest.fixture
def records(tmp_path: Path) -> Path:
    shutil.copytree(RECORDS / SMALLEST.id, tmp_path / SMALLEST.id)
    return tmp_path


def judged_by(monkeypatch, change) -> None:
    """Today's suite, with the smallest fault's check changed."""
    scenario = catalogue.declared()[SMALLEST.scenario]
    checks = tuple(change(check) if check.name == SMALLEST.check else check for check in scenario.checks)
    monkeypatch.setattr(track, "declared", lambda: {scenario.name: msgspec.structs.replace(scenario, checks=checks)})


LOST = "chat_completion() lost the request's id, which a header names"


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (passed(1), "skyrl-0.4.0:http has the fault, and today's judge says pass"),
        (failed(1, "it is Wednesday"), "skyrl-0.4.0:http has the fault, and today's judge says fail: it is Wednesday"),
        (failed(1, LOST), f"skyrl-0.2.0:legacy does not have the fault, and today's judge says fail: {LOST}"),
        (passed(0), "skyrl-0.4.0:http has the fault, and today's judge says untestable: request_ids judged nothing"),
    ],
    ids=["no longer sees the fault", "sees something else", "sees it everywhere", "could not judge"],
)
def test_a_judge_that_does_not_tell_the_fault_is_red(monkeypatch, finding, said):
    judged_by(monkeypatch, lambda check: msgspec.structs.replace(check, judge=lambda _: finding))
    assert str(replay(SMALLEST).problem).startswith(said)


def test_a_check_or_a_scenario_that_is_gone_is_red(monkeypatch):
    judged_by(monkeypatch, lambda check: msgspec.structs.replace(check, name="renamed"))
    said = f"today's suite does not judge {SMALLEST.scenario} by request_ids"
    assert replay(SMALLEST).problem == said
    monkeypatch.setattr(track, "declared", dict)
    assert replay(SMALLEST).problem == f"today's suite has no scenario {SMALLEST.scenario}"


def test_recordings_that_are_missing_or_changed_over_are_red(records: Path):
    folder = records / SMALLEST.id
    (folder / "with").rename(folder / "one")
    (folder / "without").rename(folder / "with")
    (folder / "one").rename(folder / "without")
    assert "with/recording.jsonl is not chat.test_a_request_id_in_the_header on skyrl-0.4.0:http" in str(
        replay(SMALLEST, records).problem
    )
    shutil.rmtree(folder / "without")
    assert not recorded(SMALLEST, records)
    shutil.rmtree(folder / "with")
    assert replay(SMALLEST, records).problem == (
        "there is no recording of skyrl-0.4.0:http: parity track the-request-id-is-lost --add RUN"
    )


# --- adding


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of both releases that holds the smallest fault, below a folder of some machine."""
    folder = tmp_path / "run"
    for side in SIDES:
        source = RECORDS / SMALLEST.id / side
        target = header_of(source / "recording.jsonl").target.replace(":", "_")
        to = folder / "recordings" / f"{target}@disaggregated.jsonl"
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text((source / "recording.jsonl").read_text().replace(".parity/", "/somewhere/else/.parity/"))
        shutil.copyfile(source / "reference.jsonl", folder / "reference.jsonl")
    RunFolder(folder).write_info(recordings.info())
    return folder


def test_recordings_come_from_a_run_without_the_place_where_it_was(run: Path, tmp_path: Path):
    Runs([run]).add(SMALLEST, tmp_path / "records")
    assert replay(SMALLEST, tmp_path / "records").problem is None
    for file in (tmp_path / "records").rglob("*.jsonl"):
        assert "/somewhere" not in file.read_text()
    made, kept = (root / SMALLEST.id / "with" / "recording.jsonl" for root in (tmp_path / "records", RECORDS))
    assert header_of(made) == header_of(kept)
    assert made.read_bytes().splitlines()[1:] == kept.read_bytes().splitlines()[1:]


def test_a_run_that_names_other_paths_of_its_machine_is_refused(run: Path, tmp_path: Path):
    for file in (run / "recordings").iterdir():
        file.write_text(file.read_text().replace("/somewhere/else/.parity/", "/home/me/"))
    with pytest.raises(UsageError, match="names a path of the machine that recorded it: /home/me/models/"):
        Runs([run]).add(SMALLEST, tmp_path / "records")
    assert not list((tmp_path / "records").iterdir())


def test_a_run_that_does_not_show_the_fault_changes_nothing(run: Path, records: Path):
    other = msgspec.structs.replace(SMALLEST, reason="it is Wednesday")
    with pytest.raises(
        UsageError, match=r"no run shows the-request-id-is-lost .* says fail: .*lost the request's id"
    ) as told:
        Runs([run]).add(other, records)
    assert "parity run --stack skyrl-0.4.0:http" in told.value.next_step
    assert replay(SMALLEST, records).problem is None
    assert [folder.name for folder in records.iterdir() if folder.name != "run"] == [SMALLEST.id]


def test_a_recording_that_a_repository_does_not_bear_is_refused(run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(track, "LARGEST", 1000)
    with pytest.raises(UsageError, match=r"its recording has \d+ bytes, more than 1000"):
        Runs([run]).add(SMALLEST, tmp_path / "records")


# --- the file


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"entry": "no-such"}, "names the entry 'no-such': the ledger has no such entry"),
        ({"check": "echo"}, "the ledger has it for another scenario, check, topology or release"),
        ({"with": "skyrl-0.1.0:legacy"}, "the ledger has it for another scenario, check, topology or release"),
        ({"reason": "x"}, "gives a reason or source of its own"),
        ({"id": "No Id"}, "its id is no name"),
        ({"met": " "}, "does not say what users met"),
        ({"without": "skyrl-0.4.0:http"}, "the same release has it and has it not"),
        ({"entry": None}, "its reason '' matches any reason"),
        ({"entry": None, "reason": "("}, "its reason is not a regular expression"),
        ({"entry": None, "reason": "lost"}, "its source is not"),
        ({"colour": "red"}, "holds no faults"),
    ],
)
def test_a_row_that_says_too_little_or_something_else_is_refused(tmp_path: Path, change: dict, said: str):
    row = {
        "id": "a-fault",
        "met": "Something.",
        "with": "skyrl-0.4.0:http",
        "without": "skyrl-0.2.0:legacy",
        "scenario": SMALLEST.scenario,
        "check": SMALLEST.check,
        "entry": SMALLEST.entry,
    } | change
    file = tmp_path / "track_record.toml"
    file.write_bytes(
        msgspec.toml.encode({"fault": [{name: value for name, value in row.items() if value is not None}]})
    )
    with pytest.raises(UsageError, match=re.escape(said)):
        load(file)


def test_a_row_without_an_entry_has_a_reason_and_a_source_of_its_own(tmp_path: Path):
    own = msgspec.structs.replace(SMALLEST, entry=None)
    file = tmp_path / "track_record.toml"
    file.write_bytes(
        msgspec.toml.encode({"fault": [{k: v for k, v in msgspec.to_builtins(own).items() if v is not None}]})
    )
    assert load(file) == [own]
    file.write_bytes(file.read_bytes() * 2)
    with pytest.raises(UsageError, match="its id is given twice"):
        load(file)


# --- the command


def test_the_command_shows_each_fault_and_ends_with_1_if_one_is_not_told(monkeypatch):
    done = CliRunner().invoke(cli.app, ["track", SMALLEST.id], obj={})
    assert done.exit_code == 0
    assert "red on skyrl-0.4.0:http, green on skyrl-0.2.0:legacy" in done.output
    assert "1 of 1 faults are told" in done.output
    monkeypatch.setattr(track, "declared", dict)
    done = CliRunner().invoke(cli.app, ["track", SMALLEST.id], obj={})
    assert done.exit_code == 1
    assert f"today's suite has no scenario {SMALLEST.scenario}" in done.output
    with pytest.raises(UsageError, match="the track record has no no-such"):
        track.chosen(["no-such"])
