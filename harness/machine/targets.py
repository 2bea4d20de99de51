"""From "skyrl-0.2.0:http" to adapter, environment and variables; from "local:http" to the user's interpreter.

The registry is `backends/targets.toml`. Nothing is installed or started here. A local target may have a label of the user's,
"local:http#old", so that two of a kind can be compared. A target whose router is a package of its own may have another version of
it, another policy, or both: "skyrl-0.4.0:http#vllm-router-0.1.13", "…#vllm-router-round_robin".
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from harness import PROJECT
from harness.contract.capability import Capability
from harness.contract.checkout import Checkout
from harness.contract.errors import EnvironmentBroken, UsageError
from harness.contract.faults import Fault, by_id
from harness.contract.runtime import Runtime
from harness.machine import checkouts
from harness.machine.environments import Engine, requirement_file
from harness.machine.installed import normal

REGISTRY = PROJECT / "backends" / "targets.toml"
IMPORT_DEADLINE_S = 120.0
LABEL = "#"
"""Separates a target from its label, and from its router."""
_LABELS = re.compile(r"[\w.+-]+")
HOST_NEEDS = ("msgspec", "starlette", "uvicorn", "psutil")
"""Modules that a local interpreter must be able to import beside the stack: the host uses them."""


_ROUTER = r"(?:-(?P<version>\d[\w.]*))?(?:-(?P<policy>[a-z][a-z_]*))?"


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has in place of the router that a target ships with."""

    package: str
    version: str | None = None
    """None: the one of the target's environment."""
    policy: str | None = None
    """How it chooses a server. None: the stack's own choice."""

    @property
    def label(self) -> str:
        """ "vllm-router-0.1.13-round_robin", without what is None."""
        return "-".join(filter(None, (self.package, self.version, self.policy)))


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that can be driven: in an `environment`, by a `python` that the user names, or `inline`."""

    name: str
    about: str
    adapter: str
    """ "module:Class"."""
    environment: str | None = None
    """Name for `environments.ensure`."""
    python: Path | None = None
    """Interpreter of a local target, checked."""
    checkout: Checkout | None = None
    """The source tree of a local target. Without a `python` it gets an environment of its own (`harness.machine.checkouts`)."""
    variables: dict[str, str] = {}
    capabilities: frozenset[Capability]
    """Declared capabilities. Those of a start may differ, which is a finding."""
    release: str | None = None
    """ "package==version" of a released stack."""
    like: str | None = None
    """The target that it is like."""
    inline: bool = False
    """True if it is pure Python: it runs in the driver's own process, with its own model and no checkpoint."""
    reference: str = "reference"
    """The target that serves as its oracle."""
    faults: str | None = None
    """ "module:NAME" of its seeded faults."""
    slowdowns: str | None = None
    """ "module:NAME" of what can be seeded to make it slow (`parity bench --slowdown`)."""
    mutants: str | None = None
    """File of its code that mutants change (`harness/proving/mutants.py`), below the project."""
    runtime: str | None = None
    """ "module:NAME" of its `Runtime`."""
    router: str | None = None
    """Distribution of its router, if that can be varied alone."""
    other_router: Router | None = None
    """The router that its name asks for."""

    @property
    def local(self) -> bool:
        """True if the user names the interpreter or the checkout."""
        return self.environment is None and not self.inline

    @property
    def package(self) -> str:
        """The distribution that it is a release of, or whose release it is like; "" if there is none."""
        like = registry().get(self.like or "")
        return (self.release or (like.release if like else None) or "").partition("==")[0]

    def seeded(self) -> dict[str, Fault]:
        """Fault id → fault. Raises UsageError for a target without seeded faults."""
        if self.faults is None:
            raise UsageError(
                f"no faults are seeded for {self.name!r}", next_step="`parity targets` shows which have some"
            )
        return by_id(_named(self.faults))

    def slower(self) -> dict[str, frozenset[str]]:
        """Slowdown id → the rows of `parity bench` that must be slower under it. Empty if it has none."""
        return {} if self.slowdowns is None else {one.id: one.slower for one in _named(self.slowdowns)}

    @property
    def runs_on(self) -> Runtime:
        """The `Runtime` that `runtime` names, else one that needs nothing."""
        return Runtime() if self.runtime is None else _named(self.runtime)


