"""The pytest plugin, run as a maintainer runs it, on toy stacks: collection, refusals and exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness import PROJECT
from harness.records.recording import traces
from harness.records.run_folder import RunFolder
from tests.leftovers import footprint

pytest_plugins = ["pytester"]

CONFTEST = """
import sys
from pathlib import Path
import harness.driving.process, harness.machine.environments, harness.machine.targets
pytest_plugins = ["harness.commands.plugin"]
harness.driving.process.GRACE_S = 0.3
harness.machine.targets.REGISTRY = Path(__file__).with_name("targets.toml")
harness.machine.environments.ensure = lambda *_args, **_kwargs: Path(sys.executable)
"""
SCENARIOS = '''
from harness.checks.tokens import greedy
from harness.suite.scenario import scenario

@scenario(task=0, promise="a trigger is an ordinary prompt", checks=[greedy()])
async def test_trigger(stack, prompts):
    """Nowhere."""
    await stack.generate([[500]], temperature=0, max_tokens=3, ignore_eos=True)

@scenario(task=0, promise="greedy tokens are the model's", checks=[greedy()],
          topologies=["disaggregated", "colocated"])
async def test_greedy(stack, prompts):
    """Nowhere."""
    await stack.generate(prompts.unique(3), temperature=0, max_tokens=4, ignore_eos=True)
'''
SPOILS = '''
from harness.contract.capability import Capability
from harness.checks.tokens import greedy
from harness.suite.scenario import scenario

@scenario(task=0, promise="a server dies", needs=[Capability.KILL_SERVER], checks=[greedy()])
async def test_death(stack, prompts):
    """Nowhere."""
    await stack.kill_server(stack.servers[0])
'''
BULK = SPOILS.replace("needs=[Capability.KILL_SERVER]", "bulk=True").replace("test_death", "test_many")
PLAN = """
[[task]]
number = 0
wave = 1
title = "The contract"
[[task.bullet]]
id = "0.1"
slug = "greedy-tokens"
level = "must"
source = "SkyRL API reference"
since = "0.1.0"
text = "Greedy tokens are the model's"
scenarios = ["toy.test_greedy", "toy.test_trigger"]
"""
TOPOLOGIES = """
[disaggregated]
about = "apart"
[colocated]
about = "together"
placement = "colocated"
[keyed]
about = "with a key"
keyed = true
waves = []
"""
ADAPTERS = {
    "toy:legacy": "Toy",
    "toy:http": "Toy",
    "toy:swaps": "Swaps",
    "toy:exits": "Exits",
    "toy:hangs": "Hangs",
    "toy:never": "NeverStarts",
    "toy:tells": "Tells",
    "reference": "Oracle",
}
KNOWN = """
[[divergence]]
id = "{id}"
scenario = "{scenario}"
check = "*"
targets = ["toy:swaps", "toy:legacy~toy:swaps"]
reason = "greedy output parts from the reference's .*|a row came back with other tokens than its engine produced"
cap = 4
owner = "toy maintainers"
expires = 2999-12-31
source = "tests/adapters.py:1: results in the reverse order"
"""


def make_project(folder: Path, own: Mapping[str, str] = {}) -> None:
    """A project with two scenarios and toy targets, and with its `own` files. Its own `scenarios` package comes first on the path."""
    targets = (
        f'[targets."{name}"]\nabout = "a toy"\nadapter = "tests.adapters:{adapter}"\nenvironment = "toy"\ncapabilities = []\n'
        'runtime = "toy_runtime:RUNTIME"\n'
        for name, adapter in ADAPTERS.items()
    )
    files = {
        "conftest.py": CONFTEST,
        "targets.toml": "\n".join(['[default]\nbaseline = "toy:legacy"\ncandidate = "toy:http"', *targets]),
        "toy_runtime.py": r"from harness.contract.runtime import Runtime; RUNTIME = Runtime(stages={r'step (\d)': r'at step \1'})",
        "scenarios/__init__.py": "",
        "scenarios/plan.toml": PLAN,
        "scenarios/concessions.toml": "concession = []",
        "scenarios/open_differences.toml": "difference = []",
        "scenarios/profiles.toml": (PROJECT / "scenarios" / "profiles.toml").read_text(),
        "scenarios/topologies.toml": TOPOLOGIES,
        "scenarios/known_divergences.toml": "",
        "scenarios/wave1/__init__.py": "",
        "scenarios/wave1/test_toy.py": SCENARIOS,
        "model/config.json": "{}",
        "model/model.safetensors": "weights",
    }
    for name, content in (files | own).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv(*NO_AUTOLOAD)
    make_project(pytester.path)
    return pytester


NO_AUTOLOAD = ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hundreds of modules that no scenario uses
GIVEN = ["--baseline=toy:legacy", "--candidate=toy:http", "--engine=cpu", "--model=model", "--topology=disaggregated"]
EACH = """
import shlex, sys, pytest
for options in sys.argv[1:]:
    ended = f"ended with {pytest.main(['-pno:cacheprovider', *shlex.split(options)]):d}"
    print(ended, flush=True)
    print(ended, file=sys.stderr, flush=True)
