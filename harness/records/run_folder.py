"""The folder of one run: its files, its lock, and the description of the run.

::

    run.json                              RunInfo
    recordings/<target>@<topology>.jsonl  one per start of a stack; ":" in a target becomes "_"; of merged shards:
    recordings/<target>@<topology>.N.jsonl  one per seat of the Nth shard
    reference.jsonl                       the oracle's answers about the run's model
    reference-<architecture>.jsonl        about the model of topologies that are for one architecture
    logs/<target>@<topology>/             what the stack wrote
    report.*                              json, html, md, junit.xml
    bench.*                               json, html: of `parity bench`, in place of recordings and report
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self, final

import msgspec
from filelock import FileLock, Timeout

from harness.contract.errors import RecordingError, UsageError
from harness.contract.topology import Topology
from harness.records.verdict import RunInfo

RUNS = Path(".parity") / "runs"
RUNNING = "running"
"""The outcome in run.json until the run has ended."""


def stem(target: str, topology: str) -> str:
    """The name of one start of one target, fit for a file."""
    return f"{target.replace(':', '_')}@{topology}"


def new_run_dir(root: Path) -> Path:
    """``.parity/runs/<UTC time>-<random>`` below `root`. Does not create it."""
    now = datetime.datetime.now(datetime.UTC)
    return root / RUNS / f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def find_run(run: str, root: Path) -> Path | None:
    """The folder of a run, by its path or by its name below ``.parity/runs`` of `root`; None if there is none."""
    return next((folder.absolute() for folder in (Path(run).expanduser(), root / RUNS / run) if folder.is_dir()), None)


def references_in(folder: Path) -> list[Path]:
    """The books of the oracle's answers in a folder, one per model."""
    return sorted(folder.glob("reference*.jsonl"))


@final
class RunFolder:
    """One run's folder. `create` it to drive (it is locked until `close`), open an `existing` one to judge."""

    def __init__(self, path: Path, lock: FileLock | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, run_dir: Path | None = None, *, root: Path | None = None) -> Self:
        """A new folder, locked: `run_dir`, or ``.parity/runs/<UTC time>-<random>`` below `root` (the working folder).

        Raises UsageError if another run is using it or if it holds a run already.
        """
        run_dir = run_dir or new_run_dir(root or Path.cwd())
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"cannot make {run_dir}: {e.strerror}", next_step="give another --run-dir") from e
        path = run_dir.absolute()
        lock = FileLock(path / "run.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as e:
            raise UsageError(
                f"another run (pid {_holder(path)}) is using {path}",
                next_step="wait until it has ended, or give another --run-dir",
            ) from e
        folder = cls(path, lock)
        if folder.run_json.exists() or any(folder.recordings.glob("*")) or folder.references():
            folder.close()
            raise UsageError(f"{path} holds a run already", next_step="give another --run-dir; no run is overwritten")
        (path / "run.pid").write_text(str(os.getpid()))
        return folder

    @classmethod
    def existing(cls, path: Path) -> Self:
        """The folder of a run that was driven. Raises UsageError for any other."""
        folder = cls(path.absolute())
        if not folder.run_json.is_file():
            raise UsageError(f"{path} is not the folder of a run: it has no run.json", next_step="name a run's folder")
        return folder

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def reference(self) -> Path:
        return self.path / "reference.jsonl"

    def reference_of(self, architecture: str | None) -> Path:
        """The book about the model of topologies for `architecture`; None is the run's own model."""
        return self.reference if architecture is None else self.path / f"reference-{architecture}.jsonl"

    def references(self) -> list[Path]:
        """All existing books."""
        return references_in(self.path)

    @property
    def policies(self) -> Path:
        """Folder of trained policy versions. The trainer makes it on first use."""
        return self.path / "policies"

    @property
    def recordings(self) -> Path:
        return self.path / "recordings"

    def recording(self, target: str, topology: Topology) -> Path:
        return self.recordings / f"{stem(target, topology.name)}.jsonl"

    def logs(self, target: str, topology: Topology) -> Path:
        return self.path / "logs" / stem(target, topology.name)

    def report(self, suffix: str) -> Path:
        """``report("json")`` → …/report.json."""
        return self.path / f"report.{suffix}"

    def recorded(self) -> list[Path]:
        """All recordings of the run, by name."""
        return sorted(self.recordings.glob("*.jsonl"))

    def write_info(self, info: RunInfo) -> None:
        """Write run.json, atomically: at the start with the outcome "running", at the end with the real one."""
        handle, name = tempfile.mkstemp(dir=self.path, prefix=".run-", suffix=".json")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
            Path(name).replace(self.run_json)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def info(self) -> RunInfo:
        """Read run.json. Raises `RecordingError` for one that does not parse."""
        try:
            return msgspec.json.decode(self.run_json.read_bytes(), type=RunInfo)
        except (OSError, msgspec.DecodeError) as e:
            raise RecordingError(f"{self.run_json} does not say what was run: {e}", next_step="run it again") from e

    def close(self) -> None:
        """Release the folder. Idempotent."""
        if self._lock is not None:
            (self.path / "run.pid").unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _holder(path: Path) -> str:
    """Pid of the process that holds the lock; "unknown" if it has not written it yet."""
    with contextlib.suppress(OSError):
        return (path / "run.pid").read_text().strip() or "unknown"
    return "unknown"
