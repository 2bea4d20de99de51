"""A program like `backends.policies.fsdp2` with two ranks. The second rank fails (version 1) or hangs (version 2)."""

from __future__ import annotations

import threading
from typing import Any

from backends.policies import ranks


def one_rank(held: ranks.Held, rank: int) -> dict[str, Any]:
    if rank == 1 and held.version == 1:
        raise ValueError("this shard is lost")
    if rank == 1:
        threading.Event().wait()
    return held.tensors()


if __name__ == "__main__":
    import torch.distributed  # noqa: F401 - imported once, before the ranks fork

    ranks.main(2, one_rank)
