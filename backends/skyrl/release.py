"""The traits of SkyRL's releases: one row per release in which the adapters' work changed. One adapter serves all of them.

To add a release, add its row here, its target and its lock files. A release without a row has the traits of the newest row
before it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from packaging.version import InvalidVersion, Version

EXPERTS = "enable_return_routed_experts"
"""The engine option that makes answers bring their experts."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """What is particular to a release, from `since` on."""

    since: str
    own_router: bool
    """True if the router is SkyRL's `InferenceRouter`, in the client's process. Else it is vllm-router, a process of its own."""
    own_groups: bool
    """True if the caller starts each `ServerGroup`, which numbers all servers and takes the executor "ray" whatever is asked."""
    engine_options: tuple[str, ...]
    """Options of engines that the configuration has and both stacks pass on."""
    sync_by_extension: bool
    """True if the HTTP stack's weights arrive by SkyRL's worker extension, as legacy's do. Else by vLLM's weight transfer."""
    packed: bool
    """True if a broadcast sends whole chunks. Else one parameter at a time."""
    client_tokenizes: bool
    """True if the HTTP client is given a tokenizer, the number of data-parallel ranks, and whether experts come back."""
    legacy_pause_aborts: bool
    """True if legacy's pause() aborts after a grace period, and its client goes on by itself. Else it is vLLM's keep mode."""
    pause_modes: Mapping[str, str] | None
    """vLLM's pause modes → the HTTP client's. None: the same, and clear_cache is an argument."""
    sizes: bool
    """True if get_world_size() gives a pair: over all servers, and of each."""
    resolved_placement: bool
    """True if engines are given a `ResolvedPlacementGroup`."""
    endpoints: tuple[str, ...]
    """What the HTTP client calls at servers, beside what both clients call."""


RELEASES = (
    Release(
        since="0.1.0",
        own_router=True,
        own_groups=True,
        engine_options=(),
        sync_by_extension=True,
        packed=False,
        client_tokenizes=False,
        legacy_pause_aborts=True,
        pause_modes={"abort": "abort", "wait": "finish"},
        sizes=False,
        resolved_placement=False,
        # The last four are on SkyRL's own server actor, not on an external server.
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
)


@cache
def installed() -> Release:
    """The traits of the release in this process's environment. A checkout without a version has the newest row's."""
    try:
        version = Version(importlib.metadata.version("skyrl"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return RELEASES[-1]
    before = [release for release in RELEASES if Version(release.since) <= version]
    return before[-1] if before else RELEASES[0]