"""
"""Runs pytest several times in one process, to spare the imports."""


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run the scenarios, in the disaggregated topology and in those that are named."""
    return project.runpytest_subprocess("scenarios", "-p", "no:cacheprovider", *GIVEN, *arguments)


FIRST = {"base": "--stack=toy:legacy --twin"}
AFTERWARDS: list[dict[str, str]] = [
    {
        "upgrade": "--baseline=base --profile=upgrade",
        "known": "--baseline=base --candidate=toy:swaps --ledger=known.toml -rx",
        "stale": "--baseline=base --candidate=toy:swaps --ledger=stale.toml",
        "never": "--baseline=base --candidate=toy:never",
        "exits": "--baseline=base --candidate=toy:exits -v",
    },
    {
        "part": "--stack=toy:legacy --twin -k trigger",
        "unfit": "--baseline=part",
        "equal": "",
        "swaps": "--baseline=base --candidate=toy:swaps",
        "base again": "--stack=toy:legacy",
    },
]
"""Name, which is the run's folder up to a space → options. What needs no baseline of its own takes that of the first run. After it
two processes run the others at once."""


class Shown(NamedTuple):
    """What a run has shown, and its folder."""

    result: pytest.RunResult
    folder: Path

    @property
    def told(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())["judgement"]


def each(folder: Path, runs: Iterable[str], **variables: str) -> list[pytest.RunResult]:
    """What pytest shows with these options, one after the other."""
    command = [sys.executable, "-c", EACH, *runs]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | dict([NO_AUTOLOAD]) | variables
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    out, err = (re.split(r"^ended with (\d)\n", said, flags=re.MULTILINE) for said in (shown.stdout, shown.stderr))
    assert out[-1] == err[-1] == ""
    return [
        pytest.RunResult(int(status), said.splitlines(), complained.splitlines(), 0)
        for said, status, complained in zip(out[:-1:2], out[1::2], err[:-1:2], strict=True)
    ]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """Every run of `FIRST` and `AFTERWARDS`, in a project of their own."""
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    order, old = (
        KNOWN.format(id=name, scenario=f"toy.test_{of}") for name, of in (("order", "greedy"), ("old", "trigger"))
    )
    (folder / "known.toml").write_text(order)
    (folder / "stale.toml").write_text(order + old)

    def made(runs: Mapping[str, str]) -> dict[str, Shown]:
        homes = [name.partition(" ")[0] for name in runs]
        asked = [
            f"scenarios {' '.join(GIVEN)} --run-dir={home} {runs[name]}" for home, name in zip(homes, runs, strict=True)
        ]
        results = each(folder, asked)
        return {name: Shown(one, folder / home) for name, home, one in zip(runs, homes, results, strict=True)}

    found = made(FIRST)
    with ThreadPoolExecutor() as pool:
        for more in pool.map(made, AFTERWARDS):
            found |= more
    return found


# --- a baseline that was recorded earlier


