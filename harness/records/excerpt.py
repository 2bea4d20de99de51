"""Takes over a part of a recording: some scenarios of one seat, as they were recorded, under the name that they get in another run.

An excerpt that is published (`publish`) names files below ``.parity`` without the place where that folder was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from harness import PROJECT
from harness.contract.errors import UsageError
from harness.records.index import marks_only
from harness.records.recording import Footer, Header, ScenarioEnd, ScenarioStart, walk

_BELOW_PARITY = re.compile(rb"""/[^\s"'\\:,]*/\.parity/""")
_OF_A_MACHINE = re.compile(
    rb"""(?<![\w.:/])(?:%s)/[^\s"'\\:,]*"""
    % b"|".join(re.escape(str(path).encode()) for path in (PROJECT, Path.home(), "/home", "/root", "/tmp", "/Users"))
)


def publish(source: Path, to: Path, scenario: str) -> None:
    """Write the first take of one scenario to a new file, with the paths below a machine's ``.parity`` made relative to its parent.

    Raises `RecordingError` as `take_over` does, and UsageError if it names other paths of a machine.
    """

    def without_places(raw: bytes) -> bytes:
        told = _BELOW_PARITY.sub(b".parity/", raw)
        if (found := _OF_A_MACHINE.search(told)) is not None:
            raise UsageError(
                f"{scenario} in {source} names a path of the machine that recorded it: {found[0].decode()}",
                next_step="record it again without that path, or choose another scenario",
            )
        return told

    take_over(source, to, {scenario}, takes={1}, change=without_places)


def take_over(
    source: Path,
    to: Path,
    scenarios: Collection[str],
    target: str | None = None,
    *,
    takes: Collection[int] | None = None,
    change: Callable[[bytes], bytes] = lambda raw: raw,
) -> None:
    """Write the lines of these scenarios to a new file, with a footer that counts them, and with `target` in the header unless None.

    `takes` None means all. `change` gets each written line. Raises `RecordingError` as `harness.records.recording.read` does, and
    what `change` raises. Lines outside of scenarios are left out.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    events, wanted = 0, False
    with to.open("xb") as file:
        for raw, line in walk(source, marks_only):
            match line:
                case Header():
                    file.write(change(_line(msgspec.structs.replace(line, target=target or line.target))))
                case Footer():
                    file.write(_line(msgspec.structs.replace(line, events=events)))
                case ScenarioStart():
                    wanted = line.scenario in scenarios and (takes is None or line.take in takes)
                case _:
                    pass
            if wanted:
                file.write(change(raw))
                events += 1
            wanted = wanted and not isinstance(line, ScenarioEnd)


def _line(line: Header | Footer) -> bytes:
    return msgspec.json.encode(line) + b"\n"
