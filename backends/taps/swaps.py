"""Swaps the code of functions in the running processes of a stack, and notes which of their lines ran (`parity prove --mutants`).

`listen` starts a thread in a process. It answers orders on a Unix socket in a folder that all processes of a stack share, and
children that this process forks listen as well. Processes that are started anew listen by `swaps_site`. `everywhere` sends one order
to all of them. A process without an order does nothing but wait. An order that `lay` leaves in the folder is in force from the import
of each module on: for code that runs only while a stack starts. Never part of a run whose verdicts count.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

FOLDER = "PARITY_SWAPS"
"""Environment variable: the folder of the sockets."""
SITE = str(Path(__file__).with_name("swaps_site"))
"""Goes on PYTHONPATH: a process that is started anew listens before it imports anything."""
FIRST = "first.json"
"""File in the folder: the order that is in force while the stack starts."""
RAN = "ran.txt"
"""File in the folder: lines that ran while the stack started, also in processes that never answer, such as a router's."""
ANSWER_S = 8.0
"""Longest time (seconds) to wait for a process's answer. A process whose interpreter lock is held answers late."""
NOTE = "code swaps are in: verdicts of this start do not count"
PATCH = {
    "name": "code-swaps",
    "reason": "each process has a thread that swaps the code of functions on order (mutants)",
    "version": "backends/taps/swaps.py",
}
TOOL = 4
"""The tool number for sys.monitoring that this module takes. 0 to 3 and 5 have names (Python documentation)."""


_NAMELESS = re.compile(r"(\.<locals>\.<\w+>)+$")
"""Generator expressions and lambdas at the end of a qualified name: they belong to their function."""


class Refused(Exception):
    """The code cannot be swapped; the message says why."""


# --- the functions of a module


def functions_of(module: Any) -> dict[str, list[FunctionType]]:
    """Qualified name → functions of the module's own file, without those inside functions."""
    found: dict[str, list[FunctionType]] = {}
    for function in _of_namespace(module, vars(module)):
        found.setdefault(function.__code__.co_qualname, []).append(function)
    return found


def _of_namespace(module: Any, names: Mapping[str, Any]) -> Iterator[FunctionType]:
    for value in list(names.values()):
        for one in _unwrapped(value):
            if isinstance(one, FunctionType) and one.__code__.co_filename == module.__file__:
                yield one
            elif isinstance(one, type) and one.__module__ == module.__name__:
                yield from _of_namespace(module, vars(one))


def _unwrapped(value: Any) -> Iterator[Any]:
    match value:
        case staticmethod() | classmethod():
            yield from _unwrapped(value.__func__)
        case property():
            yield from (one for one in (value.fget, value.fset, value.fdel) if one is not None)
        case functools.cached_property():
            yield value.func
        case _:
            yield value
            if "__wrapped__" in getattr(value, "__dict__", {}):
                yield from _unwrapped(value.__wrapped__)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code and all code nested in it, in the order of the source."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


# --- one process


