"""The command shows help, passes its arguments on, and ends every named error with one message and exit status 2."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from harness.commands import cli
from harness.contract.errors import EnvironmentBroken
from harness.judging import ledger
from harness.machine import doctor
from harness.machine.doctor import Diagnosis
from harness.records.run_folder import RunFolder
from harness.records.verdict import Judgement
from harness.running.run import judge_run
from harness.suite import profiles
from reports import json_report
from tests import recordings, synthetic
from tests.leftovers import IN_BACKGROUND

COMMANDS = (
    "run",
    "up",
    "down",
    "matrix",
    "bench",
    "shrink",
    "bisect",
    "pr",
    "prove",
    "targets",
    "contract",
    "topologies",
    "setup",
    "judge",
    "track",
    "compare",
    "ledger",
    "concessions",
    "report",
    "doctor",
)


def parity(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["parity", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_shows_an_example(command: str):
    shown = CliRunner().invoke(cli.app, [command, "--help"], obj={})
    assert shown.exit_code == 0
    assert f"\n    parity {command}" in shown.output, "an example, on its own line"


def test_the_commands_are_those_that_are_documented():
    assert {c.name or c.callback.__name__ for c in cli.app.registered_commands} == set(COMMANDS)


# --- named errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--candidate", "skyrl-0.2.0:htp"], "did you mean skyrl-0.2.0:http"),
        (["run", "--stack", "skyrl-0.2.0:http", "--python", "/bin/sh"], "none is selected"),
        (["run", "--stack", "skyrl-0.2.0:http", "--checkout", "/"], "none is selected"),
        (
            ["run", "--stack", "local:http", "--checkout", "local:http=/a", "--checkout", "local:http=/b"],
            "is given twice",
        ),
        (["up", "--stack", "miniature"], "miniature has no process"),
        (["up", "--stack", "skyrl-0.2.0:http", "--cuda-graphs", "--engine", "cpu"], "--cuda-graphs needs a GPU"),
        (["pr", "--checkout", "/", "--base", "main"], "is not in a git working tree"),
        (["bench", "--candidate", "miniature"], "run different models"),
        (["bench", "--baseline", "miniature", "--candidate", "miniature", "--slowdown", "x"], "has no slowdown 'x'"),
        (["bisect", "--checkout", "/nowhere", "--good", "a", "--check", "ordering"], "there is no folder /nowhere"),
        (["setup", "local:http"], "has no environment to make"),
        (["setup", "--offline", "/nowhere"], "there is no kit /nowhere"),
        (["setup", "--download", "kit", "--offline", "/"], "--download makes no environment"),
        (["setup", "--download", "kit", "--model", "/nowhere"], "/nowhere is not a model"),
        (["matrix"], "the matrix has no column"),
        (["matrix", "--from"], "the matrix has no column"),
        (["matrix", "--stack", "miniture"], "did you mean miniature"),
        (["matrix", "--stack", "miniature", "monday"], "'monday' is no option of `parity run`"),
        (["matrix", "--stack", "miniature", "--shard", "9/8"], "--shard '9/8' is no part of a whole"),
        (["matrix", "--from", "monday", "--wave", "1"], "--from drives nothing"),
        (["matrix", "--from", "/"], "has no report.json"),
        (["judge", "no-such-run"], "there is no run 'no-such-run'"),
        (["report", "/"], "has no report.json"),
        (["report", "/", "/"], "without --merge one run is rendered"),
        (["report", "/", "--profile", "patch"], "--profile has no effect"),
        (["report", "--merge", "/"], "is not the folder of a run"),
        (["compare", "/nowhere/a.jsonl", "/nowhere/b.jsonl"], "there is no recording /nowhere/a.jsonl"),
    ],
)
def test_a_named_error_is_one_message_and_exit_status_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rooms: Rooms
):
    assert parity(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("parity: ")
    assert said in shown.err
    assert "  next: " in shown.err
    assert "Traceback" not in shown.err
    assert len(shown.err.splitlines()) == 2


def test_debug_shows_where_a_named_error_came_from(monkeypatch: pytest.MonkeyPatch, rooms: Rooms):
    monkeypatch.setattr(sys, "argv", ["parity", "--debug", "judge", "no-such-run"])
    with pytest.raises(cli.UsageError):
        cli.main()


def test_a_broken_environment_ends_setup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def broken(*_: object, **__: object) -> Path:
        raise EnvironmentBroken("pear is missing", next_step="parity setup --recreate")

    monkeypatch.setattr("harness.machine.environments.ensure", broken)
    assert parity(monkeypatch, "setup", "--engine", "cpu") == 2
    assert "pear is missing" in capsys.readouterr().err


def test_setup_fills_a_kit_with_what_the_targets_and_the_model_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[tuple[list[str], Path]] = []
    monkeypatch.setattr(
        "harness.machine.environments.download",
        lambda locks, kit, *, python: asked.append(([p.name for p in locks], kit)),
    )
    arguments = ["--download", str(tmp_path / "kit"), "--engine", "cuda", "skyrl-0.2.0:http", "reference"]
    assert parity(monkeypatch, "setup", *arguments, "--model", "smollm2") == 0
    assert asked == [(["skyrl-0.2.0.cuda.txt", "smollm2.txt"], tmp_path / "kit")]


def test_setup_makes_the_environment_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked: list[Any] = []
    monkeypatch.setattr(
        "harness.machine.targets.resolve", lambda name, _, trees: types.SimpleNamespace(name=name, trees=trees)
    )
    monkeypatch.setattr("harness.machine.targets.needs_of", lambda target, engine: (target.name, target.trees, engine))
    monkeypatch.setattr(
        "harness.machine.checkouts.environment", lambda needed, *_, **__: asked.append(needed) or tmp_path
    )
    assert parity(monkeypatch, "setup", "local:http", "--checkout", str(tmp_path), "--engine", "cuda") == 0
    assert asked == [("local:http", {"": tmp_path}, "cuda")]
    assert f"local:http-cuda: {tmp_path}" in capsys.readouterr().out
    assert parity(monkeypatch, "setup", "local:http", "--checkout", str(tmp_path), "--offline", str(tmp_path)) == 2
    assert "resolved with a package index" in capsys.readouterr().err


def test_setup_takes_everything_from_a_kit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kits: list[Path] = []
    monkeypatch.setattr("harness.machine.environments.ensure", lambda *_, kit, **__: kits.append(kit) or tmp_path)
    monkeypatch.setattr("harness.driving.models.checkpoint", lambda *asked: kits.append(asked[-1]))
    arguments = ["skyrl-0.2.0:http", "--engine", "cpu", "--model", "smollm2"]
    assert parity(monkeypatch, "setup", "--offline", str(tmp_path), *arguments) == 0
    assert kits == [tmp_path] * 3


# --- run hands over to pytest


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments and folder of the call to pytest, which ends with status 5."""
    seen: dict[str, Any] = {}

    def main(arguments: list[str]) -> int:
        seen.update(arguments=arguments, folder=Path.cwd())
        return 5

    monkeypatch.setattr(pytest, "main", main)
    return seen


