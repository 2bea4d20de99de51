"""Memory of the machine, within the container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_and_total() -> tuple[int, int]:
    """Available and total memory in bytes, by the machine and by this container's limit (cgroup v2), whichever is less."""
    machine = psutil.virtual_memory()
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if not limit.is_file() or not used.is_file() or not (allowed := limit.read_text().strip()).isdigit():
        return machine.available, machine.total
    return min(machine.available, int(allowed) - int(used.read_text())), min(machine.total, int(allowed))