def _named(name: str) -> Any:
    """The object at "module:NAME"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def default_pair() -> tuple[str, str]:
    """Baseline and candidate of a run that names none."""
    said = tomllib.loads(REGISTRY.read_text())["default"]
    return said["baseline"], said["candidate"]


@cache
def registry(path: Path | None = None) -> dict[str, Target]:
    """All targets of a file (default: `REGISTRY`) by name, in its order. Local ones have no interpreter yet."""
    entries: dict[str, dict[str, Any]] = tomllib.loads((path or REGISTRY).read_text())["targets"]
    found: dict[str, Target] = {}
    for name, entry in entries.items():
        fields = dict(entry)
        if (like := fields.get("like")) is not None:
            fields = {**entries[like], "environment": None, "release": None, **fields}
        fields["capabilities"] = _capabilities(fields["capabilities"], entries)
        found[name] = msgspec.convert({"name": name, **fields}, Target)
    return found


def _capabilities(said: Any, entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The capabilities of an entry: a list, or those of the entry `like`, with those of `plus` and without those of `minus`."""
    if isinstance(said, list):
        return said
    inherited = _capabilities(entries[said["like"]]["capabilities"], entries)
    return sorted({*inherited, *said.get("plus", ())} - {*said.get("minus", ())})


def real_stacks(names: Iterable[str], released: Mapping[str, str | None] | None = None) -> set[str]:
    """The stacks among these that are not inline, each with the release that it is (`released`), or else the one that it is like."""
    found = {name: _row(name) for name in names}
    real = {name: target for name, target in found.items() if target is not None and not target.inline}
    others = ((released or {}).get(name) or target.like for name, target in real.items())
    return {target.name for target in real.values()} | {name for name in others if name}


def released(packages: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str | None]:
    """Target → the released target that it is, for each that has another name ("local:http", "skyrl-0.2.0:http in RUN").

    `packages`: the target of each recording, with the versions in its environment. None: no released target has that version, or
    the recordings name several. Inline and unknown targets are left out.
    """
    found: dict[str, set[str | None]] = {}
    for name, versions in packages:
        row = _row(name)
        if row is not None and not row.inline and (row.local or row.name != name):
            found.setdefault(name, set()).add(_released(row, versions))
    return {name: releases.pop() if len(releases) == 1 else None for name, releases in found.items()}


def _row(name: str) -> Target | None:
    """The registry's entry. A target that is compared with itself is told apart by its run ("NAME in RUN")."""
    return registry().get(name.partition(" in ")[0].partition(LABEL)[0])


def _released(target: Target, versions: Mapping[str, str]) -> str | None:
    for other in registry().values():
        package, _, version = (other.release or "").partition("==")
        if _kind(other, target) and package and versions.get(package) == version:
            return other.name
    return None


class Step(StrEnum):
    """What a candidate is to its baseline. It decides the profile of a run that names none."""

    IMPLEMENTATION = "another implementation"
    """Another adapter drives it, or one of the two is no target of the registry."""
    RELEASE = "another release"
    """The same adapter drives both, and their versions differ or are unknown."""
    SAME = "the same release"
    """The same adapter drives both, and their version is the same, as with a checkout of that release."""


def step(baseline: str, candidate: str, packages: Mapping[str, Mapping[str, str]]) -> Step:
    """The step from one target to the other. `packages`: target → the versions that its recordings name."""
    ours, theirs = _row(baseline), _row(candidate)
    if ours is None or theirs is None or ours.adapter != theirs.adapter:
        return Step.IMPLEMENTATION
    if ours.inline:
        return Step.SAME
    left, right = _version(ours, packages.get(baseline, {})), _version(theirs, packages.get(candidate, {}))
    return Step.SAME if left is not None and left == right else Step.RELEASE


def _version(target: Target, packages: Mapping[str, str]) -> str | None:
    """The version that its environment has of the released package, or else the one that it is a release of; None if unknown."""
    return packages.get(target.package) or ((target.release or "").partition("==")[2] or None)


def _kind(released: Target, target: Target) -> bool:
    """True if a released target and another one are the same stack. A release may need fewer variables."""
    return released.adapter == target.adapter and released.variables.items() <= target.variables.items()


def described(target: Target, version: str) -> list[Target]:
    """The releases of this stack: the newest that is not newer than `version` (else the oldest) first, then the newest of all.

    Each of them once. Raises UsageError if no release of it has been described.
    """
    rows = [row for row in registry().values() if row.environment and _kind(row, target)]
    by_version = {Version(row.release.partition("==")[2]): row for row in rows if row.release}
    if not by_version:
        raise UsageError(f"no release of {target.name} is described", next_step="add one to backends/targets.toml")
    versions = sorted(by_version)
    try:
        before = [one for one in versions if one <= Version(version)]
    except InvalidVersion:
        before = versions
    return [by_version[one] for one in dict.fromkeys((before[-1] if before else versions[0], versions[-1]))]


