"""Forked processes of a stack."""

from __future__ import annotations

import socket
import time

from backends.skyrl.forked import WithoutSockets


def test_a_forked_process_keeps_no_connection_of_its_parent_open():
    ours, peer = socket.socketpair()
    child = WithoutSockets(target=time.sleep, args=(60,), daemon=True)
    child.start()
    try:
        peer.settimeout(30)
        ours.sendall(b"last words")
        ours.close()
        assert (peer.recv(64), peer.recv(64)) == (b"last words", b"")
        assert child.is_alive()
    finally:
        child.kill()
        child.join()
        peer.close()
