"""Kills process trees, and says to which run a process belongs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

MARKER = "PARITY_MARKER"
"""Variable in the environment of every process that a run starts: its driver's pid and its folder, as "PID:FOLDER". A kept stack
has "kept:FOLDER": it lives as long as its supervisor."""
KEPT = "kept"
SUPERVISOR = "harness.driving.supervisor"
"""Module that a supervisor's command line names."""


class Run(NamedTuple):
    """The run that started a process."""

    folder: str
    driver: str
    """The driver's pid; of a kept stack its supervisor's, or `KEPT` if that has ended."""
    under_way: bool
    """True if this process lives."""
    kept: bool = False

    def __str__(self) -> str:
        if self.kept:
            return f"the kept stack in {self.folder} (supervisor: pid {self.driver})"
        return f"the run in {self.folder} (driver: pid {self.driver})"


class Usage(NamedTuple):
    """What a tree of processes uses."""

    pss_bytes: int
    """Memory, with each shared page split among its users (proportional set size)."""
    cpu_s: float
    """Processor time of its living processes since their starts."""


def usage_below(pid: int) -> Usage:
    """The usage of all descendants of a process. Ignores those that end meanwhile."""
    pss, cpu = 0, 0.0
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            pss += process.memory_full_info().pss
            times = process.cpu_times()
            cpu += times.user + times.system
    return Usage(pss, cpu)


def kill_trees(pids: Iterable[int]) -> None:
    """Send SIGKILL to these processes and all their descendants. Ignores those that have ended."""
    roots = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    doomed = {process for root in roots for process in (root, *root.children(recursive=True))}
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def named(process: psutil.Process) -> str:
    """ "name (pid)"."""
    try:
        return f"{process.name()} (pid {process.pid})"
    except psutil.NoSuchProcess:
        return f"a process that has just ended (pid {process.pid})"


def marked(folder: Path, *, kept: bool = False) -> dict[str, str]:
    """The variable for processes that this driver starts, for the run in `folder`. `kept`: True if they outlive the driver."""
    return {MARKER: f"{KEPT if kept else os.getpid()}:{folder}"}


def run_of(process: psutil.Process) -> Run | None:
    """The run that started `process`; None if none did, or if the process has ended or belongs to another user.

    A process that has set its title (a Ray worker, a vLLM engine) has overwritten its environment: the marker of the nearest process
    above it counts.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.parents()):
            driver, _, folder = _marker(one).partition(":")
            if folder and driver == KEPT:
                above = [str(other.pid) for other in (one, *one.parents()) if SUPERVISOR in other.cmdline()]
                return Run(folder, above[0] if above else KEPT, bool(above), kept=True)
            if folder:
                return Run(folder, driver, driver.isdigit() and _lived_at(int(driver), one.create_time()))
    return None


def _marker(process: psutil.Process) -> str:
    try:
        return process.environ().get(MARKER, "")
    except psutil.AccessDenied:
        return ""


def _lived_at(pid: int, started: float) -> bool:
    """True if `pid` lives and did so at `started`: a younger process has only inherited the number of a dead one."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
