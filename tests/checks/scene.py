"""A correct recording of two servers, built call by call with its own clock. Tests damage it and judge it again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from harness.checks.base import Check, Finding
from harness.checks.echo import CONTROL_OPS
from harness.checks.staleness import BLOCK
from harness.records.recording import Call, CallError, Observation
from tests import traces

SERVERS = ("server-0", "server-1")
STEP = 4_000_000
"""Nanoseconds between two steps of an engine."""
WEIGHTS = {"weight": "00000000:2x2:float32"}
"""Version 0 as the reference knows it."""
GREEDY = {"temperature": 0.0, "max_tokens": 6}


def home(session: str | int) -> str:
    """The server of a session in a stack that hashes the session's text."""
    return SERVERS[hashlib.sha256(str(session).encode()).digest()[0] % 2]


class Scene:
    """Starts with a clean room and its canary. `calls` and `seen` may be edited between building and judging."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.reference = traces.FakeReference()
        self.version = 0
        self.adapters: dict[str, int] = {}
        self.calls: list[Call] = []
        self.seen: list[Observation] = []
        self._turn = 0
        self._cached: set[tuple[Any, ...]] = set()
        self.control("resume", phase="clean_room")
        self.begin_on(dict.fromkeys(SERVERS, WEIGHTS))
        self.generate([[60, 61]], length=1, phase="clean_room", label="canary")

    def begin_on(self, held: dict[str, dict[str, str]]) -> None:
        """One more clean room, which reads this. `held`: server → what its one worker shows."""
        result = {"servers": {server: [shown] for server, shown in held.items()}}
        at = {"started_ns": self.pass_time(), "ended_ns": self.pass_time()}
        self.calls.append(traces.call("digests", {}, result, phase="clean_room", **at))

    def pass_time(self, steps: float = 1) -> int:
        self.now += int(steps * STEP)
        return self.now

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sessions: list[str | int] | None = None,
        route: Callable[[int, str | int | None], str] | None = None,
        length: int = 6,
        params: dict[str, Any] | None = None,
        version: int | None = None,
        adapter: str | None = None,
        tokens: list[list[int]] | None = None,
        **about: Any,
    ) -> Call:
        """A greedy batch by the current version, under the loaded version of `adapter`. `route` maps (row, session) to the server
        that runs a row."""
        params = {**GREEDY, "max_tokens": length, **(params or {})}
        by = self.version if version is None else version
        lora = None if adapter is None else self.adapters[adapter]
        answers = tokens or [self.reference.greedy(list(p), length, version=by, adapter=lora) for p in prompts]
        started, begun = self.pass_time(), self.pass_time()
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            session = sessions[row] if sessions else None
            self._turn += 1
            chosen = home(session) if session is not None else SERVERS[self._turn % 2]
            server = route(row, session) if route else chosen
            held = (server, tuple(prompt), by, lora)
            cached = len(prompt) // BLOCK * BLOCK if held in self._cached else 0
            self._cached.add(held)
            at = {"from_ns": begun, "step_ns": STEP}
            self.seen += traces.executed(prompt, answer, server=server, params=params, cached_tokens=cached, **at)
        self.pass_time(length + 2)
        call = traces.generate(
            [list(p) for p in prompts],
            answers,
            session_ids=sessions,
            params=params,
            lora_adapter=adapter,
            started_ns=started,
            ended_ns=self.pass_time(),
            **about,
        )
        self.calls.append(call)
        return call

    def case(
        self, label: str, params: dict[str, Any], became: dict[str, Any] | CallError, server: str = SERVERS[0]
    ) -> Call:
        """A call of one row with these parameters, which an engine got as `became`, or which failed with that error."""
        prompt = [10, 11, 12 + len(self.calls)]
        answer = self.reference.greedy(prompt, 4)
        about: dict[str, Any] = {"params": params, "label": label, "started_ns": self.pass_time()}
        if isinstance(became, dict):
            at = {"from_ns": self.pass_time(), "step_ns": STEP}
            self.seen += traces.executed(prompt, answer, server=server, params=became, **at)
            about["ended_ns"] = self.pass_time(7)
            self.calls.append(traces.generate([prompt], [answer], **about))
        else:
            self.calls.append(traces.generate([prompt], None, error=became, ended_ns=self.pass_time(7), **about))
        return self.calls[-1]

    def control(
        self,
        method: str,
        servers: Sequence[str] = SERVERS,
        *,
        op: str | None = None,
        arguments: dict[str, Any] | None = None,
        phase: Any = "scenario",
        error: Any = None,
        **request: Any,
    ) -> Call:
        """A control call that reached `servers` as `op` with `arguments` (default: those of the method and the request)."""
        started = self.pass_time()
        for server in servers:
            at = self.pass_time(0.1)
            given = request if arguments is None else arguments
            self.seen.append(
                traces.observation(
                    "control", server, at, op=op or CONTROL_OPS[method], arguments=given, ended_ns=at, error=None
                )
            )
        call = traces.call(method, request, started_ns=started, ended_ns=self.pass_time(), phase=phase, error=error)
        self.calls.append(call)
        return call

    def call(self, method: str, request: dict[str, Any] | None = None, result: dict[str, Any] | None = None) -> Call:
        call = traces.call(method, request, result, started_ns=self.pass_time(), ended_ns=self.pass_time())
        self.calls.append(call)
        return call

    def sync(self, version: int) -> Call:
        self.version = version
        return self.call("sync_weights", {"version": version, "chunks": 1})

    def load(
        self, name: str, version: int, servers: Sequence[str] = SERVERS, tensors: Sequence[str] = ("lora_A", "lora_B")
    ) -> Call:
        """An adapter with these tensors that these servers loaded."""
        self.adapters[name] = version
        shown = {"lora_request": {"name": name, "tensors": dict.fromkeys(tensors, 64)}}
        request = {"name": name, "version": version}
        return self.control("load_lora_adapter", servers, op="add_lora", arguments=shown, **request)

    def digests(self, held: dict[str, dict[str, str] | list[dict[str, str]]]) -> Call:
        """`held`: server → the digests of its one worker, or a list by rank."""
        servers = {server: shown if isinstance(shown, list) else [shown] for server, shown in held.items()}
        return self.call("digests", {}, {"servers": servers})

    def change(self, call: Call, **changes: Any) -> Call:
        """Replace a call by one with these fields."""
        changed = msgspec.structs.replace(call, **changes)
        self.calls[self.calls.index(call)] = changed
        return changed

    def judge(self, check: Check, **about: Any) -> Finding:
        return traces.judge(check, *self.calls, observations=self.seen, reference=self.reference, **about)


def without_observations(scene: Scene) -> Scene:
    """The same recording without observations of the tap."""
    scene.seen.clear()
    return scene
