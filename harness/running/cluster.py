"""Runs commands as tasks of a Ray cluster, each with the resources that it needs. `backends/cluster/tasks.py` speaks to it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, final

import msgspec

from harness import PROJECT
from harness.contract.errors import UsageError
from harness.driving.process import log_tail
from harness.running import child

PROGRAM = PROJECT / "backends" / "cluster" / "tasks.py"
CANCEL_S = 30.0
"""Seconds that the cluster may take to cancel tasks, beside what their commands take to end."""
WAITS_S = 900.0
"""Seconds in which some node has to take a task while none runs: a cluster that grows starts a node in minutes."""


@final
class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A command with the resources that it needs. Its folder and its log lie where every node sees them."""

    name: str
    command: list[str]
    folder: Path
    log: Path
    cpus: int
    gpus: int


@final
class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a task."""

    name: str
    event: Literal["started", "ended", "failed"]
    node: str = ""
    """Address of the node that it runs on."""
    status: int = 0
    """Exit status of the command that ended."""
    seconds: float = 0.0
    reason: str = ""
    """Why it failed: it did not run, or not to its end."""


@final
class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray cluster."""

    address: str
    """As `ray.init` takes it: "auto", "10.0.0.1:6379"."""
    python: Path
    """An interpreter with the cluster's releases of Ray and Python."""
    engine: Literal["cpu", "cuda"]
    """Where engines compute on the cluster's nodes."""

    def run(self, tasks: Sequence[Task], log: Path, *, waits_s: float = WAITS_S) -> Iterator[Event]:
        """Run the tasks, as many at once as the cluster has resources for. `log` gets what the program says on standard error.

        On Ctrl-C every command is interrupted, and waited for. Raises UsageError if the cluster is not reached.
        """
        order = {"address": self.address, "waits_s": waits_s, "tasks": msgspec.to_builtins(tasks, enc_hook=str)}
        open_tasks = {task.name for task in tasks}
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                [self.python, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            ) as program,
        ):  # fmt: skip
            assert program.stdin is not None
            assert program.stdout is not None
            try:
                with suppress(BrokenPipeError), program.stdin as given:  # it ended at once: its log says why
                    given.write(json.dumps(order).encode() + b"\n")
                for line in program.stdout:
                    event = msgspec.json.decode(line, type=Event)
                    open_tasks -= {event.name} if event.event != "started" else set()
                    yield event
                program.wait()
            except BaseException:
                child.end(program, child.ENDING_S + CANCEL_S)
                raise
        if open_tasks:
            last = (log_tail(log).strip().splitlines() or ["it said nothing"])[-1]
            raise UsageError(
                f"the Ray cluster at {self.address} ran {len(tasks) - len(open_tasks)} of {len(tasks)} tasks: {last}",
                next_step=f"see {log}. Is it up, and has {self.python} its releases of Ray and Python (--ray-python)?",
            )
