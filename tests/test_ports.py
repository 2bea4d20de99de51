"""Who listens on a port: the stack's own processes, or another's too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.vllm.stack import VllmStack
from harness.contract.errors import StartFailed
from harness.machine import ports

LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True):
    print("listening", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def shared() -> Iterator[tuple[int, int]]:
    """A port on which this process and a child listen, and the child's pid."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as own:
        port = own.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", LISTENS, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"listening\n"
            yield port, child.pid
            child.kill()


def test_a_listener_of_another_process_tree_is_a_stranger(shared):
    port, child = shared
    assert [one.pid for one in ports.strangers(port, child)] == [os.getpid()]
    assert ports.strangers(port, os.getpid()) == [], "children belong to the tree"


class Served(VllmStack):
    """A server at a port of this process's choice."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port

    def url_of(self, _server: str) -> str | None:
        return f"http://127.0.0.1:{self.port}"


def test_a_start_on_a_port_of_another_stack_fails_and_names_it(shared, monkeypatch):
    port, child = shared
    Served(port)._check_ports(["server-0"])
    monkeypatch.setattr(os, "getpid", lambda: child)
    with pytest.raises(StartFailed, match=rf"also listens on the address of server-0, http://127.0.0.1:{port}"):
        Served(port)._check_ports(["server-0"])


def test_a_port_apart_is_none_that_the_kernel_gives_to_whoever_names_none():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert ports.APART_FROM <= ports.apart() < lowest
