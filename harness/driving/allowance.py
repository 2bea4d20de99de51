"""Seconds to add to a deadline for the size of a checkpoint's weights.

For work that reads all weights once: load, make a policy version, send, hash. The speed of generation is measured instead
(`harness.driving.stack.CANARY_S`).
"""

from __future__ import annotations

import os
from pathlib import Path

BYTES_PER_S = 5e6
"""Bytes of weights per second on a busy machine with two cores. SmolLM2 (540 MB) gets 108 s more."""
LARGE = 50_000_000
"""Bytes of weights. A CPU takes tens of milliseconds to generate a token with a model of this size or more."""


def for_weights(model_path: str | os.PathLike[str]) -> float:
    """Seconds to add; 0 for a folder without weights."""
    return _bytes(model_path) / BYTES_PER_S


def is_large(model_path: str | os.PathLike[str]) -> bool:
    """True if a forward pass takes a CPU long (SmolLM2), False for the project's tiny models."""
    return _bytes(model_path) >= LARGE


def _bytes(model_path: str | os.PathLike[str]) -> int:
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
