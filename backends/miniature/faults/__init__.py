"""Broken miniatures: each is a part that does one thing wrong, and says which checks must see it.

`registry.seeded` registers a class as a fault: it replaces the part that it inherits from. Every time that it does wrong it
counts itself (`fired`), so that a fault which never took effect is not mistaken for one that was survived. Names are those
of the contract's promises; variants say where (one server), when (under load, the second time) and how much (a little).
"""

from backends.miniature.faults import (
    adapters,
    endpoint,
    ends,
    exposure,
    gym,
    logprobs,
    memory,
    pausing,
    results,
    routing,
    sampling,
    staleness,
    text,
    training,
    transfer,
    weights,
)
from backends.miniature.faults.registry import FAULTS, RETRY_FAULTS, parts

__all__ = [
    "FAULTS",
    "RETRY_FAULTS",
    "adapters",
    "endpoint",
    "ends",
    "exposure",
    "gym",
    "logprobs",
    "memory",
    "parts",
    "pausing",
    "results",
    "routing",
    "sampling",
    "staleness",
    "text",
    "training",
    "transfer",
    "weights",
]
