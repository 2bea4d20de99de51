"""Runs one host and sees to it that nothing of it is left: neither after a crash, nor Ctrl-C, nor a killed driver.

A small process between the driver and a host. It is the host's subreaper (Linux), so that everything the stack starts
stays below it, daemons included. It ends when the host ends, or when its own standard input closes: that is the driver's lifeline.
Then it kills what is left, removes the scratch folder and says in one line of JSON what it had to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
SHM = Path("/dev/shm")
SHM_POLL_S = 0.5
SHM_STRANGE_S = 3.0
"""How long a new entry may be there before the process that made it maps it."""
GRACE_S = 3.0
NICENESS = 10
AUTOGROUP_S = 0.12
"""The kernel takes a user's autogroup changes ten times a second at most, over all of them."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: `command` with `environment`, output into `log`; `scratch` is removed afterwards."""

    command: list[str]
    environment: dict[str, str]
    log: str
    scratch: str
    keep: str
    """Folder into which more logs are copied before the scratch folder goes."""
    more_logs: str = ""
    """Pattern of the folders, below the scratch folder, that hold them."""


class Farewell(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's last word. `exit_code` is the host's (negative: signal; None: it was still running, or never ran)."""

    exit_code: int | None
    killed: list[str]
    """Names of processes that had to be killed after the host had ended."""
    shared_memory: list[str]
    """Shared memory that was left behind, and removed."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _yield_to_driver(pid: int) -> None:
    """Give the stack a lower scheduling priority than the driver, as a whole; inside it nothing changes.

    Busy engines on a small machine starve a driver of the same weight for more than a second (measured on 2 cores, Linux
    6.18, autogroup scheduling): too late to act on what it waits for. Ray lowers its workers in the same way.
    """
    for _ in range(3):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))
        except BlockingIOError:
            time.sleep(AUTOGROUP_S)
        except OSError:
            break  # a kernel without autogroups
        else:
            return
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).nice(NICENESS)


def _below() -> list[psutil.Process]:
    """Everything that the stack started and that still runs; a process may end while we look."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:80] or process.name()}"
    except psutil.Error:
        return str(process.pid)


class SharedMemory:
    """Entries of /dev/shm that the stack made, known by who maps them, as they appear.

    Whoever made one may be gone when it has to be removed, and its resource tracker too. They are told apart by inode: a
    semaphore is mapped under the name that it had before it got its own (glibc, sem_open).
    """

    def __init__(self) -> None:
        self._before = self._entries()
        self._strange: set[int] = set()
        self._first_seen: dict[int, float] = {}
        self._next_look = 0.0
        self._ours: dict[int, Path] = {}

    def look(self) -> None:
        """Take note of what is new. Cheap where nothing is."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + SHM_POLL_S
        if new := self._entries().keys() - self._before.keys() - self._strange - self._ours.keys():
            self.add(_below())
            for inode in new - self._ours.keys():
                if now - self._first_seen.setdefault(inode, now) > SHM_STRANGE_S:
                    self._strange.add(inode)

    def add(self, processes: list[psutil.Process]) -> None:
        """What these processes map is ours, if it was not there before."""
        entries = self._entries()
        mapped = {inode for process in processes for inode in mapped_by(process)}
        self._ours |= {inode: entries[inode] for inode in mapped & entries.keys() - self._before.keys()}

    def remove(self) -> list[str]:
        """Remove what is left of ours: its names."""
        left = sorted(path for inode, path in self._entries().items() if self._ours.get(inode) == path)
        for path in left:
            path.unlink(missing_ok=True)
        return [str(path) for path in left]

    @staticmethod
    def _entries() -> dict[int, Path]:
        """inode → path."""
        if not SHM.is_dir():
            return {}
        with os.scandir(SHM) as found:
            return {entry.inode(): Path(entry.path) for entry in found}


def mapped_by(process: psutil.Process) -> set[int]:
    """Inodes of the shared memory that a process maps; none for one that has ended in the meantime."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if " /dev/shm/" in line}


def _reap() -> None:
    """Collect children that ended. The subreaper inherits all orphans."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _end_all(shared: SharedMemory) -> list[str]:
    """End everything below, first politely: the names of what was there. Returns once all of it has been reaped."""
    left = _below()
    names = [_name(p) for p in left]
    shared.add(left)
    for process in left:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while _remain() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    while _remain():
        left = _below()
        shared.add(left)
        for process in left:
            _signal(process, signal.SIGKILL)
        time.sleep(POLL_S)
    return names


def _remain() -> bool:
    """Is anything below us, zombies included? A zombie may have threads that still hold its ports."""
    _reap()
    return bool(psutil.Process().children(recursive=True))


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _keep_more_logs(scratch: Path, pattern: str, keep: Path) -> None:
    into = keep / pattern.partition("/")[0]
    for logs in scratch.glob(pattern) if pattern else ():
        try:
            shutil.copytree(logs, into, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", "events"))
        except OSError as e:  # a full disk, say: what was copied stays, and the scratch folder goes all the same
            print(f"[supervisor] {logs} was not kept whole: {e}", file=sys.stderr)  # noqa: T201


def supervise(job: Job) -> Farewell:
    """Run the job to its end, or until standard input closes."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the lifeline decides, so that cleaning up is never cut short
    exit_code = None
    shared = SharedMemory()
    try:
        host = _started(job)
        if host is not None:
            exit_code = _until_ended(host, shared)
    finally:
        killed = _end_all(shared)
        removed = shared.remove()
        if removed:
            with Path(job.log).open("a") as log:
                print(f"[supervisor] shared memory was left behind and is removed: {', '.join(removed)}", file=log)
        scratch = Path(job.scratch)
        _keep_more_logs(scratch, job.more_logs, Path(job.keep))
        shutil.rmtree(scratch, ignore_errors=True)
    return Farewell(exit_code=exit_code, killed=killed, shared_memory=removed)


def _started(job: Job) -> subprocess.Popen[bytes] | None:
    """The host, or None where it cannot be run at all: the log says why."""
    with Path(job.log).open("ab") as log:
        try:
            host = subprocess.Popen(
                job.command,
                env=job.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - this process has no threads
            )
        except OSError as e:
            log.write(f"[supervisor] {job.command[0]} cannot be run: {e}\n".encode())
            return None
    _yield_to_driver(host.pid)
    return host


def _until_ended(host: subprocess.Popen[bytes], shared: SharedMemory) -> int | None:
    """Wait for the host's end: its exit code. None if the lifeline closed first."""
    while host.poll() is None:
        shared.look()
        readable, _, _ = select.select([sys.stdin.buffer], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return None
    return host.returncode


def main() -> None:
    """Entry point: the job is the only argument, as JSON."""
    farewell = supervise(msgspec.json.decode(sys.argv[1], type=Job))
    try:
        print(msgspec.json.encode(farewell).decode(), flush=True)  # noqa: T201
    except BrokenPipeError:
        os._exit(0)  # the driver is gone: nobody is left to tell


if __name__ == "__main__":
    main()
