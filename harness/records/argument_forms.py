"""The arguments of a call in other forms: a tuple for a list, NumPy's numbers for Python's, by keyword instead of by position.

A form keeps the content. Every annotation admits some of them (`ADMITTED`). Others are beyond the annotations of a client's
methods, and a client may refuse them. A place is the path to a value within the arguments: "input_batch.session_ids[]" are all
items of that list.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from importlib import import_module
from types import MappingProxyType
from typing import Any, final
from uuid import UUID

AS_IT_IS = "as it is"
"""In place of a form: the arguments stay as they are. Also the label of such a call."""
USED_AGAIN = "used again"
"""In place of a form, while calls are unanswered: their caller uses the objects that it gave them for something else."""
NO_NUMBERS: Mapping[str, float] = MappingProxyType({"not a number": math.nan, "infinite": math.inf})
"""In place of a form: a float becomes this, which the messages of the contract cannot hold. It does not keep the content."""
BY_KEYWORD, BY_POSITION, LEFT_OUT = "by keyword", "by position", "left out"
ADMITTED = frozenset({BY_KEYWORD, BY_POSITION, LEFT_OUT, "of a subclass", "NumPy str", "IntEnum", "NumPy float64"})
"""Forms that the usual type's annotation admits: an object of a subclass is one of the class."""
ALL = "all arguments"
"""A place."""
DEPTH = 4
"""Levels of a place."""


Make = Callable[[Any], Any]


@final
class List(list[Any]):
    """A list, by its own class."""


def _member(value: int) -> Any:
    return next(iter(IntEnum("Number", {"ONE": value})))  # type: ignore[call-overload]


def _numpy(name: str) -> Make:
    """NumPy is imported when one of its forms is made: every host and every driver imports this module."""

    def make(value: Any) -> Any:
        return getattr(import_module("numpy"), name)(value)

    return make


def _rectangular(value: list[Any]) -> bool:
    try:
        return bool(value) and _numpy("asarray")(value).dtype.kind in "iuf"
    except ValueError:  # rows of different lengths
        return False


def _whole(value: float) -> bool:
    return value == int(value)


def _is_uuid(value: str) -> bool:
    try:
        return str(UUID(value)) == value
    except ValueError:
        return False


FORMS: Mapping[type, Mapping[str, tuple[Callable[[Any], bool], Make]]] = {
    list: {
        "of a subclass": (bool, List),
        "tuple": (bool, tuple),
        "NumPy array": (_rectangular, _numpy("asarray")),
    },
    dict: {
        "of a subclass": (bool, OrderedDict),
        "read-only mapping": (bool, MappingProxyType),
    },
    str: {"NumPy str": (bool, _numpy("str_")), "UUID": (_is_uuid, UUID)},
    int: {"IntEnum": (lambda _: True, _member), "NumPy int64": (lambda _: True, _numpy("int64"))},
    float: {
        "NumPy float64": (lambda _: True, _numpy("float64")),
        "NumPy float32": (lambda _: True, _numpy("float32")),
        "int": (_whole, int),
    },
    bool: {"NumPy bool": (lambda _: True, _numpy("bool_"))},
}
"""Type → the forms that a value of it has beside the usual one: form → (which values have it, how it is made)."""


def places(signature: inspect.Signature, args: tuple[Any, ...], given: Mapping[str, Any]) -> list[str]:
    """Every "place: form" that these arguments have. `args` begins with the client itself."""
    kinds = {name: one.kind for name, one in signature.parameters.items()}
    either = {name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if inspect.Parameter.VAR_POSITIONAL in kinds.values():
        either |= given.keys()
    bound = _bound(signature, args, given)
    found = []
    if bound.keys() <= either:
        found.append(f"{ALL}: {BY_POSITION if given else BY_KEYWORD}")
    for name, value in bound.items():
        found += [f"{place}: {form}" for place, form in dict.fromkeys(_within(value, name))]
    return found if bound else []


def _bound(signature: inspect.Signature, args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Name → value, without the client itself. What `**kwargs` takes keeps its own names."""
    found = dict(list(signature.bind(*args, **given).arguments.items())[1:])
    for name, one in signature.parameters.items():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


def _within(value: Any, place: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    yield from ((place, form) for form, (has, _) in FORMS.get(type(value), {}).items() if has(value))
    if depth == DEPTH:
        return
    if isinstance(value, dict):
        for key, one in value.items():
            inner = f"{place}.{key}"
            if one is None:
                yield inner, LEFT_OUT
            yield from _within(one, inner, depth + 1)
    elif isinstance(value, list):
        for one in value:
            yield from _within(one, f"{place}[]", depth + 1)


def formed(
    signature: inspect.Signature, args: tuple[Any, ...], given: Mapping[str, Any], asked: str
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The same arguments with one place in another form; None if they have no such place. `asked` is one of `places`."""
    place, _, form = asked.rpartition(": ")
    kept = f"{place}: NumPy float64" if form in NO_NUMBERS else asked
    if kept not in places(signature, args, given):
        return None
    bound = _bound(signature, args, given)
    if place == ALL:
        return (args[:1], bound) if form == BY_KEYWORD else ((*args[:1], *bound.values()), {})
    name = place.split(".")[0].split("[")[0]
    bound[name] = _changed(bound[name], place.removeprefix(name), form)
    return args[:1] + tuple(bound[each] for each in bound if each not in given), {each: bound[each] for each in given}


def _changed(value: Any, path: str, form: str) -> Any:
    """A copy of `value` with the place at `path` changed."""
    if not path:
        has, make = FORMS.get(type(value), {}).get(form, (bool, None))
        formed = make(value) if make is not None and has(value) else value
        return NO_NUMBERS.get(form, formed)
    if path.startswith("[]"):
        return [_changed(one, path[2:], form) for one in value] if isinstance(value, list) else value
    if not isinstance(value, dict):
        return value
    key = max((key for key in map(str, value) if _leads(path, key)), key=len, default=None)
    if key is None:
        return value
    rest = path[1 + len(key) :]
    if not rest and form == LEFT_OUT:
        return {name: one for name, one in value.items() if name != key or one is not None}
    return {name: _changed(one, rest, form) if name == key else one for name, one in value.items()}


def _leads(path: str, key: str) -> bool:
    return path.startswith(f".{key}") and path[1 + len(key) : 2 + len(key)] in ("", ".", "[")
