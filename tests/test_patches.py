"""Patches of vLLM: a process applies them by name, so each has to be known by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backends.vllm import patches


def _within(value: Any) -> Iterator[patches.Patch]:
    if isinstance(value, patches.Patch):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ():
        yield from _within(one)


def test_every_patch_is_known_by_its_name():
    made = {patch for name, value in vars(patches).items() if name != "BY_NAME" for patch in _within(value)}
    assert made == set(patches.BY_NAME.values())
