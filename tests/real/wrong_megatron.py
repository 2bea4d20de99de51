"""Ranks of Megatron-core whose fused tensors were cut as if nothing were interleaved: a program, as `fixtures.megatron_core` is."""

from __future__ import annotations

from typing import Any

from fixtures import megatron, megatron_core

_right = megatron.llama_like


def wrong(*given: Any, **more: Any) -> megatron.Sharding:
    """Queries, keys and values one behind the other, and so gate and up: the first rank has the one, the second the other."""
    sharding = _right(*given, **more)
    return sharding._replace(rules=tuple(rule._replace(groups=1) for rule in sharding.rules))


if __name__ == "__main__":
    megatron.llama_like = wrong
    megatron_core.main()