def test_a_baseline_that_was_recorded_earlier_is_not_started_again(shown: dict[str, Shown]):
    assert shown["base"].result.ret == 0
    upgrade = shown["upgrade"]
    assert upgrade.result.ret == 0, upgrade.result.outlines
    upgrade.result.stdout.fnmatch_lines(["baseline toy:legacy: recorded earlier, in *base", "1 starts, about *"])
    assert [path.name for path in sorted((upgrade.folder / "recordings").iterdir())] == [
        "toy_http@disaggregated.jsonl",
        "toy_legacy@disaggregated.jsonl",
    ]
    told = upgrade.told
    assert told["gate"]["question"] == "May toy:http replace toy:legacy? (profile upgrade)"
    assert {v["takes"] for v in told["verdicts"] if v["target"] == "toy:legacy"} == {2}
    assert {v["status"] for v in told["verdicts"] if v["baseline"]} == {"parity"}
    assert told["run"]["recorded"] == str(shown["base"].folder)


def test_a_recording_that_does_not_fit_starts_nothing(shown: dict[str, Shown]):
    assert (shown["part"].result.ret, shown["unfit"].result.ret) == (0, 2)
    shown["unfit"].result.stdout.fnmatch_lines(
        ["*has no recording of toy.test_greedy on toy:legacy@disaggregated*", "*next: select only*"]
    )
    assert not shown["unfit"].folder.exists()


# --- what is collected


def test_each_scenario_is_an_item_a_stack_and_one_a_comparison_in_order_of_starts(project: pytest.Pytester):
    shown = run(project, "--collect-only", "-q", "--topology=colocated")
    ids = [line.partition("::")[2] for line in shown.outlines if "::" in line]
    assert ids == [
        "test_trigger[toy:http@disaggregated]",
        "test_greedy[toy:http@disaggregated]",
        "test_trigger[toy:legacy@disaggregated]",
        "test_greedy[toy:legacy@disaggregated]",
        "test_greedy[toy:http@colocated]",
        "test_greedy[toy:legacy@colocated]",
        "test_trigger[toy:legacy~toy:http@disaggregated]",
        "test_greedy[toy:legacy~toy:http@disaggregated]",
        "test_greedy[toy:legacy~toy:http@colocated]",
    ]
    assert not (project.path / ".parity").exists(), "collecting starts nothing"


def test_what_spoils_a_stack_is_driven_on_it_last(project: pytest.Pytester):
    (project.path / "scenarios" / "wave1" / "test_a_death.py").write_text(SPOILS)
    shown = run(project, "--collect-only", "-q", "--everything")
    ids = [line.partition("::")[2] for line in shown.outlines if "::" in line]
    assert ids[:3] == [
        "test_trigger[toy:http@disaggregated]",
        "test_greedy[toy:http@disaggregated]",
        "test_death[toy:http@disaggregated]",
    ]


BULK_IS_DRIVEN = {
    "scenarios": False,
    "scenarios -m wave1": False,
    "scenarios --everything": True,
    "scenarios -m bulk": True,
    "scenarios -k 'many or greedy'": True,
    "scenarios -k 'not greedy'": False,
    "scenarios -k 'many and not greedy'": True,
    "scenarios/wave1/test_bulk.py": True,
}


def test_bulk_is_driven_where_it_is_chosen_and_left_out_in_words_otherwise(project: pytest.Pytester):
    (project.path / "scenarios" / "wave1" / "test_bulk.py").write_text(BULK)
    ends = each(project.path, [f"{chosen} {' '.join(GIVEN)} --collect-only -q" for chosen in BULK_IS_DRIVEN])
    for (chosen, driven), shown in zip(BULK_IS_DRIVEN.items(), ends, strict=True):
        assert ("test_many[toy:http@disaggregated]" in shown.stdout.str()) == driven, chosen
        said = "left out: scenarios, 1 of many requests or other stacks (--everything adds them)"
        assert (said in shown.outlines) == (not driven), chosen


