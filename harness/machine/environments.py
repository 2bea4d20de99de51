"""One virtual environment per stack release and engine: made once from a hashed requirement file, checked before every use.

An environment is never repaired in place. `check` refuses one that does not match its requirement file, and
`parity setup --recreate` replaces it. A *kit* is a folder with the files of all packages. `download` fills it on a machine with a
package index, and `ensure` makes an environment from it on a machine without one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import filelock
import msgspec
import uv

from harness import PROJECT
from harness.contract.devices import VISIBLE
from harness.contract.errors import EnvironmentBroken, UsageError
from harness.machine.installed import differences, normal, pins
from harness.machine.interpreters import STACK_PYTHON, find_interpreter
from harness.machine.progress import Progress, console_progress

Engine = Literal["cpu", "cuda"]

REQUIREMENTS = PROJECT / "backends" / "envs"
NEEDED_BYTES: Mapping[str, int] = {"cpu": 9 * 10**9, "cuda": 11 * 10**9}
"""Engine → bytes of disk that making a stack environment takes."""
INSTALL_DEADLINE_S = 3600.0
STAMP = "parity.json"
RECREATE = (
    "make it anew with `parity setup --recreate` (if the same file differs again, uv's cache holds the changed one: "
    "`uv cache clean PACKAGE`)"
)
_FILE = re.compile(r"(?P<name>.+?)-(?P<version>\d[^-]*?)(-.*\.whl|\.tar\.gz|\.zip)$")
"""A wheel or a source archive, by its file's name."""
FROM_LOCK = ("--no-progress", "--no-deps", "--require-hashes")


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: an environment without it is incomplete."""

    requirements_sha256: str
    python: str


def detect_engine() -> Engine:
    """ "cuda" if `nvidia-smi -L` lists a GPU, else "cpu"."""
    return "cuda" if list_gpus() else "cpu"


def list_gpus() -> list[str]:
    """The lines of `nvidia-smi -L` about the GPUs that this process may use (`CUDA_VISIBLE_DEVICES`), in its order.

    None if the program is missing or does not answer within 20 s.
    """
    if (binary := shutil.which("nvidia-smi")) is None:
        return []
    try:
        said = subprocess.run([binary, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in said.stdout.splitlines()] if said.returncode == 0 else []
    chosen = os.environ.get(VISIBLE)
    return [line for line in lines if line.startswith("GPU ")] if chosen is None else _chosen(lines, chosen)


def _chosen(lines: Sequence[str], chosen: str) -> list[str]:
    """The lines about the devices that a value of `CUDA_VISIBLE_DEVICES` names, by index or UUID. As in CUDA, the first name of
    no device ends the list."""
    found: list[str] = []
    for name in map(str.strip, chosen.split(",")):
        starts, holds = (f"GPU {name}:", "") if name.isdecimal() else ("", f"(UUID: {name}")
        line = next((one for one in lines if one.startswith(starts) and holds in one), None)
        if line is None or not name:
            break
        found.append(line)
    return found


def requirement_file(name: str, engine: Engine, *, folder: Path = REQUIREMENTS) -> Path:
    """The compiled requirement file of an environment. Raises UsageError if there is none for this engine."""
    path = folder / f"{name}.{engine}.txt"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.txt"))) or "none"
        raise UsageError(
            f"environment {name!r} has no requirement file for the engine {engine!r} ({path.name})",
            next_step=f"choose one of: {there}; or compile a new one from a .in file with `tox -e lock`",
        )
    return path


def location(name: str, engine: Engine, *, root: Path, requirements: Path = REQUIREMENTS) -> Path:
    """The environment's folder. A changed requirement file gives another folder."""
    digest = _sha256(requirement_file(name, engine, folder=requirements))
    return root.resolve() / ".parity" / "envs" / f"{name}-{engine}-{digest[:12]}"


def ensure(
    name: str,
    engine: Engine,
    *,
    root: Path,
    progress: Progress | None = None,
    python: Path | None = None,
    recreate: bool = False,
    kit: Path | None = None,
    requirements: Path = REQUIREMENTS,
    needed_bytes: int | None = None,
) -> Path:
    """The environment's python. Makes the environment if it is missing (about 35 s on two cores, minutes with downloads).

    `root` is the project's folder, `python` the interpreter to make it with, `kit` the folder of packages that replaces the
    index. A second run waits for the first. Raises EnvironmentBroken with the differences or the end of uv's output.
    """
    show = console_progress() if progress is None else progress
    locked = requirement_file(name, engine, folder=requirements)
    home = location(name, engine, root=root, requirements=requirements)
    with _alone(home, show):
        what, makes = f"environment {name}-{engine}", recreate or not (home / STAMP).is_file()
        source = _source(kit, locked, what) if makes else []
        if makes and home.exists():
            with show(f"{what}: removing {'it' if recreate else 'what a broken-off run left'}"):
                shutil.rmtree(home)
        if not home.exists():
            _make(
                home,
                locked,
                what,
                show,
                python=python,
                source=source,
                needed_bytes=needed_bytes or NEEDED_BYTES[engine],
            )
        check(home, locked, show)
    return home / "bin" / "python"


