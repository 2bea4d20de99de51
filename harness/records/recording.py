"""Recordings: the only thing that passes from driving to judging. JSON Lines: header, events, footer.

A recording is readable while it is being written: each line is flushed whole. Readers refuse one that was cut off.
One file holds everything that was driven on one start of one target in one topology.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.contract.capability import Capability
from harness.contract.checkout import Checkout
from harness.contract.errors import NEXT_STEP, RecordingError
from harness.contract.messages import Start
from harness.contract.topology import Topology
from harness.contract.vocabulary import TINY, Vocabulary

ENUMERATED = "enumerated"
"""Name of the mark that tells how many of its cases a scenario drove ("driven"), and how many its budget left out ("left_out")."""
FORMAT = 2
"""Version of this file format. A reader refuses any other."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="header"):
    """Identity of the stack, its packages, model and machine. Written once the stack is up."""

    format: int = FORMAT
    harness_version: str
    run_id: str
    created_at: str
    """UTC, ISO 8601."""
    target: str
    topology: Topology
    start: Start
    engine: Literal["cpu", "cuda"]
    capabilities: list[Capability]
    packages: dict[str, str]
    """Package → version in the stack's environment (skyrl, vllm, ray, torch, …)."""
    commit: str | None = None
    """Commit of the harness's checkout; None outside one."""
    checkout: Checkout | None = None
    """The stack's source tree, if it was not the one of its environment."""
    model: dict[str, str]
    """"name", "sha256" of the checkpoint, "dtype"."""
    cuda_graphs: bool = False
    batch_invariant: bool = False
    """Both as in `StartRequest`. Engines of older recordings were eager and not batch-invariant."""
    budget: float = 1.0
    """How much of what scenarios enumerate was driven (`--budget`)."""
    vocabulary: Vocabulary = TINY
    """Recordings older than this field are of tiny models."""
    hardware: dict[str, str]
    seed: int
    servers: list[str]
    patches: list[dict[str, str]] = []
    notes: list[str] = []

    @property
    def model_sha256(self) -> str:
        """Hash of the checkpoint; empty if it was not recorded."""
        return self.model.get("sha256", "")


class CallError(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a call or a scenario. `kind` is the exception's class name on the stack's side."""

    kind: str
    message: str
    status: int | None = None
    place: str = ""
    """File, line, function and statement of the stack's own code that raised it; empty if it is not known."""
    blame: str = "stack"

    @property
    def said(self) -> str:
        """Kind, status and how the message begins, without what varies from run to run: numbers, addresses, paths, ids."""
        return saying(self.kind, self.message, self.status)


SAYING = 80
"""Characters of a message in a reason."""
_VARIES = re.compile(r"https?://\S+|(?<!\w)(?:/[\w.@-]+){2,}|\b(?=\w*\d)[0-9a-f]{8}[0-9a-f-]*\b|\d+(?:\.\d+)*")


def most_at_once(spans: Iterable[tuple[int, int | None]]) -> int:
    """Most of these spans (start and end in ns) that are open at one time. What has no end stays open."""
    changes = [change for start, end in spans for change in ((start, 1), *([] if end is None else [(end, -1)]))]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def saying(kind: str, message: str, status: int | None = None) -> str:
    """As `CallError.said`, of an error that came as a body."""
    plain = " ".join(_VARIES.sub("…", message.partition(NEXT_STEP)[0]).split())
    short = plain if len(plain) <= SAYING else plain[:SAYING].rsplit(" ", 1)[0] + " …"
    named = f"{kind or 'a nameless error'}{f' {status}' if status is not None else ''}"
    return f"{named}: {short}" if short else named


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """What one method of the stack's own client returned or raised within a call, before an adapter translated it."""

    method: str
    arguments: list[str]
    """Names of those that were given, without their values."""
    forms: dict[str, str]
    """Place → form (`harness.records.forms`) over all calls of the method; at place "" also "raises module.Class"."""
    formed: str | None = None
    """The form that a scenario asked for and that an argument got (`harness.records.argument_forms`)."""
    changed: list[str] = []
    """Arguments whose content the call changed. Looked at only where a scenario asks for forms."""


class ScenarioStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="scenario_start"):
    scenario: str
    take: int = 1
    """1, or 2 for the baseline's twin: the same scenario driven again on the same start."""
    at_ns: int


