"""Runs commands as tasks of a Ray cluster: a program for an interpreter that has the cluster's release of Ray.

It imports nothing of the project. Standard input: one JSON object, {"address", "waits_s", "tasks": [{"name", "command", "folder",
"log", "cpus", "gpus"}]}. Standard output: a JSON object per line when something happens to a task:

- {"name", "event": "started", "node"}: it runs on the node with this address;
- {"name", "event": "ended", "status", "seconds"}: exit status of its command;
- {"name", "event": "failed", "reason"}: it did not run, or not to its end.

Every node must see the folders and logs under the same paths. SIGINT interrupts every command once and waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

WITH_ITS_WORKER = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGINT); signal.pthread_sigmask(signal.SIG_SETMASK, []); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Starts a command that is interrupted when the worker dies (`PR_SET_PDEATHSIG`). Ray blocks SIGINT in its workers."""
ENDING_S = 90.0
"""Seconds that an interrupted command may take."""
REACHED_S = 10.0
"""Seconds in which the cluster's head has to take a connection."""
OF_THE_WORKER = ("RAY_", "PYTHONPATH")
"""Variables that Ray sets in its workers begin so. With them a command would join the cluster, or import the worker's packages."""


class Events:
    """What tasks report while they run. An actor."""

    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []

    def put(self, event: dict[str, Any]) -> None:
        self._found.append(event)

    def drain(self) -> list[dict[str, Any]]:
        found, self._found = self._found, []
        return found


def run(task: dict[str, Any], events: Any) -> dict[str, Any]:
    """Run a task's command to its end. A cancelled task interrupts it, and kills it after `ENDING_S`."""
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray cancels by it, and a script's background ignores it
    # Not waited for: while a task waits for Ray, its cores are given to the next one.
    events.put.remote({"name": task["name"], "event": "started", "node": ray.util.get_node_ip_address()})
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_WORKER)}
    Path(task["log"]).parent.mkdir(parents=True, exist_ok=True)
    with Path(task["log"]).open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", WITH_ITS_WORKER, *task["command"]], cwd=task["folder"], env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            while child.poll() is None:
                try:
                    child.wait(0.2)  # a longer wait would hold back the cancellation
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return {"name": task["name"], "event": "ended", "status": child.returncode, "seconds": time.monotonic() - began}


def tell(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class Queue:
    """The tasks that the cluster has not finished."""

    def __init__(self, tasks: list[dict[str, Any]], waits_s: float) -> None:
        self._events = ray.remote(num_cpus=0)(Events).remote()
        self._waits_s, self._moved = waits_s, time.monotonic()
        self._running: set[str] = set()
        largest = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
        self._left = {self._submitted(task, largest): task for task in tasks}

    def _submitted(self, task: dict[str, Any], largest: float) -> Any:
        """A node with fewer cores than a task asks for gives it all that it has."""
        cpus = min(task["cpus"], largest) if largest else task["cpus"]
        return ray.remote(max_retries=0, num_cpus=cpus, num_gpus=task["gpus"])(run).remote(task, self._events)

    def drain(self) -> None:
        """Wait until each task has ended, or no node took one for too long."""
        while self._left:
            done, _ = ray.wait(list(self._left), num_returns=1, timeout=1.0)
            self._tell_started()
            for one in done:
                self._end(one)
            if not self._running and time.monotonic() - self._moved > self._waits_s:
                self._give_up()

    def _tell_started(self) -> None:
        names = {task["name"] for task in self._left.values()}
        for event in ray.get(self._events.drain.remote()):
            self._running |= {event["name"]} & names
            self._moved = time.monotonic()
            tell(event)

    def _end(self, one: Any, reason: str = "") -> None:
        name = self._left.pop(one)["name"]
        self._running.discard(name)
        self._moved = time.monotonic()
        try:
            tell(ray.get(one))
        except (ray.exceptions.RayError, KeyboardInterrupt) as e:
            tell({"name": name, "event": "failed", "reason": reason or str(e).strip().splitlines()[-1]})

    def _give_up(self) -> None:
        for one, task in list(self._left.items()):
            ray.cancel(one)
            self._end(one, f"no node had {task['gpus']} GPUs and {task['cpus']} CPUs for it in {self._waits_s:.0f} s")

    def cancel(self) -> None:
        """Interrupt what runs, take back what waits."""
        for one in self._left:
            ray.cancel(one)
        for one in list(self._left):
            ray.wait([one], timeout=ENDING_S + 10)
            self._end(one, "interrupted")


def reach(address: str) -> None:
    """Raises OSError if nothing listens at a host and port: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=REACHED_S).close()


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    order = json.loads(sys.stdin.readline())
    reach(order["address"])
    ray.init(address=order["address"], log_to_driver=False, logging_level="ERROR")
    queue = Queue(order["tasks"], order["waits_s"])
    try:
        queue.drain()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        queue.cancel()
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
