"""How much longer a large checkpoint may take than the tiny model: seconds to add to a deadline, by the size of its weights.

It is for work that goes over all weights once: load, make a policy version, send, hash. How fast engines make tokens is measured
instead (`harness.driving.stack.CANARY_S`).
"""

from __future__ import annotations

import os
from pathlib import Path

BYTES_PER_S = 5e6
"""As slow as a busy machine of two cores may be. SmolLM2 (540 MB) gets 108 s more."""


def for_weights(model_path: str | os.PathLike[str]) -> float:
    """Seconds; none for a folder without weights."""
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors")) / BYTES_PER_S