class Swapper:
    """Swaps code in this process and notes calls."""

    def __init__(self) -> None:
        self._called: set[tuple[str, int]] = set()
        self._names: dict[int, str] = {}
        """id of a watched code object → "module:name"."""
        self._kept: list[CodeType] = []
        """The watched code objects, so that no id is used twice."""
        self._undo: list[tuple[FunctionType, CodeType]] = []
        self._nested: list[tuple[CodeType, CodeType]] = []
        self._ran: Path | None = None
        """Where to note lines while the stack starts; None after the first order."""

    def begin(self, ran: Path) -> None:
        """Note lines in this file until the first order."""
        self._ran = ran

    def order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one order. `watch`: modules whose functions are watched. `swaps`: module, function and the whole changed source
        of each function that gets other code. Answers the lines of functions ("module:name") that ran since the last order."""
        called: dict[str, list[int]] = {}
        for name, line in sorted(self._called):
            called.setdefault(name, []).append(line)
        self._ran = None
        self.put_back()
        answer: dict[str, Any] = {"pid": os.getpid(), "called": called, "swapped": 0, "refused": ""}
        try:
            for swap in order.get("swaps", ()):
                answer["swapped"] += self.swap(swap["module"], swap["function"], swap["source"])
        except Refused as e:
            self.put_back()
            answer |= {"swapped": 0, "refused": str(e)}
        self.watch(order.get("watch", ()))
        return answer

    def watch(self, modules: Iterable[str]) -> None:
        """Note each line of the functions of these modules that runs from now on, once. Does nothing before Python 3.12."""
        self._called.clear()
        if hasattr(sys, "monitoring"):
            self.watch_also(modules)
            sys.monitoring.restart_events()

    def watch_also(self, modules: Iterable[str]) -> None:
        """Note the lines of these modules as well."""
        monitoring = getattr(sys, "monitoring", None)
        if monitoring is None:
            return
        if monitoring.get_tool(TOOL) is None:
            monitoring.use_tool_id(TOOL, "parity-swaps")
            monitoring.register_callback(TOOL, monitoring.events.LINE, self._note)
        for name in modules:
            module = sys.modules.get(name)
            if getattr(module, "__file__", None) is None:
                continue
            for functions in functions_of(module).values():
                for function in functions:
                    for code in codes_in(function.__code__):
                        if id(code) not in self._names:
                            self._names[id(code)] = f"{name}:{_NAMELESS.sub('', code.co_qualname)}"
                            self._kept.append(code)
                            monitoring.set_local_events(TOOL, code, monitoring.events.LINE)

    def _note(self, code: CodeType, line: int) -> Any:
        name = self._names[id(code)]
        self._called.add((name, line))
        if self._ran is not None:
            with self._ran.open("a") as file:  # short lines: written at once, so those of several processes do not mix
                file.write(f"{name}\t{line}\n")
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]  # until the next order

    def swap(self, name: str, function: str, source: str) -> int:
        """Give the function the code of the changed source. Returns the number of changed functions; 0 if the module is not
        imported here. Raises `Refused`."""
        module = sys.modules.get(name)
        if getattr(module, "__file__", None) is None:
            return 0
        assert module is not None
        outer = function.partition(".<locals>.")[0]
        live = functions_of(module).get(outer, [])
        if not live:
            raise Refused(f"{outer} is not in {name} as its file has it: replaced, or defined in no lasting place")
        try:
            compiled = compile(source, str(module.__file__), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as e:
            raise Refused(f"does not compile: {e}") from e
        new = [code for code in codes_in(compiled) if code.co_qualname == outer]
        live.sort(key=lambda one: one.__code__.co_firstlineno)
        if len(new) != len(live):
            raise Refused(f"{outer} is there {len(live)} times, and {len(new)} times in the source")
        before = len(self._undo)
        for one, code in zip(live, new, strict=True):
            self._replace_all(one, code)
        return len(self._undo) - before

    def _replace_all(self, function: FunctionType, code: CodeType) -> None:
        old = function.__code__
        before, after = list(codes_in(old)), list(codes_in(code))
        if [c.co_qualname for c in before] == [c.co_qualname for c in after]:
            for one, other in zip(before[1:], after[1:], strict=True):
                if one != other:
                    self._nested.append((one, other))
                    for closure in _functions_with(one):
                        self._replace(closure, other)
        self._replace(function, code)

    def _replace(self, function: FunctionType, code: CodeType) -> None:
        old = function.__code__
        if old.co_freevars != code.co_freevars:
            self.put_back()
            raise Refused(f"{code.co_qualname} then uses other variables of its surroundings")
        function.__code__ = code
        self._undo.append((function, old))

    def put_back(self) -> None:
        """Give every function its own code again, also closures that were made meanwhile."""
        for function, old in reversed(self._undo):
            function.__code__ = old
        for old, new in self._nested:
            for closure in _functions_with(new):
                closure.__code__ = old
        self._undo.clear()
        self._nested.clear()


def _functions_with(code: CodeType) -> list[FunctionType]:
    """The functions that run this code. Frozen objects are looked at as well: vLLM freezes its heap."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        return [one for one in gc.get_referrers(code) if isinstance(one, FunctionType) and one.__code__ is code]
    finally:
        if frozen:
            gc.freeze()


