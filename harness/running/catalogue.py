"""All declared scenarios by name, imported without pytest and without a stack."""

from __future__ import annotations

import ast
import hashlib
import importlib
import pkgutil
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

import scenarios
from fixtures.prompts import Prompts
from harness import PROJECT
from harness.checks.always import ALWAYS
from harness.contract import messages
from harness.contract.errors import UsageError
from harness.contract.faults import DRIVEN, NOTHING, Fact, family
from harness.driving.stack import Stack
from harness.suite.scenario import Scenario, declaration


@cache
def functions() -> dict[str, Callable[..., Awaitable[None]]]:
    """Name → function, of every scenario in scenarios/wave*. Raises UsageError for a duplicate name."""
    found: dict[str, Callable[..., Awaitable[None]]] = {}
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
            found[scenario.name] = function
    return found


def body(name: str, seed: int = 0) -> Callable[[Stack], Awaitable[None]]:
    """A scenario's function with its own prompts, called as pytest would call it."""
    function = functions()[name]
    return lambda stack: function(stack=stack, prompts=Prompts(name, stack.vocabulary, seed))


@cache
def facts_read() -> dict[str, Fact]:
    """Check → the facts that it reads, over all scenarios. `DRIVEN` reads answers: a wrong one may end a scenario."""
    found = {DRIVEN: Fact.ANSWERS}
    for check in (*ALWAYS, *(check for scenario in declared().values() for check in scenario.checks)):
        found[family(check.name)] = found.get(family(check.name), NOTHING) | check.reads
    return found


@cache
def declared() -> dict[str, Scenario]:
    """Name → declaration, of every scenario in scenarios/wave*. Raises UsageError for a duplicate name."""
    return {name: scenario for name, function in functions().items() if (scenario := declaration(function))}


@cache
def defined_in() -> dict[str, str]:
    """Scenario → the module that defines it, "wave1.test_routing"."""
    return {name: function.__module__.removeprefix("scenarios.") for name, function in functions().items()}


@cache
def contract() -> dict[str, str]:
    """What a stack is driven by, each with a hash that a comment or a line break does not change: "the methods of the contract",
    "what drives and observes a stack" (driving, adapters, taps), "what scenarios share" (fixtures and helpers), and every module
    of scenarios.

    Runs with equal hashes asked a stack the same. Checks are no part: recordings are judged by those of the day.
    """
    root = Path(scenarios.__path__[0])
    shared = [*sorted(root.glob("*.py")), root / "sequences.toml", *sorted((PROJECT / "fixtures").glob("*.py"))]
    modules = {name: sys.modules[f"scenarios.{name}"].__file__ or "" for name in sorted(set(defined_in().values()))}
    return {
        "the methods of the contract": _hash([Path(messages.__file__)]),
        "what drives and observes a stack": _hash(
            sorted([*(PROJECT / "harness" / "driving").glob("*.py"), *(PROJECT / "backends").rglob("*.py")])
        ),
        "what scenarios share": _hash(shared),
        **{name: _hash([Path(file)]) for name, file in modules.items()},
    }


def _hash(files: Iterable[Path]) -> str:
    told = hashlib.sha256()
    for file in files:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        told.update((ast.dump(ast.parse(text)) if file.suffix == ".py" else text).encode())
    return told.hexdigest()[:16]


def whole_waves(selected: Mapping[str, Collection[str]]) -> list[int]:
    """Fully selected waves: every scenario in every topology that a run drives by default. `selected`: topology → scenarios."""
    scenarios = declared().values()
    return [
        wave
        for wave in sorted({s.wave for s in scenarios})
        if all(
            s.name in selected.get(topology, ())
            for s in scenarios
            if s.wave == wave
            for topology in s.topologies
            if s.by_default(topology)
        )
    ]


def matching(expression: str, scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Scenarios that pytest's -k would select by module, function, wave or mark.

    Raises UsageError for a malformed expression or an empty selection.
    """
    if not expression:
        return list(scenarios)
    try:
        parsed = ast.parse(expression, mode="eval").body
        found = [s for s in scenarios if _holds(parsed, _words(s))]
    except SyntaxError as e:
        raise UsageError(
            f"-k {expression}: {e.msg}", next_step="write it as for pytest: -k 'routing and not remote'"
        ) from e
    if not found:
        raise UsageError(f"-k {expression} selects no scenario", next_step="`parity contract` lists them")
    return found


def _words(scenario: Scenario) -> str:
    """What pytest's -k looks at, in lower case: "test_ordering.test_an_empty_batch wave1"."""
    return " ".join([f"test_{scenario.name}", f"wave{scenario.wave}", *scenario.marks]).lower()


def _holds(expression: ast.expr, words: str) -> bool:
    """True if the words satisfy the expression of words, and, or, not. Raises SyntaxError for anything else."""
    match expression:
        case ast.BoolOp(op=operator, values=parts):
            return (all if isinstance(operator, ast.And) else any)([_holds(part, words) for part in parts])
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _holds(part, words)
        case ast.Name() | ast.Attribute():
            return ast.unparse(expression).lower() in words
    raise SyntaxError(f"{ast.unparse(expression)!r} is no word")
