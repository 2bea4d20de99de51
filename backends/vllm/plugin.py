"""vLLM general plugin (entry point in plugin_site): vLLM loads it in every process of an engine.

The adapter controls it through the environment: `PARITY_TAP_DIR` switches the plugin and its engine tap on, `PARITY_PATCHES` names
the patches to apply, separated by commas. Without `PARITY_TAP_DIR` it does nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

TAP_DIR = "PARITY_TAP_DIR"
PATCHES = "PARITY_PATCHES"


def register() -> None:
    """The plugin's entry point. vLLM may call it several times per process."""
    folder = os.environ.get(TAP_DIR)
    if folder is None:
        return
    from backends.vllm import engine_tap, patches, probes

    probes.install()
    engine_tap.install(Path(folder))
    for name in filter(None, os.environ.get(PATCHES, "").split(",")):
        patches.BY_NAME[name].apply()