def runtimes() -> list[Runtime]:
    """The runtimes of all targets, each once."""
    return [target.runs_on for target in {t.runtime: t for t in registry().values() if t.runtime}.values()]


def known(name: str) -> Target:
    """The registry's entry, also under a label or with another router. Raises UsageError for an unknown name, naming close ones."""
    if (target := registry().get(name)) is not None:
        return target
    kind, *labels = name.split(LABEL)
    if (target := registry().get(kind)) is not None and all(map(_LABELS.fullmatch, labels)):
        router = re.fullmatch(re.escape(target.router or "-") + _ROUTER, labels[-1])
        if router is not None and any(router.groups()):
            labels.pop()
            target = msgspec.structs.replace(
                target, other_router=Router(package=str(target.router), **router.groupdict())
            )
        if len(labels) <= target.local:
            return msgspec.structs.replace(target, name=name)
        own = f"only a router of its own, such as {kind}{LABEL}{target.router}-1.2.3" if target.router else "none"
        raise UsageError(
            f"{name}: only local targets have labels, and one each",
            next_step=f"leave out {LABEL}{labels[-1]}; {kind} can have {'a label and ' * target.local}{own}",
        )
    close = difflib.get_close_matches(name, registry(), cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(registry())}"
    raise UsageError(f"unknown target {name!r}: {meant}", next_step="`parity targets` lists them")


def with_router(name: str, version: str | None, policy: str | None) -> str:
    """The target's name with another version of its router ("vllm-router==0.1.13"), another policy, or both.

    Raises UsageError for a target that has no router of that package, or names another one already.
    """
    target = known(name)
    if target.router is None:
        able = ", ".join(one.name for one in registry().values() if one.router)
        raise UsageError(
            f"{name} has no router that is a package of its own",
            next_step=f"--router and --router-policy are for {able}",
        )
    asked = re.fullmatch(r"(?P<package>[\w.-]+)==(?P<version>\d[\w.]*)", version or f"{target.router}==0")
    if asked is None or normal(asked["package"]) != target.router:
        raise UsageError(
            f"--router {version}: the router of {name} is {target.router}",
            next_step=f"write --router {target.router}==VERSION",
        )
    if target.other_router is not None:
        raise UsageError(f"{name} names its router already", next_step="leave out --router and --router-policy")
    router = Router(package=target.router, version=asked["version"] if version else None, policy=policy)
    named = f"{name}{LABEL}{router.label}"
    if not re.fullmatch("[a-z][a-z_]*", policy or "a"):
        raise UsageError(f"--router-policy {policy!r} is no name of a policy", next_step="write it as in round_robin")
    return named


def wider(name: str) -> list[str]:
    """The name, and those that stand for it: without its router, without its label, and "" for all."""
    parts = name.split(LABEL)
    return [LABEL.join(parts[:count]) for count in range(len(parts), 0, -1)] + [""]


def of_local(option: str, given: Sequence[str]) -> dict[str, Path]:
    """Values of `--python` or `--checkout` → local target → path. "PATH" is for all local targets (""), "TARGET=PATH" for one.

    Raises UsageError for a name that is no local target, and for two paths of one target.
    """
    found: dict[str, Path] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not equals:
            name, path = "", one
        elif not known(name).local:
            raise UsageError(
                f"{option} {one}: {name} is no local target, it has an environment of its own",
                next_step="name a `local:` target of `parity targets`",
            )
        if name in found:
            raise UsageError(
                f"{option} is given twice for {name or 'all local targets'}",
                next_step=f"give each local target a label and a path: {option} local:http#old=PATH {option} local:http#new=PATH",
            )
        found[name] = Path(path).expanduser().absolute()  # not resolved: a virtual environment's python is a link
    return found


def for_target(name: str, given: Mapping[str, Path] | None) -> Path | None:
    """The path for a local target: its own, that of its kind without a label, or that of all."""
    return next((given[key] for key in wider(name) if key in given), None) if given else None


