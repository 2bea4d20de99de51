"""Another version of a target's router: one package in a folder of its own, in front of the target's environment."""

from __future__ import annotations

import importlib
import tempfile
from contextlib import suppress
from pathlib import Path

from harness.machine.environments import run_uv, unpack
from harness.machine.progress import Progress
from harness.machine.targets import Router

LOCK = "router"
"""Name of the requirement file beside the package's files."""
PACKAGES = "packages"


def front(router: Router | None, root: Path, python: Path, progress: Progress) -> list[Path]:
    """The folder for PYTHONPATH, filled on first use; none if the version is that of the environment.

    Its packages come without their dependencies: those of the environment `python` serve. Raises EnvironmentBroken with the end of
    uv's output, for a version that the index does not have, for instance.
    """
    if router is None or router.version is None:
        return []
    name = f"{router.package}-{router.version}"
    home = root.resolve() / ".parity" / "routers" / name
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        fetching = progress(f"router {name}: fetching it")
        with fetching, tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{name}-") as half:
            _fetch(router, Path(half), python)
            with suppress(OSError):  # another run was faster
                Path(half).rename(home)
    return [home / PACKAGES]


def _fetch(router: Router, folder: Path, python: Path) -> None:
    """Its hashed requirement file, and what that names."""
    arguments = importlib.import_module("backends.envs.compile").arguments
    what = f"router {router.package} {router.version}"
    (folder / f"{LOCK}.in").write_text(f"{router.package}=={router.version}\n")
    run_uv([*arguments(LOCK), "--python", str(python), "--no-deps"], what, folder)
    unpack(folder / f"{LOCK}.txt", folder / PACKAGES, python, what)
