"""Another stack, in a process of its own: it cannot start, it ends, or it dies with its process, and the host looks at what is left.

The process (`python -m backends.skyrl.other`) starts the stack as the host does. It is kept for the next call unless it has ended.
What is left of a stack the host reads itself: from the processes and from the ports at which they listen. Above the process stands
another one that takes over orphans and collects the dead, as init does: Ray's workers take a dead raylet that nobody collects for a
living one.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from harness.contract import messages
from harness.driving.host import load_adapter
from harness.driving.supervisor import PR_SET_CHILD_SUBREAPER
from harness.machine import ports
from harness.machine.processes import kill_trees

ENVIRONMENT = dict(os.environ)
"""Of this process when it began. What a start sets in it is not handed on."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".safetensors.index.json")
"""Endings of the files that hold a checkpoint's weights, or list them."""
REFUSED = {"max_model_len": 10**9}
"""An option that vLLM refuses: no model has this length."""
LOOK_S = 0.25
PREPARE_S = 240.0
"""Seconds that the process may take for its imports, and for Ray."""

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own processes, which end with those that need them."""
OF_RAY = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray-dashboard", "/ray/")
"""What stands in the titles of Ray's own processes. They are no part of a stack."""
RAY, ROUTER = "Ray", "router"
ABOVE = "above"
"""The argument of the process that stands above."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the process says at each step."""

    error: str | None = None
    took_s: float = 0.0
    names: list[str] = []
    router: int | None = None
    """The router's pid."""
    pid: int = 0
    """The process's own."""
    forked: list[int] = []
    """Pids of servers that the harness forked: how they end is not the stack's doing."""
    gpus: float | None = None
    """Accelerators that Ray has to give."""


