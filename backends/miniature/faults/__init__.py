"""Broken miniatures: each has one part that does one thing wrong, and names the checks that must see it.

`registry.seeded` registers a class as a fault, which replaces the part that it inherits from. A fault counts its effects (`fired`),
so that a fault without effect is not mistaken for one that the checks missed. Names are those of the contract's promises. Variants
say where (one server), when (under load, the second time) and how much (a little).
"""

from importlib import import_module
from pkgutil import iter_modules

from backends.miniature.faults.registry import FAULTS, RETRY_FAULTS, parts

__all__ = ["FAULTS", "RETRY_FAULTS", "parts"]

for _module in iter_modules(__path__):  # each registers its faults
    import_module(f"{__name__}.{_module.name}")
