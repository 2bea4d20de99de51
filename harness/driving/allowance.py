"""Seconds to add to a deadline for the size of a checkpoint's weights.

For work that reads all weights once: load, make a policy version, send, hash. The speed of generation is measured instead
(`harness.driving.stack.CANARY_S`).
"""

from __future__ import annotations

import os
from pathlib import Path

BYTES_PER_S = 5e6
"""Bytes of weights per second on a busy machine with two cores. SmolLM2 (540 MB) gets 108 s more."""


def for_weights(model_path: str | os.PathLike[str]) -> float:
    """Seconds to add; 0 for a folder without weights."""
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors")) / BYTES_PER_S
