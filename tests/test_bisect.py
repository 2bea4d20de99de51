"""`parity bisect` names the commit that turned a check red. Neither it nor `parity pr` touches the user's working tree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness import PROJECT
from harness.contract.errors import UsageError
from harness.records.verdict import Conformance, Judgement, Parity
from harness.running.bisect import Found, bisect, of_check
from tests import recordings
from tests.repositories import Repository
from tests.test_plugin import make_project

# --- the bisection itself, with a judge that reads a file


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "tree")


def judged(work: Path, _commit: str) -> tuple:
    return (work / "state").read_text().strip(), "as the file says"


def history(repository: Repository, *states: str) -> list[str]:
    """One commit per state: "good", "bad" or "skip"."""
    return [repository.commit(f"commit {n}", {"state": f"{state}\n", "n": f"{n}"}) for n, state in enumerate(states)]


def found(repository: Repository, commits: list[str], lines: list[str] | None = None) -> Found:
    return bisect(repository.tree, commits[0], commits[-1], judged, ([] if lines is None else lines).append)


def test_the_first_bad_commit_is_named_with_its_diffstat(repository: Repository):
    commits = history(repository, "good", "good", "good", "bad", "bad", "bad", "bad")
    lines: list[str] = []
    end = found(repository, commits, lines)
    assert (end.first_bad, end.possible) == (commits[3], [])
    assert "commit 3" in end.description
    assert "2 files changed" in end.description
    assert len(lines) == len(end.steps) == len({step.commit for step in end.steps}), "each commit is judged once"
    assert lines[0].startswith(f"good  {commits[0][:9]}  commit 0")


def test_a_commit_that_cannot_be_judged_is_skipped(repository: Repository):
    commits = history(repository, "good", "good", "skip", "good", "bad")
    end = found(repository, commits)
    assert end.first_bad == commits[4]
    assert (commits[2], "skip") in [(step.commit, step.verdict) for step in end.steps], "the middle one is met"


def test_commits_that_hide_the_first_bad_one_are_listed(repository: Repository):
    commits = history(repository, "good", "skip", "skip", "bad")
    end = found(repository, commits)
    assert (end.first_bad, set(end.possible)) == (None, set(commits[1:]))


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (("bad", "good", "bad"), "the good revision .* is bad"),
        (("good", "bad", "good"), "the bad revision .* is good"),
        (("skip", "bad"), "the good revision .* is not judged: as the file says"),
    ],
)
def test_ends_that_are_not_as_they_were_said_to_be_are_refused(repository: Repository, states, said: str):
    before = history(repository, *states)
    with pytest.raises(UsageError, match=said):
        found(repository, before)


def test_a_good_revision_that_mended_an_old_fault_on_another_branch_is_refused(repository: Repository):
    history(repository, "bad")
    repository.git("checkout", "--quiet", "-b", "mended")
    good = repository.commit("mend", {"state": "good\n"})
    repository.git("checkout", "--quiet", "main")
    bad = repository.commit("go on", {"n": "2"})
    with pytest.raises(UsageError, match=r"merge base .* is bad"):
        bisect(repository.tree, good, bad, judged, [].append)


def test_a_bisection_leaves_tree_index_branches_and_an_own_bisection_alone(repository: Repository):
    commits = history(repository, "good", "good", "bad", "bad")
    repository.file("state", "my own edit\n")
    repository.file("new", "mine\n")
    before = repository.state()
    assert found(repository, commits).first_bad == commits[2]
    assert repository.state() == before
    assert (repository.tree / "state").read_text() == "my own edit\n"
    with pytest.raises(KeyboardInterrupt):
        bisect(repository.tree, commits[0], commits[-1], _interrupts, [].append)
    assert repository.state() == before


def _interrupts(work: Path, _commit: str) -> tuple:
    assert work.is_dir()
    raise KeyboardInterrupt


# --- what a run says about a check


def said(*statuses: str, check: str = "ordering", known: str | None = None) -> str:
    verdicts = [recordings.verdict(check=check, status=status, known=known) for status in statuses]
    return of_check(Judgement(run=recordings.info(), verdicts=verdicts), "ordering")[0]


def test_red_is_bad_green_is_good_and_what_could_not_be_judged_is_skipped():
    assert said(Conformance.PASS, Conformance.FAIL) == said(Parity.REGRESSION) == "bad"
    assert said(Conformance.PASS, Conformance.PASS) == "good"
    assert said(Conformance.FAIL, Conformance.UNTESTABLE) == "bad"
    for bare in (Conformance.UNTESTABLE, Conformance.MISSING):
        assert said(Conformance.PASS, bare) == "skip"
    assert said() == said(Conformance.PASS, check="other") == "skip"
    assert said(Conformance.PASS, check="ordering:late") == "good", "under a label"
    assert said(Conformance.FAIL, known="entry") == "good", "the ledger explains it"


# --- end to end: a stack whose adapter is in the repository, in processes of its own

RUN = """
import sys
from pathlib import Path
HERE = Path(__file__).parent
import harness.driving.process, harness.machine.environments, harness.machine.targets as targets
harness.driving.process.GRACE_S = 0.3
targets.REGISTRY, targets.PROJECT = HERE / "targets.toml", HERE
harness.machine.environments.ensure = lambda *_args, **_kwargs: Path(sys.executable)
import harness.commands.cli as cli, harness.running.child as child
cli.PROJECT = HERE
child.COMMAND = (sys.executable, __file__, "run")
cli.main()
"""
ROW = """
[targets."{name}"]
about = "a toy"
adapter = "{adapter}"
capabilities = []
runtime = "toy_runtime:RUNTIME"
"""
RUNTIME = """
from harness.contract.checkout import Layout, Part
from harness.contract.runtime import Runtime
PARTS = (Part(distribution="toystack", module="toystack", version="toystack/__init__.py"),)
RUNTIME = Runtime(modules=("toystack",), source=Layout(parts=PARTS, engine="vllm", engines={}))
"""
CORRECT = "from tests.adapters import Toy as Stack\n"
FAULTY = "from tests.adapters import Swaps as Stack\n"
HANGS = "from tests.adapters import Hangs as Stack\n"
BROKEN = "from tests.adapters import Gone as Stack\n"


class Toys:
    """A project of two scenarios, and a repository of a stack that the local target "local:toy" drives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        files = {
            "conftest.py": 'pytest_plugins = ["harness.commands.plugin"]\n',
            "pytest.ini": "[pytest]\n",
            "run.py": RUN,
            "toy_runtime.py": RUNTIME,
            "targets.toml": '[default]\nbaseline = "toy"\ncandidate = "local:toy"\n'
            + ROW.format(name="toy", adapter="toystack.stack:Stack")
            + 'environment = "toy"\nrelease = "toystack==1.0"\n'
            + ROW.format(name="reference", adapter="tests.adapters:Oracle")
            + 'environment = "toy"\n[targets."local:toy"]\nabout = "a checkout"\nlike = "toy"\n',
        }
        make_project(self.folder, files)
        self.repository = Repository(folder / "toys")
        self.repository.commit(
            "begin", {"toystack/__init__.py": '__version__ = "1.0"\n', ".gitignore": "__pycache__\n"}
        )

    def commit(self, subject: str, stack: str) -> str:
        return self.repository.commit(subject, {"toystack/stack.py": f"{stack}# {subject}\n"})

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        given = ["--target", "local:toy", "--checkout", str(self.repository.tree), "--run-dir", "runs"]
        of_run = ["--python", sys.executable, "--engine", "cpu", "--model", "model", "--topology", "disaggregated"]
        return subprocess.Popen(
            [sys.executable, "run.py", arguments[0], *given, *of_run, *arguments[1:]],
            cwd=self.folder,
            env={**_clean(), "PYTHONPATH": f"{self.folder}:{PROJECT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as process:
            said, _ = process.communicate(timeout=300)
        return process.returncode, said


def _clean() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # hundreds of modules that no scenario uses


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    return Toys(tmp_path)


def test_bisect_drives_each_commit_and_names_the_one_with_the_fault(toys: Toys):
    good = toys.commit("a correct stack", CORRECT)
    broken = toys.commit("does not start", BROKEN)
    toys.commit("starts again", CORRECT)
    fault = toys.commit("rows the other way round", FAULTY)
    toys.commit("a comment", FAULTY)
    before = toys.repository.state()
    status, told = toys.run("bisect", "--good", good, "--check", "tokens.greedy", "-k", "greedy")
    assert status == 0, told
    assert f"commit {fault}" in told
    assert "toystack/stack.py | 4 ++--" in told
    assert f"good  {good[:9]}  a correct stack" in told
    assert toys.repository.state() == before
    logs = {path.name for path in (toys.folder / "runs").glob("*.log")}
    assert f"{fault[:9]}.log" in logs
    skipped = f"skip  {broken[:9]}  does not start"
    assert (skipped in told) == (f"{broken[:9]}.log" in logs)


def test_a_selection_that_judges_nothing_is_refused_before_anything_is_bisected(toys: Toys):
    good = toys.commit("a correct stack", CORRECT)
    toys.commit("rows the other way round", FAULTY)
    status, told = toys.run("bisect", "--good", good, "--check", "tokens.greedy", "-k", "no_such_scenario")
    assert (status, "selected no scenario" in told) == (2, True), told
    status, told = toys.run("bisect", "--good", good, "--check", "tokens.gredy", "-k", "greedy", "--run-dir", "more")
    assert (status, "no verdict about tokens.gredy; it judged" in told) == (2, True), told


def test_ctrl_c_ends_the_running_stack_and_removes_the_worktree(toys: Toys):
    good = toys.commit("hangs", HANGS)
    toys.commit("more", FAULTY)
    before = toys.repository.state()
    with toys.start("bisect", "--good", good, "--check", "tokens.greedy") as process:
        recording = toys.folder / "runs" / good[:9] / "recordings"
        _until(lambda: any(b'"canary"' in path.read_bytes() for path in recording.glob("*")), process)
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=120)
    assert (process.returncode, "interrupted" in told) == (2, True), told
    assert toys.repository.state() == before
    _, left = psutil.wait_procs(below, timeout=20)
    assert left == []


def _until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_pr_compares_the_working_tree_with_the_commit_where_it_left_its_base(toys: Toys):
    base = toys.commit("a correct stack", CORRECT)
    toys.repository.git("checkout", "--quiet", "-b", "mine")
    head = toys.commit("a change", CORRECT)
    toys.repository.git("checkout", "--quiet", "main")
    toys.commit("main goes on", BROKEN)
    toys.repository.git("checkout", "--quiet", "mine")
    toys.repository.file("toystack/stack.py", FAULTY)
    before = toys.repository.state()
    status, told = toys.run("pr", "--base", "main", "--comment", "comment.md", "-k", "greedy")
    assert status == 1, told
    comment = (toys.folder / "comment.md").read_text()
    assert f"local:toy#{base[:9]}` → `local:toy#{head[:9]}+" in comment
    assert "uncommitted changes" in comment
    assert "regression" in comment
    assert "parity-tree-" not in comment, "the base's worktree is gone"
    assert f"--checkout 'local:toy#{base[:9]}=BASE_TREE'" in comment
    assert f"worktree add --detach BASE_TREE {base}` makes it" in comment
    assert toys.repository.state() == before


def test_pr_refuses_a_tree_without_changes(toys: Toys):
    toys.commit("a correct stack", CORRECT)
    status, told = toys.run("pr", "--base", "main")
    assert (status, "there is nothing to compare" in told) == (2, True), told
