"""What a stack's processes need from the machine, and what they leave on it. Adapters supply the values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import msgspec

from harness.contract.checkout import Layout

GIB = 2**30


@final
class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """The needs of one kind of stack. The defaults are for a stack that needs and leaves nothing."""

    import_path: str = ""
    """Folder of the project that its processes get on PYTHONPATH."""
    modules: tuple[str, ...] = ()
    """Modules that a user's own interpreter must be able to import."""
    cache_variable: str = ""
    """Environment variable that names the folder for what its processes compile."""
    logs: str = ""
    """Pattern of folders below the scratch folder that hold more logs."""
    stages: Mapping[str, str] = {}
    """Pattern of a line in its start-up log → words for the progress line, a template of `re.Match.expand`."""
    ports: tuple[int, ...] = ()
    """Fixed loopback ports that it tries first. If one is taken, it tries another."""
    start_bytes: int = 0
    """Bytes of memory of all its processes except the engines."""
    engine_bytes: int = GIB
    """Bytes of memory of one engine with the tiny model."""
    shared_memory_bytes: int = 0
    """Bytes that it wants in /dev/shm."""
    socket: str = ""
    """Longest path of its Unix sockets, below the temporary folder."""
    source: Layout | None = None
    """Its source tree. None: a checkout of it cannot be driven."""
