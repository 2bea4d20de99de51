"""`backends.policies.megatron_core` with fused tensors cut as if they were not interleaved."""

from __future__ import annotations

from typing import Any

from backends.policies import megatron, megatron_core

_right = megatron.llama_like


def wrong(*given: Any, **more: Any) -> megatron.Sharding:
    """Queries, keys and values one after the other, and likewise gate and up: the first rank has gate, the second has up."""
    sharding = _right(*given, **more)
    return sharding._replace(rules=tuple(rule._replace(groups=1) for rule in sharding.rules))


if __name__ == "__main__":
    megatron.llama_like = wrong
    megatron_core.main()
