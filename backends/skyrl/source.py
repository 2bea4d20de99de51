"""Parts of SkyRL's modules that import what no environment here has, such as a database: taken out of their source, as released."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any


def taken(module: str, names: Collection[str], given: dict[str, Any], *, hints_matter: bool = False) -> dict[str, Any]:
    """The classes, functions and constants of these names, executed over `given`, which has what the module imports for them.
    `hints_matter`: type hints are evaluated, as models of requests need it."""
    package, *parts = module.split(".")  # to find a module by its name would import the packages that it lies in
    found = importlib.util.find_spec(package)
    assert found is not None, f"there is no {package}"
    file = Path(next(iter(found.submodule_search_locations or ())), *parts).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of_module = ast.parse("" if hints_matter else "from __future__ import annotations")
    of_module.body += [one for one in tree.body if _name_of(one) in names]
    space = {**given, "__name__": module}
    exec(compile(of_module, str(file), "exec", dont_inherit=True), space)
    return space


def _name_of(statement: ast.stmt) -> str | None:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case _:
            return None