def check(home: Path, locked: Path, show: Progress) -> None:
    """Compare an environment with its requirement file: stamp, interpreter, packages, contents of files.

    Takes about 2 s; the first time, or after another installation has linked the same files, up to a minute (9 GB).

    Raises EnvironmentBroken naming the first differences.
    """
    found = problems(home, locked, show)
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise EnvironmentBroken(
            f"environment {home.name} does not match {locked.name}: {'; '.join(found[:5])}{more}", next_step=RECREATE
        )


def problems(home: Path, locked: Path, show: Progress) -> list[str]:
    """An environment's differences from its requirement file, in words; empty if it matches. `show`: progress of reading its files."""
    stamp = home / STAMP
    if not stamp.is_file():
        return ["it was never finished (no stamp file)"]
    try:
        stamped = msgspec.json.decode(stamp.read_bytes(), type=Stamp)
    except msgspec.DecodeError as error:
        return [f"its stamp file is damaged ({error})"]
    found = []
    if stamped.requirements_sha256 != _sha256(locked):
        found.append("it was made from another requirement file")
    if not (home / "bin" / "python").exists():
        found.append(f"its interpreter is gone ({stamped.python})")
    return found + differences(home, pins(locked), show)


def unpack(locked: Path, folder: Path, python: Path, what: str, kit: Path | None = None) -> None:
    """Install the packages of a requirement file into `folder`, to use their files. `what` names the step in errors.

    Raises EnvironmentBroken, with the end of uv's output.
    """
    into = ["--python", str(python), "--target", str(folder)]
    run_uv(["pip", "install", *into, *FROM_LOCK, *_source(kit, locked, what), "-r", str(locked)], what)


def download(locks: Sequence[Path], kit: Path, *, progress: Progress | None = None, python: Path | None = None) -> None:
    """Fill `kit` with the packages of requirement files and of the driver, as files for this platform. Uses pip, since uv has no
    download. Keeps existing files.

    The kit fits machines with this platform, with a Python like `python` for the stacks, and with one like the driver's for the
    driver. Raises EnvironmentBroken with the end of pip's output.
    """
    show = console_progress() if progress is None else progress
    interpreter = find_interpreter(chosen=python)
    for locked in locks:
        with show(f"kit {kit}: fetching the {len(pins(locked))} packages of {locked.name}"):
            options = ["--no-deps", "--require-hashes", "-r", str(locked)]
            _pip(["--python", str(interpreter), "download", "--dest", str(kit), *options], f"kit {kit}")
    with show(f"kit {kit}: fetching the driver's own packages"):
        _pip(["download", "--dest", str(kit), *_of_driver()], f"kit {kit}")


