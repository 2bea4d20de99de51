"""Broken miniatures: each has one part that does one thing wrong, and names the checks that must see it.

`registry.seeded` registers a class as a fault, which replaces the part that it inherits from. A fault counts its effects (`fired`),
so that a fault without effect is not mistaken for one that the checks missed. Names are those of the contract's promises. Variants
say where (one server), when (under load, the second time) and how much (a little).
"""

from backends.miniature.faults import (
    adapters,
    cancellation,
    endpoint,
    ends,
    exposure,
    fields,
    forms,
    gym,
    hops,
    interface,
    logprobs,
    memory,
    pausing,
    requests,
    results,
    routing,
    sampling,
    slow,
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
    "cancellation",
    "endpoint",
    "ends",
    "exposure",
    "fields",
    "forms",
    "gym",
    "hops",
    "interface",
    "logprobs",
    "memory",
    "parts",
    "pausing",
    "requests",
    "results",
    "routing",
    "sampling",
    "slow",
    "staleness",
    "text",
    "training",
    "transfer",
    "weights",
]
