"""The form of a value: its types, keys and lengths without its content, as place → form. Pure.

A place is "" for the value itself, ".name" for a field, "[]" for every item of a list, ".*" for every value of a mapping whose keys
are content. The forms of several values at one place are alternatives: "None | list".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Set
from enum import Enum
from itertools import chain
from typing import Any

ABSENT = "(not there)"
"""Alternative of a field that only some of the objects at its place have."""
OR = " | "
BY_NUMBER = " by number"
"""After the form of a mapping whose keys are numbers, and not texts."""
_SCALARS = {type(None): "None", bool: "bool", int: "int", float: "float", str: "str", bytes: "bytes"}
_NAME = re.compile(r"[A-Za-z_][\w./-]*")
"""A key that is the name of a field. Any other, like a server's address or a number, is content."""


def class_name(kind: type) -> str:
    """Name with its module, if that is not Python's own."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Forms:
    """Collects the forms of several values."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[str]] = defaultdict(set)
        self._objects: Counter[str] = Counter()
        """Place → number of values with fields that lie there."""
        self._fields: dict[str, Counter[str]] = defaultdict(Counter)
        """Place → field → number of these that have it."""

    def returned(self, value: Any) -> None:
        try:
            self._add(value, "", inner=False, within_object=False)
        except Exception as e:  # noqa: BLE001 - objects of any package; the caller gets its result all the same
            self._kinds[""].add(f"unreadable: {class_name(type(e))}")

    def raised(self, error: Exception) -> None:
        self._kinds[""].add(f"raises {class_name(type(error))}")

    def found(self) -> dict[str, str]:
        """Place → form."""
        for place, fields in self._fields.items():
            for name, count in fields.items():
                if count < self._objects[place]:
                    self._kinds[f"{place}.{name}"].add(ABSENT)
        return {place: OR.join(sorted(kinds)) for place, kinds in sorted(self._kinds.items())}

    def _add(self, value: Any, place: str, *, inner: bool, within_object: bool) -> None:
        """`inner`: the value is one of a list's, so that its length is content."""
        kind = type(value)
        name = _SCALARS.get(kind) or class_name(kind)
        size = f" of {len(value)}" if isinstance(value, Collection) and not inner else ""
        if kind in _SCALARS or isinstance(value, Enum):
            self._kinds[place].add(name)
        elif isinstance(value, Mapping):
            if _has_names(value):
                self._kinds[place].add(name)
                self._add_fields(value, place, inner=inner, within_object=within_object)
            else:
                self._kinds[place].add(name + size + _by_number(value))
                for one in value.values():
                    self._add(one, f"{place}.*", inner=True, within_object=within_object)
        elif isinstance(value, (list, tuple, Set)):
            self._kinds[place].add(name + size)
            self._add_items(value, f"{place}[]", within_object=within_object)
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            self._kinds[place].add(f"{name} {value.dtype} rank {len(value.shape)}")
        else:
            self._kinds[place].add(name)
            if not within_object:
                public = {key: one for key, one in _attributes(value).items() if not key.startswith("_")}
                self._add_fields(public, place, inner=inner, within_object=True)

    def _add_items(self, items: Any, place: str, *, within_object: bool) -> None:
        kinds = set(map(type, items))
        if kinds <= _SCALARS.keys():
            for kind in kinds:
                self._kinds[place].add(_SCALARS[kind])
            return
        if kinds == {list}:  # a level at a time: experts are many small lists
            self._kinds[place].add("list")
            self._add_items(list(chain.from_iterable(items)), f"{place}[]", within_object=within_object)
            return
        for one in items:
            self._add(one, place, inner=True, within_object=within_object)

    def _add_fields(self, fields: Mapping[str, Any], place: str, *, inner: bool, within_object: bool) -> None:
        self._objects[place] += 1
        self._fields[place].update(fields.keys())
        for name, one in fields.items():
            self._add(one, f"{place}.{name}", inner=inner, within_object=within_object)


def _has_names(value: Mapping[Any, Any]) -> bool:
    """True if the keys are names of fields. Numbers by any text are content: log-probabilities by token."""
    named = all(isinstance(key, str) and _NAME.fullmatch(key) for key in value)
    return named and not (value and all(isinstance(one, float) for one in value.values()))


def _by_number(value: Mapping[Any, Any]) -> str:
    """JSON has no keys but texts: a mapping by number comes back from it as one by text."""
    return BY_NUMBER if value and all(isinstance(key, int) for key in value) else ""


def _attributes(value: Any) -> dict[str, Any]:
    fields = getattr(type(value), "__struct_fields__", None)
    return {name: getattr(value, name) for name in fields} if fields else dict(getattr(value, "__dict__", {}))
