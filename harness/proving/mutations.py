"""Mutants of a module, from its text alone: one small change each, made by the operators of mutmut.

Nothing of the module is imported. A mutant's id names module, function, operator and occurrence, so the same text gives the same
mutants. Only the bodies of functions are changed, because a running process can take these (`backends/taps/swaps.py`).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, final

import msgspec

from harness.contract.errors import UsageError

if TYPE_CHECKING:
    import libcst as cst


@final
class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one function."""

    module: str
    function: str
    """Qualified name of the innermost function ("Client.generate.<locals>.throttled")."""
    operator: str
    occurrence: int
    """Its place among the changes by this operator in this function, from 0."""
    line: int
    lines: tuple[int, int]
    """First and last line of the changed statement, or of its head if it has a body."""
    before: str
    """The changed statement, one line."""
    after: str

    @property
    def id(self) -> str:
        return f"{self.module}:{self.function}:{self.operator}:{self.occurrence}"

    def runs_in(self, ran: Mapping[str, Collection[int]]) -> bool:
        """True if the changed statement is among these lines. `ran`: function → its lines that ran."""
        first, last = self.lines
        return any(first <= line <= last for line in ran.get(self.place, ()))

    @property
    def place(self) -> str:
        """The function with its module, as the watched calls name it."""
        return f"{self.module}:{self.function}"


@final
class Equivalent(msgspec.Struct, frozen=True, kw_only=True):
    """Mutants that no scenario can tell from the original. All patterns must match; an absent one matches all."""

    mutant: str = "*"
    """Pattern of ids."""
    statement: str = "*"
    """Pattern of the statement before the change."""
    becomes: str = "*"
    """Pattern of the statement after the change."""
    reason: str

    def explains(self, mutant: Mutant) -> bool:
        pairs = ((mutant.id, self.mutant), (mutant.before, self.statement), (mutant.after, self.becomes))
        return all(fnmatchcase(text, pattern) for text, pattern in pairs)


@final
class Surveyed(msgspec.Struct, frozen=True, kw_only=True):
    """The functions and mutants of one module."""

    module: str
    functions: tuple[str, ...]
    """Qualified names, also of functions inside functions."""
    mutants: tuple[Mutant, ...]

    @property
    def public(self) -> list[str]:
        """Functions ("module:name") without a leading underscore in their name or their class's."""
        return [f"{self.module}:{name}" for name in self.functions if is_public(name)]


def is_public(function: str) -> bool:
    """True for a function or method that others may call: no part of its name begins with an underscore."""
    return not any(part.startswith(("_", "<")) for part in function.split("."))


@final
class _Site(msgspec.Struct, frozen=True, kw_only=True):
    function: str
    operator: str
    occurrence: int
    node: Any
    changed: Any
    statement: Any


def survey(module: str, source: str) -> Surveyed:
    """Functions and mutants of a module's text. Raises UsageError without the mutation tool."""
    cst, _ = _tool()
    wrapper = cst.metadata.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    lines = wrapper.resolve(cst.metadata.PositionProvider)
    tree = wrapper.module
    functions: list[str] = []
    mutants = [
        Mutant(
            module=module,
            function=site.function,
            operator=site.operator,
            occurrence=site.occurrence,
            line=lines[site.node].start.line,
            lines=(lines[site.statement].start.line, lines[site.statement].end.line),
            before=_one_line(tree.code_for_node(site.statement)),
            after=_one_line(tree.code_for_node(_changed(site.statement, site))),
        )
        for site in _sites(tree, functions)
    ]
    return Surveyed(module=module, functions=tuple(functions), mutants=tuple(m for m in mutants if m.before != m.after))


def mutated(mutant: Mutant, source: str) -> str:
    """The module's text with the mutant's change. Raises UsageError if this text does not have the mutant."""
    cst, _ = _tool()
    tree = cst.parse_module(source)
    for site in _sites(tree, []):
        if (site.function, site.operator, site.occurrence) == (mutant.function, mutant.operator, mutant.occurrence):
            return str(_changed(tree, site).code)
    raise UsageError(f"there is no mutant {mutant.id}", next_step="a mutant belongs to one release of its module")


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, or all if there are fewer. The same seed gives the same ones."""
    return random.Random(seed).sample(list(mutants), min(count, len(mutants)))


def _tool() -> tuple[Any, Any]:
    try:
        import libcst
        import libcst.metadata
        from mutmut.mutation.mutators import mutation_operators
    except ImportError as e:
        raise UsageError(
            f"mutants need {e.name}, which is not installed", next_step="pip install 'rollout-parity[mutants]'"
        ) from e
    return libcst, mutation_operators


def _changed(root: Any, site: _Site) -> Any:
    return site.changed if root is site.node else root.deep_replace(site.node, site.changed)


def _one_line(code: str) -> str:
    return " ".join(code.split())


def _sites(tree: cst.Module, functions: list[str]) -> Iterator[_Site]:
    """Every possible change, in the order of the text. Adds the functions' names to `functions`."""
    cst, operators = _tool()
    counts: dict[tuple[str, str], int] = {}

    def walk(node: Any, prefix: str, function: str, statement: Any) -> Iterator[_Site]:
        if isinstance(node, cst.Annotation) or _is_docstring(cst, node) or _is_abstract(cst, node):
            return
        if isinstance(node, cst.ClassDef):
            yield from walk(node.body, f"{prefix}{node.name.value}.", function, statement)
            return
        if isinstance(node, cst.FunctionDef):
            for part in (*node.decorators, node.params) if function else ():
                yield from walk(part, prefix, function, part)  # evaluated by the surrounding function
            name = f"{prefix}{node.name.value}"
            functions.append(name)
            yield from walk(node.body, f"{name}.<locals>.", name, None)
            return
        part = _statement(cst, node)
        for kind, operator in operators if function else ():
            for changed in operator(node) if isinstance(node, kind) else ():
                name = operator.__name__.removeprefix("operator_")
                number = counts.get((function, name), 0)
                counts[function, name] = number + 1
                yield _Site(
                    function=function,
                    operator=name,
                    occurrence=number,
                    node=node,
                    changed=changed,
                    statement=part or statement or node,
                )
        for child in node.children:
            head = child if part is None and _is_head(cst, node, child) else None
            yield from walk(child, prefix, function, part or head or statement)

    yield from walk(tree, "", "", None)


def _is_docstring(cst: Any, node: Any) -> bool:
    return isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString)


def _is_abstract(cst: Any, node: Any) -> bool:
    """True for an abstract method: only its overrides run."""
    return isinstance(node, cst.FunctionDef) and any(
        cst.Module([]).code_for_node(one.decorator).endswith("abstractmethod") for one in node.decorators
    )


def _statement(cst: Any, node: Any) -> Any:
    """The node if it is a whole statement without a body."""
    return node if isinstance(node, cst.BaseSmallStatement) else None


def _is_head(cst: Any, node: Any, child: Any) -> bool:
    """True if the child is an expression of a statement with a body, such as its condition."""
    return isinstance(node, cst.BaseCompoundStatement) and isinstance(child, cst.BaseExpression | cst.WithItem)


def explained(mutants: Iterable[Mutant], entries: Sequence[Equivalent]) -> dict[str, str]:
    """Id → reason, of the mutants that an entry explains."""
    return {m.id: entry.reason for m in mutants for entry in entries[::-1] if entry.explains(m)}
