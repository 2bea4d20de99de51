"""Writes and indexes a recording: judging reads the same lines during a run as afterwards."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

import msgspec

from harness.contract.errors import RecordingError
from harness.records import recording
from harness.records.index import Index, Part, Span

_encoder = msgspec.json.Encoder()


class Recorder:
    """Writes one recording. A context manager; leaving it writes the footer ("failed" after an exception)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: Index
        """Where each ended scenario lies."""
        self._file: IO[bytes] | None = None
        self._events = 0
        self._offset, self._line = 0, 1
        self._begun = Span(0, 0, 0, 0)

    @property
    def header(self) -> recording.Header:
        return self.index.header

    def open(self, header: recording.Header) -> Self:
        """Create the file and write its header. An existing file is never overwritten."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = self.path.open("xb")
        except FileExistsError as e:
            raise RecordingError(
                f"{self.path} exists already", next_step="give another --run-dir; a recording is never overwritten"
            ) from e
        self.index = Index(parts=(Part(self.path, header),), spans={}, last_end=None)
        self._write(header)
        return self

    def add(self, event: recording.Event) -> None:
        """Append one event and flush its line."""
        self._write(event)
        self._events += 1
        match event:
            case recording.ScenarioStart():
                self._begun = Span(0, self._offset, self._line, 0)
            case recording.ScenarioEnd():
                begun = self._begun
                span = Span(0, begun.offset, begun.line, self._line - begun.line)
                spans = self.index.spans | {(event.scenario, event.take): span}
                self.index = msgspec.structs.replace(self.index, spans=spans, last_end=event)
            case _:
                pass

    def close(self, outcome: Literal["completed", "failed"] = "completed") -> None:
        """Write the footer. Without it a reader refuses the recording."""
        if self._file is not None:
            self._write(recording.Footer(events=self._events, outcome=outcome))
            self._file.close()
            self._file = None

    def _write(self, line: recording.Line) -> None:
        if self._file is None:
            raise RecordingError(f"{self.path} is not open for writing")
        raw = _encoder.encode(line) + b"\n"
        self._file.write(raw)
        self._file.flush()
        self._offset += len(raw)
        self._line += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close("failed" if kind else "completed")


class Unwritten(Recorder):
    """A recorder that keeps the latest scenario in memory and writes no file, for drives that need only the verdicts."""

    def open(self, header: recording.Header) -> Self:
        self.index = Kept(parts=(Part(self.path, header),), spans={}, last_end=None, traces={})
        self._events_kept: list[recording.Event] = []
        return self

    def add(self, event: recording.Event) -> None:
        match event:
            case recording.ScenarioStart():
                self._events_kept = []
            case recording.ScenarioEnd():
                self._keep(event)
            case _:
                self._events_kept.append(event)

    def _keep(self, end: recording.ScenarioEnd) -> None:
        found = self._events_kept
        trace = recording.ScenarioTrace(
            header=self.header,
            scenario=end.scenario,
            take=end.take,
            calls=tuple(event for event in found if isinstance(event, recording.Call)),
            observations=tuple(event for event in found if isinstance(event, recording.Observation)),
            marks=tuple(event for event in found if isinstance(event, recording.Mark)),
            end=end,
        )
        index = self.index
        assert isinstance(index, Kept)
        earlier_takes = {at: take for at, take in index.traces.items() if at[0] == end.scenario}
        traces = earlier_takes | {(end.scenario, end.take): trace}
        spans = dict.fromkeys(traces, Span(0, 0, 0, 0))
        self.index = msgspec.structs.replace(index, spans=spans, traces=traces, last_end=end)


class Kept(Index, frozen=True, kw_only=True):
    """An index of traces in memory."""

    traces: dict[tuple[str, int], recording.ScenarioTrace]

    def trace(self, scenario: str, take: int = 1, *, observations: bool = True) -> recording.ScenarioTrace:
        found = self.traces[scenario, take]
        return found if observations else msgspec.structs.replace(found, observations=())
