"""The text of a scenario: written call by call, with the checks that fit what was written, and read back to be driven.

What is driven is the printed text itself, so that what a search finds is what its reader runs. `Script` knows how calls
are written and which checks may judge them; which calls there are is said in `harness.exploring.workloads`.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import ModuleType
from typing import Literal, final

import msgspec

from harness.contract.capability import Capability
from harness.contract.topology import Placement, topology
from harness.suite.scenario import Scenario, declaration

WIDTH = 120
MODULE, FUNCTION = "test_explored", "test_found"
"""Names of the printed file and function. Prompts follow from them: under other names they are others."""

HOMES: dict[str, tuple[str, ...]] = {
    "fixtures.prompts": ("Prompts",),
    "harness.contract.capability": ("Capability",),
    "harness.contract.messages": ("GenerateRequest",),
    "harness.checks.adapters": (
        "ADAPTER_EFFECT", "ADAPTER_ISOLATED", "FRESH_ADAPTER_CACHE", "ONLY_ADAPTER_TRAVELS",
    ),
    "harness.checks.continuation": ("CONTINUATION",),
    "harness.checks.control_plane": (
        "FAN_OUT", "HEALTHY", "HEALTH_FOLLOWS_SERVERS", "NO_SLEEP", "PAUSE_STATES", "WORLD_SIZE",
    ),
    "harness.checks.errors": ("names_error", "nothing_for_nothing", "returns_error"),
    "harness.checks.experts": ("routed_experts",),
    "harness.checks.exposure": ("BOUND_TO_LOOPBACK", "CONTROL_PLANE_CLOSED", "NOTHING_UNPICKLED"),
    "harness.checks.kept_cache": ("KEPT_CACHE",),
    "harness.checks.liveness": ("ALL_COMPLETE", "EVERY_CALL_ENDS"),
    "harness.checks.logprobs": ("are_numbers", "of_reference"),
    "harness.checks.openai": ("envelope", "usage"),
    "harness.checks.ordering": ("in_order",),
    "harness.checks.pausing": (
        "ABORTED", "FROZEN", "HELD", "PAUSED", "SAME_AS_UNINTERRUPTED", "UNINTERRUPTED", "WAITED",
    ),
    "harness.checks.quantization": ("quantization_effect",),
    "harness.checks.routing": ("SAME_SESSION", "SESSIONLESS_SPREAD", "SESSIONS_SPREAD", "STICKY"),
    "harness.checks.sampling": ("goodness_of_fit", "independent", "within_filters"),
    "harness.checks.staleness": (
        "CURRENT_POLICY", "FORCED_EFFECT", "FRESH_CACHE", "SAME_VERSION_SAME_OUTPUT", "WHOLE_VERSION",
    ),
    "harness.checks.stopping": ("ends_as_asked", "stop_text"),
    "harness.checks.text": ("text_of_tokens",),
    "harness.checks.tokenization": ("DECODED", "ENCODED", "ROUND_TRIP"),
    "harness.checks.tokens": ("different_output", "greedy", "same_output"),
    "harness.checks.turns": ("TURNS_KEEP_TOKENS",),
    "harness.checks.weights": ("EVERY_PARAMETER", "SAME_VERSION_SAME_PARAMETERS", "UNIFORM_SERVERS"),
    "harness.suite.scenario": ("scenario",),
    "harness.driving.stack": ("Stack",),
    "scenarios.pauses": ("pause_idle", "pause_in_flight"),
}  # fmt: skip
"""Module → the names that a printed scenario may use of it."""

_HOME = {name: module for module, names in HOMES.items() for name in names}
_NAMES = re.compile(r"(?<![\w.])(" + "|".join(sorted(_HOME, key=len, reverse=True)) + r")(?!\w)")


class Role(IntEnum):
    """What may be asked of the answers to a call; the worst of a label's calls is the label's."""

    STEADY = 0
    """Nothing changes while it is answered: everything can be said of it."""
    MOVED = 1
    """A weight sync comes in between: which tokens that gives is left open, and only that."""
    APART = 2
    """It has so many rows that only checks of its own judge it."""
    CUT = 3
    """pause(abort) may end it early."""
    DOOMED = 4
    """It is to fail, or its server dies: judged by checks of its own."""


Kind = Literal["rows", "completion", "chat_completion"]
QUANTIZED = frozenset({Capability.QUANTIZED, Capability.QUANTIZED_SYNC})
"""What a script needs in a quantized topology: any may sync."""

KINDS: dict[str, Kind] = {
    "generate": "rows",
    "generate_messages": "rows",
    "generate_request": "rows",
    "sample": "rows",
    "completion": "completion",
    "chat_completion": "chat_completion",
}
"""Method of the stack → with which calls it is judged together. OpenAI calls always have a label: checks go by it."""

ROWS: dict[str, Role] = {
    "greedy({})": Role.STEADY,
    "of_reference({})": Role.STEADY,
    "routed_experts({})": Role.MOVED,
    "are_numbers({})": Role.MOVED,
    "in_order({})": Role.MOVED,
    "ends_as_asked({}, causes=[])": Role.MOVED,
    "stop_text({})": Role.MOVED,
    "text_of_tokens({})": Role.MOVED,
}
"""Check of rows, with a place for labels → the worst role that it can judge."""

BODIES: dict[str, Role] = {
    "envelope({}, {})": Role.STEADY,
    "usage({}, {})": Role.STEADY,
    "greedy({1}, methods=[{0}])": Role.STEADY,
    "text_of_tokens({1}, methods=[{0}])": Role.STEADY,
    "ends_as_asked({1}, causes=[], methods=[{0}])": Role.STEADY,
}
"""Check of OpenAI bodies, with places for the method and for labels."""

WHOLE = (
    "FAN_OUT", "HEALTHY", "PAUSE_STATES", "WORLD_SIZE", "STICKY", "SAME_SESSION", "SESSIONS_SPREAD", "SESSIONLESS_SPREAD",
    "EVERY_PARAMETER", "UNIFORM_SERVERS", "SAME_VERSION_SAME_PARAMETERS", "CURRENT_POLICY", "FRESH_CACHE", "FORCED_EFFECT",
    "SAME_VERSION_SAME_OUTPUT", "WHOLE_VERSION", "KEPT_CACHE", "FROZEN", "WAITED", "HELD", "TURNS_KEEP_TOKENS", "ADAPTER_EFFECT",
    "ADAPTER_ISOLATED", "FRESH_ADAPTER_CACHE", "ONLY_ADAPTER_TRAVELS", "ENCODED", "DECODED", "ROUND_TRIP", "CONTROL_PLANE_CLOSED",
    "NOTHING_UNPICKLED", "BOUND_TO_LOOPBACK",
)  # fmt: skip
"""Checks that look at a scenario as a whole and need no label. Where they find nothing of their kind they say so."""


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """One statement: `before` `callee`(`arguments`)`after`, or `before` alone."""

    indent: int
    before: str
    callee: str = ""
    arguments: tuple[str, ...] = ()
    after: str = ""
    steady: bool = False
    """A call for rows without a label of its own: it is given "answer" where some of its kind are not steady."""

    def written(self, *, label: bool) -> list[str]:
        """The statement in lines of at most `WIDTH`."""
        at = "    " * self.indent
        if not self.callee:
            return [at + self.before if self.before else ""]
        arguments = [*self.arguments, *(['label="answer"'] if label else [])]
        return _wrapped(at, self.before + self.callee, arguments, self.after)


def _wrapped(at: str, head: str, arguments: Iterable[str], after: str) -> list[str]:
    arguments = list(arguments)
    one = f"{at}{head}({', '.join(arguments)}){after}"
    if len(one) <= WIDTH:
        return [one]
    together = f"{at}    {', '.join(arguments)}"
    if len(together) <= WIDTH:
        return [f"{at}{head}(", together, f"{at}){after}"]
    return [f"{at}{head}(", *(f"{at}    {argument}," for argument in arguments), f"{at}){after}"]


@final
class Script:
    """One scenario in the making. Operations write into it; `text` is the whole file."""

    def __init__(
        self,
        capabilities: Collection[Capability],
        where: str = "disaggregated",
    ) -> None:
        self.capabilities = frozenset(capabilities)
        self.topology = topology(where)
        self.needs: set[Capability] = set(QUANTIZED) if self.topology.quantization else set()
        self.adapters: dict[str, int] = {}
        """Name → version of what is loaded where the script has come to."""
        self._lines: list[_Line] = []
        self._indent = 1
        self._roles: dict[Kind, dict[str, Role]] = {"rows": {}, "completion": {}, "chat_completion": {}}
        self._checks: list[str] = []
        self._counts: dict[str, int] = {}
        self._known: dict[str, str] = {}

    # --- writing

    def line(self, text: str) -> None:
        """A statement as it stands."""
        self._lines.append(_Line(indent=self._indent, before=text))

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A statement with a body."""
        self.line(head)
        self._indent += 1
        yield
        self._indent -= 1

    def call(
        self,
        method: str,
        *arguments: str,
        label: str | None = None,
        role: Role = Role.STEADY,
        into: str = "",
        task: str = "",
        attempt: bool = False,
    ) -> None:
        """A call of the stack: its result goes `into` a variable, or it is a `task` of that group; `attempt`: it may fail.

        `arguments` are code. A call without a label is steady; its label, if it needs one, is found at the end.
        """
        kind = KINDS.get(method)
        if kind in ("completion", "chat_completion") and label is None:
            label = kind
        if kind is not None:
            roles, name = self._roles[kind], label or ""
            roles[name] = max(roles.get(name, Role.STEADY), role)
        given = [*arguments, *([] if label is None else [f"label={_label(label)}"])]
        before, after = f"{into} = await " if into else "await ", ""
        if task:
            before, after = f"{task}.create_task(", ")"
        if attempt:
            before, after = f"{before}stack.attempt(", f"){after}"
        self._lines.append(
            _Line(
                indent=self._indent,
                before=before,
                callee=f"stack.{method}",
                arguments=tuple(given),
                after=after,
                steady=kind == "rows" and label is None,
            )
        )

    def need(self, *capabilities: Capability) -> None:
        """The scenario needs these. Raises ValueError for one that the stack does not offer: the workload is wrong."""
        lacking = sorted(set(capabilities) - self.capabilities)
        if lacking:
            raise ValueError(f"the workload needs {', '.join(lacking)}, which the stack does not offer")
        self.needs |= set(capabilities)

    def fresh(self, name: str) -> str:
        """A label or variable that was not used before: name, name_2, …"""
        number = self._counts[name] = self._counts.get(name, 0) + 1
        return name if number == 1 else f"{name}_{number}"

    def known(self, name: str, expression: str) -> str:
        """The variable that holds `expression`: written where it is first asked for."""
        if name not in self._known:
            self._known[name] = expression
            self.line(f"{name} = {expression}")
        return name

    def check(self, expression: str) -> None:
        """A check that only this operation gives something to judge."""
        if expression not in self._checks:
            self._checks.append(expression)

    # --- which checks judge it

    def checks(self) -> list[str]:
        """The checks that may judge what was written, as code."""
        found = [*self._checks]
        for template, worst in ROWS.items():
            if template.startswith("routed_experts") and Capability.ROUTED_EXPERTS not in self.capabilities:
                continue
            if (labels := self._labels("rows", worst)) is not None:
                found.append(_filled(template, labels))
        if self.topology.quantization and (labels := self._labels("rows", Role.STEADY)) is not None:
            found.append(_filled("quantization_effect({})", labels))
        bodies: tuple[Kind, ...] = ("completion", "chat_completion")
        for method in bodies:
            for template, worst in BODIES.items():
                if (labels := self._labels(method, worst)) is not None:
                    found.append(_filled(template, f'"{method}"', labels))
        worst = max((role for roles in self._roles.values() for role in roles.values()), default=Role.STEADY)
        found += WHOLE
        found += ["ALL_COMPLETE"] if worst < Role.CUT else []
        paused = self._roles["rows"].get("PAUSED")
        if paused is not None:
            found += ["SAME_AS_UNINTERRUPTED"] if paused < Role.CUT else ["ABORTED"]
        if Capability.RETRY_ABORTED in self.capabilities:
            found.append("CONTINUATION")
        if self.topology.placement != Placement.COLOCATED:
            found.append("NO_SLEEP")
        return list(dict.fromkeys(found))

    def _labels(self, kind: Kind, worst: Role) -> str | None:
        """The labels of calls of that role or a better one, as code: none if those are all there are; None: no such call."""
        roles = self._roles[kind]
        fit = [name for name, role in roles.items() if role <= worst]
        if not fit:
            return None
        if len(fit) == len(roles) and kind == "rows":
            return ""
        return ", ".join(_label(name or "answer") for name in fit)

    # --- the whole

    def text(self, checks: Iterable[str] | None = None, *, promise: str = "", source: str = "") -> str:
        """The file. `checks` (code; default: all that may judge it) are declared; `source` goes into the docstring."""
        declared = self.checks() if checks is None else list(checks)
        some_are_not = any(self._roles["rows"].values())
        body = [line for entry in self._lines for line in entry.written(label=entry.steady and some_are_not)]
        head = self._declaration(declared, promise or "what a search found holds")
        signature = f"async def {FUNCTION}(stack: Stack, prompts: Prompts) -> None:"
        unused = "  # noqa: ARG001 - every scenario has both" if not any("prompts" in line for line in body) else ""
        doc = _docstring(source or "Found by `parity explore`.")
        code = [*head, signature + unused, *doc, *(body or ["    assert stack"])]
        return "\n".join([*self._opening("\n".join(code)), "", "", *code, ""])

    def _declaration(self, checks: list[str], promise: str) -> list[str]:
        needs = ", ".join(f"Capability.{need.name}" for need in sorted(self.needs))
        arguments = ["task=0", f"promise={_quoted(promise)}"]
        arguments += [f"needs={{{needs}}}"] if needs else []
        arguments += [f"checks=[{', '.join(checks)}]"]
        if self.topology != topology("disaggregated"):
            arguments.append(f'topologies=["{self.topology.name}"]')
        lines = ["@scenario("]
        for argument in arguments:
            if len(argument) + 5 > WIDTH and argument.startswith("checks="):
                lines += ["    checks=[", *(f"        {check}," for check in checks), "    ],"]
            elif len(argument) + 5 > WIDTH and argument.startswith("needs="):
                names = sorted(f"Capability.{need.name}" for need in self.needs)
                lines += ["    needs={", *(f"        {name}," for name in names), "    },"]
            else:
                lines.append(f"    {argument},")
        return [*lines, ")"]

    def _opening(self, code: str) -> list[str]:
        used: dict[str, set[str]] = {}
        for name in set(_NAMES.findall(code)):
            used.setdefault(_HOME[name], set()).add(name)
        imports = []
        for module in sorted(used):
            names = sorted(used[module], key=lambda n: (not n.isupper(), not n[0].isupper(), n))
            line = f"from {module} import {', '.join(names)}"
            imports += [line] if len(line) <= WIDTH else _wrapped("", f"from {module} import ", names, "")
        standard = ["import asyncio", ""] if "asyncio." in code else []
        return [
            '"""A sequence of calls that a search found."""',
            "",
            "from __future__ import annotations",
            "",
            *standard,
            *imports,
        ]


