"""The jobs for GPU machines are well formed, and `parity` accepts every `parity` command in them.

The tests run the jobs' shell with stand-ins for `parity` and for installers: nothing drives a stack or uses a network.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from ruamel.yaml import YAML

from harness.commands import cli
from harness.machine.targets import known

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "gpu.yml"
JOBS = ROOT / "jobs"
CLUSTER_JOB = JOBS / "anyscale-gpu.yaml"
WAVES = ["1", "2", "3", "4", "5", "6"]
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "WORKDIR"}
STAND_IN = """#!{python} -IS
import json, pathlib, sys
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1]) if "--run-dir" in sys.argv else None
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if run is not None:
    run.mkdir(parents=True)
    (run / "report.md").write_text("may one stack replace another?")
sys.exit({statuses}.get(sys.argv[1], 0))
"""


def loaded(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


class Shell:
    """Runs scripts with a `parity` that records its arguments, makes its --run-dir, and ends as told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = folder / "summary.md"
        self.log = folder / "calls.jsonl"
        self.put("parity")
        for installer in ("pip", "uv"):
            self.put(installer)

    def put(self, command: str, **statuses: int) -> None:
        path = self.folder / "bin" / command
        path.parent.mkdir(exist_ok=True)
        path.write_text(STAND_IN.format(python=sys.executable, log=str(self.log), statuses=statuses))
        path.chmod(0o755)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "RUNNER_TEMP": str(self.folder),
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def accepted(words: list[str]) -> dict[str, Any]:
    """The values that the command's own parser reads from these words. Raises a usage error for words that it refuses."""
    name, *rest = words
    with typer.main.get_command(cli.app).commands[name].make_context(name, rest) as parsed:
        return {"command": name, **parsed.params}


@pytest.mark.parametrize("wrong", ["run --waves 1", "run --wave 9", "run --engine tpu", "report", "setup --engines 2"])
def test_a_command_that_the_parser_refuses_is_noticed(wrong: str):
    with pytest.raises(Exception) as refused:  # noqa: PT011  # typer brings a click of its own, whose errors have no public name
        accepted(wrong.split())
    assert getattr(refused.value, "exit_code", None) == 2


# --- the workflow


def steps(job: str) -> list[dict[str, Any]]:
    return loaded(WORKFLOW)["jobs"][job]["steps"]


def script(step: dict[str, Any], wave: str) -> str:
    """A step's script as the runner expands it. Raises KeyError for an unknown expression."""
    engines = loaded(WORKFLOW)["on"]["workflow_dispatch"]["inputs"]["engines"]["default"]
    values = {"matrix.wave": wave, "inputs.engines": engines}
    return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: values[found[1]], step["run"])


def check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_workflow_fits_githubs_schema(tmp_path: Path):
    assert check(WORKFLOW).returncode == 0
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOW.read_text().replace("runs-on:", "runs-in:"))
    assert "runs-in" in check(broken).stdout


def test_the_workflow_drives_each_wave_and_packs_it_also_when_it_is_red(shell: Shell):
    matrix = loaded(WORKFLOW)["jobs"]["wave"]["strategy"]["matrix"]["wave"]
    assert list(map(str, matrix)) == WAVES
    shell.put("parity", run=1)
    for wave, step in itertools.product(WAVES, steps("wave")):
        if "pip install" in (text := step.get("run", "")) or not text:
            continue
        ended = shell.run("bash", "-ec", script(step, wave))
        assert ended.returncode == int("parity run" in text), ended.stderr
    ran = [found for words in shell.calls if (found := accepted(words))["command"] == "run"]
    assert [found["wave"] for found in ran] == [[int(wave)] for wave in WAVES]
    assert {found["engine"] for found in ran} == {"cuda"}
    assert [(shell.folder / f"wave-{wave}.tar.gz").is_file() for wave in WAVES] == [True] * 6


def test_the_workflow_keeps_reports_and_recordings_whatever_happened():
    names = [step.get("name", step.get("uses")) for step in steps("wave")]
    after = steps("wave")[names.index("Drive the wave") + 1 :]
    assert [step["if"] for step in after] == ["always()", "always()"]
    assert after[-1]["with"]["if-no-files-found"] == "error"
    assert {"report.*", "junit.xml"} <= {Path(kept).name for kept in after[-1]["with"]["path"].split()}


def test_the_last_job_merges_all_waves_by_name_and_shows_the_report(shell: Shell):
    for wave in WAVES:
        (shell.folder / f"wave-{wave}").mkdir()
        packed = shell.folder / "artifacts" / f"wave-{wave}" / f"wave-{wave}.tar.gz"
        packed.parent.mkdir(parents=True)
        assert shell.run("tar", "--create", "--gzip", "--file", str(packed), f"wave-{wave}").returncode == 0
    for step in steps("report"):
        if "run" in step and "pip install" not in step["run"]:
            assert shell.run("bash", "-ec", script(step, "")).returncode == 0
    [merge] = map(accepted, shell.calls)
    assert merge["merge"]
    assert merge["runs"] == [f"shards/wave-{wave}" for wave in WAVES]
    assert all((shell.folder / run).is_dir() for run in merge["runs"])
    assert shell.summary.read_text() == (shell.folder / merge["run_dir"] / "report.md").read_text()


