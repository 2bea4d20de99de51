"""Faults of settings on their way to the engines."""

from __future__ import annotations

from collections.abc import Mapping

from backends.miniature.engine import Engine
from backends.miniature.faults.registry import ONE, seeded


@seeded("setting_lost", "one_server", caught_by=["settings"], changes=frozenset({"Miniature.workers"}))
class SettingLost(Engine):
    """One server runs with its engine's default instead of a configured setting."""

    def configure(self, settings: Mapping[str, str]) -> None:
        super().configure(settings)
        if self.name == ONE:
            self.fired += 1
            self.settings["max_model_len"] = "2048"
