"""Kills process trees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def kill_trees(pids: Iterable[int]) -> None:
    """Send SIGKILL to these processes and all their descendants. Ignores those that have ended."""
    roots = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    doomed = {process for root in roots for process in (root, *root.children(recursive=True))}
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
