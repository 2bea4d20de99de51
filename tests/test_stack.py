"""A scenario on a stack, driven well or badly: its recording always says how it ended, and none of its tasks runs on."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from harness.contract import messages
from harness.contract.capability import Capability
from harness.contract.clock import monotonic
from harness.contract.errors import Blame, NotOffered
from harness.contract.topology import Topology
from harness.driving.process import HostProcess
from harness.driving.stack import CLEAN_ROOM_PASSES, START_GRACE_S, Stack
from harness.machine.progress import console_progress
from harness.records.recorder import Recorder
from harness.records.recording import ScenarioTrace
from harness.records.recording import traces as read
from scenarios import requests
from tests import traces
from tests.adapters import ANSWERS, TRIGGER
from tests.leftovers import footprint

pytestmark = pytest.mark.asyncio
Body = Callable[[Stack], Awaitable[Any]]


class Rig:
    """One live stack that records to a file."""

    def __init__(self, stack: Stack, host: HostProcess, recorder: Recorder, path: Path) -> None:
        self.stack, self.host, self.recorder, self.path = stack, host, recorder, path

    async def drive(self, body: Body, *, deadline_s: float = 60.0) -> ScenarioTrace:
        """Drive a scenario; returns its trace from the recording."""
        given = await self.stack.drive("module.test_it", 1, deadline_s, lambda: body(self.stack))
        self.recorder.close("completed")
        (kept,) = read(self.path)
        assert kept == given, "the trace is what the recording holds"
        return kept


@pytest_asyncio.fixture
async def rigs(tmp_path: Path, short_grace: None) -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    """Starts stacks of the adapters in `tests/adapters.py`, and ends them."""
    stacks: list[Stack] = []

    async def make(adapter: str = "Toy") -> Rig:
        logs = tmp_path / "logs"
        host = HostProcess(python=Path(sys.executable), adapter=f"tests.adapters:{adapter}", variables={}, logs=logs)
        start = messages.StartRequest(
            target="toy", topology=Topology(), model_path="", scratch=str(host.scratch), logs=str(logs)
        )
        stack = Stack(host, start)
        stacks.append(stack)
        await stack.start(console_progress())
        recorder = Recorder(tmp_path / "recording.jsonl").open(traces.header(target="toy"))
        stack.record_to(recorder)
        return Rig(stack, host, recorder, tmp_path / "recording.jsonl")

    yield make
    for stack in stacks:
        await stack.close()


async def misbehave(stack: Stack) -> None:
    await stack.generate([TRIGGER], max_tokens=1)


async def test_a_scenario_is_recorded_after_its_clean_room(rigs):
    """The first canary after a start warms the engine: deadlines are scaled by the second one's time."""
    rig = await rigs()
    trace = await rig.drive(lambda stack: stack.generate([[5, 6]], label="mine", max_tokens=2))
    assert (trace.end.outcome, trace.end.error) == ("completed", None)
    assert [(c.phase, c.method, c.label) for c in trace.calls] == [
        ("clean_room", "digests", "clean_room"),
        ("clean_room", "generate", "canary"),
        ("clean_room", "generate", "canary"),
        ("scenario", "generate", "mine"),
    ]
    assert {seen.kind for seen in trace.observations} == {"request", "step", "finish"}
    assert rig.stack.alive


@pytest.mark.parametrize(
    ("adapter", "kind", "said", "status"),
    [
        ("Raises", "Refused", "not like this", 418),
        ("Lies", "ValidationError", "unknown field `healthy`", None),
        ("Exits", "StackDied", "with status 3", None),
        ("Hangs", "CallTimedOut", "generate did not return within", None),
        ("LosesEngine", "StackDied", "died while generate was waiting", None),
        ("LosesEngineUnnoticed", "StackDied", "died in the course of the scenario", None),
    ],
)
async def test_every_bad_end_is_recorded_by_name(rigs, adapter: str, kind: str, said: str, status: int | None):
    rig = await rigs(adapter)
    before = footprint(rig.host._supervisor.pid, scratch=rig.host.scratch)
    body = misbehave if adapter != "LosesEngineUnnoticed" else _until_told
    trace = await rig.drive(body, deadline_s=1 if kind == "CallTimedOut" else 60)
    error = trace.end.error
    assert (trace.end.outcome, error.kind, error.status, error.blame) == ("failed", kind, status, Blame.STACK)
    assert said in error.message
    last = trace.calls[-1]
    if adapter != "LosesEngineUnnoticed":
        assert (last.method, last.phase, last.result) == ("generate", "scenario", None)
        assert last.error.kind == kind
    if kind in ("Refused", "ValidationError"):
        assert rig.stack.alive
    else:
        assert not rig.stack.alive
        assert before.left() == []


