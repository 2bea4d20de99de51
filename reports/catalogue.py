"""The contract as a document: every promise of the plan, every scenario with its source, every check with its fault.

`parity contract` prints it. Pure.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from harness.checks.always import ALWAYS
from harness.checks.base import Check
from harness.suite.plan import Plan
from harness.suite.scenario import Scenario

HEAD = """\
# The contract

What a rollout stack promises: first the promises of the plan, each with an id that never changes, then the scenarios that
give evidence for them.

*Needs* lists required capabilities (`harness/contract/capability.py` explains them); a stack without them
is `missing` here. *Driven in* lists topologies (`parity topologies`). The checks of every scenario apply too.
"""


def catalogue(scenarios: Mapping[str, Scenario], plan: Plan) -> str:
    """The document, in Markdown. `scenarios` maps names to declarations (`harness.running.catalogue.declared`)."""
    every = sorted(scenarios.values(), key=_place)
    counted = f"{len(plan.bullets)} promises, {len(every)} scenarios, {len(_checks(every))} checks."
    return "\n".join([HEAD, counted, "", *_promises(plan), *_scenarios(every), *_checks_section(every)]) + "\n"


def _promises(plan: Plan) -> Iterator[str]:
    yield "## Promises\n"
    yield "| id | place | level | since | promise | source |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in plan.bullets:
        yield f"| `{one.slug}` | {one.id} | {one.level} | {one.since} | {_cell(one.text)} | {_cell(one.source)} |"
    yield ""


def _place(scenario: Scenario) -> tuple[int, str]:
    return scenario.wave, scenario.name.partition(".")[0]


def _scenarios(every: Iterable[Scenario]) -> Iterator[str]:
    for (wave, area), group in groupby(every, key=_place):
        module = importlib.import_module(f"scenarios.wave{wave}.test_{area}")
        yield f"## Wave {wave}: {area}\n"
        yield f"{_line(module.__doc__ or '')}\n"
        for scenario in group:
            yield from _scenario(scenario)


def _scenario(scenario: Scenario) -> Iterator[str]:
    yield f"### `{scenario.name}`\n"
    yield f"{scenario.promise}\n"
    yield f"- Source: {_line(scenario.source)}"
    yield f"- Checks: {_names(check.name for check in scenario.checks)}"
    if scenario.needs:
        yield f"- Needs: {_names(sorted(scenario.needs))}"
    yield f"- Task {scenario.task}; driven in: {', '.join(scenario.topologies)}\n"


def _checks(every: Iterable[Scenario]) -> dict[str, Check]:
    """Name → check. The part of a name after the colon only labels the calls that the check reads."""
    found: dict[str, Check] = {}
    for check in (*ALWAYS, *(check for scenario in every for check in scenario.checks)):
        found.setdefault(check.name.partition(":")[0], check)
    return found


def _checks_section(every: Iterable[Scenario]) -> Iterator[str]:
    yield "## Checks\n"
    yield f"Applied to every scenario: {_names(check.name for check in ALWAYS)}. What follows a colon in a scenario's check"
    yield "is the label of the calls that it looks at.\n"
    yield "| check | the fault it is for | where the rule is written |"
    yield "| --- | --- | --- |"
    for name, check in sorted(_checks(every).items()):
        yield f"| `{name}` | {_cell(check.fault)} | {_cell(check.source)} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")