class Call(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="call"):
    """One call through the contract. `phase` separates the scenario's own calls from the clean room before it."""

    id: int
    method: str
    request: dict[str, Any]
    result: dict[str, Any] | None = None
    error: CallError | None = None
    started_ns: int
    ended_ns: int
    phase: Literal["clean_room", "scenario"] = "scenario"
    label: str | None = None
    """The name that the scenario gave to this call, for checks that compare calls."""
    raw: list[Raw] | None = None
    """By method. None in recordings older than this field."""

    @property
    def named(self) -> dict[str, Any]:
        """What evidence calls it: its id, by which reports and comparisons know what is wrong, and its label if it has one."""
        return {"call": self.id} | ({"label": self.label} if self.label else {})


class Observation(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="observation"):
    """What an engine tap saw, out of band. `kind` and `data`:

    =================  ==================================================================================
    `request`          an engine took a request: request_id, prompt_token_ids, sampling_params, parent_id, cache_salt
    `late_request`     the same, but of a batch that failed in an earlier scenario
    `step`             one engine step: tokens = {request_id: [new token ids]}
    `finish`           a request left the engine: request_id, reason ("stop", "length", "abort", …),
                       cached_tokens: prompt tokens taken from the prefix cache (null if unknown)
    `abort`            the frontend dropped requests: request_ids
    `control`          a control call reached the engine: op, arguments, ended_ns, error (null if none);
                       for add_lora, arguments.lora_request = {name, tensors: {tensor: bytes}}
    `refusal`          an HTTP server answered with an error: method, path, status
    `delay`            a message had to wait before the engine took it: what ("request" or op), seconds
    =================  ==================================================================================
    """

    kind: str
    server: str
    at_ns: int
    data: dict[str, Any]


class Mark(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="mark"):
    """A moment or a result that the scenario itself names: an event of its schedule, a figure of a training step.

    `name` and `numbers`: "generation_ack" and "sync_finished" have none; "evaluation" has reward; `ENUMERATED`.
    """

    name: str
    step: int
    at_ns: int
    numbers: dict[str, float] = {}


class ScenarioEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="scenario_end"):
    scenario: str
    take: int = 1
    outcome: Literal["completed", "failed"]
    attempts: int = 1
    """Number of attempts. The driver tries again if requests ended before it saw them in flight."""
    allowed_s: float | None = None
    """Seconds that driving could take: the scenario's deadline times the engines' slowness. None if it was not begun."""
    error: CallError | None = None
    """Set when `outcome` is "failed": why the scenario could not be driven to its end."""
    at_ns: int


class Footer(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="footer"):
    """The last line. `events` counts the lines between header and footer; readers check the count."""

    events: int
    outcome: Literal["completed", "failed"]


Event = ScenarioStart | Call | Observation | Mark | ScenarioEnd
Line = Header | ScenarioStart | Call | Observation | Mark | ScenarioEnd | Footer

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class ScenarioTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The whole recording of one scenario: the input of the checks."""

    header: Header
    scenario: str
    take: int
    calls: tuple[Call, ...]
    observations: tuple[Observation, ...]
    end: ScenarioEnd
    marks: tuple[Mark, ...] = ()

    @property
    def seconds(self) -> float:
        """Wall time from the first call, the clean room's, to the end. 0 if no call was made."""
        return (self.end.at_ns - min((call.started_ns for call in self.calls), default=self.end.at_ns)) / 1e9

    @property
    def began_ns(self) -> int:
        """End of the last clean room. Earlier lines belong to a clean room or to an abandoned attempt."""
        return max((c.ended_ns for c in self.calls if c.phase == "clean_room"), default=0)

    @property
    def own_calls(self) -> list[Call]:
        """The scenario's own calls, in the order in which they ended: those after the last clean room."""
        cleaned = max((at for at, c in enumerate(self.calls) if c.phase == "clean_room"), default=-1)
        return list(self.calls[cleaned + 1 :])

    @property
    def own_marks(self) -> list[Mark]:
        """The scenario's marks in order of time, without those of abandoned attempts."""
        return [mark for mark in self.marks if mark.at_ns >= self.began_ns]


