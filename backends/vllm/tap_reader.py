"""Reads the files of the engine taps. Runs in the host; imports nothing from vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backends.vllm import schedule
from harness.machine.logs import whole_lines

WHOAMI = "parity_whoami"
"""Worker method by which the adapter tells each engine its server name. Its call pairs name and engine."""


class TapReader:
    """Follows the files of a tap folder. An engine has its tap's name until `WHOAMI` gives it a server name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._names: dict[str, str] = {}
        self._pending: list[dict[str, Any]] = []
        self._live: dict[tuple[str, str], int] = {}
        self._served: set[str] = set()

    def poll(self) -> None:
        """Read every complete line that was written since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            for line in whole_lines(path, self._offsets):
                self._take(json.loads(line))

    def _take(self, seen: dict[str, Any]) -> None:
        data = seen["data"]
        match seen["kind"]:
            case "control" if data["arguments"].get("method") == WHOAMI:
                self._names[seen["server"]] = data["arguments"]["kwargs"]["name"]
                return
            case "control" if str(data["arguments"].get("method", "")).startswith("parity_"):
                return
            case "answer":
                self._served.add(seen["server"])
                if data["status"] < 400:
                    return
                seen["kind"] = "refusal"
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

    def order(self, seed: int | None) -> None:
        """Delay what reaches the engines by the schedule of this seed; None: no longer."""
        self.poll()
        schedule.order(self._folder, seed, self._names)

    def served(self) -> set[str]:
        """Engines with a server name of which an HTTP server has answered."""
        self.poll()
        return {self._names[engine] for engine in self._served if engine in self._names}

    def frontends(self) -> dict[str, int]:
        """server → process of its engine's frontend, for every engine with a server name."""
        return {name: int(engine.partition("-")[0]) for engine, name in self._names.items()}

    def take(self) -> list[dict[str, Any]]:
        """All observations since the last `take`, in order of time, with server names."""
        self.poll()
        taken, self._pending = self._pending, []
        for seen in taken:
            seen["server"] = self._names.get(seen["server"], seen["server"])
        return sorted(taken, key=lambda seen: seen["at_ns"])

    def in_flight(self) -> Iterator[tuple[str, int]]:
        """(server, tokens so far) of every request in flight."""
        self.poll()
        for (server, _), tokens in self._live.items():
            yield self._names.get(server, server), tokens
