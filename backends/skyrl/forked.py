"""--start fork: SkyRL's server actor as a plain class, one child each, forked from a process that has imported everything.

Seconds instead of a minute. It leaves out Ray, placement groups and ServerGroup; a fork run alone never says that legacy may go.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
from multiprocessing import forkserver
from typing import Any

from backends.skyrl.release import installed
from harness import ports
from harness.errors import StartFailed

START_DEADLINE_S = 180
PRELOAD = "backends.skyrl.warm"
"""Module that the fork server imports once: it imports SkyRL's server actor, and with it vLLM."""


def warm_up() -> None:
    """Start the fork server, which begins to import in the background. Its environment is this process's, now."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()


class ForkedServers:
    """One child process per server."""

    def __init__(self, cli_arguments: Any, count: int) -> None:
        self._arguments = cli_arguments
        self._count = count
        self._children: list[Any] = []

    def start(self) -> list[str]:
        """URLs of the servers, in order, once every one answers. Raises `StartFailed` for one that does not."""
        context = multiprocessing.get_context("forkserver")
        urls: Any = context.Queue()
        # SkyRL looks for free ones from where it is told to start: two stacks that both start at its default would race for one.
        for index, port in enumerate(ports.free(self._count)):
            child = context.Process(
                target=_serve, args=(self._arguments, index, port, urls, dict(os.environ)), name=f"server-{index}"
            )
            child.start()
            self._children.append(child)
        found: dict[int, str] = {}
        while len(found) < self._count:
            try:
                index, url = urls.get(timeout=START_DEADLINE_S)
            except queue.Empty:
                raise StartFailed(
                    f"servers {set(range(self._count)) - set(found)} are not up after {START_DEADLINE_S} s"
                ) from None
            if url.startswith("error: "):
                raise StartFailed(f"server {index}: {url}")
            found[index] = url
        return [found[index] for index in range(self._count)]

    def stop(self) -> None:
        """End the children; what they started is ended by the supervisor."""
        for child in self._children:
            child.terminate()


def _serve(arguments: Any, index: int, port: int, urls: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor as shipped

    from backends.skyrl.actors import loopback_server_actor

    shipped.get_node_ip = lambda: "127.0.0.1"

    async def run() -> None:
        executor = {} if installed().first else {"distributed_executor_backend": "uni"}
        actor = loopback_server_actor()(arguments, start_port=port, server_idx=index, **executor)
        info = await actor.start()
        urls.put((index, info.url))
        await actor._server_task

    try:
        asyncio.run(run())
    except Exception as e:
        urls.put((index, f"error: {type(e).__name__}: {e}"))
        raise
