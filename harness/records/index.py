"""Where each scenario lies in a recording, so that readers can load one without holding the others in memory.

Jobs that share a run record one seat (a target in a topology) in several files; `indices` makes one `Index` of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Self, final

import msgspec

from harness.contract.errors import RecordingError
from harness.records import recording

_CALL = b'{"event":"call",'
_OBSERVATION = b'{"event":"observation",'


class Span(msgspec.Struct, frozen=True):
    """The lines of one scenario, without its start: `offset` in bytes, `line` counted from 1."""

    part: int
    """Which part of the index holds them."""
    offset: int
    line: int
    lines: int


@final
class Part(msgspec.Struct, frozen=True):
    """One file of an index. Each start of a stack has a header of its own: its servers, its time, its machine."""

    path: Path
    header: recording.Header


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """All recordings of one seat, each checked to be whole. `spans` maps (scenario, take) to its lines, in driving order."""

    parts: tuple[Part, ...]
    spans: dict[tuple[str, int], Span]
    last_end: recording.ScenarioEnd | None
    """End of the last scenario. In a failed recording it holds the error."""

    @property
    def header(self) -> recording.Header:
        """The first part's header. Other parts have the same stack identity but their own servers and times."""
        return self.parts[0].header

    def renamed(self, target: str) -> Self:
        """The same recordings under another target name."""
        parts = (Part(part.path, msgspec.structs.replace(part.header, target=target)) for part in self.parts)
        return msgspec.structs.replace(self, parts=tuple(parts))

    @property
    def scenarios(self) -> list[str]:
        """Names of the scenarios, each once, in the order in which they were first driven."""
        return list(dict.fromkeys(name for name, _ in self.spans))

    def takes(self, scenario: str) -> list[int]:
        """The recorded takes of a scenario, in order; empty if it was not driven."""
        return sorted(take for name, take in self.spans if name == scenario)

    def trace(self, scenario: str, take: int = 1, *, observations: bool = True) -> recording.ScenarioTrace:
        """Load one take of one scenario; without `observations` only its calls, which is faster.

        Raises KeyError for a take that was not recorded, and `RecordingError` for a line that does not parse.
        """
        span = self.spans[scenario, take]
        path, header = self.parts[span.part].path, self.parts[span.part].header
        calls: list[recording.Call] = []
        seen: list[recording.Observation] = []
        marks: list[recording.Mark] = []
        end: recording.ScenarioEnd | None = None
        with path.open("rb") as file:
            file.seek(span.offset)
            for number, raw in enumerate(islice(file, span.lines), start=span.line):
                if not observations and raw.startswith(_OBSERVATION):
                    continue
                match _decoded(raw, path, number):
                    case recording.Observation() as observation:
                        seen.append(observation)
                    case recording.Call() as call:
                        calls.append(call)
                    case recording.Mark() as mark:
                        marks.append(mark)
                    case recording.ScenarioEnd() as last:
                        end = last
                    case _:
                        raise RecordingError(f"{path}:{number}: the recording was changed while it was read")
        if end is None:
            raise RecordingError(f"{path}: {scenario} has no end")
        return recording.ScenarioTrace(
            header=header,
            scenario=scenario,
            take=take,
            calls=tuple(calls),
            observations=tuple(seen),
            end=end,
            marks=tuple(marks),
        )


def _decoded(raw: bytes, path: Path, number: int) -> recording.Line:
    try:
        return recording.decode_line(raw)
    except msgspec.DecodeError as e:
        raise RecordingError(f"{path}:{number}: not a line of a recording: {e}") from e


def marks_only(raw: bytes) -> recording.Line | None:
    """Decode all but calls and observations, most of a recording. `Index.trace` decodes those when needed."""
    return None if raw.startswith((_OBSERVATION, _CALL)) else recording.decode_line(raw)


def index(path: Path) -> Index:
    """Find the scenarios of a whole recording. Calls and observations are counted here and parsed when they are loaded.

    Raises `RecordingError` as `harness.records.recording.read` does, for a scenario without an end or a start, and for one that
    was recorded twice under the same take.
    """
    header: recording.Header | None = None
    footer: recording.Footer | None = None
    start: recording.ScenarioStart | None = None
    end: recording.ScenarioEnd | None = None
    offset, at = 0, Span(0, 0, 0, 0)
    spans: dict[tuple[str, int], Span] = {}
    for number, (raw, line) in enumerate(recording.walk(path, marks_only), start=1):
        offset += len(raw)
        if line is None:  # a call or an observation
            continue  # outside a scenario it is the driver's own, such as prepare_weight_sync
        match line:
            case recording.Header():
                header = line
            case recording.ScenarioStart():
                if start is not None:
                    raise RecordingError(f"{path}:{number}: {start.scenario} has no end before {line.scenario} starts")
                if (line.scenario, line.take) in spans:
                    raise RecordingError(f"{path}:{number}: take {line.take} of {line.scenario} was recorded twice")
                start, at = line, Span(0, offset, number + 1, 0)
            case recording.ScenarioEnd():
                if start is None or (start.scenario, start.take) != (line.scenario, line.take):
                    raise RecordingError(f"{path}:{number}: end of {line.scenario}, which did not start")
                spans[line.scenario, line.take] = Span(0, at.offset, at.line, number - at.line + 1)
                start, end = None, line
            case recording.Footer():
                if start is not None:
                    raise RecordingError(f"{path}:{number}: {start.scenario} was cut off")
                footer = line
            case _:
                pass  # a mark
    if header is None or footer is None:
        raise RecordingError(f"{path} holds no recording")
    return Index(parts=(Part(path, header),), spans=spans, last_end=end)


def indices(paths: Iterable[Path]) -> list[Index]:
    """Index recordings, one `Index` per seat, in the order of their first files. Raises what `index` raises."""
    seats: dict[tuple[str, str], Index] = {}
    for path in paths:
        one = index(path)
        seat = (one.header.target, one.header.topology.name)
        seats[seat] = _joined(seats[seat], one) if seat in seats else one
    return list(seats.values())


def _joined(left: Index, right: Index) -> Index:
    """Two indices of one seat as one. Raises `RecordingError` for a take that both recorded."""
    if twice := sorted(left.spans.keys() & right.spans.keys()):
        name, take = twice[0]
        first, second = left.parts[left.spans[name, take].part], right.parts[right.spans[name, take].part]
        raise RecordingError(
            f"take {take} of {name} was recorded twice, in {first.path} and in {second.path}",
            next_step="keep one of the two recordings",
        )
    moved = {key: msgspec.structs.replace(span, part=span.part + len(left.parts)) for key, span in right.spans.items()}
    ends = [one.last_end for one in (left, right) if one.last_end is not None]
    failed = (end for end in ends if end.error is not None)
    return Index(
        parts=left.parts + right.parts, spans=left.spans | moved, last_end=next(failed, ends[-1] if ends else None)
    )
