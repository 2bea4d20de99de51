"""Streams the logs of a run's stacks while they are written: what `-v` shows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.1


class LogStream:
    """Follows every ``*.log`` below a folder in a thread and hands each whole line to `write`, with its file's name."""

    def __init__(self, folder: Path, write: Callable[[str], None]) -> None:
        self._folder, self._write = folder, write
        self._offsets: dict[Path, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="parity-logs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hand on what is left, then end."""
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._read()
        self._read()

    def _read(self) -> None:
        for path in sorted(self._folder.rglob("*.log")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    self._write(f"  {path.parent.name}/{path.name}: {line.decode(errors='replace').rstrip()}")
