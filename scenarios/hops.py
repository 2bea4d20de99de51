"""Faults of a hop that control calls meet."""

from __future__ import annotations

from typing import Any

CONTROL_FAULTS: tuple[dict[str, Any], ...] = (
    {},
    {"status": 503, "body": "html"},
    {"connection": "closed"},
    {"connection": "reset"},
)
AFTER_THE_ENGINE: tuple[dict[str, Any], ...] = ({"moment": "after"}, {"connection": "closed", "moment": "after"})