async def test_a_call_without_time_names_the_call_that_took_it(rigs):
    rig = await rigs("Hangs")

    async def gives_up_late(stack: Stack) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(misbehave(stack), 0.7 * (stack._deadline - monotonic()))
        await misbehave(stack)

    error = (await rig.drive(gives_up_late, deadline_s=2)).end.error
    assert re.search(
        r"next: look at generate first, which took \d+ s before that and raised Cancelled: the scenario gave up waiting; then read",
        error.message,
    ), error.message


async def test_rows_of_a_batch_that_failed_are_not_the_next_scenarios(rigs):
    rig = await rigs("LeavesRows")

    async def fails(stack: Stack) -> None:
        await stack.attempt(stack.generate([[7, 8], TRIGGER], max_tokens=2))

    async def goes_on(stack: Stack) -> None:
        await stack.generate([[5, 6], [9, 9]], max_tokens=2)

    async def again(stack: Stack) -> None:
        await fails(stack)
        await goes_on(stack)

    async def ran(scenario: str, take: int, body: Body) -> dict[str, list[list[int]]]:
        trace = await rig.stack.drive(scenario, take, 60, lambda: body(rig.stack))
        found: dict[str, list[list[int]]] = {"request": [], "late_request": []}
        for seen in trace.observations:
            if seen.kind in found and seen.at_ns >= trace.began_ns:
                found[seen.kind].append(seen.data["prompt_token_ids"])
        return found

    assert await ran("first", 1, fails) == {"request": [], "late_request": []}
    assert await ran("second", 1, goes_on) == {"request": [[5, 6], [9, 9]], "late_request": [[7, 8]]}
    assert await ran("first", 2, again) == {"request": [[7, 8], [5, 6], [9, 9]], "late_request": []}
    rig.recorder.close("completed")


async def test_what_runs_on_without_its_caller_is_over_before_the_next_take(rigs):
    """Of SkyRL 0.2.0's legacy client: cancelled, sample() goes on with one sample after the other."""

    async def goes(stack: Stack) -> None:
        caller = asyncio.create_task(misbehave(stack))
        await stack.until_generating(requests=1)
        caller.cancel()
        await asyncio.wait({caller})
        await requests.until_idle(stack)  # between two of them

    async def stays(stack: Stack) -> None:
        await stack.generate([[5, 6]], max_tokens=1)
        await asyncio.sleep(ANSWERS * 0.1)

    rig = await rigs("GoesOn")
    first, second = [
        await rig.stack.drive("first", n, 60, lambda b=b: b(rig.stack)) for n, b in enumerate((goes, stays), 1)
    ]
    seen = [o for trace in (first, second) for o in trace.observations if o.kind == "request"]
    rig.recorder.close("completed")
    assert [o.data["prompt_token_ids"] for o in seen].count(TRIGGER) == ANSWERS
    assert [o.data["prompt_token_ids"] for o in seen if o.at_ns >= second.began_ns] == [[5, 6]]


async def _until_told(stack: Stack) -> None:
    """A call that succeeds although a process has died. Then waits until the host has noticed."""
    await misbehave(stack)
    while stack._host.died is None:
        await stack.in_flight()


async def test_an_error_keeps_its_name_and_tells_the_death_behind_it(rigs):
    async def body(stack: Stack) -> None:
        with pytest.raises(Exception, match="the engine is gone"):
            await misbehave(stack)
        while stack._host.died is None:
            await stack.in_flight()
        await misbehave(stack)

    rig = await rigs("LosesEngineAndSays")
    trace = await rig.drive(body)
    assert trace.end.error.kind == "Refused"
    assert "(engine (pid " in trace.end.error.message
    assert not rig.stack.alive


async def test_what_a_scenario_provokes_does_not_end_it(rigs):
    async def body(stack: Stack) -> None:
        assert await stack.attempt(stack.generate([TRIGGER], max_tokens=1)) is None
        await stack.generate([[5]], max_tokens=1)

    trace = await (await rigs("Raises")).drive(body)
    assert trace.end.outcome == "completed"
    assert [c.error.kind for c in trace.calls if c.error is not None] == ["Refused"]


async def test_a_death_is_not_swallowed_by_an_attempt(rigs):
    trace = await (await rigs("Exits")).drive(lambda stack: stack.attempt(misbehave(stack)))
    assert trace.end.error.kind == "StackDied"