def _of_driver() -> list[str]:
    """The requirements of this project and its tests."""
    described = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    project = described["project"]
    return [*described["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["test"]]


def _source(kit: Path | None, locked: Path, what: str) -> list[str]:
    """uv's options for the source of packages: its index, or a kit. Raises EnvironmentBroken naming what the kit lacks."""
    if kit is None:
        return []
    held = {(normal(found["name"]), found["version"]) for file in kit.iterdir() if (found := _FILE.match(file.name))}
    if lacking := sorted(f"{name} {version}" for name, version in set(pins(locked).items()) - held):
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise EnvironmentBroken(
            f"{what}: the kit {kit} lacks {', '.join(lacking[:5])}{more} of {locked.name}",
            next_step="fill it on a machine with a package index, with this version of the project, the same targets and engine: "
            "`parity setup --download KIT --engine cpu|cuda [TARGET]...`",
        )
    return ["--no-index", "--find-links", str(kit)]


def _make(
    home: Path, locked: Path, what: str, show: Progress, *, python: Path | None, source: list[str], needed_bytes: int
) -> None:
    """`source`: uv's options from `_source`."""
    free = shutil.disk_usage(home.parent).free
    if free < needed_bytes:
        raise EnvironmentBroken(
            f"{what} needs about {needed_bytes / 1e9:.0f} GB; {home.parent} has {free / 1e9:.1f} GB free",
            next_step=f"free some space there (unused environments are in {home.parent}), or put the "
            "project on another disk",
        )
    with show(f"{what}: looking for Python {STACK_PYTHON}"):
        interpreter = find_interpreter(chosen=python, fetch=not source)
    with show(f"{what}: creating it with {interpreter}"):
        run_uv(["venv", "--python", str(interpreter), "--no-project", str(home)], what)
    count = len(pins(locked))
    with show(f"{what}: installing {count} packages (35 s on a 2-core machine, minutes when they must be downloaded)"):
        run_uv(
            [
                *("pip", "install", "--python", str(home / "bin" / "python"), "--strict"),
                *(*FROM_LOCK, *source, "-r", str(locked), "--build-constraints", str(locked)),
            ],
            what,
        )
    stamp = Stamp(requirements_sha256=_sha256(locked), python=str(interpreter))
    half = home / f"{STAMP}.half"
    half.write_bytes(msgspec.json.encode(stamp))
    half.rename(home / STAMP)


@contextmanager
def _alone(home: Path, show: Progress) -> Iterator[None]:
    """Hold the environment's lock file. Waits for a run that is making it."""
    home.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(home.with_name(home.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        with show(f"environment {home.name}: waiting for another run that makes it"):
            try:
                lock.acquire(timeout=INSTALL_DEADLINE_S)
            except filelock.Timeout:
                raise EnvironmentBroken(
                    f"environment {home.name}: another process has held {lock.lock_file} for an hour",
                    next_step="end that process (`parity doctor` lists leftovers of killed runs), then try again",
                ) from None
    try:
        yield
    finally:
        lock.release()


def run_uv(arguments: list[str], what: str, folder: Path | None = None) -> None:
    """Run uv in `folder` (default: the working folder). Raises EnvironmentBroken with the end of its output."""
    _run("uv", [uv.find_uv_bin(), *arguments], what, folder)


def _pip(arguments: list[str], what: str) -> None:
    _run("pip", [sys.executable, "-m", "pip", *arguments], what)


def _run(tool: str, command: list[str], what: str, folder: Path | None = None) -> None:
    variables = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    try:
        said = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentBroken(
            f"{what}: {tool} was not done after {INSTALL_DEADLINE_S:.0f} s",
            next_step=f"look at the network and the disk, then try again: what was downloaded is kept in {tool}'s cache",
        ) from None
    if said.returncode != 0:
        raise failure(what, said.stdout, tool)


_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"hash mismatch|hashes? (do|does) not match",
        "a package does not have the hash that the requirement file holds",
        "do not use that package: ask who runs the package index, or compile the file anew with `tox -e lock` and "
        "review what changed",
    ),
    (
        r"no space left on device|disk quota exceeded",
        "the disk is full",
        "free some space for the environment and for uv's cache (`uv cache dir`), then try again",
    ),
    (
        r"error sending request|dns error|failed to lookup address|connection (refused|reset)|timed out|"
        r"network is unreachable|failed to (fetch|download)|tls|certificate",
        "the package index could not be reached",
        "check the network and proxy; uv reads its index from UV_DEFAULT_INDEX and UV_INDEX, not from pip's settings; pip, which "
        "fills kits, reads its own. On a machine without an index: `parity setup --offline KIT`",
    ),
    (
        r"no wheels with a matching",
        "the files of a package are for another Python or platform",
        "fill the kit on a machine of this platform, with `parity setup --download KIT --python PATH` for this version of Python",
    ),
    (
        r"no solution found|no matching distribution|not found in the (package )?registry|no version of",
        "the package index does not have a package of the requirement file",
        "point uv at an index that has it (UV_DEFAULT_INDEX, UV_INDEX), or compile the file anew with `tox -e lock`",
    ),
)


def failure(what: str, output: str, tool: str = "uv") -> EnvironmentBroken:
    """The named error for uv's or pip's output, with its last lines. Removes credentials from addresses."""
    cause, next_step = (
        f"{tool} failed",
        "look at the end of its output above; `parity doctor` says what this machine lacks",
    )
    for pattern, named, advice in _CAUSES:
        if re.search(pattern, output, re.IGNORECASE):
            cause, next_step = named, advice
            break
    tail = "\n".join(f"  | {line}" for line in output.strip().splitlines()[-15:])
    tail = re.sub(r"//[^/@\s]+@", "//…@", tail)
    return EnvironmentBroken(f"{what}: {cause}. The end of {tool}'s output:\n{tail}", next_step=next_step)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