def _filled(template: str, *values: str) -> str:
    """The template with its places filled, and without the comma that an empty one leaves."""
    return template.format(*values).replace("(, ", "(").replace(", )", ")")


def _label(name: str) -> str:
    """A label as code: names of constants as they are."""
    return name if name.isupper() else f'"{name}"'


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if '"' not in text else repr(text)


def _docstring(text: str) -> list[str]:
    words, lines, line = text.replace("\\", "/").replace('"""', "'''").split(), [], '    """'
    for word in words:
        longer = f"{line}{'' if line.endswith(chr(34) * 3) or line == '    ' else ' '}{word}"
        if len(longer) > WIDTH:
            lines.append(line)
            longer = f"    {word}"
        line = longer
    space = " " if line.endswith('"') else ""
    return [*lines, f'{line}{space}"""']


Body = Callable[..., Awaitable[None]]


def load(text: str) -> tuple[Scenario, Body]:
    """The scenario that a printed file declares, and its function. Raises ValueError for a file that declares none."""
    module = ModuleType(MODULE)
    name = f"<{MODULE}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for tracebacks
    exec(compile(text, name, "exec"), vars(module))
    function = vars(module).get(FUNCTION)
    declared = declaration(function)
    if function is None or declared is None:
        raise ValueError(f"the text declares no scenario {FUNCTION}")
    return declared, function
