"""Broken miniatures (placeholder until the faults are in)."""

from __future__ import annotations

from typing import Any

from harness.faults import Fault

FAULTS: tuple[Fault, ...] = ()
RETRY_FAULTS: tuple[Fault, ...] = ()


def parts(_fault: str, correct: Any) -> Any:
    return correct
