"""The adverse schedule of a running stack: a file of the tap's folder, which the host writes and every engine tap reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from harness.contract.delays import delay_s

FILE = "schedule.json"


def order(folder: Path, seed: int | None, servers: Mapping[str, str]) -> None:
    """Delay messages by the schedule of this seed from its beginning on; None: no longer. `servers`: tap → server's name."""
    new = folder / f"{FILE}.new"
    new.write_text(json.dumps({"seed": seed, "servers": dict(servers)}))
    new.replace(folder / FILE)


class Schedule:
    """One engine's view of the schedule."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._read_of: tuple[int, int] | None = None
        """Inode and time of change of the file as it was read."""
        self._seed: int | None = None
        self._servers: dict[str, str] = {}
        self._next = 0

    def next_s(self, tap: str) -> float | None:
        """Seconds that this tap's next message has to wait; None without a schedule."""
        self._renew()
        if self._seed is None:
            return None
        self._next += 1
        return delay_s(self._seed, self._servers.get(tap, tap), self._next - 1)

    def _renew(self) -> None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return
        if self._read_of != (found.st_ino, found.st_mtime_ns):
            self._read_of, self._next = (found.st_ino, found.st_mtime_ns), 0
            ordered = json.loads(self._path.read_text())
            self._seed, self._servers = ordered["seed"], ordered["servers"]
