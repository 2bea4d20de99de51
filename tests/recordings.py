"""Made-up whole recordings of any size, correct for every check in `ALWAYS`.

Used by the tests of offline judging and by `benchmarks/judge.py`. Two recordings made with the same arguments differ only in
target, times and ids.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.checks.liveness import ALL_COMPLETE
from harness.checks.routing import STICKY
from harness.judging.ledger import Entry
from harness.records.book import Book
from harness.records.recorder import Recorder
from harness.records.recording import Call, Event, Header, Observation, ScenarioEnd, ScenarioStart
from harness.records.reference import ExpectedDigests, ExpectedDigestsRequest
from harness.records.run_folder import RunFolder
from harness.records.verdict import RunInfo, Verdict
from harness.suite.scenario import Scenario
from tests import traces

SERVERS = ("server-0", "server-1")
MODEL = "0" * 64
WEIGHTS = {"weight": "00000000:2x2:float32"}
Change = Callable[[Event], Event]


def declared(name: str = "module.test_it", **changes: Any) -> Scenario:
    """A scenario that fits `events`: sticky sessions, and every call answered."""
    fields: dict[str, Any] = {
        "name": name,
        "wave": 1,
        "task": 1,
        "promise": "sessions stick",
        "needs": frozenset(),
        "checks": (STICKY, ALL_COMPLETE),
        "topologies": ("disaggregated",),
        "deadline_s": 60.0,
        "source": "tests",
    }
    return Scenario(**(fields | changes))


class Clock:
    """Times and ids of one recording."""

    def __init__(self) -> None:
        self.now = 1_000

    def tick(self) -> int:
        self.now += 1_000
        return self.now


def events(
    name: str = "module.test_it",
    *,
    take: int = 1,
    calls: int = 3,
    rows: int = 4,
    tokens: int = 5,
    clock: Clock | None = None,
    servers: Sequence[str] = SERVERS,
) -> Iterator[Event]:
    """One scenario recorded on a correct stack: clean room, then greedy batches with two turns per session."""
    clock = clock or Clock()
    rng = random.Random(name)
    yield ScenarioStart(scenario=name, take=take, at_ns=clock.tick())
    yield _digests(clock, servers)
    yield from _batch(clock, rng, [[3, 4, 5, 6]], None, 1, phase="clean_room", label="canary")
    for _ in range(calls):
        prompts = [[rng.randrange(8, 60_000) for _ in range(16)] for _ in range(rows)]
        yield from _batch(clock, rng, prompts, [f"session-{row // 2}" for row in range(rows)], tokens)
    yield ScenarioEnd(scenario=name, take=take, outcome="completed", at_ns=clock.tick())


def book(path: Path, model: str = MODEL) -> None:
    """A reference that knows the checkpoint, and was asked for nothing else."""
    with Book.create(path, model) as made:
        made.add(ExpectedDigestsRequest(version=0), ExpectedDigests(digests=WEIGHTS))


def _digests(clock: Clock, servers: Sequence[str]) -> Call:
    """What the clean room reads: the checkpoint, on every server."""
    result = {"servers": {server: [WEIGHTS] for server in servers}}
    began, ended = clock.tick(), clock.tick()
    return Call(
        id=began, method="digests", request={}, result=result, started_ns=began, ended_ns=ended, phase="clean_room"
    )


def _batch(
    clock: Clock, rng: random.Random, prompts: list[list[int]], sessions: list[str] | None, tokens: int, **about: Any
) -> Iterator[Event]:
    """The taps' observations of one generate call, then the call. A server's step makes one token for each of its rows."""
    params = {"temperature": 0.0, "max_tokens": tokens, "logprobs": 1}
    started = clock.tick()
    answers = [[rng.randrange(8, 60_000) for _ in range(tokens)] for _ in prompts]
    place = {row: SERVERS[(row // 2) % len(SERVERS)] for row in range(len(prompts))}
    ids = {row: f"{started}-{row}" for row in place}
    for row, server in place.items():
        data = {"request_id": ids[row], "prompt_token_ids": prompts[row], "sampling_params": params, "parent_id": None}
        yield Observation(kind="request", server=server, at_ns=clock.tick(), data=data)
    for step in range(tokens):
        for server in sorted(set(place.values())):
            made = {ids[row]: [answers[row][step]] for row, at in place.items() if at == server}
            yield Observation(kind="step", server=server, at_ns=clock.tick(), data={"tokens": made})
    for row, server in place.items():
        yield Observation(
            kind="finish", server=server, at_ns=clock.tick(), data={"request_id": ids[row], "reason": "length"}
        )
    yield Call(
        id=started,
        method="generate",
        request={"prompt_token_ids": prompts, "prompts": None, "sampling_params": params, "session_ids": sessions},
        result={
            "response_ids": answers,
            "responses": ["".join(chr(97 + token % 26) for token in answer) for answer in answers],
            "stop_reasons": ["length"] * len(answers),
            "response_logprobs": [[-1.0 - (token % 97) / 16 for token in answer] for answer in answers],
        },
        started_ns=started,
        ended_ns=clock.tick(),
        **about,
    )


def header(target: str, **changes: Any) -> Header:
    return traces.header(target=target, run_id="run", **changes)


def write(
    path: Path,
    target: str,
    names: list[str],
    *,
    takes: int = 1,
    change: Change | None = None,
    about: dict[str, Any] | None = None,
    **size: int,
) -> None:
    """A whole recording of these scenarios. `change` may damage any event of the last take; `about` are fields of the header."""
    clock = Clock()
    with Recorder(path).open(header(target, **(about or {}))) as recorder:
        for take in range(1, takes + 1):
            for name in names:
                for event in events(name, take=take, clock=clock, servers=recorder.header.servers, **size):
                    recorder.add(change(event) if change and take == takes else event)


def run_folder(path: Path, names: list[str], *, change: Change | None = None, **changes: Any) -> RunFolder:
    """A finished run of both stacks: the baseline with its twin, and the candidate damaged by `change`."""
    with RunFolder.create(path) as folder:
        write(folder.recording("stack:old", traces.header().topology), "stack:old", names, takes=2)
        write(folder.recording("stack:new", traces.header().topology), "stack:new", names[::-1], change=change)
        book(folder.reference)
        folder.write_info(info(**changes))
    return folder


def info(**changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "run_id": "run",
        "created_at": "2026-01-01T00:00:00+00:00",
        "command": "parity run",
        "baseline": "stack:old",
        "candidate": "stack:new",
        "start": "ray",
        "engine": "cpu",
    }
    return RunInfo(**(fields | changes))


def verdict(**changes: Any) -> Verdict:
    """A passed verdict of one stack."""
    about = {"scenario": "m.test_a", "wave": 1, "task": 0, "promise": "p", "topology": "disaggregated"}
    return Verdict(**(about | {"check": "c", "target": "t", "status": "pass", "facts": 3} | changes))


def entry(**changes: Any) -> Entry:
    """An entry of the ledger."""
    fields = {"id": "e", "scenario": "*", "check": "c", "targets": ["t"], "reason": "r", "cap": 9, "owner": "they"}
    return Entry(**(fields | {"expires": datetime.date(2999, 12, 31), "source": "client.py:1: so it is"} | changes))
