"""The events of one scenario on one stack in time, from its recording. Pure: draws nothing.

All times are seconds since the scenario began, which is the end of its clean room.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, final

import msgspec

from harness.checks.base import Evidence
from harness.checks.instruments import tap_works
from harness.checks.matching import assignment
from harness.checks.pausing import pauses
from harness.contract.messages import DATA_PLANE, FIRST_TRAINED, METHODS, Plane, SessionId
from harness.records.recording import Call
from harness.records.verdict import GapCurve
from harness.records.wire import SESSION

Kind = Literal["call", "pause", "memory", "weights", "training", "other"]

KINDS: dict[str, Kind] = {
    "pause": "pause", "resume": "pause", "sleep": "memory", "wake_up": "memory", "sync_weights": "weights",
    "load_lora_adapter": "weights", "unload_lora_adapter": "weights", "train": "training",
}  # fmt: skip
"""Control call → its kind; all others are "other"."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """Something with a duration. `label` is short enough to stand beside it."""

    start: float
    end: float
    label: str
    kind: Kind = "call"
    failed: bool = False
    version: int | None = None
    """The policy version that it loads or makes."""


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One request in an engine: its start, its end, and the times of its tokens."""

    start: float
    end: float
    steps: tuple[float, ...] = ()
    aborted: bool = False


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one server, in order of start."""

    name: str
    executions: tuple[Execution, ...]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A pause, from the return of pause() to the call of resume()."""

    start: float
    end: float
    mode: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A policy version in force, from the end of its sync to the end of the next one."""

    start: float
    end: float
    version: int


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A mark of the scenario itself, such as an acknowledgement or an evaluation."""

    at: float
    name: str
    step: int = 0
    numbers: dict[str, float] = {}


@final
class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario on one stack. Tuples are in order of start."""

    scenario: str
    topology: str
    target: str
    calls: tuple[Bar, ...] = ()
    controls: tuple[Bar, ...] = ()
    servers: tuple[Server, ...] = ()
    pauses: tuple[Held, ...] = ()
    versions: tuple[Version, ...] = ()
    """Empty if no policy was synced."""
    marks: tuple[Mark, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of the last event; 0 if nothing happened."""
        ends = [bar.end for bar in (*self.calls, *self.controls)]
        ends += [e.end for server in self.servers for e in server.executions]
        return max([*ends, *(m.at for m in self.marks)], default=0.0)

    def version_at(self, at: float) -> int | None:
        """The policy version in force at a time; None if no policy was synced."""
        found = bisect_right(self.versions, at, key=lambda v: v.start) - 1
        return self.versions[max(found, 0)].version if self.versions else None


def timeline(evidence: Evidence) -> Timeline:
    """Lay out one take of one scenario in time."""
    began = evidence.began_ns or min((c.started_ns for c in evidence.trace.calls), default=0)

    def since(at_ns: int) -> float:
        return (at_ns - began) / 1e9

    shown = [c for c in evidence.calls() if METHODS[c.method].plane is not Plane.OUT_OF_BAND]
    ended = since(
        max(
            [c.ended_ns for c in evidence.calls()] + [e.step_ns[-1] for e in evidence.executions if e.step_ns],
            default=began,
        )
    )
    return Timeline(
        scenario=evidence.trace.scenario,
        topology=evidence.header.topology.name,
        target=evidence.header.target,
        calls=tuple(_bar(c, since) for c in shown if c.method in DATA_PLANE),
        controls=tuple(_bar(c, since) for c in shown if c.method not in DATA_PLANE),
        servers=_servers(evidence, since, ended),
        pauses=tuple(Held(start=since(p.from_ns), end=since(p.to_ns), mode=p.mode) for p in pauses(evidence)),
        versions=_versions(evidence, since, ended),
        marks=_marks(evidence, since),
    )


def _bar(call: Call, since: Callable[[int], float]) -> Bar:
    version = (call.request if call.method == "sync_weights" else call.result or {}).get("version")
    return Bar(
        start=since(call.started_ns),
        end=since(call.ended_ns),
        label=_label(call),
        kind="call" if call.method in DATA_PLANE else KINDS.get(call.method, "other"),
        failed=call.error is not None,
        version=version if isinstance(version, int) else None,
    )


def _label(call: Call) -> str:
    """The scenario's name for a call, else its method, with its distinguishing arguments."""
    request = call.request
    match call.method:
        case "generate":
            rows = len(request.get("prompt_token_ids") or request.get("prompts") or ())
            ids: list[SessionId] = request.get("session_ids") or []
            name = f"{call.label or 'generate'} × {rows}" if rows > 1 else call.label or "generate"
            name += f" {shown_session(ids[0])}" if rows == len(ids) == 1 and not call.label else ""
        case "sample":
            name = f"{call.label or 'sample'} × {request.get('num_samples', 1)}"
        case "pause":
            name = f"pause {request.get('mode', 'keep')}"
        case "sync_weights":
            name = "sync" if request.get("chunks", 1) == 1 else f"sync in {request['chunks']} chunks"
        case "sleep":
            name = f"sleep {request.get('level', 2)}"
        case "wake_up":
            name = " ".join(["wake", *(request.get("tags") or ())])
        case _:
            name = call.label or call.method
    return name if call.error is None else f"{name}: {call.error.kind}"


