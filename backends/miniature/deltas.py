"""What changed between two versions of a tensor, bit by bit."""

from __future__ import annotations

import numpy as np

from backends.miniature import model

Deltas = list[dict[str, model.Array]]
"""A published version in pieces: name → the bits that differ from those of the version before it."""


def between(old: model.Array, new: model.Array) -> model.Array:
    """The bits that differ."""
    return _bits(old) ^ _bits(new.astype(old.dtype))


def applied(tensor: model.Array, delta: model.Array) -> model.Array:
    """The tensor with these bits changed."""
    return (_bits(tensor) ^ delta).view(tensor.dtype)


def _bits(tensor: model.Array) -> model.Array:
    return np.ascontiguousarray(tensor).view(np.uint8)