def test_what_spoils_and_what_needs_a_start_of_its_own_are_driven_where_they_are_chosen(project: pytest.Pytester):
    wave = project.path / "scenarios" / "wave1"
    (wave / "test_a_death.py").write_text(SPOILS)
    (wave / "test_a_key.py").write_text(
        SPOILS.replace("needs=[Capability.KILL_SERVER]", 'topologies=["disaggregated", "keyed"]').replace(
            "death", "key"
        )
    )
    anywhere = [one for one in GIVEN if not one.startswith("--topology")]
    driven = {
        "": [],
        "--everything": ["death", "keyed"],
        "-m spoils": ["death"],
        "-m 'not bulk'": [],
        "-m 'wave1 and not wave2'": [],
        "-k spoils": ["death"],
        "-k 'key or death'": ["death", "keyed"],
        "-k 'not greedy'": [],
        "--topology keyed": ["keyed"],
    }
    commands = [f"scenarios {' '.join(anywhere)} {chosen} --collect-only -q" for chosen in driven]
    for (chosen, those), shown in zip(driven.items(), each(project.path, commands), strict=True):
        listed = [line for line in shown.outlines if "[toy:http@" in line]
        assert [one for one in ("death", "keyed") if any(one in line for line in listed)] == those, chosen
    said = "left out: scenarios, 1 that spoil their stack, 1 in keyed (--everything adds them)"
    assert said in project.runpytest_subprocess("scenarios", *anywhere, "--collect-only", "-q").outlines


def test_bulk_that_has_no_place_in_this_run_is_not_said_to_be_left_out(project: pytest.Pytester):
    (project.path / "scenarios" / "wave1" / "test_bulk.py").write_text(BULK)
    elsewhere = [one for one in GIVEN if not one.startswith("--topology")]
    shown = project.runpytest_subprocess("scenarios", *elsewhere, "--topology=colocated", "--collect-only", "-q")
    assert "test_greedy[toy:http@colocated]" in shown.stdout.str()
    assert "left out" not in shown.stdout.str()


def test_a_single_stack_is_compared_with_nothing_and_scenarios_have_the_mark_of_their_wave(project: pytest.Pytester):
    shown = run(project, "--collect-only", "-q", "--stack", "toy:http", "--engines", "4", "-m", "wave1 and not wave2")
    ids = [line.partition("::")[2] for line in shown.outlines if "::" in line]
    assert ids == ["test_trigger[toy:http@disaggregated]", "test_greedy[toy:http@disaggregated]"]


# --- what is refused before anything starts


REFUSED = {
    "--candidate toy:htp": "unknown target 'toy:htp': did you mean toy:http",
    "--candidate toy:legacy": "baseline and candidate are the same target",
    "--model nowhere": "nowhere is not a model: it has no config.json",
    "--ledger broken.toml": "broken.toml",
    "--ledger nowhere.toml": "nowhere.toml",
    "--engines 0": "--engines and --repeat count from 1",
    "--budget 0": "--budget 0 is not above 0 and at most 100",
    "--cuda-graphs": "--cuda-graphs needs a GPU, and this run is on --engine cpu",
    "--batch-invariant": "--batch-invariant needs a GPU, and this run is on --engine cpu",
    "--baseline=no/such/run": "there is no run 'no/such/run'",
    "--baseline=model": "is not the folder of a run",
    "--profile=downgrade": "there is no profile 'downgrade'",
    "--twin --no-twin": "--twin and --no-twin exclude each other",
}


def test_what_cannot_work_is_one_message_and_exit_status_4(project: pytest.Pytester):
    (project.path / "broken.toml").write_text("[[divergence]\n")
    ends = each(project.path, [f"scenarios {' '.join(GIVEN)} --run-dir run {options}" for options in REFUSED])
    for (options, said), end in zip(REFUSED.items(), ends, strict=True):
        complained = end.stderr.str()
        assert (end.ret, complained.count("ERROR: ")) == (pytest.ExitCode.USAGE_ERROR, 1), options
        assert said in complained.partition("ERROR: ")[2].partition("\n")[0], options
        assert "Traceback" not in complained + end.stdout.str()
    assert not (project.path / "run").exists()


def test_a_folder_is_used_by_one_run_at_a_time(project: pytest.Pytester):
    with RunFolder.create(project.path / "run"):
        shown = run(project, "--run-dir", "run")
    assert shown.ret == 2
    assert re.search(r"UsageError: another run \(pid \d+\) is using \S*run", shown.stdout.str())
    assert "next: wait until it has ended, or give another --run-dir" in shown.stdout.str()


