"""The doctor names missing requirements, conflicting processes and next steps, without false alarms."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from harness import PROJECT
from harness.contract.runtime import GIB, Runtime
from harness.machine import doctor
from harness.machine.doctor import Diagnosis
from harness.machine.environments import STAMP, location
from harness.machine.processes import Run, kill_trees, run_of
from harness.machine.targets import runtimes


def test_everything_that_is_examined_says_what_to_do_unless_it_is_well(tmp_path: Path):
    found = doctor.examine(tmp_path, "cpu")
    assert {"driver", "interpreter", "uv", "disk", "memory", "cores", "gpus", "ports", "leftovers"} <= {
        d.name for d in found
    }
    for diagnosis in found:
        assert diagnosis.finding
        assert bool(diagnosis.next_step) == (diagnosis.status in ("warn", "fail")), diagnosis


def test_a_taken_port_names_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (taken,) = doctor.ports([Runtime(ports=(port,))])
    assert (taken.status, f"port {port} is held by" in taken.finding) == ("warn", True)
    assert f"(pid {os.getpid()})" in taken.finding


def test_free_ports_are_well():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert doctor.ports([Runtime(ports=(port,))])[0].status == "ok"


@pytest.mark.parametrize(
    ("available_gib", "status", "engines"), [(24, "ok", 20), (5.5, "ok", 2), (5.0, "warn", 1), (3.0, "fail", 0)]
)
def test_memory_is_told_in_engines(available_gib: float, status: str, engines: int):
    (memory,) = doctor.memory(int(available_gib * GIB), 24 * GIB, runtimes())
    assert (memory.status, f": {engines} engines" in memory.finding) == (status, True)


def test_a_long_temporary_folder_is_red_before_ray_meets_it(tmp_path: Path):
    assert doctor.socket_paths(Path("/tmp"), runtimes())[0].status == "ok"
    assert doctor.socket_paths(tmp_path / ("x" * 60), runtimes())[0].status == "fail"


def test_a_chosen_engine_without_its_hardware_is_red(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "list_gpus", list)
    assert doctor.gpus("cuda")[0].status == "fail"
    assert doctor.gpus(None)[0].status == "ok"


def test_environments_are_told_apart_not_made_broken_and_of_old(tmp_path: Path):
    locks = tmp_path / "requirements"
    locks.mkdir()
    for name in ("made.cpu", "absent.cpu", "absent.cuda"):
        (locks / f"{name}.txt").write_text("pear==1.0 --hash=sha256:00\n")
    home = location("made", "cpu", root=tmp_path, requirements=locks)
    (home / "bin").mkdir(parents=True)
    (home / STAMP).write_text("{}")
    (home.parent / "made-cpu-0123456789ab").mkdir()
    found = {d.name: d for d in doctor.environments(tmp_path, "cpu", requirements=locks)}
    assert {name: d.status for name, d in found.items()} == {
        "environment made-cpu": "fail",
        "environment absent-cpu": "warn",  # the doctor checks the engine "cpu" only, so absent-cuda does not matter
        "old environments": "warn",
    }
    assert "--recreate" in found["environment made-cpu"].next_step
    assert "0123456789ab" in found["old environments"].finding


def test_a_linked_folder_of_environments_holds_no_old_ones(tmp_path: Path):
    locks = tmp_path / "requirements"
    locks.mkdir()
    (locks / "made.cpu.txt").write_text("pear==1.0 --hash=sha256:00\n")
    root, elsewhere = tmp_path / "project", tmp_path / "large-disk"
    (root / ".parity").mkdir(parents=True)
    elsewhere.mkdir()
    (root / ".parity" / "envs").symlink_to(elsewhere)
    (location("made", "cpu", root=root, requirements=locks) / "bin").mkdir(parents=True)
    assert [d.name for d in doctor.environments(root, "cpu", requirements=locks)] == ["environment made-cpu"]
    (elsewhere / "made-cpu-0123456789ab").mkdir()
    assert "0123456789ab" in doctor.environments(root, "cpu", requirements=locks)[-1].finding


DRIVER = """
import subprocess, sys
from pathlib import Path
from harness.machine.processes import marked
serve = "import os, socket; server = socket.create_server(('127.0.0.1', 0))"
serve += "; print(os.getpid(), server.getsockname()[1], flush=True); server.accept()"
subprocess.run([sys.executable, "-c", serve], env=marked(Path(sys.argv[1])))
"""


@contextmanager
def _driver(run: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A process that stands for a run's driver, with the pid and the port of a process that it started."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run)], stdout=subprocess.PIPE, text=True, cwd=PROJECT
    ) as driver:
        pid, port = map(int, driver.stdout.readline().split())
        try:
            yield driver, pid, port
        finally:
            driver.kill()
            kill_trees([pid])


def _about(run: Path, port: int) -> dict[str, Diagnosis]:
    found = doctor.ports([Runtime(ports=(port,))]) + doctor.leftovers()
    return {diagnosis.name: diagnosis for diagnosis in found if str(run) in diagnosis.finding}


def test_what_a_run_under_way_uses_is_noted_with_its_folder_and_pid(tmp_path: Path):
    with _driver(tmp_path / "run") as (driver, pid, port):
        found = _about(tmp_path / "run", port)
    assert {name: (d.status, d.next_step) for name, d in found.items()} == {"ports": ("note", ""), "run": ("note", "")}
    for diagnosis in found.values():
        assert f"driver: pid {driver.pid}" in diagnosis.finding
    assert f"port {port} is held by" in found["ports"].finding
    assert f"(pid {pid})" in found["ports"].finding


def test_what_a_dead_run_left_is_a_problem_with_the_command_that_ends_it(tmp_path: Path):
    with _driver(tmp_path / "run") as (driver, pid, port):
        driver.kill()
        driver.wait()
        found = _about(tmp_path / "run", port)
        assert {name: d.status for name, d in found.items()} == {"ports": "warn", "leftovers": "warn"}
        for diagnosis in found.values():
            assert f"(pid {pid})" in diagnosis.finding
            assert diagnosis.next_step == f"end them: `kill -9 {pid}`"
        left = psutil.Process(pid)
        subprocess.run(["kill", "-9", str(pid)], check=True)
        psutil.wait_procs([left])
    assert _about(tmp_path / "run", port) == {}


class Known:
    """A process as psutil shows it."""

    def __init__(self, *above: Known, started: float = 0.0, **environment: str) -> None:
        self.environ, self.parents, self.create_time = lambda: environment, lambda: list(above), lambda: started


def test_a_process_without_its_environment_belongs_to_the_run_of_those_above():
    above = Known(started=time.time(), PARITY_MARKER=f"{os.getpid()}:/run")
    assert run_of(Known(above)) == Run("/run", str(os.getpid()), under_way=True)
    assert run_of(Known()) is None


def test_a_dead_drivers_number_that_another_process_has_got_is_no_sign_of_life():
    assert run_of(Known(started=0.0, PARITY_MARKER=f"{os.getpid()}:/run")) == Run(
        "/run", str(os.getpid()), under_way=False
    )


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, "ok"),
        ({"http_proxy": "http://proxy:3128"}, "fail"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}, "ok"),
        ({"https_proxy": "http://proxy:3128"}, "ok"),
    ],
)
def test_a_proxy_for_this_machine_itself_is_red(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], status: str
):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [one.status for one in doctor.proxies()] == [status]
