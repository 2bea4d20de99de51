"""Stacks that outlive the command that started them (`parity up`): what each was started with, and whether a run may use it.

Each lies in a file below ``.parity/up``, one per stack or reference. It lives as long as its supervisor.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import msgspec
import psutil

from harness import PROJECT
from harness.contract.checkout import Checkout
from harness.contract.errors import UsageError
from harness.contract.messages import Description, StartRequest
from harness.machine.processes import SUPERVISOR

UP = Path(".parity") / "up"
FILES = "*/kept/*.json"
LOADED = ("backends", "harness/contract", "harness/driving", "harness/machine", "harness/records")
"""Folders with the code that a stack's processes load. A change there makes a running stack stale."""
INLINE = "backends/miniature"
"""Of these the code that no process of a stack loads."""
AGAIN = "`parity down`, then `parity up` again; or --fresh, to start a stack for this run alone"


def policies(root: Path = PROJECT) -> Path:
    """The folder of trained policy versions that kept stacks, kept references and their drivers share."""
    return root / UP / "policies"


@final
class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A stack or reference that was started to be used by several runs."""

    name: str
    """ "TARGET@TOPOLOGY", or the reference's target."""
    since: str
    """When it was up: UTC, ISO 8601."""
    supervisor: int
    """Pid."""
    lifeline: Path
    adapter: str
    request: StartRequest
    model_sha256: str
    python: Path
    checkout: Checkout | None = None
    description: Description | None = None
    """None for a reference."""
    book: Path
    """Its run's book of the reference's answers."""
    code: dict[str, str]
    """File below the project → hash, of all that its processes may load."""

    @property
    def alive(self) -> bool:
        return _lives(self.supervisor, self.lifeline)

    def differs(self, other: Kept) -> list[str]:
        """What was asked of this one and is not asked of `other`, in words. `other` need not run."""
        ours, theirs = self._facts(), other._facts()
        return [f"{fact} is {ours[fact]} there, {theirs[fact]} here" for fact in ours if ours[fact] != theirs[fact]]

    def _facts(self) -> dict[str, Any]:
        asked: dict[str, Any] = msgspec.to_builtins(self.request)
        topology = asked.pop("topology")
        topology.pop("about")
        shape = {f"{fact} of the topology": value for fact, value in topology.items() if fact != "name"}
        for own in ("scratch", "logs"):
            del asked[own]
        return {
            "target": asked.pop("target"),
            "topology": topology["name"],
            **shape,
            **asked,
            "the model's hash": self.model_sha256[:12],
            "the interpreter": str(self.python),
            "the checkout": "none" if self.checkout is None else self.checkout.told,
            "the adapter": self.adapter,
        }

    def refuse_stale(self) -> None:
        """Raises UsageError if code that it loaded has changed since."""
        now = code()
        if changed := sorted(file for file in self.code | now if self.code.get(file) != now.get(file)):
            more = f" and {len(changed) - 3} other files" if len(changed) > 3 else ""
            raise UsageError(
                f"{self.name}, up since {self.since}, is stale: {', '.join(changed[:3])}{more} changed after its start",
                next_step=AGAIN,
            )

    def write(self, folder: Path) -> None:
        file = folder / "kept" / f"{self.name.replace(':', '_')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(msgspec.json.encode(self, enc_hook=str))


def running(root: Path = PROJECT) -> Iterator[Kept]:
    """All kept stacks and references that live."""
    for file in sorted((root / UP).glob(FILES)):
        found = _read(file)
        if found is not None and found.alive:
            yield found


def _read(file: Path) -> Kept | None:
    """None for a file of another version of the harness whose stack has ended. Raises UsageError if that stack lives."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Kept, dec_hook=lambda kind, said: kind(said))
    except msgspec.ValidationError as e:
        said = msgspec.json.decode(file.read_bytes())
        name, supervisor, lifeline = said.get("name"), said.get("supervisor", 0), said.get("lifeline", "")
        if not _lives(supervisor, Path(lifeline)):
            return None
        raise UsageError(
            f"another version of the harness started {name}, which is up: {file}: {e}",
            next_step=f"`parity down` of that version ends it, and so does `kill {supervisor}`",
        ) from None


def _lives(supervisor: int, lifeline: Path) -> bool:
    try:
        return lifeline.is_socket() and SUPERVISOR in psutil.Process(supervisor).cmdline()
    except psutil.Error:
        return False


def new_folder(name: str, root: Path = PROJECT) -> Path:
    """A folder for the logs and files of a new one. Folders of those that have ended are removed."""
    alive = {one.book.parent for one in running(root)}
    for old in (root / UP).glob("*"):
        if old not in alive and not (alive and old == policies(root)):
            shutil.rmtree(old)
    return root / UP / name


def names(root: Path = PROJECT) -> list[str]:
    """The names of the kept stacks that live."""
    return [one.name for one in running(root) if one.description is not None]


def code(root: Path = PROJECT) -> dict[str, str]:
    """File below the project → hash, of all code that a stack's processes may load."""
    files = (
        path
        for folder in LOADED
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".toml") and not path.is_relative_to(root / INLINE)
    )
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(files)}