def resolve(name: str, pythons: Mapping[str, Path] | None = None, trees: Mapping[str, Path] | None = None) -> Target:
    """The target of that name. `pythons` are interpreters of local targets, `trees` their checkouts (`of_local`); other targets have
    their own. A local target has the capabilities of the release that its checkout or interpreter has, or of the newest one before it.

    Raises UsageError for an unknown name, a local target without an interpreter or checkout, and a checkout that is none, and
    EnvironmentBroken for an interpreter that cannot run a stack.
    """
    target = known(name)
    if not target.local:
        return target
    chosen, tree = for_target(name, pythons), for_target(name, trees)
    if chosen is None and tree is None:
        raise UsageError(
            f"target {name!r} needs your own checkout, or the interpreter of your own environment",
            next_step="add --checkout PATH, a git working tree of the stack; or --python PATH (pytest: --target-python PATH), a "
            f"python that can import {' and '.join(target.runs_on.modules)}",
        )
    if tree is not None:
        target = _of_checkout(target, tree)
    if chosen is not None:
        version = version_in(chosen, target.package, (*target.runs_on.modules, *HOST_NEEDS), front_of(target))
        if tree is None:
            target = msgspec.structs.replace(target, capabilities=described(target, version)[0].capabilities)
    return msgspec.structs.replace(target, python=chosen)


def _of_checkout(target: Target, tree: Path) -> Target:
    if (layout := target.runs_on.source) is None:
        raise UsageError(
            f"{target.name} has no source tree that is known", next_step="name its interpreter: --python PATH"
        )
    checkout = checkouts.read(tree, layout)
    nearest = described(target, checkout.versions[layout.parts[0].distribution])[0]
    return msgspec.structs.replace(target, checkout=checkout, capabilities=nearest.capabilities)


def front_of(target: Target) -> list[Path]:
    """Folders that come first on the PYTHONPATH of a target with a checkout; none for others."""
    layout = target.runs_on.source
    return [] if target.checkout is None or layout is None else checkouts.front(target.checkout, layout, PROJECT)


def needs_of(target: Target, engine: Engine) -> checkouts.Needs:
    """What the checkout of a target requires of its environment."""
    layout, checkout = target.runs_on.source, target.checkout
    assert layout is not None
    assert checkout is not None
    rows = described(target, checkout.versions[layout.parts[0].distribution])
    files = {
        row.environment: requirement_file(row.environment, engine).with_suffix(".in") for row in rows if row.environment
    }
    return checkouts.needs(checkout, layout, engine, {name: file.read_text() for name, file in files.items()})


_SAY_VERSION = """
import importlib.metadata, sys
print(next((found.version for found in importlib.metadata.distributions(name=sys.argv[1])), ""))
"""


def version_in(python: Path, package: str, modules: tuple[str, ...], front: Sequence[Path] = ()) -> str:
    """The version of `package` that this interpreter has ("" if it has none, as with a bare source tree).

    Runs it, with a deadline, to check that it can import `modules`. `front`: folders that come first on PYTHONPATH.

    Raises UsageError if it is missing or not executable, EnvironmentBroken if it cannot import the modules.
    """
    if not python.is_file():
        raise UsageError(f"interpreter {python} does not exist", next_step="name a python executable with --python")
    if not os.access(python, os.X_OK):
        raise UsageError(f"{python} is not executable", next_step="name a python executable with --python")
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}  # the host sets its own
    variables |= {"PYTHONPATH": os.pathsep.join(map(str, front))} if front else {}
    try:
        said = subprocess.run(
            [python, "-c", "\n".join([*(f"import {name}" for name in modules), _SAY_VERSION]), package],
            env=variables,
            capture_output=True,
            text=True,
            timeout=IMPORT_DEADLINE_S,
            cwd="/",  # a folder in the current one may have a module's name and is not the package
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentBroken(
            f"{python} did not import {', '.join(modules)} within {IMPORT_DEADLINE_S:.0f} s",
            next_step=f"try it by hand: {python} -c 'import {', '.join(modules)}'",
        ) from None
    except OSError as error:
        raise UsageError(
            f"{python} cannot be run: {error.strerror}", next_step="name a python executable with --python"
        ) from error
    if said.returncode != 0:
        last = (said.stderr.strip().splitlines() or [f"exit status {said.returncode}"])[-1]
        raise EnvironmentBroken(
            f"{python} cannot run a stack: {last}",
            next_step=f"install the missing ones into its environment, of: {', '.join(modules)}",
        )
    return said.stdout.splitlines()[-1]  # imports may print as well
