"""Checks what this machine can run, and says how to fix what it lacks. Starts, removes and changes nothing, except that it remembers
the hashes of files that it has read (`contents`)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal
from urllib.request import getproxies_environment, proxy_bypass

import msgspec
import psutil
import uv

from harness.contract.errors import EnvironmentBroken
from harness.contract.runtime import GIB, Runtime
from harness.machine import kept
from harness.machine.environments import (
    NEEDED_BYTES,
    RECREATE,
    REQUIREMENTS,
    Engine,
    detect_engine,
    list_gpus,
    location,
    problems,
)
from harness.machine.interpreters import STACK_PYTHON, find_interpreter
from harness.machine.memory import available_and_total
from harness.machine.ports import holder, listener
from harness.machine.processes import Run, named, run_of
from harness.machine.progress import console_progress
from harness.machine.targets import runtimes

SOCKET_PATH_LIMIT = 107
"""Most bytes of a Unix socket's path on Linux."""

Status = Literal["ok", "note", "warn", "fail"]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. `next_step` is set if the status is "warn" or "fail". Only "fail" prevents a run."""

    name: str
    status: Status
    finding: str
    next_step: str = ""


def examine(root: Path, engine: Engine | None = None) -> list[Diagnosis]:
    """Check everything that a run on this machine needs. `root` is the project's folder. Takes a few seconds."""
    stacks = runtimes()
    looked_for: tuple[Callable[[], list[Diagnosis]], ...] = (
        interpreters,
        installer,
        lambda: disk(root, NEEDED_BYTES[engine or detect_engine()]),
        lambda: memory(*available_and_total(), stacks),
        cores,
        lambda: gpus(engine),
        proxies,
        lambda: ports(stacks),
        lambda: shared_memory(stacks),
        lambda: socket_paths(Path(tempfile.gettempdir()), stacks),
        lambda: environments(root, engine or detect_engine()),
        leftovers,
    )
    return [diagnosis for look in looked_for for diagnosis in look()]


def interpreters() -> list[Diagnosis]:
    """The driver's Python and one for the stacks."""
    driver = Diagnosis(name="driver", status="ok", finding=f"Python {sys.version.split()[0]} ({sys.executable})")
    try:
        found = find_interpreter(fetch=False)
    except EnvironmentBroken as error:
        return [driver, Diagnosis(name="interpreter", status="fail", finding=error.message, next_step=error.next_step)]
    return [driver, Diagnosis(name="interpreter", status="ok", finding=f"Python {STACK_PYTHON} for stacks: {found}")]


