"""Finds a Python of a given version for the stacks' environments. A name on PATH proves nothing: pyenv's shim fails
when another version is set, so every candidate is run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import uv

from harness import PROJECT
from harness.contract.errors import EnvironmentBroken

STACK_PYTHON = "3.12"
"""Python version of every stack environment. SkyRL 0.2.0's clients fail on 3.11, despite its metadata."""

KEPT_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(PROJECT / ".parity" / "bytecode")}
"""Variables of processes that import a stack's packages, thousands of modules each. They keep the compiled code in one folder.
Installers leave it out, and compiling in each process would take half of every import."""

_PROBE = "import sys; print('%d.%d' % sys.version_info[:2])"


def find_interpreter(version: str = STACK_PYTHON, *, chosen: Path | None = None, fetch: bool = True) -> Path:
    """A working interpreter of `version`: the chosen one (`--python`, PARITY_PYTHON), else from PATH, pyenv or uv, in this order.

    With `fetch`, uv downloads one if none is found. Raises EnvironmentBroken if the chosen one does not fit, or if none
    is found.
    """
    if chosen is None and (variable := os.environ.get("PARITY_PYTHON")):
        chosen = Path(variable)
    if chosen is not None:
        found = version_of(chosen)
        if found != version:
            said = f"is Python {found}" if found else "does not run as a Python interpreter"
            raise EnvironmentBroken(
                f"the chosen interpreter {chosen} {said}; the stacks need Python {version}",
                next_step=f"name a Python {version} with --python or PARITY_PYTHON, or leave both out",
            )
        return chosen
    for candidate in candidates(version):
        if version_of(candidate) == version:
            return candidate
    managed = _from_uv(version, fetch=fetch)
    if managed is not None and version_of(managed) == version:
        return managed
    raise EnvironmentBroken(
        f"no Python {version} found on PATH, in pyenv or by uv{', and uv could not fetch one' if fetch else ''}",
        next_step=f"install one (`apt install python{version} python{version}-venv`, `pyenv install {version}` or "
        f"`uv python install {version}`), or name one with --python PATH or PARITY_PYTHON=PATH",
    )


def candidates(version: str) -> Iterator[Path]:
    """Files that may be a Python of `version`, best first. Not verified."""
    for folder in os.get_exec_path():
        for name in (f"python{version}", "python3", "python"):
            if (path := shutil.which(name, path=folder)) is not None:
                yield Path(path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{version}*/bin/python{version}"), key=_patch_level, reverse=True)


def version_of(interpreter: Path) -> str | None:
    """ "3.12", or None if it does not run within 20 s."""
    try:
        said = subprocess.run(
            [interpreter, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() if said.returncode == 0 else None


def _patch_level(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parents[1].name.split(".") if part.isdigit())


def _from_uv(version: str, *, fetch: bool) -> Path | None:
    """An interpreter that uv knows. With `fetch`, uv downloads a missing one."""
    found = _uv("find", version)
    if found is None and fetch and _uv("install", version) is not None:
        found = _uv("find", version)
    return Path(found) if found else None


def _uv(action: str, version: str) -> str | None:
    """The output of `uv python ACTION VERSION`, or None if it fails or takes more than five minutes."""
    command = [uv.find_uv_bin(), "python", action, version]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return None
    return said.stdout.strip() if said.returncode == 0 else None
