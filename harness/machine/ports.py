"""Loopback ports: free ones for a start, and the holder of a taken one."""

from __future__ import annotations

import contextlib
import socket

import psutil

from harness.machine.processes import named


def free(count: int) -> list[int]:
    """`count` different free ports. All are held at once and released together."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listener(port: int) -> psutil.Process | None:
    """The process that listens on a loopback port; None if it has just ended or is another user's."""
    for found in psutil.net_connections(kind="tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                return psutil.Process(found.pid)
    return None


def holder(port: int) -> str:
    """The listener on a loopback port, as "name (pid)"."""
    process = listener(port)
    return "another user's process, or one that has just ended" if process is None else named(process)