class Owner:
    """The process, as the host sees it."""

    def __init__(self, request: messages.StartRequest, adapter: type, number: int) -> None:
        scratch, logs = Path(request.scratch) / f"o{number}", Path(request.logs) / f"other-{number}"
        for folder in (scratch, logs):
            folder.mkdir(parents=True)
        self._request = msgspec.structs.replace(
            request,
            topology=msgspec.structs.replace(request.topology, engines=1),
            scratch=str(scratch),
            logs=str(logs),
            fault_taps=False,
            code_swaps=None,
        )
        self._adapter = f"{adapter.__module__}:{adapter.__qualname__}"
        self._above: subprocess.Popen[bytes]
        self._process: psutil.Process
        self._seen: dict[psutil.Process, str] = {}
        """Every process that was ever below this one → its kind."""
        self._before: set[psutil.Process] = set()
        self._ports_before: set[int] = set()
        self._bound: set[int] = set()
        """Ports at which the stack listened."""
        self._told = Told()

    @property
    def lives(self) -> bool:
        return _title(self._process) is not None

    async def prepare(self) -> None:
        """Raises RuntimeError if the process does not come to the point where a stack can start."""
        ours, its = socket.socketpair()
        log = Path(self._request.logs) / "process.log"
        with its, log.open("ab") as output:
            self._above = subprocess.Popen(
                [sys.executable, "-m", "backends.skyrl.other", str(its.fileno()), self._adapter, ABOVE],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._reads, self._writes = await asyncio.open_unix_connection(sock=ours)
        self._told = await self._ask(msgspec.to_builtins(self._request), PREPARE_S) or Told(error="no answer")
        if self._told.error is not None:
            self._clear()
            raise RuntimeError(f"another stack's process does not come up: {self._told.error}; see {log}")
        self._process = psutil.Process(self._told.pid)
        self._before = self._new()
        self._ports_before = self._listened()

    async def live(self, request: messages.OtherStackRequest) -> messages.OtherStackResult:
        """One life of a stack."""
        up = await self._ask({"begin": request.wrong}, request.start_s)
        if up is None:
            self._clear()
            return messages.OtherStackResult(in_time=False, took_s=request.start_s)
        self._told = up
        new = self._new()
        self._bound = self._listened() - self._ports_before
        result = messages.OtherStackResult(
            error=up.error, names=up.names, took_s=up.took_s, ran=self._remnants(new, self._bound)
        )
        ended = Told()
        left: list[messages.Remnant] = []
        if request.then == "killed":
            self._process.send_signal(signal.SIGKILL)
        else:
            ended = await self._ask({"end": request.end_s}, 2 * request.end_s) or Told(error="it does not end in time")
            left = await self._gone(self._new, request.end_s)
            if ended.gpus is not None:
                left.append(messages.Remnant(kind="reservation", what=f"Ray lacks {ended.gpus:g} accelerators"))
        outlived: list[messages.Remnant] = []
        if request.then != "stays":
            self._writes.close()
            outlived = await self._gone(self._new_and_itself, request.end_s)
            self._clear()
        return msgspec.structs.replace(result, end_error=ended.error, left=left, outlived=outlived)

    def _clear(self) -> None:
        """Kill the process and all that it has started: the run's own stack shares the machine with it."""
        kill_trees([self._above.pid])
        self._above.wait()

    async def _ask(self, word: Any, within_s: float) -> Told | None:
        """What the process answers; None without an answer in time, or if it has ended."""
        self._writes.write(msgspec.json.encode(word) + b"\n")
        try:
            line = await asyncio.wait_for(self._reads.readline(), within_s)
        except (TimeoutError, ConnectionError):
            return None
        return msgspec.json.decode(line, type=Told) if line else None

    # --- what is there

    def _new(self) -> set[psutil.Process]:
        """The processes since `prepare`, without Ray's own: it ends them itself."""
        for process in psutil.Process(self._above.pid).children(recursive=True):
            if process.pid != self._told.pid and (kind := self._kind(process)) is not None:
                self._seen[process] = kind
        return {process for process, kind in self._seen.items() if kind != RAY} - self._before

    def _new_and_itself(self) -> set[psutil.Process]:
        """The same, and the process if it has not ended."""
        self._seen |= {self._process: "owner"}
        return self._new() | {self._process}

    def _kind(self, process: psutil.Process) -> str | None:
        """None for a process that is not the stack's own, and for one that has ended."""
        title = _title(process)
        if title is None or any(helper in title for helper in HELPERS) or self._is_harness(process):
            return None
        if process.pid == self._told.router:
            return ROUTER
        if "VLLM::" in title:
            return "engine"
        if any(sign in title for sign in OF_RAY):
            return RAY
        return "server" if title.startswith("ray::") else "process"

    def _is_harness(self, process: psutil.Process) -> bool:
        """True for a server that the harness forked, and for what such a server started."""
        try:
            return bool({process.pid, *(above.pid for above in process.parents())} & set(self._told.forked))
        except psutil.Error:
            return False

    def _listened(self) -> set[int]:
        """Ports at which the process listens, or one of the stack's own."""
        own = {self._told.pid, *(process.pid for process, kind in self._seen.items() if kind != RAY)}
        return {port for port, pid in ports.listened().items() if pid in own}

    def _remnants(self, processes: Collection[psutil.Process], bound: Collection[int]) -> list[messages.Remnant]:
        """Those of the processes that live, and those of the ports at which any other process listens."""
        titles = {process: title for process in processes if (title := _title(process)) is not None}
        found = [
            messages.Remnant(kind=self._seen[process], what=f"pid {process.pid}: {title[:120]}")
            for process, title in titles.items()
        ]
        named = {process.pid for process in titles}
        return found + [
            messages.Remnant(kind="address", what=f"port {port}, pid {pid}")
            for port, pid in ports.listened().items()
            if port in bound and pid not in named
        ]

    async def _gone(self, which: Callable[[], set[psutil.Process]], within_s: float) -> list[messages.Remnant]:
        """What is left of these processes and of the stack's addresses after this time; nothing as soon as nothing is."""
        ends = time.monotonic() + within_s
        while (found := self._remnants(which(), self._bound)) and time.monotonic() < ends:
            await asyncio.sleep(LOOK_S)
        return found


def _title(process: psutil.Process) -> str | None:
    """The command line; None if the process has ended."""
    try:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return " ".join(process.cmdline()).strip() or process.name()
    except psutil.Error:
        return None


# --- in the process


class Keeper:
    """The process's own side: it prepares once, and begins and ends stacks as it is told."""

    def __init__(self, adapter: str) -> None:
        self._prepared = load_adapter(adapter)()
        self._stack: Any = None
        self._up = False
        self._gpus: float | None = None

    async def prepare(self, request: messages.StartRequest) -> Told:
        await self._prepared.prepare(request)
        self._gpus = self._given()
        return Told(pid=os.getpid())

    async def begin(self, wrong: str | None) -> Told:
        """A start, and the answer to a first request."""
        self._stack = stack = copy.copy(self._prepared)
        stack.cfg = copy.deepcopy(stack.cfg)
        names = spoil(stack, wrong)
        said, began = None, time.monotonic()
        try:
            await stack.bring_up()
            await stack.generate(
                messages.GenerateRequest(prompt_token_ids=[[1, 2, 3]], sampling_params={"max_tokens": 1})
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the host tells of it
            said = f"{type(error).__name__}: {error}"
        self._up = said is None
        router = stack.roles().get(ROUTER) if self._up else None
        return Told(
            pid=os.getpid(),
            error=said,
            took_s=time.monotonic() - began,
            names=names,
            router=router,
            forked=stack.forked_servers(),
        )

    async def end(self, within_s: float) -> Told:
        """End a stack that was up by its own methods. Afterwards nothing here refers to it any more."""
        stack, self._stack = self._stack, None
        said = None
        try:
            await (stack.end() if self._up else stack.let_go())
        except Exception as error:  # noqa: BLE001 - the same
            said = f"{type(error).__name__}: {error}"
        del stack
        ends = time.monotonic() + within_s
        while (lacking := self._lacking()) and time.monotonic() < ends:
            await asyncio.sleep(LOOK_S)
        return Told(error=said, gpus=lacking or None)

    def _given(self) -> float | None:
        if self._prepared.request.start != "ray":
            return None
        import ray

        return float(ray.available_resources().get("GPU", 0.0))

    def _lacking(self) -> float:
        """Accelerators that Ray had before the first stack, and has not to give now."""
        gc.collect()
        given = self._given()
        return 0.0 if given is None or self._gpus is None else self._gpus - given


def spoil(stack: Any, wrong: str | None) -> list[str]:
    """Change a stack's configuration so that it cannot start. Returns what its error has to name."""
    if wrong is None:
        return []
    if wrong == "option":
        stack.cfg.generator.inference_engine.engine_init_kwargs |= REFUSED
        return list(REFUSED)
    folder = Path(stack.request.scratch) / wrong.replace(" ", "-")
    if wrong == "no weights":
        shutil.copytree(
            stack.engine_model,
            folder,
            ignore=lambda _, names: [name for name in names if name.endswith(WEIGHTS)],
        )
    stack.engine_model = stack.cfg.trainer.policy.model.path = str(folder)
    return [str(folder)]


async def keep(adapter: str, connection: socket.socket) -> None:
    keeper = Keeper(adapter)
    with connection.makefile("rwb") as talk:

        def say(told: Told) -> None:
            talk.write(msgspec.json.encode(told) + b"\n")
            talk.flush()

        request = msgspec.json.decode(await asyncio.to_thread(talk.readline), type=messages.StartRequest)
        say(await keeper.prepare(request))
        while line := await asyncio.to_thread(talk.readline):
            match json.loads(line):
                case {"begin": wrong}:
                    say(await keeper.begin(wrong))
                case {"end": within_s}:
                    say(await keeper.end(within_s))


def stand_above(*arguments: str) -> None:
    """Run the process as a child, and collect it and every orphan, until nothing is left below."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    subprocess.Popen([sys.executable, "-m", "backends.skyrl.other", *arguments], pass_fds=[int(arguments[0])])
    os.close(int(arguments[0]))
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    descriptor, adapter, *above = sys.argv[1:]
    if above:
        stand_above(descriptor, adapter)
    else:
        asyncio.run(keep(adapter, socket.socket(fileno=int(descriptor))))
