"""If a process of a released stack is killed or frozen during a generate call, the end has a name and nothing is left.

Runs on real engines (CPU, --start fork). Each case needs its own start, because it ends the stack.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from fixtures.prompts import Prompts
from harness import PROJECT
from harness.contract.errors import Blame
from harness.contract.messages import StartRequest
from harness.contract.topology import Topology
from harness.driving.models import tiny_model
from harness.driving.process import HostProcess
from harness.driving.stack import Stack
from harness.machine import environments
from harness.machine.progress import console_progress
from harness.machine.targets import resolve
from harness.records.recorder import Recorder
from harness.records.recording import ScenarioTrace
from harness.records.recording import traces as read
from tests import traces
from tests.leftovers import Footprint, footprint

pytestmark = [pytest.mark.real, pytest.mark.asyncio]
NAMED_WITHIN_S = 60.0
LEGACY, HTTP = "skyrl-0.2.0:legacy", "skyrl-0.2.0:http"


class Live(msgspec.Struct, frozen=True):
    """A running stack and its footprint on the machine."""

    stack: Stack
    host: HostProcess
    recorder: Recorder

    @property
    def supervisor(self) -> psutil.Process:
        return psutil.Process(self.host._supervisor.pid)

    def pid(self, role: str) -> int:
        return self.stack.description.processes[role]

    def footprint(self) -> Footprint:
        return footprint(self.supervisor.pid, scratch=self.host.scratch)


@asynccontextmanager
async def up(name: str, engines: int, folder: Path) -> AsyncIterator[Live]:
    """Start a released stack; end it after the block."""
    target, progress = resolve(name), console_progress()
    python = environments.ensure(str(target.environment), "cpu", root=PROJECT, progress=progress)
    model = tiny_model(python, progress)
    host = HostProcess(
        python=python, adapter=target.adapter, variables=target.variables, logs=folder / "logs", runtime=target.runs_on
    )
    topology = Topology(engines=engines)
    request = StartRequest(
        target=name,
        topology=topology,
        capabilities=sorted(target.capabilities),
        start="fork",
        model_path=str(model),
        scratch=str(host.scratch),
        logs=str(host.logs),
    )
    stack = Stack(host, request)
    try:
        await stack.start(progress)
        with Recorder(folder / "recording.jsonl").open(traces.header(target=name, topology=topology)) as recorder:
            stack.record_to(recorder)
            yield Live(stack, host, recorder)
    finally:
        await stack.close()


async def struck(live: Live, strike: Callable[[], None], *, deadline_s: float = 120.0) -> tuple[ScenarioTrace, float]:
    """Strike in the middle of a generate call over all engines. Returns the recording and how long the end took (s)."""
    struck_at = 0.0

    async def body() -> None:
        nonlocal struck_at
        prompts = Prompts("real.test_death").unique(8)
        async with asyncio.TaskGroup() as group:
            group.create_task(live.stack.generate(prompts, max_tokens=480, temperature=0.0, ignore_eos=True))
            await live.stack.until_generating(requests=len(prompts), tokens=len(prompts))
            strike()
            struck_at = time.monotonic()

    trace = await live.stack.drive("real.test_death", 1, deadline_s, body)
    assert struck_at, f"it was never struck: {trace.end.error}"
    return trace, time.monotonic() - struck_at


def check(trace: ScenarioTrace, live: Live, kinds: set[str]) -> str:
    """Check that the recorded end and the call have a name and a blame, and that the stack is not used again. Its message."""
    error = trace.end.error
    assert error is not None, "a stack without one of its processes gave a whole answer"
    assert error.kind in kinds, error
    assert error.blame == Blame.STACK
    call = trace.calls[-1]
    assert (call.method, call.phase, call.result) == ("generate", "scenario", None)
    assert call.error is not None
    assert not live.stack.alive
    return error.message


@pytest.mark.parametrize(
    ("name", "engines", "victim", "kinds"),
    [
        (LEGACY, 2, "server-0/worker-0", {"StackDied", "EngineDeadError"}),
        (HTTP, 2, "server-0/worker-0", {"StackDied", "ClientResponseError"}),
        (HTTP, 1, "router", {"StackDied"}),
        (HTTP, 1, "host", {"StackDied"}),
    ],
    ids=["legacy-engine", "http-engine", "http-router", "http-host"],
)
async def test_a_killed_process_ends_the_call_by_name_and_leaves_nothing(
    tmp_path: Path, name: str, engines: int, victim: str, kinds: set[str]
):
    async with up(name, engines, tmp_path) as live:
        pid = live.supervisor.children()[0].pid if victim == "host" else live.pid(victim)
        before = live.footprint()
        assert psutil.Process(pid) in before.processes
        assert name == LEGACY or before.ports

        trace, took_s = await struck(live, psutil.Process(pid).kill)

        message = check(trace, live, kinds)
        assert ("signal 9" if victim == "host" else f"{victim} (pid {pid}) died") in message
        assert took_s < NAMED_WITHIN_S
        assert before.left() == []
    (kept,) = read(tmp_path / "recording.jsonl")
    assert kept.end == trace.end


async def test_a_frozen_engine_ends_with_the_calls_deadline(tmp_path: Path):
    async with up(HTTP, 1, tmp_path) as live:
        before = live.footprint()
        engine = psutil.Process(live.pid("server-0/worker-0"))
        trace, _ = await struck(live, lambda: engine.send_signal(signal.SIGSTOP), deadline_s=20)
        message = check(trace, live, {"CallTimedOut"})
        assert message.startswith("generate did not return within ")
        assert before.left() == []