def test_run_without_options_leaves_every_default_to_the_plugin(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    assert parity(monkeypatch, "run") == 5
    assert given == {"arguments": ["scenarios"], "folder": cli.PROJECT}


def test_the_help_of_a_run_names_each_profile_with_its_step():
    for one in profiles.load():
        assert re.search(rf"\b{one.name} \((default for )?{one.default_for}\)", cli.PROFILES), one.name
    assert cli.PROFILES.count("(") == len(profiles.load())


def test_run_hands_over_each_option_and_paths_as_seen_from_here(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    parity(
        *(monkeypatch, "run", "--wave", "1", "--wave", "2", "-k", "ordering", "--candidate", "local:http"),
        *("--python", "venv/bin/python", "--engine", "cuda", "--start", "fork", "--engines", "4"),
        *("--base-port", "9000"),
        *("--topology", "remote", "--topology", "colocated", "--model", "m", "--run-dir", "r", "--ledger", "l.toml"),
        *("--budget", "0.2", "--seed", "7", "--repeat", "3", "--no-twin", "--fresh"),
        *("--everything", "--cuda-graphs", "--batch-invariant", "-vv"),
        *("--", "-x", "--pdb"),
    )
    assert given["arguments"] == [
        *("scenarios", "-m", "wave1 or wave2", "-k", "ordering", "--candidate=local:http"),
        *(f"--target-python={tmp_path}/venv/bin/python", "--cuda-graphs", "--batch-invariant", "--engine=cuda"),
        *("--start=fork", "--engines=4", "--topology=remote", "--topology=colocated", f"--model={tmp_path}/m"),
        *(
            f"--run-dir={tmp_path}/r",
            f"--ledger={tmp_path}/l.toml",
            "--budget=0.2",
            "--seed=7",
            "--everything",
            "--repeat=3",
        ),
        *("--base-port=9000", "--no-twin", "--fresh", "-v", "-v", "-x", "--pdb"),
    ]
    assert Path.cwd() == tmp_path


def test_a_baseline_that_was_recorded_earlier_is_handed_over_as_seen_from_here(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "monday").mkdir()
    parity(monkeypatch, "run", "--baseline", "monday", "--candidate", "miniature:retry", "--profile", "upgrade")
    assert given["arguments"] == [
        *("scenarios", f"--baseline={tmp_path}/monday", "--candidate=miniature:retry", "--profile=upgrade")
    ]
    parity(monkeypatch, "run", "--stack", "miniature", "--twin")
    assert given["arguments"] == ["scenarios", "--stack=miniature", "--twin"]


def test_run_hands_over_checkouts_of_each_local_target(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    pair = ["--baseline", "local:http#old", "--candidate", "local:http#new"]
    parity(monkeypatch, "run", *pair, "--checkout", "local:http#old=a", "--checkout", "local:http#new=b")
    assert given["arguments"] == [
        *("scenarios", "--baseline=local:http#old", "--candidate=local:http#new"),
        *(f"--checkout=local:http#old={tmp_path}/a", f"--checkout=local:http#new={tmp_path}/b"),
    ]


def test_another_router_is_the_candidates_or_that_of_each_stack(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    http = "skyrl-0.4.0:http"
    parity(monkeypatch, "run", "--baseline", http, "--candidate", http, "--router", "vllm-router==0.1.13")
    assert given["arguments"] == ["scenarios", f"--baseline={http}", f"--candidate={http}#vllm-router-0.1.13"]
    parity(monkeypatch, "run", "--stack", http, "--stack", "skyrl-0.3.0:http", "--router-policy", "random")
    assert given["arguments"] == [
        "scenarios", f"--stack={http}#vllm-router-random", "--stack=skyrl-0.3.0:http#vllm-router-random",
    ]  # fmt: skip
    assert parity(monkeypatch, "run", "--stack", "miniature", "--router", "vllm-router==0.1.13") == 2
    assert "miniature has no router that is a package of its own" in capsys.readouterr().err


def test_several_stacks_are_judged_without_a_comparison(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    parity(monkeypatch, "run", "--stack", "skyrl-0.2.0:http", "--stack", "reference")
    assert given["arguments"] == ["scenarios", "--stack=skyrl-0.2.0:http", "--stack=reference"]


# --- judge, compare, report


class Rooms:
    """Stands in for judging and rendering: remembers its calls and returns one judgement."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.judgement = Judgement(run=recordings.info(), verdicts=[])  # nothing was judged: exit status 1
        self.calls: list[tuple[Any, ...]] = []
        self._put(monkeypatch, "harness.running.run", judge_run=self.judge, compare_recordings=self.judge)
        self._put(
            monkeypatch, "reports.render", write_all=lambda _, folder, **_more: self.calls.append(("write", folder))
        )
        self._put(monkeypatch, "reports.json_report", read_report=self.judge)
        self._put(monkeypatch, "reports.terminal", show=lambda _, **_more: self.calls.append(("show",)))

    def judge(self, *paths: Path, profile: str | None = None) -> Judgement:
        self.calls.append(("judge", *paths, *([] if profile is None else [profile])))
        return self.judgement

    @staticmethod
    def _put(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
        for function, stand_in in functions.items():
            monkeypatch.setattr(f"{name}.{function}", stand_in)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rooms:
    monkeypatch.setattr(cli, "PROJECT", tmp_path / "project")
    return Rooms(monkeypatch)


def test_judge_finds_a_run_by_name_writes_its_reports_and_ends_with_its_status(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
):
    folder = cli.PROJECT / ".parity" / "runs" / "monday"
    folder.mkdir(parents=True)
    assert parity(monkeypatch, "judge", "monday") == rooms.judgement.exit_status == 1
    assert rooms.calls == [("judge", folder), ("write", folder), ("show",)]
    parity(monkeypatch, "judge", "monday", "--profile", "upgrade")
    assert rooms.calls[3] == ("judge", folder, "upgrade")


def test_report_reads_nothing_but_the_report(rooms: Rooms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "report.json").touch()
    assert parity(monkeypatch, "report", str(tmp_path)) == 1
    assert rooms.calls == [("judge", tmp_path / "report.json"), ("write", tmp_path), ("show",)]


def test_report_merges_shards_judges_them_and_leaves_nothing_after_a_refusal(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shards = [recordings.run_folder(tmp_path / name, [f"module.test_{name}"]).path for name in ("a", "b")]
    out = tmp_path / "whole"
    assert parity(monkeypatch, "report", "--merge", *map(str, shards), "--run-dir", str(out)) == 1
    assert [call[0] for call in rooms.calls] == ["judge", "write", "show"]
    assert len(list((out / "recordings").iterdir())) == 4
    assert parity(monkeypatch, "report", "--merge", str(shards[0]), str(tmp_path / "c"), "--run-dir", str(out)) == 2
    assert "there is no run" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "whole"}


def test_a_merge_without_a_folder_goes_beside_the_other_runs(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    run = recordings.run_folder(tmp_path / "a", ["module.test_a"]).path
    assert parity(monkeypatch, "report", "--merge", str(run)) == 1
    [made] = (cli.PROJECT / ".parity" / "runs").iterdir()
    assert (made / "run.json").is_file()


def test_the_ledger_over_several_runs_ends_red_where_an_entry_explains_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    entry = msgspec.structs.replace(ledger.load().entries[0], also={})
    monkeypatch.setattr(ledger, "load", lambda: ledger.Ledger(entries=(entry,)))
    one = synthetic.verdict("a", "b", entry.check, entry.targets[0])
    about = msgspec.structs.replace(one, scenario=entry.scenario)
    verdicts = {"other": one, "green": about, "red": msgspec.structs.replace(about, status="fail", known=entry.id)}
    for name, verdict in verdicts.items():
        (tmp_path / name).mkdir()
        judgement = msgspec.structs.replace(synthetic.judgement(), verdicts=[verdict])
        (tmp_path / name / "report.json").write_bytes(json_report.encode(json_report.settle(judgement)))

    def ended(*names: str) -> int:
        return parity(monkeypatch, "ledger", *(name if name[0] == "-" else str(tmp_path / name) for name in names))

    assert ended("other", "green", "red") == ended("red", "--all") == ended("other") == 0
    assert ended("other", "green") == ended("other", "--all") == 1
    shown = capsys.readouterr()
    assert "nothing about it was judged" in shown.out  # with --all alone
    assert f"red: {entry.id} ({entry.targets[0]}) explains nothing (judged: 1): remove it" in shown.err
    assert parity(monkeypatch, "ledger", str(tmp_path / "red"), "--json", str(tmp_path / "uses.json")) == 0
    (use,) = msgspec.json.decode((tmp_path / "uses.json").read_bytes())["entries"]
    assert (use["entry"], use["judged"], use["explained"], use["runs"]) == (entry.id, 1, 1, [str(tmp_path / "red")])
    (tmp_path / "empty").mkdir()
    assert ended("red", "empty") == 2
    assert "empty has no report.json" in capsys.readouterr().err


def test_compare_writes_reports_only_where_it_is_told(rooms: Rooms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert parity(monkeypatch, "compare", *map(str, paths)) == 1
    assert rooms.calls == [("judge", *paths), ("show",)]
    parity(monkeypatch, "compare", *map(str, paths), "--out", str(tmp_path / "out"))
    assert rooms.calls[2:] == [("judge", *paths), ("write", tmp_path / "out"), ("show",)]
    parity(monkeypatch, "compare", *map(str, paths), "--profile", "patch")
    assert rooms.calls[5] == ("judge", *paths, "patch")
    assert (tmp_path / "out").is_dir()


# --- doctor


@pytest.mark.parametrize(("worst", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_ends_red_only_on_what_keeps_a_run_from_working(
    worst: Any, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = [Diagnosis(name="disk", status=worst, finding="1 GB free", next_step="free some")]
    monkeypatch.setattr(doctor, "examine", lambda *_: found)
    assert parity(monkeypatch, "doctor") == status
    assert "next: free some" in capsys.readouterr().out


def test_a_second_sigterm_does_not_interrupt_what_the_first_one_began():
    kept = []
    with cli._terminable():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        kept.append("results")
    assert kept == ["results"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_from_outside_keeps_and_reports_what_was_recorded(tmp_path: Path, how: signal.Signals):
    """By the command's own process alone, in a script's background, where SIGINT is ignored."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "harness.commands.cli", "run", "--stack", "miniature", "--wave", "1"]
    recording = run / "recordings" / "miniature@disaggregated.jsonl"
    command += ["--run-dir", str(run)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*IN_BACKGROUND, *command], **quiet) as process:
        deadline = time.monotonic() + 60
        while not (recording.is_file() and b'"scenario_end"' in recording.read_bytes()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(how)
        assert process.wait(timeout=60) == pytest.ExitCode.INTERRUPTED
    assert RunFolder.existing(run).info().outcome == "interrupted"
    assert judge_run(run).verdicts
    assert (run / "report.html").is_file()
