"""The traits of SkyRL's releases. A release has a row if it changed something for the adapters, which serve all releases.

To add a release, add its row here, its target and its lock files. A release without a row has the traits of the newest row
before it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from packaging.version import InvalidVersion, Version

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
SENDERS = "backends/skyrl_train/weight_sync/weight_senders.py"
EXPERTS = "enable_return_routed_experts"
"""The engine option that makes answers include their routed experts."""
TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
"""Options with which the OpenAI address takes a chat that leaves the choice among its tools to the model (vLLM documentation, Tool
Calling; SkyRL #322)."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """Traits of the releases from `since` on."""

    since: str
    file: str = ""
    """File below the package `skyrl` that a source tree has from these traits on. Its version changes later, with the release."""
    own_router: bool
    """True if the router is SkyRL's `InferenceRouter`, in the client's process. Otherwise it is vllm-router, in its own process."""
    own_groups: bool
    """True if the caller starts each `ServerGroup`, which numbers all servers and always takes the executor "ray"."""
    engine_options: tuple[str, ...]
    """Engine options that the configuration has and both stacks pass on."""
    sync_by_extension: bool
    """True if SkyRL's worker extension receives the HTTP stack's weights, as in legacy. Otherwise vLLM's weight transfer does."""
    packed: bool
    """True if a broadcast sends whole chunks. Otherwise it sends one parameter at a time."""
    client_tokenizes: bool
    """True if the HTTP client takes a tokenizer, the number of data-parallel ranks, and whether to return experts."""
    legacy_pause_aborts: bool
    """True if legacy's pause() aborts after a grace period and its client continues requests. Otherwise it is vLLM's keep mode."""
    pause_modes: Mapping[str, str] | None
    """vLLM's pause modes → the HTTP client's. None: the names are the same, and clear_cache is an argument."""
    sizes: bool
    """True if get_world_size() returns a pair: the total over all servers, and the size of each."""
    resolved_placement: bool
    """True if engines take a `ResolvedPlacementGroup`."""
    extended_servers: bool
    """True if a server that was started on its own needs SkyRL's worker extension to take the HTTP stack's weights."""
    update_group_option: bool = True
    """True if the configuration has `override_existing_update_group`."""
    adapters_in_requests: bool = False
    """True if adapters are loaded under names, and a request names its own. Otherwise a client has one active adapter."""
    counts_syncs: bool = False
    """True if the client counts completed syncs, and the trainer tells it of each."""
    server: str = "skyrl.backends.skyrl_train.inference_engines.vllm.vllm_server"
    """Module of the standalone server."""
    extension: str = "skyrl.backends.skyrl_train.inference_servers.vllm_worker.WorkerWrap"
    """SkyRL's worker extension for external servers."""
    trainer_engine: bool = False
    """True if vLLM's trainer engine sends weights. Otherwise SkyRL's transfer strategy does."""
    trainers_code: tuple[str, ...] = (
        "skyrl.backends.skyrl_train.weight_sync.broadcast_strategy",
        "skyrl.backends.skyrl_train.weight_sync.cuda_ipc_strategy",
        "skyrl.backends.skyrl_train.workers.worker",
    )
    """Modules of the trainer's side of a weight sync, which both stacks have."""
    endpoints: tuple[str, ...]
    """Endpoints that the HTTP client calls on servers, in addition to those of both clients."""


RELEASES = [
    Release(
        since="0.1.0",
        own_router=True,
        own_groups=True,
        engine_options=(),
        sync_by_extension=True,
        extended_servers=True,
        packed=False,
        client_tokenizes=False,
        legacy_pause_aborts=True,
        pause_modes={"abort": "abort", "wait": "finish"},
        sizes=False,
        resolved_placement=False,
        # SkyRL's own server actor has the last four; an external server lacks them.
        endpoints=(
            "/inference/v1/generate",
            "/tokenize",
            "/detokenize",
            "/is_paused",
            "/get_server_info",
            "/init_weight_transfer",
            "/update_weights_skyrl",
            "/finalize_weight_update",
        ),
    ),
    Release(
        since="0.2.0",
        own_router=False,
        own_groups=False,
        engine_options=("distributed_executor_backend", EXPERTS),
        sync_by_extension=False,
        extended_servers=False,
        packed=True,
        client_tokenizes=True,
        legacy_pause_aborts=False,
        pause_modes=None,
        sizes=True,
        resolved_placement=True,
        endpoints=(
            "/inference/v1/generate",
            "/skyrl/v1/generate",
            "/tokenize",
            "/detokenize",
            "/is_paused",
            "/get_world_size",
            "/collective_rpc",
            "/init_weight_transfer_engine",
            "/update_weights",
        ),
    ),
]
RELEASES.append(
    replace(
        RELEASES[-1],
        since="0.3.0",
        extended_servers=True,
        update_group_option=False,
        adapters_in_requests=True,
        counts_syncs=True,
        server="skyrl.backends.skyrl_train.inference_servers.vllm_server_actor",
        extension="skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap",
    )
)
RELEASES.append(
    replace(
        RELEASES[-1],
        since="0.4.0",
        file=SENDERS,
        trainer_engine=True,
        trainers_code=(
            "skyrl.backends.skyrl_train.weight_sync.sources",
            "skyrl.backends.skyrl_train.weight_sync.weight_senders",
            "skyrl.backends.skyrl_train.workers.worker",
        ),
    )
)


@cache
def installed() -> Release:
    """The traits of the installed release. A checkout without a version has the newest row's traits, and so has a newer release."""
    try:
        version = Version(importlib.metadata.version("skyrl"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return RELEASES[-1]
    package = importlib.util.find_spec("skyrl")
    return of(version, Path(package.origin).parent if package is not None and package.origin else None)


def of(version: Version, package: Path | None) -> Release:
    """The traits of a version. `package`: folder of the package, which may have the traits of a release to come."""
    before = [
        one
        for one in RELEASES
        if Version(one.since) <= version or (package is not None and one.file and (package / one.file).is_file())
    ]
    return before[-1] if before else RELEASES[0]


def assumed(version: str) -> str | None:
    """What to say of a SkyRL that is newer than the newest row, or has no readable version; None for one that has been described."""
    newest = Version(RELEASES[-1].since)
    try:
        if Version(version).release[:2] <= newest.release[:2]:
            return None
    except InvalidVersion:
        pass
    return f"SkyRL {version} has no row in backends/skyrl/release.py: it is started as {newest} is"
