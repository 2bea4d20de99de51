"""A kept stack serves the runs that would start the same, and no other. It leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from harness import PROJECT
from harness.commands import cli
from harness.contract.errors import StackError, UsageError
from harness.contract.topology import topology
from harness.driving.process import HostProcess
from harness.driving.stack import Stack
from harness.machine import doctor, kept, targets
from harness.machine.kept import Kept
from harness.machine.progress import silent
from harness.machine.targets import Target
from harness.running.session import Model, Options, Seat, Session
from tests import recordings
from tests.adapters import TRIGGER
from tests.leftovers import Footprint, footprint

PLACE = topology("disaggregated", engines=1)
SCENARIO = recordings.declared(checks=())
Told = list[str]


def target(name: str, adapter: str) -> Target:
    return Target(
        name=name,
        about="",
        adapter=f"tests.adapters:{adapter}",
        environment=name,
        python=Path(sys.executable),
        capabilities=frozenset(),
        reference="oracle",
    )


@pytest.fixture(autouse=True)
def of_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_grace: None) -> Iterator[None]:
    """Targets with processes that start at once, and a folder of kept stacks that no other test uses. Ends what a test left up."""
    rows = [target(name, name) for name in ("Toy", "NeverStarts", "Hangs")] + [target("oracle", "Oracle")]
    monkeypatch.setattr(targets, "registry", lambda: {row.name: row for row in rows})
    monkeypatch.setattr(kept, "UP", tmp_path / "up")
    monkeypatch.setattr(Session, "_checkpoint", lambda *_: Model(path=tmp_path, sha256="0" * 64))
    yield
    cli.down()


@contextmanager
def session(folder: Path, told: Told | None = None, target: str = "Toy", **options) -> Iterator[Session]:
    asked = {
        "baseline": target,
        "candidate": target,
        "stacks": [target],
        "engine": "cpu",
        "start": "fork",
        "reuse": True,
    }
    told = [] if told is None else told
    one = Session(Options(**{**asked, "run_dir": folder, **options}), silent, tell=told.append)
    try:
        yield one
    finally:
        one.close()


def seat(target: str = "Toy") -> Seat:
    return Seat(target=target, topology=PLACE)


def up(name: str = "first", target: str = "Toy", idle_s: float = 600.0) -> Footprint:
    """Start a stack with its reference, and keep it. Returns what both use of the machine."""
    with session(kept.new_folder(name), target=target, idle_s=idle_s, record=False) as one:
        one.keep(seat(target))
    return everything()


def everything() -> Footprint:
    each = [footprint(one.supervisor, scratch=one.lifeline.parent) for one in kept.running()]
    return Footprint(processes=[p for one in each for p in one.processes], ports=set(), shared_memory=set())


def stack_of_tests() -> Kept:
    return next(one for one in kept.running() if one.description is not None)


def hosts() -> set[int]:
    return {p.pid for one in kept.running() for p in psutil.Process(one.supervisor).children()}


async def well(stack: Stack) -> None:
    await stack.generate([[5, 6]], max_tokens=2, temperature=0.0)


def drive(run: Session, body: Callable = well, target: str = "Toy") -> str:
    """The outcome of a scenario."""
    run.drive(SCENARIO, seat(target), body)
    [trace] = run.driven(SCENARIO, seat(target))
    return trace.end.outcome


def test_runs_use_it_one_after_the_other_as_if_they_were_one(tmp_path: Path):
    up()
    before = hosts()
    assert kept.names() == ["Toy@disaggregated"]
    canaries = []
    for name in "ab":
        with session(tmp_path / name) as run:
            assert drive(run) == "completed"
            [trace] = run.driven(SCENARIO, seat())
            canaries += [call.request["prompt_token_ids"] for call in trace.calls if call.label == "canary"]
            canary = 1 + (name == "a")  # the first one after a start warms the engine
            assert len([one for one in trace.observations if one.kind == "request"]) == 1 + canary
            assert "earlier runs may have driven it" in trace.header.notes[0]
        assert hosts() == before
    assert canaries[0] != canaries[1], "the second run went on where the first one stopped"


def test_the_rows_of_a_failed_batch_are_known_to_the_next_run(tmp_path: Path):
    up(target="Hangs")

    async def gives_up(stack: Stack) -> None:
        import asyncio

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stack.generate([TRIGGER], max_tokens=1), 0.3)

    with session(tmp_path / "a", target="Hangs") as run:
        drive(run, gives_up, "Hangs")
        run._stack._condition.abandoned["1 2"] = "another"
    with session(tmp_path / "b", target="Hangs") as run:
        run._sit(seat("Hangs"))
        assert run._stack._condition.abandoned["1 2"] == "another"


def test_what_does_not_fit_is_named_and_the_run_starts_its_own(tmp_path: Path):
    up()
    told: Told = []
    with session(tmp_path / "other", told, dtype="bfloat16") as run:
        assert drive(run) == "completed"
        own = run._stack._host.supervisor
        assert own not in {one.supervisor for one in kept.running()}
    assert [line.partition(":")[0] for line in told] == ["oracle", "Toy@disaggregated"]
    assert all("dtype is float32 there, bfloat16 here" in line for line in told)
    with session(tmp_path / "fresh", told, reuse=False) as run:
        assert drive(run) == "completed"
    assert len(told) == 2, "a fresh run looks for none"
    assert kept.names() == ["Toy@disaggregated"], "it goes on"
    for change, says in (
        ({"model_sha256": "1" * 64}, "the model's hash is 000000000000 there, 111111111111 here"),
        ({"adapter": "a:B"}, "the adapter is tests.adapters:Toy there, a:B here"),
        ({"python": Path("/other")}, f"the interpreter is {sys.executable} there, /other here"),
    ):
        one = stack_of_tests()
        assert one.differs(msgspec.structs.replace(one, **change)) == [says]


def test_changed_code_makes_it_stale_by_name_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    up()
    now = kept.code()
    changed = "backends/skyrl/http.py"
    assert changed in now
    monkeypatch.setattr(kept, "code", lambda: now | {changed: "other"})
    with session(tmp_path / "run") as run, pytest.raises(UsageError, match=f"is stale: {changed} changed") as refused:
        drive(run)
    assert "parity down" in refused.value.next_step


def test_all_code_of_the_harness_that_a_host_loads_counts():
    listed = "import sys, harness.driving.host; print(*(m.__file__ for m in sys.modules.values() if m and getattr(m, '__file__', 0)))"
    loaded = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True).stdout.split()
    ours = {str(Path(file).relative_to(PROJECT)) for file in loaded if file.startswith(str(PROJECT / "harness"))}
    assert {"harness/driving/host.py", "harness/contract/messages.py"} <= ours
    assert ours - kept.code().keys() == {"harness/__init__.py"}


def test_one_that_another_run_drives_is_left_to_it(tmp_path: Path):
    up()
    told: Told = []
    with session(tmp_path / "a") as first, session(tmp_path / "b", told) as second:
        assert drive(first) == "completed"
        assert drive(second) == "completed"
        with pytest.raises(UsageError, match=rf"Toy@disaggregated was not ended: another driver \(pid {os.getpid()}\)"):
            cli.down()
        assert drive(first) == "completed"
    assert [line for line in told if f"another driver (pid {os.getpid()}) has it" in line]


def interrupted(run: Session) -> None:
    async def body(_stack: Stack) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(run, body)


def hung(run: Session) -> None:
    async def body(stack: Stack) -> None:
        stack._deadline = time.monotonic() + 0.2
        await stack.generate([TRIGGER], max_tokens=1)

    assert drive(run, body, "Hangs") == "failed"


def broken(run: Session) -> None:
    async def body(stack: Stack) -> None:
        stack.give_up()

    drive(run, body)


@pytest.mark.parametrize(("how", "target"), [(interrupted, "Toy"), (hung, "Hangs"), (broken, "Toy")])
def test_one_in_an_unknown_condition_is_ended(tmp_path: Path, how: Callable[[Session], None], target: str):
    before = up(target=target)
    stack = psutil.Process(stack_of_tests().supervisor)
    with session(tmp_path / "run", target=target) as run:
        how(run)
    stack.wait(30)
    assert [one.name for one in kept.running()] == ["oracle"]
    cli.down()
    before.wait_until_gone()


def test_a_run_that_is_killed_takes_it_along(tmp_path: Path):
    up()
    one = stack_of_tests()
    holder = f"""
