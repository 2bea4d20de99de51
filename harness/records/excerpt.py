"""Takes over a part of a recording: some scenarios of one seat, as they were recorded, under the name that they get in another run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from harness.records.index import marks_only
from harness.records.recording import Footer, Header, ScenarioEnd, ScenarioStart, walk


def take_over(source: Path, to: Path, scenarios: Collection[str], target: str) -> None:
    """Write the lines of these scenarios to a new file, unchanged, with `target` in the header and a footer that counts them.

    Raises `RecordingError` as `harness.records.recording.read` does. Lines outside of scenarios are left out.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    events, wanted = 0, False
    with to.open("xb") as file:
        for raw, line in walk(source, marks_only):
            match line:
                case Header():
                    file.write(_line(msgspec.structs.replace(line, target=target)))
                case Footer():
                    file.write(_line(msgspec.structs.replace(line, events=events)))
                case ScenarioStart():
                    wanted = line.scenario in scenarios
                case _:
                    pass
            if wanted:
                file.write(raw)
                events += 1
            wanted = wanted and not isinstance(line, ScenarioEnd)


def _line(line: Header | Footer) -> bytes:
    return msgspec.json.encode(line) + b"\n"
