"""A stack's processes, ports, shared memory and scratch folder. Tests record them and later check that they are gone."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
import psutil

from harness.driving.supervisor import SHM, mapped_by

IN_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
"""Before a command: it starts as in a script's background, where SIGINT is ignored."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """A stack's use of the machine at one moment."""

    processes: list[psutil.Process]
    ports: set[int]
    shared_memory: set[Path]
    """Entries of /dev/shm that the processes map."""
    scratch: Path | None = None

    def left(self) -> list[str]:
        """The parts that still exist."""
        found = [f"process {p.pid}" for p in self.processes if alive(p)]
        found += [f"port {port}" for port in self.ports if port in listening()]
        found += [str(path) for path in self.shared_memory if path.exists()]
        if self.scratch is not None and self.scratch.exists():
            found.append(str(self.scratch))
        return found

    def wait_until_gone(self, deadline_s: float = 30.0) -> None:
        """Wait until nothing is left. Raises AssertionError that names the leftovers."""
        deadline = time.monotonic() + deadline_s
        while left := self.left():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)


def footprint(root: int, *, scratch: Path | None = None) -> Footprint:
    """The current footprint of the process `root` and its descendants."""
    top = psutil.Process(root)
    processes = [top, *top.children(recursive=True)]
    return Footprint(
        processes=processes,
        ports={port for p in processes for port in ports_of(p)},
        shared_memory={path for p in processes for path in mapped(p)},
        scratch=scratch,
    )


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mapped(process: psutil.Process) -> set[Path]:
    """Entries of /dev/shm that a process maps."""
    inodes = mapped_by(process)
    if not inodes:
        return set()
    with os.scandir(SHM) as found:
        return {Path(entry.path) for entry in found if entry.inode() in inodes}


def ports_of(process: psutil.Process) -> set[int]:
    with contextlib.suppress(psutil.Error):
        return {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return set()


def listening() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