@pytest.mark.parametrize(
    "breaks", [lambda s: s.kill_server("engine-0"), lambda s: s.sync_weights(1, fail_after_chunks=1)]
)
async def test_a_scenario_that_does_not_say_so_cannot_break_the_stack(rigs, breaks: Body):
    rig = await rigs()
    trace = await rig.drive(breaks)
    assert trace.end.error.blame == Blame.HARNESS
    assert "spoils=True" in trace.end.error.message
    assert rig.stack.alive
    assert {call.method for call in trace.calls if call.phase == "scenario"} == set(), "nothing was done"


async def test_what_a_scenario_leaves_running_is_cancelled(rigs):
    left: list[asyncio.Task[None]] = []

    async def body(stack: Stack) -> None:
        left.append(asyncio.create_task(misbehave(stack)))
        await stack.until_generating(requests=1)

    trace = await (await rigs("Hangs")).drive(body)
    assert left[0].cancelled()
    assert trace.end.outcome == "completed"
    assert [c.error.kind for c in trace.calls if c.error is not None] == ["Cancelled"]


async def test_a_task_that_refuses_to_end_is_named_and_waited_for_no_longer(rigs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.driving.stack.CANCEL_DEADLINE_S", 0.2)
    refusals: list[str] = []

    async def stubborn() -> None:
        while len(refusals) < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                refusals.append("no")

    async def body(stack: Stack) -> None:
        left.append(asyncio.create_task(stubborn()))
        await stack.generate([[5]], max_tokens=1)

    left: list[asyncio.Task[None]] = []
    rig = await rigs()
    trace = await rig.drive(body)
    assert (trace.end.outcome, trace.end.error.kind) == ("failed", "TaskRefusesToEnd")
    assert trace.end.error.blame == Blame.HARNESS
    assert "stubborn" in trace.end.error.message
    assert refusals == ["no"]
    assert left[0].done(), "nor does the end of the run wait for it"
    assert not rig.stack.alive, "what it did meanwhile must not reach the next scenario"


async def test_a_scenario_that_waits_for_ever_times_out_by_name(rigs):
    rig = await rigs()
    trace = await rig.drive(lambda _stack: asyncio.Event().wait(), deadline_s=0.3)
    assert (trace.end.error.kind, trace.end.error.blame) == ("ScenarioTimedOut", Blame.STACK)
    assert not rig.stack.alive
    assert not rig.host.scratch.exists()


async def test_a_timeout_of_the_scenarios_own_is_the_harnesss_fault(rigs):
    async def body(_stack: Stack) -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 0.01)

    rig = await rigs()
    trace = await rig.drive(body)
    assert (trace.end.error.kind, trace.end.error.blame) == ("TimeoutError", Blame.HARNESS)
    assert rig.stack.alive


async def test_a_room_that_cannot_be_cleaned_is_recorded_and_nothing_is_driven_in_it(rigs):
    driven: list[bool] = []

    async def body(_stack: Stack) -> None:
        driven.append(True)

    trace = await (await rigs("NeverClean")).drive(body)
    assert driven == []
    assert (trace.end.error.kind, trace.end.error.status) == ("Refused", 418)
    assert [(c.phase, c.method) for c in trace.calls] == [("clean_room", "digests")]


async def test_a_wait_that_is_in_vain_says_what_was_awaited(rigs):
    rig = await rigs()
    trace = await rig.drive(lambda stack: stack.until_generating(requests=3, tokens=20), deadline_s=0.5)
    assert (trace.end.error.kind, trace.end.error.blame) == ("CallTimedOut", Blame.STACK)
    assert "waited for 3 requests in flight with 20 tokens; saw InFlightResult(requests=0" in trace.end.error.message
    assert "look at the timeline" in trace.end.error.message
    assert not rig.stack.alive


async def test_a_wait_ends_when_a_process_dies(rigs):
    async def body(stack: Stack) -> None:
        pending = asyncio.create_task(misbehave(stack))
        try:
            await stack.until_generating(requests=2)
        finally:
            pending.cancel()

    trace = await (await rigs("LosesEngine")).drive(body)
    assert trace.end.error.kind == "StackDied"
    assert "while 2 requests in flight with 0 tokens were awaited" in trace.end.error.message


async def test_what_is_not_declared_is_refused_before_it_is_sent(rigs):
    async def body(stack: Stack) -> None:
        with pytest.raises(NotOffered, match="toy does not offer 'sleep'"):
            await stack.sleep()

    trace = await (await rigs()).drive(body)
    assert trace.end.outcome == "completed"
    assert "sleep" not in [c.method for c in trace.calls]


