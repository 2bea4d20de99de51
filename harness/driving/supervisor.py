"""Runs one host and removes all that it leaves, also after a crash, Ctrl-C or a killed driver.

A small process between the driver and a host. It is the host's subreaper (Linux), so that everything the stack starts
stays below it, daemons included. It ends when the host ends, or when its lifeline does. Then it kills what is left, removes
the scratch folder and gives its report as one line of JSON (`Farewell`).

The lifeline of a stack with one driver is the supervisor's standard input (`Inherited`). A kept stack has one driver after the
other (`Reachable`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
SHM = Path("/dev/shm")
SHM_POLL_S = 0.5
SHM_STRANGE_S = 3.0
"""Seconds after which the search for the process behind a new entry stops."""
GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
NICENESS = 10
AUTOGROUP_S = 0.12
"""Seconds between attempts: the kernel takes at most ten autogroup changes per second from one user."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: `command` with `environment`, output into `log`; `scratch` is removed afterwards."""

    command: list[str]
    environment: dict[str, str]
    log: str
    scratch: str
    keep: str
    """Folder into which the supervisor copies more logs before it removes the scratch folder."""
    more_logs: str = ""
    """Pattern of the folders with these logs, below the scratch folder."""
    grace_s: float = GRACE_S
    lifeline: str = ""
    """Path of the socket where one driver after the other holds the lifeline; "": standard input is the only driver's."""
    idle_s: float = 0.0
    """Seconds without a driver after which a stack with such a socket is ended."""


