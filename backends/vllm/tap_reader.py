"""Reads what the engine taps wrote. Runs in the host; imports nothing of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHOAMI = "parity_whoami"
"""Worker method by which the adapter tells each engine its server name; its call is what pairs name and engine."""


class TapReader:
    """Follows the files of a tap folder. Engines are called by their tap's name until `WHOAMI` has named them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._names: dict[str, str] = {}
        self._pending: list[dict[str, Any]] = []
        self._live: dict[tuple[str, str], int] = {}

    def poll(self) -> None:
        """Take in every whole line that was written since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    self._take(json.loads(line))

    def _take(self, seen: dict[str, Any]) -> None:
        data = seen["data"]
        match seen["kind"]:
            case "control" if data["arguments"].get("method") == WHOAMI:
                self._names[seen["server"]] = data["arguments"]["kwargs"]["name"]
                return
            case "control" if str(data["arguments"].get("method", "")).startswith("parity_"):
                return
            case "request":
                self._live[seen["server"], data["request_id"]] = 0
            case "step":
                for request_id, tokens in data["tokens"].items():
                    if (seen["server"], request_id) in self._live:
                        self._live[seen["server"], request_id] += len(tokens)
            case "finish":
                self._live.pop((seen["server"], data["request_id"]), None)
            case "abort":
                for request_id in data["request_ids"]:
                    self._live.pop((seen["server"], request_id), None)
            case _:
                pass
        self._pending.append(seen)

    def frontends(self) -> dict[str, int]:
        """server → process that runs its engine's frontend, for every engine that has been named."""
        return {name: int(engine.partition("-")[0]) for engine, name in self._names.items()}

    def take(self) -> list[dict[str, Any]]:
        """Everything seen since the last `take`, in order of time, with servers by name."""
        self.poll()
        taken, self._pending = self._pending, []
        for seen in taken:
            seen["server"] = self._names.get(seen["server"], seen["server"])
        return sorted(taken, key=lambda seen: seen["at_ns"])

    def in_flight(self) -> Iterator[tuple[str, int]]:
        """(server, tokens so far) of every request that an engine works on."""
        self.poll()
        for (server, _), tokens in self._live.items():
            yield self._names.get(server, server), tokens