# --- all waves on one machine


@pytest.mark.parametrize("chosen", [[], ["2", "5"]])
def test_the_script_drives_each_wave_keeps_it_and_ends_with_the_status_of_the_merge(shell: Shell, chosen: list[str]):
    shell.put("parity", run=1, report=2)
    runs, kept = shell.folder / "runs", shell.folder / "kept"
    ended = shell.run(str(JOBS / "waves.sh"), str(runs), *chosen, KEEP=str(kept), ENGINES="4", RAY_ADDRESS="auto")
    assert ended.returncode == 2, ended.stderr
    *ran, merge = map(accepted, shell.calls)
    waves = chosen or WAVES
    assert [found["wave"] for found in ran] == [[int(wave)] for wave in waves]
    assert {(found["engine"], found["engines"]) for found in ran} == {("cuda", 4)}
    assert merge["merge"]
    assert merge["runs"] == [str(found["run_dir"]) for found in ran]
    assert {path.name for path in kept.iterdir()} == {*(f"wave-{wave}.tar.gz" for wave in waves), "whole.tar.gz"}
    assert f"wave {waves[0]} ended with exit status 1" in ended.stderr


def test_the_script_says_what_it_needs(shell: Shell):
    ended = shell.run(str(JOBS / "waves.sh"))
    assert ended.returncode != 0
    assert "usage: jobs/waves.sh RUNS" in ended.stderr


# --- the job of a Ray cluster


def errors(job: dict[str, Any]) -> list[str]:
    schema = json.loads((JOBS / "anyscale-job.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(job)]


@pytest.mark.parametrize(
    "change",
    [{"containerfile": "jobs/Containerfile"}, {"image_uri": None}, {"max_retries": -1}, {"timeout_s": "1h"},
     {"env_vars": {"ENGINES": 2}}, {"retries": 0}, {"entrypoint": ""}, {"ray_version": "2.51"}],
)  # fmt: skip
def test_the_cluster_job_fits_its_schema_and_the_schema_refuses_others(change: dict[str, Any]):
    job = loaded(CLUSTER_JOB)
    assert errors(job) == []
    assert errors(job | change)


def test_the_cluster_job_runs_the_script_for_all_waves(shell: Shell):
    job = loaded(CLUSTER_JOB)
    (shell.folder / "jobs").symlink_to(JOBS)
    entrypoint = re.sub(r"/(mnt|tmp)/", rf"{shell.folder}/\1/", job["entrypoint"])
    ended = shell.run("bash", "-c", entrypoint, **job["env_vars"])
    assert ended.returncode == 0, ended.stderr
    assert [accepted(words)["command"] for words in shell.calls] == ["run"] * 6 + ["report"]
    assert len(list((shell.folder / "mnt").rglob("*.tar.gz"))) == 7
    assert job["max_retries"] == 0


# --- the image


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Containerfile with its arguments; continued lines are joined."""
    text = re.sub(r"^\s*#.*\n", "", (JOBS / "Containerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def test_the_containerfile_is_made_of_instructions_and_valid_shell(shell: Shell):
    found = instructions()
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= INSTRUCTIONS
    for name, rest in found:
        if name == "RUN":
            assert shell.run("bash", "-nc", rest).returncode == 0, rest
        elif name == "CMD":
            assert json.loads(rest)


def test_every_parity_command_of_the_image_is_accepted():
    shells = [part for name, rest in instructions() if name == "RUN" for part in rest.split("&&")]
    commands = [words for part in shells if (words := shlex.split(part))[0] == "parity"]
    commands += [json.loads(rest) for name, rest in instructions() if name == "CMD"]
    about = re.findall(r"rollout-parity:cuda (parity .*)", (JOBS / "Containerfile").read_text())
    parsed = [accepted(words[1:]) for words in [*commands, *map(shlex.split, about)]]
    assert [one["command"] for one in parsed] == ["setup", "doctor", "run"]
    assert {known(name).environment for name in parsed[0]["names"]} == {"skyrl-0.2.0"}


def test_the_image_has_the_ray_of_the_environment_and_of_the_job():
    """A log would not show which of two Ray versions on a machine wrote it."""
    [base] = [rest for name, rest in instructions() if name == "FROM"]
    pinned = re.search(r"^ray==(\S+)", (ROOT / "backends" / "envs" / "skyrl-0.2.0.cuda.txt").read_text(), re.M)
    assert pinned is not None
    assert base.partition(":")[2].startswith(f"{pinned[1]}-")
    assert loaded(CLUSTER_JOB)["ray_version"] == pinned[1]
