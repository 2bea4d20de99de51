"""Loopback ports: free ones for a start, and the holder of a taken one."""

from __future__ import annotations

import contextlib
import socket

import psutil


def free(count: int) -> list[int]:
    """`count` different free ports. All are held at once and released together."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def holder(port: int) -> str:
    """The listener on a loopback port: "name (pid)", or "another user's process" if that may not be seen."""
    for connection in psutil.net_connections(kind="tcp"):
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
            and connection.pid is not None
        ):
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.NoSuchProcess:
                return f"a process that has just ended (pid {connection.pid})"
    return "another user's process"