def walk(
    path: Path, decode: Callable[[bytes], Line | None], *, live: bool = False
) -> Iterator[tuple[bytes, Line | None]]:
    """Yield each line of a recording, raw and decoded. `decode` returns None for an event that it leaves undecoded.

    Undecoded events are counted but not parsed. Raises what `read` raises.
    """
    try:
        file = path.open("rb")
    except OSError as e:
        raise RecordingError(
            f"cannot read {path}: {e.strerror}", next_step="name a recording (*.jsonl) of a run"
        ) from e
    with file:
        events, footer = 0, None
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                if live:
                    return
                raise RecordingError(
                    f"{path}:{number}: recording is cut off in the middle of a line",
                    next_step="the run was killed or the disk is full; run that target again",
                )
            try:
                line = decode(raw)
            except msgspec.DecodeError as e:
                raise RecordingError(f"{path}:{number}: not a line of a recording: {e}") from e
            if line is not None or number == 1 or footer is not None:  # most lines are undecoded events in their place
                _check_place(path, number, line, footer)
            if isinstance(line, Footer):
                footer = line
            elif number > 1:
                events += 1
            yield raw, line
        if live:
            return
        if footer is None:
            raise RecordingError(
                f"{path} has no footer: it was cut off after {events} events",
                next_step="the run was killed before it finished; run that target again",
            )
        if footer.events != events:
            raise RecordingError(f"{path}: footer counts {footer.events} events, the file holds {events}")


def _check_place(path: Path, number: int, line: Line | None, footer: Footer | None) -> None:
    """Raises `RecordingError` unless the header comes first, only there, and nothing follows the footer."""
    if number == 1:
        if not isinstance(line, Header):
            raise RecordingError(f"{path}: the first line is not a header", next_step="name a recording (*.jsonl)")
        if line.format != FORMAT:
            raise RecordingError(
                f"{path} has format {line.format}, this harness reads {FORMAT}",
                next_step="judge it with the harness that recorded it",
            )
    elif footer is not None:
        raise RecordingError(f"{path}:{number}: lines after the footer")
    elif isinstance(line, Header):
        raise RecordingError(f"{path}:{number}: a second header")


def decode_line(raw: bytes) -> Line:
    """One line of a recording. Raises `msgspec.DecodeError`."""
    return _decoder.decode(raw)


def read(path: Path, *, live: bool = False) -> Iterator[Line]:
    """Yield the lines of a recording, header first.

    Raises `RecordingError` with the line's number for anything that is not a whole recording: another format, a
    line that does not parse, a missing footer, a footer with a wrong count. `live` is for a run in progress: the footer
    may be missing, and a last line without its newline is skipped.
    """
    for _, line in walk(path, decode_line, live=live):
        if line is not None:
            yield line


def header_of(path: Path) -> Header:
    """The header of a recording, whole or not. Raises `RecordingError` for a file that does not begin with one."""
    line = next(read(path, live=True), None)
    if not isinstance(line, Header):
        raise RecordingError(f"{path} is empty: not a recording", next_step="name a recording (*.jsonl) of a run")
    return line


def traces(path: Path) -> Iterator[ScenarioTrace]:
    """Yield each scenario of a whole recording, in the order in which they were driven. Holds one scenario in memory.

    Raises `RecordingError` as `read` does, and for a scenario without an end or without a start.
    """
    header: Header | None = None
    start: ScenarioStart | None = None
    calls: list[Call] = []
    observations: list[Observation] = []
    marks: list[Mark] = []
    for line in read(path):
        match line:
            case Header():
                header = line
            case ScenarioStart():
                if start is not None:
                    raise RecordingError(f"{path}: {start.scenario} has no end before {line.scenario} starts")
                start, calls, observations, marks = line, [], [], []
            case Call():
                calls.append(line)
            case Observation():
                observations.append(line)
            case Mark():
                marks.append(line)
            case ScenarioEnd():
                if start is None or header is None or (start.scenario, start.take) != (line.scenario, line.take):
                    raise RecordingError(f"{path}: end of {line.scenario}, which did not start")
                yield ScenarioTrace(
                    header=header,
                    scenario=line.scenario,
                    take=line.take,
                    calls=tuple(calls),
                    observations=tuple(observations),
                    end=line,
                    marks=tuple(marks),
                )
                start = None
            case Footer():
                if start is not None:
                    raise RecordingError(f"{path}: {start.scenario} was cut off")