class Farewell(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's report. `exit_code` is the host's (negative: signal; None: it was still running, or never ran)."""

    exit_code: int | None
    killed: list[str]
    """Names of processes that the supervisor had to end."""
    shared_memory: list[str]
    """Paths of shared memory that was left behind and removed."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _yield_to_driver(pid: int) -> None:
    """Give the whole stack a lower scheduling priority than the driver. Inside the stack nothing changes.

    Busy engines on a small machine starve a driver of the same weight for more than a second (measured on 2 cores, Linux
    6.18, autogroup scheduling), so the driver acts too late. Ray lowers its workers in the same way.
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
    """All running processes that the stack started. A process may end during the search."""
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
    """The stack's entries of /dev/shm, found as they appear by the processes that map them.

    An entry's creator and its resource tracker may be gone when it has to be removed. Inodes identify the entries: a
    semaphore is mapped under the name that it had before it got its own (glibc, sem_open).
    """

    def __init__(self) -> None:
        self._before = self._entries()
        self._strange: set[int] = set()
        self._first_seen: dict[int, float] = {}
        self._next_look = 0.0
        self._ours: dict[int, Path] = {}

    def look(self) -> None:
        """Note new entries. Cheap if there are none."""
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
        """Claim the entries that these processes map, except those from before the start."""
        entries = self._entries()
        mapped = {inode for process in processes for inode in mapped_by(process)}
        self._ours |= {inode: entries[inode] for inode in mapped & entries.keys() - self._before.keys()}

    def remove(self) -> list[str]:
        """Remove the claimed entries that are left. Returns their paths."""
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
    """Inodes of the shared memory that a process maps; empty if it has ended in the meantime."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if " /dev/shm/" in line}


class Lifeline(Protocol):
    """The connection to the driver. Without it the stack ends."""

    def cut(self, wait_s: float) -> bool:
        """Wait for news. True if the stack has to end."""

    def say(self, farewell: bytes) -> None:
        """Send the report, if anyone is there to read it."""


class Inherited:
    """Standard input. It closes with the driver, who started this process."""

    def cut(self, wait_s: float) -> bool:
        readable, _, _ = select.select([sys.stdin.buffer], [], [], wait_s)
        return bool(readable) and not os.read(sys.stdin.fileno(), 4096)

    def say(self, farewell: bytes) -> None:
        sys.stdout.buffer.write(farewell)
        sys.stdout.flush()


YOURS, TAKEN, FREE, END = b"yours", b"taken", b"free", b"end"
"""Words of a `Reachable` lifeline. A driver who connects is told YOURS with the stack's condition, and holds it; or TAKEN with
the holder's pid. The holder says FREE with the condition that it leaves, or END and gets the farewell. Each is one line."""


class Reachable:
    """A socket that one driver at a time holds.

    The stack ends if its holder says so or goes without a word, or if there has been no holder for `idle_s` seconds.
    """

    def __init__(self, path: str, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since = time.monotonic()
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(path)
        self._door.listen()
        self._holder: socket.socket | None = None
        self._pid = 0
        self._heard = self._condition = b""

    def cut(self, wait_s: float) -> bool:
        if self._holder is None and time.monotonic() > self._since + self._idle_s:
            return True
        readable, _, _ = select.select([self._door, *([self._holder] if self._holder else [])], [], [], wait_s)
        ends = self._holder in readable and self._listen(self._holder)
        if self._door in readable:
            self._admit(self._door.accept()[0])
        return ends

    def _admit(self, driver: socket.socket) -> None:
        free = self._holder is None
        with contextlib.suppress(OSError):  # a driver that has gone already is noticed as a holder
            driver.sendall(b"%s %s\n" % ((YOURS, self._condition) if free else (TAKEN, str(self._pid).encode())))
        if free:
            self._holder = driver
            self._pid = int.from_bytes(driver.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        else:
            driver.close()

    def _listen(self, holder: socket.socket) -> bool:
        """True if the stack has to end."""
        try:
            said = holder.recv(65_536)
        except OSError:
            return True
        self._heard += said
        if said and not self._heard.endswith(b"\n"):
            return False
        word, _, condition = self._heard.rstrip(b"\n").partition(b" ")
        if word != FREE:
            return True
        holder.close()
        self._holder, self._condition, self._heard, self._since = None, condition, b"", time.monotonic()
        return False

    def say(self, farewell: bytes) -> None:
        self._door.close()
        if self._holder is not None:
            self._holder.sendall(farewell)  # the connection ends with this process


def _reap() -> None:
    """Collect children that ended. The subreaper inherits all orphans."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _end_all(shared: SharedMemory, grace_s: float) -> list[str]:
    """End all descendants, first with SIGTERM, and reap them. Returns their names."""
    left = _below()
    names = [_name(p) for p in left]
    shared.add(left)
    for process in left:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
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
    """True if any descendant is left, zombies included. A zombie may have threads that still hold its ports."""
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
        except OSError as e:  # for example a full disk: copied files stay, and the scratch folder is removed anyway
            print(f"[supervisor] {logs} was not kept whole: {e}", file=sys.stderr)  # noqa: T201


def supervise(job: Job, lifeline: Lifeline) -> Farewell:
    """Run the job to its end, or to that of the lifeline."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the lifeline ends it, so that no signal cuts the clean-up short
    exit_code = None
    shared = SharedMemory()
    try:
        host = _started(job)
        if host is not None:
            exit_code = _until_ended(host, shared, lifeline)
    finally:
        killed = _end_all(shared, job.grace_s)
        removed = shared.remove()
        if removed:
            with Path(job.log).open("a") as log:
                print(f"[supervisor] shared memory was left behind and is removed: {', '.join(removed)}", file=log)
        scratch = Path(job.scratch)
        _keep_more_logs(scratch, job.more_logs, Path(job.keep))
        shutil.rmtree(scratch, ignore_errors=True)
    return Farewell(exit_code=exit_code, killed=killed, shared_memory=removed)


def _started(job: Job) -> subprocess.Popen[bytes] | None:
    """Start the host. Returns None if it cannot be run; the log says why."""
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


def _until_ended(host: subprocess.Popen[bytes], shared: SharedMemory, lifeline: Lifeline) -> int | None:
    """Wait for the host's end. Returns its exit code, or None if the lifeline was cut first."""
    while host.poll() is None:
        shared.look()
        if lifeline.cut(POLL_S):
            return None
    return host.returncode


def main() -> None:
    """Entry point: the job is the only argument, as JSON."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    lifeline = Reachable(job.lifeline, job.idle_s) if job.lifeline else Inherited()
    farewell = supervise(job, lifeline)
    try:
        lifeline.say(msgspec.json.encode(farewell) + b"\n")
    except OSError:
        os._exit(0)  # the driver is gone


if __name__ == "__main__":
    main()
