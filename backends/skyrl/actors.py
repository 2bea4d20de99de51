"""Ray actors of both stacks, as shipped but for what the harness must be able to see and where they may listen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backends.vllm.plugin import TAP_DIR

SHIPPED = ".shipped-host"
"""Suffix of a file of the taps' folder, named after a port: where SkyRL's server wanted to bind it."""


def shipped_hosts() -> dict[int, str]:
    """Port → host of every server that the loopback patch bound elsewhere."""
    return {int(path.stem): path.read_text() for path in Path(os.environ[TAP_DIR]).glob(f"*{SHIPPED}")}


def loopback_server_actor() -> type:
    """SkyRL's VLLMServerActor, listening on loopback alone."""
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

    class LoopbackServerActor(VLLMServerActor):
        """Binds to 127.0.0.1; SkyRL sets host="0.0.0.0" in its constructor."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            (Path(os.environ[TAP_DIR]) / f"{self._cli_args.port}{SHIPPED}").write_text(self._cli_args.host)
            self._cli_args.host = "127.0.0.1"

        def _ensure_ray_executor(self) -> None:
            """0.1.0 asks for the executor "ray" here, whatever it is told: refused on CPU. 0.2.0 never calls it."""
            if getattr(self._cli_args, "distributed_executor_backend", None) is None:
                super()._ensure_ray_executor()

    return LoopbackServerActor


def probed_engine_actor() -> Any:
    """SkyRL's AsyncVLLMInferenceEngine as a Ray actor, with one more method: vLLM's own collective_rpc."""
    import ray
    from skyrl.backends.skyrl_train.inference_engines.vllm.vllm_engine import AsyncVLLMInferenceEngine

    class ProbedEngine(AsyncVLLMInferenceEngine):
        """Lets the adapter reach the workers out of band."""

        async def parity_rpc(self, method: str, arguments: dict[str, Any]) -> list[Any]:
            results: list[Any] = await self._get_engine().collective_rpc(method, kwargs=arguments)
            return results

    return ray.remote(ProbedEngine)