async def test_what_a_call_needs_follows_from_the_adapters_that_are_loaded(tmp_path):
    class Host:
        died, ended = None, False

        async def call(self, method: str, _request: Any, _deadline_s: float, _raw: Any = None) -> Any:
            return (
                messages.Generation(response_ids=[[1]], responses=None, stop_reasons=["stop"])
                if method == "generate"
                else messages.Empty()
            )

    request = messages.StartRequest(target="toy", topology=Topology(), model_path="", scratch="", logs="")
    about = {"target": "toy", "topology": Topology(), "start": "fork", "servers": []}
    stack = Stack(Host(), request)
    stack.description = messages.Description(**about, capabilities=[Capability.ADAPTER_SYNC, Capability.LORA])
    with pytest.raises(NotOffered, match="adapter_by_name"):
        await stack.generate([[1]], lora_adapter="policy")
    await stack.generate([[1]])
    await stack.load_lora_adapter("policy", 1)
    await stack.load_lora_adapter("policy", 2)
    await stack.generate([[1]], lora_adapter="policy")
    await stack.generate([[1]])
    with pytest.raises(NotOffered, match="adapter_by_name"):
        await stack.generate([[1]], lora_adapter="other")
    with pytest.raises(NotOffered, match="several_adapters"):
        await stack.load_lora_adapter("other", 1)
    with pytest.raises(NotOffered, match="unload_adapter"):
        await stack.unload_lora_adapter("policy")
    stack.description = messages.Description(**about, capabilities=list(Capability))
    await stack.load_lora_adapter("other", 1)
    await stack.generate([[1]])


@pytest.mark.parametrize(("canary_s", "longer"), [(60.0, False), (1e-6, True)])
async def test_a_slow_engine_has_longer_deadlines_and_the_recording_says_so(
    rigs, monkeypatch: pytest.MonkeyPatch, canary_s: float, longer: bool
):
    monkeypatch.setattr("harness.driving.stack.CANARY_S", canary_s)
    rig = await rigs()
    trace = await rig.drive(lambda stack: stack.generate([[5, 6]], max_tokens=2), deadline_s=7)
    assert trace.end.allowed_s is not None
    assert (trace.end.allowed_s > 7) == longer
    assert longer or trace.end.allowed_s == 7


async def test_a_large_checkpoint_has_longer_deadlines_before_the_engines_speed_is_known(tmp_path):
    given: dict[str, float] = {}

    class Host:
        died, ended = None, False

        async def launch(self) -> None: ...

        async def call(self, method: str, _request: Any, deadline_s: float, _raw: Any = None) -> Any:
            given[method] = deadline_s
            about = {"target": "toy", "topology": Topology(), "start": "fork", "servers": []}
            match method:
                case "start":
                    return messages.Description(**about, capabilities=[])
                case "observe":
                    return messages.ObserveResult(observations=[])
                case "in_flight":
                    return messages.InFlightResult(requests=0, tokens=0, servers={})
                case "digests":
                    return messages.DigestsResult(servers={})
                case "generate":
                    return messages.Generation(response_ids=[[1]], responses=None, stop_reasons=["stop"])
            raise AssertionError(method)

    async def asked(model_path: Path) -> dict[str, float]:
        request = messages.StartRequest(
            target="toy", topology=Topology(), model_path=str(model_path), scratch="", logs=""
        )
        stack = Stack(Host(), request)
        await stack.start(console_progress())
        recorder = Recorder(model_path.with_suffix(".jsonl")).open(traces.header(target="toy"))
        stack.record_to(recorder)
        await stack.drive("module.test_it", 1, 60.0, lambda: asyncio.sleep(0))
        recorder.close("completed")
        return dict(given)

    tiny, large = tmp_path / "tiny", tmp_path / "large"
    for folder, size in ((tiny, 1_000_000), (large, 500_000_000)):
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)
    short, long = await asked(tiny), await asked(large)
    assert short["start"] == pytest.approx(messages.START_DEADLINE_S["cpu"] + START_GRACE_S, abs=1)
    assert long["start"] - short["start"] == pytest.approx(99.8)
    assert long["digests"] - short["digests"] == pytest.approx(CLEAN_ROOM_PASSES * 99.8, abs=1)


@pytest.mark.parametrize(
    ("size", "engine", "tokens"), [(1_000_000, "cpu", 200), (500_000_000, "cpu", 96), (500_000_000, "cuda", 200)]
)
async def test_scenarios_ask_less_of_a_model_that_is_slow_on_a_cpu(tmp_path, size, engine, tokens):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(size)
    request = messages.StartRequest(
        target="toy", topology=Topology(), model_path=str(tmp_path), scratch="", logs="", engine=engine
    )
    assert requests.long(Stack(object(), request))["max_tokens"] == tokens
