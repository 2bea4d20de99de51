"""vLLM's options for its OpenAI address (vLLM documentation, vllm serve, Frontend)."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from types import ModuleType

from harness.contract.messages import Scalar

PLACES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where the class of these options lies, the latest release first."""


def options() -> dict[str, Scalar]:
    """Name → default of each option that is a number, a switch, a text or None."""
    place = next(found for found in map(_module, PLACES) if found is not None)
    defaults = {field.name: field.default for field in dataclasses.fields(place.FrontendArgs)}
    return {name: default for name, default in defaults.items() if isinstance(default, Scalar)}


def _module(name: str) -> ModuleType | None:
    """None if this release of vLLM has no such module."""
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        if not name.startswith(missing.name or name):
            raise
        return None
