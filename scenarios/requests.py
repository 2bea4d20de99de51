"""Sampling parameters and topologies of many scenarios."""

from __future__ import annotations

from typing import Any

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""One right answer to a prompt, of exactly `max_tokens` tokens."""
ANSWER: dict[str, Any] = {"max_tokens": 16, **GREEDY}
LONG: dict[str, Any] = {"max_tokens": 200, **GREEDY}
"""Long enough (about a second) to be paused in the middle, or twice."""
EVERYWHERE = ("disaggregated", "colocated", "remote")
"""Wherever two engines can live: topologies of `scenarios/topologies.toml`."""