import sys, time
from pathlib import Path
from harness.driving.process import Holder
held = Holder({one.supervisor}, Path({str(one.lifeline)!r}))
print("held", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, cwd=PROJECT) as driver:
        assert driver.stdout.readline() == b"held\n"
        before = footprint(one.supervisor, scratch=one.lifeline.parent)
        driver.kill()
    before.wait_until_gone()


def test_it_ends_without_a_run_for_its_idle_time():
    up(idle_s=1.5).wait_until_gone()
    assert list(kept.running()) == []


def test_it_ends_with_its_supervisor():
    before = up()
    for one in kept.running():
        os.kill(one.supervisor, signal.SIGKILL)
    before.wait_until_gone()
    assert list(kept.running()) == []


def test_the_doctor_names_it_and_down_ends_all_of_it():
    before = up()
    one = stack_of_tests()
    found = [diagnosis for diagnosis in doctor.leftovers() if one.name in diagnosis.finding]
    assert [(diagnosis.name, diagnosis.status) for diagnosis in found] == [("running stack", "note")]
    assert "`parity down`" in found[0].finding
    cli.down()
    before.wait_until_gone()
    assert list(kept.running()) == []
    with pytest.raises(StackError, match="it has just ended"):
        HostProcess.of_kept(one)
    kept.new_folder("next")
    assert list(kept.UP.iterdir()) == []


def test_one_that_does_not_start_leaves_nothing_behind():
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(StackError, match="NeverStarts@disaggregated could not be started: StartFailed: server-1"):
        up(target="NeverStarts")
    started = set(psutil.Process().children(recursive=True)) - before
    Footprint(processes=[*started], ports=set(), shared_memory=set()).wait_until_gone()
    assert list(kept.running()) == []


def test_a_second_stack_uses_the_reference_of_the_first():
    up()
    up("second", target="Hangs")
    assert sorted(one.name for one in kept.running()) == ["Hangs@disaggregated", "Toy@disaggregated", "oracle"]


def test_one_of_another_version_is_named_while_it_lives_and_ignored_later():
    up()
    (file, *_) = (PROJECT / kept.UP).glob(kept.FILES)
    before, said = file.read_bytes(), msgspec.json.decode(file.read_bytes())
    del said["model_sha256"]
    file.write_bytes(msgspec.json.encode(said))
    with pytest.raises(UsageError, match=rf"another version of the harness started .*{file.name}") as refused:
        list(kept.running())
    assert str(said["supervisor"]) in refused.value.next_step
    file.write_bytes(before)
    cli.down()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(said))
    assert list(kept.running()) == []
