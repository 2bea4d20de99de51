"""Who holds a port: for the doctor, and for a start that finds its port taken."""

from __future__ import annotations

import psutil


def holder(port: int) -> str:
    """Who listens on a loopback port: "name (pid)", or "another user's process" where that may not be seen."""
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