# --- what is run


def test_two_equal_stacks_are_green_and_reported(shown: dict[str, Shown]):
    result, folder = shown["equal"]
    result.assert_outcomes(passed=6)
    assert result.ret == 0
    assert {p.name for p in folder.glob("report.*")} == {"report.json", "report.html", "report.md"}
    assert (folder / "junit.xml").exists()
    assert {v["status"] for v in shown["equal"].told["verdicts"]} == {"pass", "parity"}


def test_no_run_is_overwritten(shown: dict[str, Shown]):
    again = shown["base again"].result
    assert again.ret == 2
    again.stdout.fnmatch_lines(["*holds a run already*", "*no run is overwritten*"])


def test_how_engines_compute_reaches_the_stack_and_the_report(project: pytest.Pytester):
    gpus = "harness.machine.environments.list_gpus = lambda: ['GPU 0: made up'] * 3"
    project.makeconftest(f"{CONFTEST}{gpus}\nimport harness.driving.stack\nharness.driving.stack.TELL_EVERY_S = 0.1\n")
    options = ["--engine=cuda", "--dtype=bfloat16", "--cuda-graphs", "--batch-invariant"]
    shown = run(project, "--run-dir", "run", "--stack", "toy:tells", *options)
    shown.stderr.fnmatch_lines(["toy:tells: starting disaggregated (ray, cuda): 0 s, at step 3"])
    (header,) = Shown(shown, project.path / "run").told["run"]["headers"]
    assert header["notes"] == ["bfloat16, cuda_graphs=True, batch_invariant=True"]
    assert (header["cuda_graphs"], header["batch_invariant"]) == (True, True)
    assert "engine cuda, bfloat16, CUDA graphs, batch-invariant" in (project.path / "run" / "report.md").read_text()


def test_a_wrong_stack_is_red(shown: dict[str, Shown]):
    result = shown["swaps"].result
    result.assert_outcomes(passed=4, failed=2)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*FAIL tokens.greedy: greedy output parts from the reference's*", "*REGRESSION tokens.greedy*"]
    )


def test_a_known_divergence_is_expected_to_fail(shown: dict[str, Shown]):
    result = shown["known"].result
    result.assert_outcomes(passed=4, xfailed=2)
    result.stdout.fnmatch_lines(["*known divergence: order*"])
    assert result.ret == 0


def test_a_ledger_entry_that_matches_nothing_is_red(shown: dict[str, Shown]):
    result = shown["stale"].result
    result.assert_outcomes(passed=4, xfailed=2, errors=2)
    assert result.ret == 1
    assert [p["entry"] for p in shown["stale"].told["ledger_problems"]] == ["old", "old"], "for each of its targets"
    result.stdout.fnmatch_lines(["ERROR ledger::old*"])


def test_a_stack_that_does_not_start_is_red_with_its_blame(shown: dict[str, Shown]):
    result = shown["never"].result
    result.assert_outcomes(passed=2, failed=4)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*UNTESTABLE tokens.greedy: did not start: StartFailed*", "*blame: stack*"])
    error = shown["never"].told["run"]["not_started"]["toy:never@disaggregated"]
    assert error["message"].startswith("server-1 is not up after 180 s")


def test_a_stack_that_dies_is_started_anew_for_the_next_scenario(shown: dict[str, Shown]):
    result = shown["exits"].result
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*test_trigger*toy:exits@disaggregated* FAILED*",
            "*test_greedy*toy:exits@disaggregated* PASSED*",
            "*FAIL tokens.greedy: could not be driven: StackDied*",
        ]
    )
    assert "the last words of the host" in result.stderr.str(), "-v streams the stacks' logs"


