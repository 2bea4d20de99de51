"""Adverse schedules: how long each message waits at an engine's door. A function of seed, server and number, the same on every
stack, so that a run can be repeated."""

from __future__ import annotations

import hashlib

MOST_S = 0.05
"""Longest delay (seconds): several steps of an engine with the tiny model, and far below every deadline."""


def delay_s(seed: int, server: str, number: int) -> float:
    """Seconds that the server's message `number` (request or control call, from 0) waits. Even in [0, MOST_S)."""
    chosen = hashlib.sha256(f"{seed} {server} {number}".encode()).digest()
    return MOST_S * int.from_bytes(chosen[:4], "big") / 2**32
