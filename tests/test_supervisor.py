"""A stack leaves nothing behind after its own end, a crash, Ctrl-C or a killed driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from harness import PROJECT
from harness.driving import supervisor
from harness.driving.supervisor import Farewell, Job
from harness.machine.processes import Run, run_of
from tests.adapters import SHARED_MEMORY
from tests.leftovers import alive, footprint

DAEMON = """
import sys, time
from pathlib import Path
from tests.adapters import daemonize
daemonize(Path(sys.argv[1]))
"""
STAYS, ENDS = "time.sleep(3600)", "sys.exit(7)"
DRIVER = """
import asyncio, sys
from pathlib import Path
from harness.contract.messages import Empty, GenerateRequest, StartRequest
from harness.driving import process
from harness.contract.topology import Topology
from tests.adapters import TRIGGER

process.GRACE_S = 0.3
logs = Path(sys.argv[1])
host = process.HostProcess(python=Path(sys.executable), adapter="tests.adapters:Daemonizes", variables={}, logs=logs)

async def main():
    await host.launch()
    start = dict(target="toy", topology=Topology(), model_path="", scratch=str(host.scratch), logs=str(logs))
    await host.call("start", StartRequest(**start), 60)
    hangs = GenerateRequest(prompt_token_ids=[TRIGGER], sampling_params={"max_tokens": 1})
    call = asyncio.create_task(host.call("generate", hangs, 600))
    while not (await host.call("in_flight", Empty(), 60)).requests:
        await asyncio.sleep(0.01)
    print(host.scratch, host._supervisor.pid, flush=True)
    await call

asyncio.run(main())
"""


def wait_for(path: Path) -> Path:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)
    return path


def job(tmp_path: Path, *command: str) -> Job:
    scratch = tmp_path / "scratch"
    (scratch / "ray" / "session_2026" / "logs").mkdir(parents=True)
    (scratch / "ray" / "session_2026" / "logs" / "raylet.out").write_text("what Ray said")
    return Job(
        command=list(command),
        environment={**os.environ, "PYTHONPATH": str(PROJECT)},
        log=str(tmp_path / "host.log"),
        scratch=str(scratch),
        keep=str(tmp_path),
        more_logs="ray/session_2*/logs",
        grace_s=0.3,
    )


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Supervises a host that has started a daemon and keeps running."""
    code = f"{DAEMON}\n{STAYS}"
    yield from _supervise(job(tmp_path, sys.executable, "-c", code, str(tmp_path / "daemon.pid")))


def _supervise(what: Job) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.driving.supervisor", msgspec.json.encode(what).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=PROJECT,
    )
    with process:
        yield process
        process.kill()


def farewell(process: subprocess.Popen[bytes]) -> Farewell:
    """Close the lifeline and read the supervisor's farewell."""
    output, _ = process.communicate(timeout=60)
    return msgspec.json.decode(output, type=Farewell)


def test_a_closed_lifeline_ends_everything(supervised: subprocess.Popen[bytes], tmp_path: Path):
    daemon = psutil.Process(int(wait_for(tmp_path / "daemon.pid").read_text()))
    before = footprint(supervised.pid, scratch=tmp_path / "scratch")
    shared = f"/dev/shm/{SHARED_MEMORY.format(pid=daemon.pid)}"
    assert daemon in before.processes, "the daemon left its session, not its supervisor"
    assert Path(shared) in before.shared_memory

    said = farewell(supervised)

    assert before.left() == []
    assert said.exit_code is None, "the host was still running"
    assert any(name.startswith(f"{daemon.pid} ") for name in said.killed)
    assert said.shared_memory == [shared]
    assert (tmp_path / "ray" / "raylet.out").read_text() == "what Ray said"


def test_a_host_that_ends_takes_its_daemons_along(tmp_path: Path):
    code = f"{DAEMON}\n{ENDS}"
    running = _supervise(job(tmp_path, sys.executable, "-c", code, str(tmp_path / "daemon.pid")))
    process = next(running)
    daemon = psutil.Process(int(wait_for(tmp_path / "daemon.pid").read_text()))
    said = msgspec.json.decode(process.stdout.read(), type=Farewell)
    running.close()
    assert said.exit_code == 7
    assert any(name.startswith(f"{daemon.pid} ") for name in said.killed)
    assert not alive(daemon)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_does_not_cut_cleaning_up_short(
    supervised: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
):
    wait_for(tmp_path / "daemon.pid")
    before = footprint(supervised.pid, scratch=tmp_path / "scratch")
    supervised.send_signal(number)
    supervised.stdin.close()
    supervised.stdin = None
    supervised.send_signal(number)
    assert farewell(supervised).killed
    assert before.left() == []


