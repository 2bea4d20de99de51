"""--start fork: runs SkyRL's server actor as a plain class, one child per server, forked from a process with all imports done.

A start takes seconds, not a minute. Without Ray, placement groups and ServerGroup, a fork run alone never shows that one stack
may replace another.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from backends.skyrl.release import installed
from harness.contract.devices import VISIBLE, Devices
from harness.contract.errors import StartFailed
from harness.machine import ports

PRELOAD = "backends.skyrl.warm"
"""Module that the fork server imports once. It imports SkyRL's server actor and vLLM."""


def warm_up() -> None:
    """Start the fork server, which begins to import in the background. It inherits this process's current environment."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()


def wait_until_warm(deadline_s: float) -> None:
    """Return once the fork server has imported everything. Raises `StartFailed` after `deadline_s`."""
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join(deadline_s)
    if first.exitcode != 0:
        first.kill()
        raise StartFailed(f"the fork server has not imported vLLM after {deadline_s:.0f} s")


class WithoutSockets(ForkProcess):
    """A forked process that holds none of its parent's connections, as a spawned one: they end when the parent closes them."""

    def run(self) -> None:
        for descriptor in list(Path("/proc/self/fd").iterdir()):
            if descriptor.is_socket():
                os.close(int(descriptor.name))
        super().run()


class ForkedServers:
    """One child process per server. Each data-parallel rank of each engine is a server, in the order of SkyRL's groups."""

    def __init__(
        self,
        cli_arguments: Any,
        engines: int,
        *,
        data_parallel: int,
        executor: str,
        deadline_s: float,
        devices: Devices | None = None,
    ) -> None:
        self._arguments = cli_arguments
        self._ranks = data_parallel
        self._group = engines * data_parallel if installed().own_groups else data_parallel
        """Servers in one of SkyRL's groups, which numbers its servers: all servers (0.1.0), or the ranks of one engine."""
        self._executor = executor
        self._deadline_s = deadline_s
        self._devices = devices
        self._count = engines * data_parallel
        self._children: list[Any] = []

    def start(self) -> list[str]:
        """URLs of the servers, in order, once all are up. Raises `StartFailed` if one fails or is not up in time."""
        context = multiprocessing.get_context("forkserver")
        urls: Any = context.Queue()
        # SkyRL searches for a free port from its start port on: two stacks with the default start port would race for one port.
        chosen = ports.free(self._count)
        for index, port in enumerate(chosen):
            number = index % self._group
            own = {} if self._devices is None else self._devices.visible(index, self._count, os.environ.get(VISIBLE))
            options = {"start_port": port, "server_idx": number, **self._parallel(chosen[index - number])}
            child = context.Process(
                target=_serve,
                args=(self._arguments, index, options, urls, {**os.environ, **own}),
                name=f"server-{index}",
            )
            child.start()
            self._children.append(child)
        found: dict[int, str] = {}
        ends = time.monotonic() + self._deadline_s
        while len(found) < self._count:
            try:
                index, url = urls.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise StartFailed(
                    f"servers {set(range(self._count)) - set(found)} are not up after {self._deadline_s:.0f} s"
                ) from None
            if url.startswith("error: "):
                raise StartFailed(f"server {index}: {url}")
            found[index] = url
        return [found[index] for index in range(self._count)]

    def _parallel(self, first_port: int) -> dict[str, Any]:
        """Options that tell a server's actor about the other ranks. `first_port` is the port of its engine's first rank."""
        if installed().own_groups:
            return {}
        options: dict[str, Any] = {"distributed_executor_backend": self._executor}
        if self._ranks > 1:
            from skyrl.env_vars import SKYRL_VLLM_DP_PORT_OFFSET

            options |= {
                "dp_size": self._ranks,
                "dp_master_address": "127.0.0.1",
                "dp_rpc_port": first_port + SKYRL_VLLM_DP_PORT_OFFSET,
            }
        return options

    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def stop(self) -> None:
        """Terminate the children. The supervisor ends their own child processes."""
        for child in self._children:
            child.terminate()


def _serve(arguments: Any, index: int, options: dict[str, Any], urls: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from ray._private.async_compat import get_new_event_loop
    from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor as shipped

    from backends.skyrl.actors import loopback_server_actor

    shipped.get_node_ip = lambda: "127.0.0.1"

    async def run() -> None:
        actor = loopback_server_actor()(arguments, **options)
        port = actor.get_server_info().port
        if "dp_rpc_port" in options and options["server_idx"] == 0 and port != options["start_port"]:
            raise StartFailed(
                f"rank 0 has moved to port {port}: the other ranks look for it at {options['start_port']}"
            )
        info = await actor.start()
        urls.put((index, info.url))
        await actor._server_task

    try:
        # Ray runs actors on uvloop. asyncio leaves Nagle's algorithm on for vLLM's socket, and each answer waits 40 ms.
        with asyncio.Runner(loop_factory=get_new_event_loop) as runner:
            runner.run(run())
    except Exception as e:
        urls.put((index, f"error: {type(e).__name__}: {e}"))
        raise
