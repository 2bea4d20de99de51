"""Ray actors of both stacks, changed only to give the harness access and to bind to loopback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backends.vllm.plugin import TAP_DIR

SHIPPED = ".shipped-host"
"""Suffix of a file in the taps' folder that is named after a port. It holds the host to which SkyRL's server wanted to bind."""


def shipped_hosts() -> dict[int, str]:
    """Port → SkyRL's own host, for every server that the loopback patch moved."""
    return {int(path.stem): path.read_text() for path in Path(os.environ[TAP_DIR]).glob(f"*{SHIPPED}")}


def loopback_server_actor() -> type:
    """SkyRL's VLLMServerActor, listening on loopback only."""
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

    class LoopbackServerActor(VLLMServerActor):
        """Binds to 127.0.0.1; SkyRL sets host="0.0.0.0" in its constructor."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            (Path(os.environ[TAP_DIR]) / f"{self._cli_args.port}{SHIPPED}").write_text(self._cli_args.host)
            self._cli_args.host = "127.0.0.1"

        def _ensure_ray_executor(self) -> None:
            """Keeps a configured executor. 0.1.0 always asks for "ray" here, which vLLM refuses on CPU; 0.2.0 never calls it."""
            if getattr(self._cli_args, "distributed_executor_backend", None) is None:
                super()._ensure_ray_executor()

    return LoopbackServerActor


def probed_engine_actor() -> Any:
    """SkyRL's AsyncVLLMInferenceEngine as a Ray actor, with an added method for vLLM's own collective_rpc."""
    import ray
    from skyrl.backends.skyrl_train.inference_engines.vllm.vllm_engine import AsyncVLLMInferenceEngine

    class ProbedEngine(AsyncVLLMInferenceEngine):
        """Gives the adapter out-of-band access to the workers."""

        async def parity_rpc(self, method: str, arguments: dict[str, Any]) -> list[Any]:
            results: list[Any] = await self._get_engine().collective_rpc(method, kwargs=arguments)
            return results

    return ray.remote(ProbedEngine)
