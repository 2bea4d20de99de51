"""Reads the logs of a run's stacks while they are written, for `-v` and for the progress of a start."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

POLL_S = 0.1


def whole_lines(path: Path, offsets: dict[Path, int]) -> Iterator[bytes]:
    """The lines of a growing file that are complete and begin at its offset or later. Moves the offset."""
    with path.open("rb") as file:
        file.seek(offsets.get(path, 0))
        for line in file:
            if not line.endswith(b"\n"):
                return
            offsets[path] = offsets.get(path, 0) + len(line)
            yield line


class LogStream:
    """Follows every ``*.log`` below a folder in a thread and hands each whole line to `write`, with its file's name."""

    def __init__(self, folder: Path, write: Callable[[str], None]) -> None:
        self._folder, self._write = folder, write
        self._offsets: dict[Path, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="parity-logs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hand on the remaining lines, then end."""
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._read()
        self._read()

    def _read(self) -> None:
        for path in sorted(self._folder.rglob("*.log")):
            for line in whole_lines(path, self._offsets):
                self._write(f"  {path.parent.name}/{path.name}: {line.decode(errors='replace').rstrip()}")


class LatestStage:
    """A stack's stage, from the latest line of its logs that matches one of `stages`: pattern → words (`Runtime.stages`)."""

    def __init__(self, folder: Path, stages: Mapping[str, str]) -> None:
        self._folder = folder
        self._stages = {re.compile(pattern): words for pattern, words in stages.items()}
        self._offsets: dict[Path, int] = {}
        self._latest = ""

    def __call__(self) -> str:
        """Read the new lines. Returns the latest stage, or "" if no line has matched yet."""
        for path in sorted(self._folder.rglob("*.log")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, end, _ = file.read().replace(b"\r", b"\n").rpartition(b"\n")  # progress bars end in \r
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(end)
            for line in whole.decode(errors="replace").splitlines():
                self._latest = self._of(line) or self._latest
        return self._latest

    def _of(self, line: str) -> str:
        found = ((pattern.search(line), words) for pattern, words in self._stages.items())
        return next((match.expand(words) for match, words in found if match), "")
