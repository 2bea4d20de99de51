"""Which SkyRL this process holds. One adapter serves all releases that have both stacks; where they differ is said here.

                    0.1.0 (vLLM 0.16)                             0.2.0 (vLLM 0.19)
router              InferenceRouter, in the client's process      VLLMRouter, a process of its own
servers             ServerGroup, executor "ray" whatever is asked create_inference_servers, executor as configured
HTTP weight sync    SkyRL's worker extension, as legacy           vLLM's own weight transfer
broadcast           one parameter at a time                       whole chunks, packed
legacy's pause      abort after a grace period, client goes on    vLLM's keep mode
HTTP pause modes    abort (client goes on), finish                abort (caller goes on), keep, wait
sample()            legacy alone                                  both
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """What adapters ask of the installed release."""

    version: str
    first: bool
    """0.1.x: the left column of the table."""


def installed() -> Release:
    """The release in this process's environment. A checkout without a version counts as the newest that has both stacks."""
    try:
        version = importlib.metadata.version("skyrl")
    except importlib.metadata.PackageNotFoundError:
        version = "0.2.0"
    return Release(version=version, first=version.startswith("0.1."))