def installer() -> list[Diagnosis]:
    """uv, which makes the environments."""
    try:
        said = subprocess.run([uv.find_uv_bin(), "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        step = "install it into the driver's environment: `pip install uv`"
        return [Diagnosis(name="uv", status="fail", finding=f"uv does not run ({error})", next_step=step)]
    return [Diagnosis(name="uv", status="ok", finding=said.stdout.strip())]


def disk(root: Path, needed: int) -> list[Diagnosis]:
    """Room for one more environment."""
    free = shutil.disk_usage(root).free
    finding = f"{free / 1e9:.0f} GB free at {root}; a stack environment takes about {needed / 1e9:.0f} GB"
    if free >= needed:
        return [Diagnosis(name="disk", status="ok", finding=finding)]
    made = any((root / ".parity" / "envs").glob("*/bin/python"))
    step = f"free {(needed - free) / 1e9:.0f} GB there before an environment is made"
    return [Diagnosis(name="disk", status="warn" if made else "fail", finding=finding, next_step=step)]


def memory(available: int, total: int, stacks: Sequence[Runtime]) -> list[Diagnosis]:
    """How many engines of the largest stack fit. Sizes in bytes."""
    start, engine = max(stack.start_bytes for stack in stacks), max(stack.engine_bytes for stack in stacks)
    engines = max(0, (available - start) // engine)
    finding = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available: {engines} engines with --start ray"
    if engines >= 2:
        return [Diagnosis(name="memory", status="ok", finding=finding)]
    needed = (start + 2 * engine) / GIB
    step = f"two engines need {needed:.1f} GiB: end what else runs here, or use --engines 1 or --start fork"
    return [Diagnosis(name="memory", status="warn" if engines else "fail", finding=finding, next_step=step)]


def cores() -> list[Diagnosis]:
    """The number of cores limits start-up."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if usable >= 2:
        return [Diagnosis(name="cores", status="ok", finding=f"{usable} usable cores")]
    step = "expect starts of several minutes, or use a machine with two cores or more"
    return [Diagnosis(name="cores", status="warn", finding="1 usable core", next_step=step)]


def gpus(engine: Engine | None) -> list[Diagnosis]:
    """The engine that --engine auto takes, and whether a chosen engine can work."""
    found = list_gpus()
    if engine == "cuda" and not found:
        step = "install the driver (nvidia-smi must list the GPU), or use --engine cpu"
        return [Diagnosis(name="gpus", status="fail", finding="no GPU for --engine cuda", next_step=step)]
    finding = f"{len(found)} GPUs: {'; '.join(found)}" if found else "no GPU: --engine auto means cpu"
    return [Diagnosis(name="gpus", status="ok", finding=finding)]


def proxies() -> list[Diagnosis]:
    """Whether requests to this machine itself go to a proxy: a stack that waits for its own server then never sees it."""
    found = getproxies_environment()
    if not found.keys() & {"http", "all"} or proxy_bypass("127.0.0.1"):
        return [Diagnosis(name="proxies", status="ok", finding="requests to 127.0.0.1 go to no proxy")]
    finding = f"requests to 127.0.0.1 go to a proxy ({', '.join(sorted(found))}), and stacks that ask their own servers do not start"
    return [Diagnosis(name="proxies", status="fail", finding=finding, next_step="export NO_PROXY=127.0.0.1,localhost")]


def ports(stacks: Sequence[Runtime]) -> list[Diagnosis]:
    """The fixed loopback ports that stacks try first. A taken port is only a warning: stacks try another. One that a run
    under way holds is a note."""
    wanted = sorted({port for stack in stacks for port in stack.ports})
    taken = [port for port in wanted if not _free(port)]
    if not taken:
        finding = f"all {len(wanted)} fixed ports of loopback are free ({wanted[0]} to {wanted[-1]})"
        return [Diagnosis(name="ports", status="ok", finding=finding)]
    found: list[Diagnosis] = []
    for port in taken:
        process = listener(port)
        run = run_of(process) if process else None
        finding = f"port {port} is held by {holder(port)}"
        if process is None or run is None:
            step = "end this process if it is left over, or give --base-port for the servers of the remote placement"
            found.append(Diagnosis(name="ports", status="warn", finding=finding, next_step=step))
        elif run.under_way:
            found.append(Diagnosis(name="ports", status="note", finding=f"{finding} of {run}, which is under way"))
        else:
            finding += f", left over from {run}, whose driver has ended"
            found.append(Diagnosis(name="ports", status="warn", finding=finding, next_step=_end([process])))
    return found


def shared_memory(stacks: Sequence[Runtime]) -> list[Diagnosis]:
    """Object stores and queues between processes live in /dev/shm."""
    wanted = max(stack.shared_memory_bytes for stack in stacks)
    folder = Path("/dev/shm")
    if not folder.is_dir():
        step = "mount a tmpfs there: processes of a stack talk through it"
        return [Diagnosis(name="shared memory", status="fail", finding="there is no /dev/shm", next_step=step)]
    free = shutil.disk_usage(folder).free
    finding = f"{free / GIB:.1f} GiB free in /dev/shm"
    if free >= wanted:
        return [Diagnosis(name="shared memory", status="ok", finding=finding)]
    step = f"stacks want {wanted // GIB} GiB: start the container with --shm-size={wanted // GIB}g or more"
    return [Diagnosis(name="shared memory", status="warn", finding=finding, next_step=step)]


def socket_paths(temporary: Path, stacks: Sequence[Runtime]) -> list[Diagnosis]:
    """Sockets below the temporary folder must stay under the limit of a Unix socket's path."""
    length = len(os.fsencode(temporary)) + max(len(stack.socket) for stack in stacks)
    finding = f"sockets below {temporary} get paths of about {length} of {SOCKET_PATH_LIMIT} bytes"
    if length <= SOCKET_PATH_LIMIT:
        return [Diagnosis(name="socket paths", status="ok", finding=finding)]
    step = "set TMPDIR to a shorter folder, such as /tmp"
    return [Diagnosis(name="socket paths", status="fail", finding=finding, next_step=step)]


def environments(root: Path, engine: Engine, *, requirements: Path = REQUIREMENTS) -> list[Diagnosis]:
    """Existing environments, whether they match their requirement file, and those without a current requirement file."""
    found: list[Diagnosis] = []
    show = console_progress()
    current: set[Path] = set()
    of_engine: list[tuple[Engine, Path]] = [("cpu", path) for path in sorted(requirements.glob("*.cpu.txt"))]
    of_engine += [("cuda", path) for path in sorted(requirements.glob("*.cuda.txt"))]
    for of, locked in of_engine:
        name = locked.stem.removesuffix(f".{of}")
        home = location(name, of, root=root, requirements=requirements)
        current.add(home)
        label = f"environment {name}-{of}"
        if home.exists() and (wrong := problems(home, locked, show)):
            finding = f"{home} is broken: {'; '.join(wrong[:3])}"
            found.append(Diagnosis(name=label, status="fail", finding=finding, next_step=RECREATE))
        elif home.exists():
            found.append(Diagnosis(name=label, status="ok", finding=f"{home} matches {locked.name}"))
        elif of == engine:
            step = "the first run makes it, or now: `parity setup`"
            found.append(Diagnosis(name=label, status="warn", finding="not made yet", next_step=step))
    old = [path for path in _folders(root / ".parity" / "envs") if path not in current]
    if old:
        finding = f"made from requirement files that have changed since: {', '.join(map(str, old))}"
        found.append(
            Diagnosis(name="old environments", status="warn", finding=finding, next_step="remove these folders")
        )
    return found


def leftovers() -> list[Diagnosis]:
    """Processes that runs started: those of a run under way or of a kept stack, and orphans of a run whose driver has ended."""
    up = {str(one.supervisor): f"{one.name} is up since {one.since}" for one in kept.running()}
    runs: defaultdict[Run, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        if (run := run_of(process)) is not None:
            runs[run].append(process)
    found = []
    for run, processes in runs.items():
        if run.under_way and run.kept:
            finding = f"{up.get(run.driver, run)}, {len(processes)} processes; `parity down` ends it"
            found.append(Diagnosis(name="running stack", status="note", finding=finding))
        elif run.under_way:
            finding = f"{run} is under way, with {len(processes)} processes"
            found.append(Diagnosis(name="run", status="note", finding=finding))
        else:
            finding = f"{run} has ended and left {len(processes)} processes: {', '.join(map(named, processes[:10]))}"
            found.append(Diagnosis(name="leftovers", status="warn", finding=finding, next_step=_end(processes)))
    if all(run.under_way for run in runs):
        found.append(Diagnosis(name="leftovers", status="ok", finding="no process of a dead run"))
    return found


def _end(processes: Sequence[psutil.Process]) -> str:
    return f"end them: `kill -9 {' '.join(str(process.pid) for process in processes)}`"


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
