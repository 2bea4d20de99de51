"""All scenarios that the project declares, by name: imported without pytest and without any stack."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import scenarios
from harness.errors import UsageError
from harness.scenario import Scenario, declaration


@cache
def declared() -> dict[str, Scenario]:
    """Name → declaration, of every test function in scenarios/wave*. Raises UsageError for a name given twice."""
    found: dict[str, Scenario] = {}
    for module in pkgutil.walk_packages(scenarios.__path__, "scenarios."):
        if not module.name.startswith("scenarios.wave") or module.ispkg:
            continue
        for function in vars(importlib.import_module(module.name)).values():
            scenario = declaration(function)
            if scenario is None or function.__module__ != module.name:
                continue
            if scenario.name in found:
                raise UsageError(
                    f"two scenarios are named {scenario.name}", next_step="module and function name one; rename either"
                )
            found[scenario.name] = scenario
    return found
