"""SkyRL's configuration, made of values by key. Written for skyrl 0.1.0 to 0.4.0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from harness.contract.messages import OverrideResult, Scalar

SECTION = "generator"
"""The section of the configuration that the rollout stack reads."""


def overridden(overrides: dict[str, Scalar | list[str]], *, validated: bool = False) -> OverrideResult:
    """The configuration with these overrides. Raises what SkyRL raises about one, with `validated` also what its entry point does.
    Sampling parameters are made of it as SkyRL's trainers make them for each batch."""
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.evaluate import get_sampling_params_for_backend

    cfg = SkyRLTrainConfig.from_cli_overrides(dict(overrides)) if overrides else SkyRLTrainConfig()
    if validated:
        from skyrl.train.utils import validate_cfg

        validate_cfg(cfg)
    found = dict(_leaves(getattr(cfg, SECTION), SECTION))
    sampling = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    return OverrideResult(
        values={key: found[key] for key in overrides or found if key in found},
        sampling={name: value for name, value in sampling.items() if isinstance(value, Scalar)},
    )


def _leaves(section: Any, at: str) -> Iterator[tuple[str, Scalar]]:
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), f"{at}.{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, key)
        elif isinstance(value, Scalar):
            yield key, value
