"""SkyRL's configuration, made of values by key. Written for skyrl 0.1.0 to 0.4.0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from harness.contract.messages import Scalar

SECTION = "generator"
"""The section of the configuration that the rollout stack reads."""


def values(overrides: dict[str, Scalar]) -> dict[str, Scalar]:
    """Key → value, as `OverrideResult` says. Raises what SkyRL raises about an override."""
    from skyrl.train.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig.from_cli_overrides(dict(overrides)) if overrides else SkyRLTrainConfig()
    found = dict(_leaves(getattr(cfg, SECTION), SECTION))
    return {key: found[key] for key in overrides or found if key in found}


def _leaves(section: Any, at: str) -> Iterator[tuple[str, Scalar]]:
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), f"{at}.{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, key)
        elif isinstance(value, Scalar):
            yield key, value
