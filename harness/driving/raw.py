"""Notes what a stack's own client returns or raises while one call of the contract runs, before an adapter translates it.

An adapter names the class of its client once (`watch`). The host collects the notes of each call (`noting`). Only forms are kept:
types, keys and lengths, no values. A watched method returns the client's own object. What a client asks of itself is not noted.
A scenario may ask for the arguments in another form (`ask_for`, `harness.records.argument_forms`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from harness.records import argument_forms
from harness.records.argument_forms import AS_IT_IS, USED_AGAIN
from harness.records.forms import Forms
from harness.records.recording import Raw


class Notes:
    """The client's methods that were called, with the forms of everything that each returned or raised."""

    def __init__(self) -> None:
        self._arguments: dict[str, dict[str, None]] = {}
        self._forms: dict[str, Forms] = {}
        self.formed: dict[str, str] = {}
        """Method → the form that was asked for and that an argument got."""
        self.changed: dict[str, list[str]] = {}
        """Method → arguments that have another content after the call."""

    def add(self, method: str, arguments: Iterable[str]) -> Forms:
        """Note a call. Returns the forms of this method's results, to add to."""
        self._arguments.setdefault(method, {}).update(dict.fromkeys(arguments))
        return self._forms.setdefault(method, Forms())

    def noted(self) -> list[Raw]:
        return [
            Raw(
                method=method,
                arguments=list(self._arguments[method]),
                forms=forms.found(),
                formed=self.formed.get(method),
                changed=self.changed.get(method, []),
            )
            for method, forms in sorted(self._forms.items())
        ]


_notes: ContextVar[Notes | None] = ContextVar("notes", default=None)
"""Of the contract's call that runs; None outside of one."""
_inside: ContextVar[frozenset[str]] = ContextVar("inside", default=frozenset())
"""Names of the watched objects within whose methods this task runs."""


_asked: str | None = None
"""The form that is asked for, of the next calls. With `AS_IT_IS` their forms are listed, and what a call changes in them is noted."""
_listed: list[str] = []
"""The forms that the arguments of the last call with `AS_IT_IS` have."""


_unanswered: list[Any] = []
"""The arguments of each call that runs."""


def ask_for(form: str | None) -> list[str]:
    """Give the next calls an argument in this form; or use those of unanswered calls again (`USED_AGAIN`). Returns the forms of the
    last call that was made with `AS_IT_IS`."""
    global _asked  # noqa: PLW0603 - the watched classes belong to the process too
    if form == USED_AGAIN:
        _use_again(_unanswered)
    _asked = None if form == USED_AGAIN else form
    return list(_listed)


def _use_again(given: Any) -> None:
    """Ask for one token in every dict of sampling parameters."""
    if isinstance(given, dict):
        given |= {"max_tokens": 1} if "max_tokens" in given else {}
        given = list(given.values())
    for inner in given if isinstance(given, list | tuple) else ():
        _use_again(inner)


@contextlib.contextmanager
def noting() -> Iterator[Notes]:
    """Collect what watched methods return within the block, in tasks and threads that it starts too."""
    notes = Notes()
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Within the block nothing is noted: the adapter does not call the client itself."""
    token = _notes.set(None)
    try:
        yield
    finally:
        _notes.reset(token)


def watch(kind: type, name: str = "") -> None:
    """Note the calls of every method of this class, as "name.method" if it has a name. Does nothing the second time.

    The class itself is changed, so that copies and unpickled objects are watched too, and so that signatures, attributes and
    pickles stay as they are.
    """
    for method in dir(kind):
        function = inspect.getattr_static(kind, method)
        if isinstance(function, FunctionType) and not method.startswith("__") and not hasattr(function, "is_watched"):
            watched = _watched(function, name)
            watched.is_watched = True  # type: ignore[attr-defined]
            setattr(kind, method, watched)


def _watched(function: FunctionType, name: str) -> Callable[..., Any]:
    signature = inspect.signature(function)
    method = f"{name}.{function.__name__}" if name else function.__name__

    def in_form(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        notes = _notes.get()
        if _asked in (None, AS_IT_IS) or notes is None or name in _inside.get():
            return args, given
        formed = argument_forms.formed(signature, args, given, str(_asked))
        if formed is None:
            return args, given
        notes.formed[method] = str(_asked)
        return formed

    @contextlib.contextmanager
    def noted(args: tuple[Any, ...], given: dict[str, Any]) -> Iterator[Callable[[Any], None]]:
        """Calls within the block are the client's own. The block says what was returned."""
        notes, inside = _notes.get(), _inside.get()
        if notes is None or name in inside:
            yield lambda _: None
            return
        forms = notes.add(method, _names(signature, args, given))
        before = None
        if _asked == AS_IT_IS:
            _listed[:] = argument_forms.places(signature, args, given)
            before = copy.deepcopy((args[1:], given))
        token = _inside.set(inside | {name})
        _unanswered.append((args, given))
        try:
            yield forms.returned
        except Exception as e:
            forms.raised(e)
            raise
        finally:
            _unanswered[:] = [one for one in _unanswered if one[0] is not args or one[1] is not given]
            if before is not None and before != (args[1:], given):
                notes.changed[method] = _names_of_others(signature, args, given, before)
            with contextlib.suppress(ValueError):  # a task that is thrown away ends in another context
                _inside.reset(token)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **given: Any) -> Any:
            args, given = in_form(args, given)
            with noted(args, given) as returned:
                result = await function(*args, **given)
                returned(result)
                return result

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        args, given = in_form(args, given)
        with noted(args, given) as returned:
            result = function(*args, **given)
            returned(result)
            return result

    return called


def _names_of_others(
    signature: inspect.Signature, args: tuple[Any, ...], given: Mapping[str, Any], before: tuple[Any, Any]
) -> list[str]:
    """Names of the arguments that are not as they were `before`."""
    now, then = (signature.bind(args[0], *a, **g).arguments for a, g in ((args[1:], given), before))
    return [name for name in list(now)[1:] if now[name] != then[name]]


def _names(signature: inspect.Signature, args: tuple[Any, ...], given: Mapping[str, Any]) -> Iterator[str]:
    """Names of the arguments, without that of the object itself."""
    try:
        bound = signature.bind(*args, **given).arguments
    except TypeError:  # the call is about to fail
        yield from given
        return
    for name, value in list(bound.items())[1:]:
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_KEYWORD:
                yield from value
            case inspect.Parameter.VAR_POSITIONAL:
                yield f"*{name}"
            case _:
                yield name