# --- all processes of a stack


_HERE = Swapper()
_listening = 0


class _FromTheStart(MetaPathFinder):
    """Imports the modules of an order with their changed source, and watches them."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._watched = set(order.get("watch", ()))
        self._swap: Mapping[str, Any] = next(iter(order.get("swaps", ())), {})

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name not in self._watched and name != self._swap.get("module"):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            source = self._swap["source"] if name == self._swap.get("module") else None
            spec.loader = _Loader(name, spec.loader.path, source)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str | None) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType | None:
        return (
            super().get_code(fullname)
            if self._source is None
            else self.source_to_code(self._source.encode(), self.path)
        )

    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        _HERE.watch_also([module.__name__])


def lay(folder: Path, order: Mapping[str, Any]) -> None:
    """Leave an order that is in force from the import of each module on. Call it before any process listens."""
    (folder / FIRST).write_text(json.dumps(order))


def listen(folder: Path) -> None:
    """Answer orders in this process and in the children that it forks. Idempotent."""
    global _listening
    if _listening == os.getpid():
        return
    first, _listening = _listening == 0, os.getpid()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / f"{os.getpid()}.sock"))
    server.listen(8)
    os.register_at_fork(after_in_child=server.close)
    threading.Thread(target=_answer, args=(server,), name="parity-swaps", daemon=True).start()
    if first and (folder / FIRST).exists():
        sys.meta_path.insert(0, _FromTheStart(json.loads((folder / FIRST).read_text())))
        _HERE.begin(folder / RAN)
    if first:
        os.register_at_fork(after_in_child=lambda: listen(folder))


def _answer(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            order = json.loads(_whole(connection))
            connection.sendall(json.dumps(_HERE.order(order)).encode())


def _whole(connection: socket.socket) -> bytes:
    """All bytes until the other side ends its half."""
    return b"".join(iter(functools.partial(connection.recv, 65536), b""))


def everywhere(folder: Path, order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send an order to every process that listens. Returns the answers; `deaf` is a process that gave none in `ANSWER_S`."""
    sockets = sorted(folder.glob("*.sock"))
    with ThreadPoolExecutor(max(1, len(sockets))) as threads:
        answers = threads.map(lambda path: _ask(path, order), sockets)
        return [*(answer for answer in answers if answer is not None), *_started(folder / RAN)]


def _started(ran: Path) -> Iterator[dict[str, Any]]:
    """The lines that processes have noted in the file, once, in the form of an answer."""
    if not ran.exists():
        return
    called: dict[str, set[int]] = {}
    for name, _, line in (one.partition("\t") for one in ran.read_text().splitlines()):
        called.setdefault(name, set()).add(int(line))
    ran.unlink()
    yield {"pid": 0, "called": {name: sorted(lines) for name, lines in called.items()}, "swapped": 0, "refused": ""}


def _ask(path: Path, order: Mapping[str, Any]) -> dict[str, Any] | None:
    if int(path.stem) == os.getpid():
        return _HERE.order(order)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps(order).encode())
            connection.shutdown(socket.SHUT_WR)
            return dict(json.loads(_whole(connection)))
        except TimeoutError:
            # It is not asked again: code that holds the interpreter lock for good, such as a router's.
            path.unlink(missing_ok=True)
            return {"deaf": int(path.stem)}
        except (ConnectionError, FileNotFoundError, ValueError):
            path.unlink(missing_ok=True)  # the process has ended
            return None
