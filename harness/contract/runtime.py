"""What the processes of a stack need of the machine, and what they leave on it. Adapters say it; nothing here names one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import msgspec

GIB = 2**30


@final
class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind of stack. The defaults are for a stack that needs and leaves nothing."""

    import_path: str = ""
    """Folder of the project that its processes find more packages in."""
    modules: tuple[str, ...] = ()
    """What a user's own interpreter must be able to import."""
    cache_variable: str = ""
    """Environment variable that names the folder for what its processes compile."""
    logs: str = ""
    """Pattern of folders below the scratch folder that hold more logs."""
    stages: Mapping[str, str] = {}
    """What its log says while it starts: pattern of a line → words for the progress line, as `re.Match.expand` takes them."""
    ports: tuple[int, ...] = ()
    """Fixed ports of loopback that it asks for first. It moves on from a taken one."""
    start_bytes: int = 0
    """Memory of all its processes but the engines."""
    engine_bytes: int = GIB
    """Memory of one engine with the tiny model."""
    shared_memory_bytes: int = 0
    """Room that it wants in /dev/shm."""
    socket: str = ""
    """The longest path of one of its Unix sockets, below the temporary folder."""