def _servers(evidence: Evidence, since: Callable[[int], float], ended: float) -> tuple[Server, ...]:
    """All servers of the stack if any of them worked, so that idle ones are visible."""
    found: dict[str, list[Execution]] = {name: [] for name in evidence.header.servers}
    dropped = {
        (seen.server, request): seen.at_ns
        for seen in evidence.trace.observations
        if seen.kind == "abort"
        for request in seen.data["request_ids"]
    }
    for ran in sorted(evidence.executions, key=lambda e: e.started_ns):
        given_up = dropped.get((ran.server, ran.request_id))
        last = ran.ended_ns if ran.ended_ns is not None else given_up
        found.setdefault(ran.server, []).append(
            Execution(
                start=since(ran.started_ns),
                end=since(last) if last is not None else max(ended, since(ran.started_ns)),
                steps=tuple(since(at) for at in dict.fromkeys(ran.step_ns)),
                aborted=ran.finish_reason == "abort" or given_up is not None,
            )
        )
    if not any(found.values()):
        return ()
    return tuple(Server(name=name, executions=tuple(executions)) for name, executions in found.items())


def _versions(evidence: Evidence, since: Callable[[int], float], ended: float) -> tuple[Version, ...]:
    syncs = sorted((c for c in evidence.calls("sync_weights") if c.error is None), key=lambda c: c.ended_ns)
    if not syncs:
        return ()
    starts = [(0.0, 0), *((since(c.ended_ns), c.request["version"]) for c in syncs)]
    ends = [*(start for start, _ in starts[1:]), max(ended, starts[-1][0])]
    return tuple(
        Version(start=start, end=end, version=version) for (start, version), end in zip(starts, ends, strict=True)
    )


def _marks(evidence: Evidence, since: Callable[[int], float]) -> tuple[Mark, ...]:
    noted = sorted(evidence.trace.own_marks, key=lambda m: m.at_ns)
    return tuple(Mark(at=since(m.at_ns), name=m.name, step=m.step, numbers=m.numbers) for m in noted)


# --- what a picture is made of --------------------------------------------------------------------------------------


def packed(spans: Sequence[tuple[float, float]]) -> list[int]:
    """The row of each (start, end), so that none in a row overlap and as few rows as possible are used.

    `spans` are in order of their starts; one that ends where another starts does not overlap it.
    """
    free: list[float] = []
    rows = []
    for start, end in spans:
        row = next((number for number, until in enumerate(free) if until <= start), len(free))
        free[row : row + 1] = [max(end, start)]
        rows.append(row)
    return rows


def in_flight(executions: Iterable[Execution]) -> list[tuple[float, int]]:
    """(time, number in flight from then on), in order of time: the density of a server with many requests."""
    change: Counter[float] = Counter()
    for e in executions:
        change[e.start] += 1
        change[e.end] -= 1
    count, found = 0, []
    for at in sorted(change):
        count += change[at]
        found.append((at, count))
    return found


def version_name(version: int, all_versions: Sequence[int]) -> str:
    """ "version 2", or "trained 1" for a trained version, numbered within the picture."""
    if version < FIRST_TRAINED:
        return f"version {version}"
    trained = [v for v in dict.fromkeys(all_versions) if v >= FIRST_TRAINED]
    return f"trained {trained.index(version) + 1}" if version in trained else "trained"


# --- sessions and servers -------------------------------------------------------------------------------------------


@final
class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """Number of requests per session and server. Sessions are in order of first appearance."""

    servers: list[str]
    counts: dict[str, list[int]]
    """Session, as JSON → one number per server."""


def sessions(evidence: Evidence) -> Sessions | None:
    """Pair sessions with the servers that the taps saw running their requests. None without sessions or a working tap."""
    if not any(_session_ids(evidence)) or not tap_works(evidence):
        return None
    servers = list(evidence.header.servers)
    counts: dict[str, list[int]] = {}
    found = assignment(evidence)
    for row in sorted(found.rows, key=lambda r: (r.call.started_ns, r.index)):
        if row.session is None:
            continue
        at = counts.setdefault(shown_session(row.session), [0] * len(servers))
        for ran in found.where(row):
            if ran.server in servers:
                at[servers.index(ran.server)] += 1
    return Sessions(servers=servers, counts=counts) if counts else None


def shown_session(session: SessionId) -> str:
    """A session id as JSON, so that 7 and "7" differ."""
    return msgspec.json.encode(session).decode()


def _session_ids(evidence: Evidence) -> Iterable[bool]:
    """For each call, True if it names a session."""
    for call in evidence.calls():
        request = call.request
        body, headers = request.get("body"), request.get("headers") or {}
        inner = body.get("session_id") if isinstance(body, dict) else None  # the body of another route is text
        given = (request.get("session_ids"), request.get("session_id"), inner, headers.get(SESSION))
        yield any(value is not None for value in given)


# --- a training run -------------------------------------------------------------------------------------------------


@final
class Training(msgspec.Struct, frozen=True, kw_only=True):
    """A training run on one stack, in order of steps."""

    target: str
    reward: tuple[tuple[int, float], ...]
    """(step, mean reward of the evaluation)."""
    gap: GapCurve | None = None


def training(line: Timeline, gap: GapCurve | None) -> Training | None:
    """The rewards of the "evaluation" marks and the gap of the same run; None if there is neither."""
    reward = _curve(line.marks, "evaluation", "reward")
    return Training(target=line.target, reward=reward, gap=gap) if reward or gap is not None else None


def _curve(marks: Iterable[Mark], name: str, field: str) -> tuple[tuple[int, float], ...]:
    return tuple(sorted({m.step: m.numbers[field] for m in marks if m.name == name and field in m.numbers}.items()))