def test_a_host_that_cannot_be_run_is_told_in_its_log(tmp_path: Path):
    running = _supervise(job(tmp_path, "/nowhere/python", "-m", "harness.driving.host"))
    said = farewell(next(running))
    running.close()
    assert said == Farewell(exit_code=None, killed=[], shared_memory=[])
    assert "/nowhere/python cannot be run" in (tmp_path / "host.log").read_text()
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9"])
def test_a_driver_that_is_ended_leaves_nothing(tmp_path: Path, how: str):
    """In the middle of a call, with a daemon that ignores SIGTERM below the host."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=PROJECT,
        start_new_session=True,
    ) as driver:
        scratch, supervisor_pid = driver.stdout.readline().decode().split()
        daemon = psutil.Process(int((tmp_path / "grandchild.pid").read_text()))
        seen = footprint(int(supervisor_pid), scratch=Path(scratch))
        assert daemon in seen.processes
        runs = {run_of(process) for process in seen.processes if alive(process)}
        assert (seen.scratch or tmp_path).stat().st_mode & 0o777 == 0o700
        if how == "Ctrl-C":
            os.killpg(driver.pid, signal.SIGINT)  # to the foreground group, as a terminal sends it
        else:
            driver.kill()
        try:
            driver.wait(timeout=60)
        finally:
            driver.kill()  # otherwise the tests would wait for it indefinitely
    assert runs == {Run(str(tmp_path), str(driver.pid), under_way=True)}
    seen.wait_until_gone()


def test_shared_memory_of_a_process_that_is_gone_is_removed_too(tmp_path: Path):
    """The process that made it was killed, and so was its clean-up. Another program's memory stays."""
    shared = supervisor.SharedMemory()
    with subprocess.Popen(
        [sys.executable, "-c", f"{DAEMON}\n{STAYS}", str(tmp_path / "daemon.pid")],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        preexec_fn=lambda: supervisor._prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1),  # noqa: PLW1509 - no locks are held
    ) as host:
        daemon = psutil.Process(int(wait_for(tmp_path / "daemon.pid").read_text()))
        made = Path("/dev/shm") / SHARED_MEMORY.format(pid=daemon.pid)
        stranger = made.with_name(f"{made.name}-stranger")
        stranger.touch()
        shared.look()
        daemon.kill()
        host.kill()
    try:
        assert made.exists()
        assert shared.remove() == [str(made)]
        assert not made.exists()
        assert stranger.exists()
    finally:
        stranger.unlink()


def test_a_semaphore_is_known_though_it_is_mapped_under_another_name(tmp_path: Path):
    """Its process was killed together with the resource tracker, as Ray kills the children of a worker."""
    code = "import time; from multiprocessing import get_context; lock = get_context('spawn').Lock(); "
    code += f"print(lock._semlock.name, flush=True); {STAYS}"
    shared = supervisor.SharedMemory()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        made = Path(f"/dev/shm/sem.{host.stdout.readline().strip()[1:]}")
        shared.look()
        for tracker in psutil.Process(host.pid).children():
            tracker.kill()
        host.kill()
    assert made.exists()
    assert shared.remove() == [str(made)]
    assert not made.exists()


# --- cases that real processes cannot produce on demand


def test_a_process_that_ends_while_we_look_is_not_left(monkeypatch: pytest.MonkeyPatch):
    class Ending:
        def status(self):
            raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil.Process, "children", lambda *_a, **_k: [Ending()])
    assert supervisor._below() == []


def test_a_busy_kernel_does_not_stop_the_host(monkeypatch: pytest.MonkeyPatch):
    """A user may change autogroups ten times a second over all processes; more fail with EAGAIN (Linux, sched/autogroup.c)."""

    def busy(*_a: object, **_k: object) -> int:
        raise BlockingIOError

    with subprocess.Popen([sys.executable, "-c", f"import time; {STAYS}"]) as process:
        monkeypatch.setattr(Path, "write_text", busy)
        supervisor._yield_to_driver(process.pid)
        assert psutil.Process(process.pid).nice() == supervisor.NICENESS
        process.kill()
