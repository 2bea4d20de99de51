"""vLLM general plugin (entry point in plugin_site): loaded by vLLM itself in every process of an engine.

What it does is decided by the environment that the adapter set: `PARITY_TAP_DIR` switches the engine tap on,
`PARITY_PATCHES` names the patches to apply, separated by commas. Without these it does nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

TAP_DIR = "PARITY_TAP_DIR"
PATCHES = "PARITY_PATCHES"


def register() -> None:
    """Called by vLLM, possibly several times a process."""
    folder = os.environ.get(TAP_DIR)
    if folder is None:
        return
    from backends.vllm import engine_tap, patches, probes

    probes.install()
    engine_tap.install(Path(folder))
    for name in filter(None, os.environ.get(PATCHES, "").split(",")):
        patches.BY_NAME[name].apply()
