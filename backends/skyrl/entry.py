"""SkyRL's entry point of training, which makes engines, router and client from its configuration. Written for skyrl 0.1.0 to
0.4.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SLEEP_LEVEL = 1
"""SkyRL's default, 2, discards the weights, because its trainer syncs before the first request. Scenarios begin at version 0."""
SLEEP_NOTE = (
    "SkyRL puts colocated engines to sleep as soon as they are up, at level 2; here at level 1, and the adapter wakes them: "
    "scenarios begin with the checkpoint's weights"
)


def experiment(cfg: Any, group: Callable[[], Any] | None = None) -> Any:
    """SkyRL's `BasePPOExp`, whose get_inference_client() is the entry point's. It has no datasets, and its placement group is
    `group`'s, or SkyRL's own without one."""
    from skyrl.train.entrypoints.main_base import BasePPOExp

    class Experiment(BasePPOExp):
        """What a trainer needs besides the inference stack is left out."""

        def get_train_dataset(self) -> None:
            return None

        def get_eval_dataset(self) -> None:
            return None

        def get_colocate_pg(self, *arguments: Any, **named: Any) -> Any:
            return super().get_colocate_pg(*arguments, **named) if group is None else group()

    return Experiment(cfg)


class OwnEnginesError(RuntimeError):
    """The entry point starts engines although its configuration has the addresses of servers. They are not started."""

    def __init__(self) -> None:
        super().__init__("the entry point starts engines of its own beside the servers that it is told of")


def name_servers(cfg: Any, addresses: dict[str, Any]) -> None:
    """Give the configuration's inference engines these keys. Raises what SkyRL raises about one."""
    from skyrl.train.config import SkyRLTrainConfig

    prefix = "generator.inference_engine"
    SkyRLTrainConfig.from_cli_overrides({f"{prefix}.{key}": value for key, value in addresses.items()})
    for key, value in addresses.items():
        setattr(cfg.generator.inference_engine, key, value)


def no_group() -> None:
    """The placement group of engines that are there already: none, so that no accelerators are waited for."""


def given(function: Callable[..., Any], **ours: Any) -> Callable[..., Any]:
    """The function with these arguments in place of its caller's."""
    return lambda *arguments, **theirs: function(*arguments, **{**theirs, **ours})
