"""Layers of the code: no import runs upwards or in a circle, and the driver imports none of the stacks' packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import PROJECT

FLOORS = (
    {"harness.contract"},
    {"harness.machine", "harness.records"},
    {"harness.driving", "harness.checks"},
    {"harness.suite", "fixtures"},
    {"harness.judging", "scenarios"},
    {"harness.running"},
    {"harness.proving"},
    {"reports"},
    {"harness.commands"},
)
"""From the lowest layer up. A package imports only from layers below its own. `harness` itself imports from none."""
BACKENDS = (
    {"harness.contract", "harness.machine", "harness.records", "harness.driving", "fixtures"},
    {"backends.policies", "backends.taps"},
    {"backends.vllm"},
)
"""The same for code in a stack's process. Above these layers are the frameworks' stacks, which do not import each other. The driver
finds `backends` by name only."""
STACKS = {"torch", "ray", "vllm", "skyrl", "skyrl_gym", "transformers"}


def _rooms(*tops: str) -> Iterator[tuple[str, Path]]:
    for top in tops:
        for path in sorted((PROJECT / top).rglob("*.py")):
            module = path.relative_to(PROJECT).with_suffix("").parts
            if module[-1] != "__init__" and "plugin_site" not in module and "evidence" not in module:
                yield _room(".".join(module)), path


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("harness", "backends") else parts[0]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("tops", "floors", "others"),
    [(("harness", "scenarios", "fixtures", "reports"), FLOORS, -1), (("backends",), BACKENDS, len(BACKENDS))],
)
def test_no_import_runs_upwards(tops, floors, others):
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    upwards = {
        f"{path.relative_to(PROJECT)} imports {name}"
        for room, path in _rooms(*tops)
        for name in _imports(path)
        if name.partition(".")[0] in ("harness", "backends", "scenarios", "fixtures", "reports", "tests")
        and _room(name) not in (room, "harness", "harness.PROJECT")
        and floor.get(_room(name), len(floors)) >= floor.get(room, others)
    }
    assert upwards == set()


def test_the_driver_imports_no_package_of_a_stack():
    found = {
        f"{path.relative_to(PROJECT)} imports {name}"
        for room, path in _rooms("harness", "scenarios", "reports")
        for name in _imports(path)
        if name.partition(".")[0] in STACKS
    }
    assert found == set()


def test_tests_of_real_stacks_lie_where_one_worker_runs_them():
    mark = ".".join(("pytest", "mark", "real"))
    marked = {path for path in (PROJECT / "tests").rglob("test_*.py") if mark in path.read_text()}
    assert marked == set((PROJECT / "tests" / "real").glob("test_*.py")), "see ONE_WORKER in tests/conftest.py"