def test_ctrl_c_ends_the_stacks_and_keeps_what_was_recorded(project: pytest.Pytester):
    recording = project.path / "run" / "recordings" / "toy_hangs@disaggregated.jsonl"
    given = ["--stack", "toy:hangs", "--engine", "cpu", "--model", "model", "--topology", "disaggregated"]
    command = [sys.executable, "-mpytest", "scenarios", "-p", "no:cacheprovider", *given, "--run-dir", "run"]
    with project.popen(command, stdin=subprocess.DEVNULL) as driver:
        while not (recording.exists() and b'"canary"' in recording.read_bytes()):
            assert driver.poll() is None
            time.sleep(0.05)
        before = footprint(driver.pid)
        driver.send_signal(signal.SIGINT)
        driver.communicate(timeout=60)
    assert driver.returncode == pytest.ExitCode.INTERRUPTED
    before.wait_until_gone()
    (trace,) = traces(recording)
    assert trace.end.error.kind == "Interrupted"
    assert json.loads((project.path / "run" / "run.json").read_text())["outcome"] == "interrupted"


def test_the_harnesss_own_tests_are_left_alone(project: pytest.Pytester):
    project.makepyfile("def test_plain(): pass")
    shown = project.runpytest_subprocess("-p", "no:cacheprovider", "--candidate", "toy:htp", "-k", "plain")
    shown.assert_outcomes(passed=1)
    assert "parity" not in shown.stdout.str()


# --- the harness's own tests


PLAIN = """
def test_one(): pass

def test_other(): pass
"""
STUCK = """
import pytest, time
from pathlib import Path

@pytest.mark.parametrize("name", ["one", "other"])
def test_stuck(name):
    Path(name).touch()
    time.sleep(3600)
"""


OWN = {"PYTEST_XDIST_AUTO_NUM_WORKERS": "2", "PYTEST_ADDOPTS": "-p xdist.plugin -p no:cacheprovider"}


@pytest.fixture
def own(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The project with tests of its own, on a machine of two cores."""
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    project.makeini("[pytest]\ntestpaths = tests")
    (project.mkdir("tests") / "test_plain.py").write_text(PLAIN)
    return project


def test_all_of_the_harnesss_own_tests_use_all_cores_unless_told_otherwise(own: pytest.Pytester):
    for arguments in [], ["tests", "-k", "one or other"]:
        shown = own.runpytest_subprocess(*arguments)
        shown.assert_outcomes(passed=2)
        shown.stdout.fnmatch_lines(["created: 2/2 workers"])
    otherwise = ["tests/test_plain.py", "-n0", "--pdb", "-pno:xdist.plugin", "--collect-only"]
    for one in each(own.path, otherwise, **OWN):
        assert (one.ret, one.errlines) == (pytest.ExitCode.OK, [])
        assert "workers" not in one.stdout.str()


def test_scenarios_are_never_distributed(own: pytest.Pytester):
    shown = own.runpytest_subprocess("-m", "wave1", *GIVEN, "--run-dir", "run")
    shown.assert_outcomes(passed=6)
    assert "workers" not in shown.stdout.str()
    asked = ["-n2 scenarios", "-n2 tests tests/../scenarios", "-n2 .", "--dist=load --tx=popen scenarios"]
    said = "ERROR: scenarios are driven one after the other: leave out -n, --dist and --tx"
    for one in each(own.path, asked, **OWN):
        assert (one.ret, [line for line in one.errlines if line]) == (pytest.ExitCode.USAGE_ERROR, [said])
    shown = own.runpytest_subprocess("-n2", "-mwave1")
    assert (shown.ret, [line for line in shown.errlines if line]) == (pytest.ExitCode.USAGE_ERROR, [said])


def test_ctrl_c_ends_all_workers(own: pytest.Pytester):
    (own.path / "tests" / "test_plain.py").write_text(STUCK)
    with own.popen([sys.executable, "-mpytest"], stdin=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 60
        while not all((own.path / name).exists() for name in ("one", "other")):
            assert driver.poll() is None
            assert time.monotonic() < deadline, "not every worker has begun"
            time.sleep(0.05)
        before = footprint(driver.pid)
        driver.send_signal(signal.SIGINT)
        driver.communicate(timeout=60)
    assert driver.returncode == pytest.ExitCode.INTERRUPTED
    assert len(before.processes) == 3
    before.wait_until_gone()
