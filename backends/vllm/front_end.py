"""vLLM's options for its OpenAI address (vLLM documentation, vllm serve, Frontend)."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from importlib.util import find_spec

from harness.contract.messages import Scalar

PLACES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where the class of these options lies, the latest release first."""
CLASSES = ("BaseFrontendArgs", "FrontendArgs")
ADDRESS = frozenset({"host", "port", "uds"})
"""Where it listens, which whoever starts the servers chooses."""


def options() -> dict[str, Scalar]:
    """Name → default of each option that is a number, a switch, a text or None."""
    place = import_module(next(place for place in PLACES if find_spec(place)))
    kind = next(getattr(place, name) for name in CLASSES if hasattr(place, name))
    defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in ADDRESS}
    return {name: default for name, default in defaults.items() if isinstance(default, Scalar)}
