"""The doctor names missing requirements, conflicting processes and next steps, without false alarms."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.contract.runtime import GIB, Runtime
from harness.machine import doctor
from harness.machine.doctor import MARKER, Diagnosis
from harness.machine.environments import STAMP, location
from harness.machine.targets import runtimes


def test_everything_that_is_examined_says_what_to_do_unless_it_is_well(tmp_path: Path):
    found = doctor.examine(tmp_path, "cpu")
    assert {"driver", "interpreter", "uv", "disk", "memory", "cores", "gpus", "ports", "leftovers"} <= {
        d.name for d in found
    }
    for diagnosis in found:
        assert diagnosis.finding
        assert bool(diagnosis.next_step) == (diagnosis.status != "ok"), diagnosis


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


@contextmanager
def _marked(*command: str) -> Iterator[int]:
    """A process of a run, once it has reported that it is up."""
    process = subprocess.Popen(
        command, env={**os.environ, MARKER: "test"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.communicate()


WAIT = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
WATCH = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT!r}])"


def _left(found: list[Diagnosis]) -> str:
    return " ".join(d.finding + d.next_step for d in found)


def test_a_process_that_outlived_its_run_is_listed_with_how_to_end_it():
    with _marked(sys.executable, "-c", WAIT) as pid:
        assert f"(pid {pid})" in _left(doctor.leftovers())
    assert f"(pid {pid})" not in _left(doctor.leftovers())


def test_a_process_of_a_run_under_way_is_not_a_leftover():
    with _marked(sys.executable, "-c", WATCH, doctor.SUPERVISOR) as pid:
        assert f"(pid {pid})" not in _left(doctor.leftovers())
