"""Loopback ports: free ones for a start, and the holder of a taken one."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import psutil

from harness.machine.processes import named

APART_FROM = 20_000


def free(count: int) -> list[int]:
    """`count` different free ports. All are held at once and released together."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def apart() -> int:
    """A free port that nobody gets by chance: it lies below those that the kernel gives to whoever names none.

    Stacks search upwards from 8000, and Ray's workers from 10000 on. Raises OSError if none of a hundred is free.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(APART_FROM, lowest), 100):
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {APART_FROM} to {lowest}")


def listeners(port: int) -> list[psutil.Process]:
    """The processes that listen on a port, without those that have just ended or are another user's."""
    found = []
    for one in psutil.net_connections(kind="tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(one.pid))
    return found


def listened() -> dict[int, int]:
    """Port → pid of a process that listens there, for those that this user may see."""
    found = psutil.net_connections(kind="tcp")
    return {one.laddr.port: one.pid for one in found if one.status == psutil.CONN_LISTEN and one.laddr and one.pid}


def listener(port: int) -> psutil.Process | None:
    """The first of them."""
    return next(iter(listeners(port)), None)


def strangers(port: int, root: int) -> list[psutil.Process]:
    """The listeners on a port that do not belong to the process tree of `root`."""
    found = []
    for one in listeners(port):
        with contextlib.suppress(psutil.NoSuchProcess):
            if root not in (one.pid, *(above.pid for above in one.parents())):
                found.append(one)
    return found


def holder(port: int) -> str:
    """The listener on a loopback port, as "name (pid)"."""
    process = listener(port)
    return "another user's process, or one that has just ended" if process is None else named(process)
