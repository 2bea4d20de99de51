"""Where the suite gives way is written down, says where it stands, and stands in the report of the stacks that it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import msgspec
import pytest

from harness import PROJECT
from harness.contract.errors import UsageError
from harness.contract.messages import METHODS
from harness.judging.gate import decide
from harness.machine.targets import real_stacks, registry
from harness.suite.concessions import EVERY_STACK, load, of_stacks
from harness.suite.plan import load_plan
from harness.suite.profiles import named
from tests import synthetic

CONCESSIONS = load()
REAL = {name for name, target in registry().items() if not target.inline and name != "reference"}


@pytest.mark.parametrize("one", CONCESSIONS, ids=lambda one: one.id)
def test_a_concession_says_where_it_stands_and_for_whom(one):
    place = PROJECT / one.place
    assert place.is_file()
    assert any(word in place.read_text() for word in re.findall(r"\w{3,}", one.name)), "its file does not name it"
    assert one.stacks == [EVERY_STACK] or set(one.stacks) <= REAL
    assert one.what
    assert one.why


def test_those_of_a_run_are_those_of_its_stacks():
    assert real_stacks(["skyrl-0.2.0:http in a", "local:legacy"]) == {
        "skyrl-0.2.0:http",
        "local:legacy",
        "skyrl-0.2.0:legacy",
    }
    older = real_stacks(["local:legacy"], {"local:legacy": "skyrl-0.1.0:legacy"})
    assert older == {"local:legacy", "skyrl-0.1.0:legacy"}
    assert of_stacks(CONCESSIONS, real_stacks(["miniature", "miniature:retry"])) == []
    http, legacy = (of_stacks(CONCESSIONS, [f"skyrl-0.2.0:{kind}"]) for kind in ("http", "legacy"))
    shared = {one.id for one in CONCESSIONS if one.stacks == [EVERY_STACK]}
    assert shared < {one.id for one in http} != {one.id for one in legacy} > shared


def test_the_gate_counts_those_that_can_hide_a_difference():
    made = synthetic.judgement()
    hiding = next(one for one in CONCESSIONS if one.hides)
    harmless = msgspec.structs.replace(hiding, hides="")
    for found, said in (([hiding, harmless], True), ([harmless], False), ([], False)):
        gate = decide(
            msgspec.structs.replace(made, concessions=found), load_plan(), synthetic.ledger(), named("removal")
        )
        assert any("can hide a difference" in reason for reason in gate.reasons) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [("[[concession]]", "missing required field"), ("x = 1", "holds no concessions"), ("=", "holds no concessions")],
)
def test_what_is_malformed_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        load(tmp_path / "c.toml")


# --- what nobody wrote down ------------------------------------------------------------------------------------------

NAMED = re.compile(r"skyrl[-_]\d|\blegacy\b|0\.[1-9]\.\d", re.I)
"""A stack or a release by its name."""


def _strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Those that decide something: no docstring, no source of a rule, no words for a reader."""
    words = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("source", "help", "next_step", "fault", "reason"):
            words |= {id(part) for part in ast.walk(node.value)}
    yield from (
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in words
    )


@pytest.mark.parametrize("room", ["harness/checks", "harness/judging", "harness/driving", "scenarios", "fixtures"])
def test_nothing_that_judges_or_drives_decides_by_a_stacks_name(room):
    named = {
        f"{path.relative_to(PROJECT)}:{one.lineno}: {one.value[:60]}"
        for path in sorted((PROJECT / room).rglob("*.py"))
        for one in _strings(ast.parse(path.read_text()))
        if NAMED.search(one.value) and len(one.value) < 30
    }
    assert named == set()


ADAPTERS = {
    "skyrl-0.2.0:http": ("backends/skyrl/base.py", "backends/skyrl/http.py", "backends/vllm/stack.py"),
    "skyrl-0.2.0:legacy": ("backends/skyrl/base.py", "backends/skyrl/legacy.py", "backends/vllm/stack.py"),
}


OWN_NAMES = {("skyrl-0.2.0:legacy", "sample", "as_given")}
"""Fields that have nothing to say to an adapter: legacy's client has vLLM's names and no others."""


def _dropped(files: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(method, field) of each request that an adapter's method neither reads nor hands on as a whole."""
    for file in files:
        for function in ast.walk(ast.parse((PROJECT / file).read_text())):
            if (
                not isinstance(function, ast.AsyncFunctionDef)
                or function.name not in METHODS
                or len(function.args.args) < 2
            ):
                continue
            request = function.args.args[1].arg
            read = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute) and _is(n.value, request)}
            owners = {id(n.value) for n in ast.walk(function) if isinstance(n, ast.Attribute)}
            whole = any(_is(n, request) and id(n) not in owners for n in ast.walk(function))
            if not whole:
                yield from (
                    (function.name, field)
                    for field in METHODS[function.name].request.__struct_fields__
                    if field not in read
                )


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@pytest.mark.parametrize("target", ADAPTERS)
def test_an_argument_that_an_adapter_does_not_pass_on_is_a_concession(target):
    told = [f"{one.name} {one.what} {one.why}" for one in of_stacks(CONCESSIONS, [target])]
    silent = {
        f"{method}({field})"
        for method, field in _dropped(ADAPTERS[target])
        if not any(method in words and field in words for words in told) and (target, method, field) not in OWN_NAMES
    }
    assert silent == set()


def test_dropped_arguments_are_seen(tmp_path):
    (tmp_path / "adapter.py").write_text(
        "async def pause(self, request):\n    await self.client.pause(mode=request.mode)\n"
    )
    assert list(_dropped((str(tmp_path / "adapter.py"),))) == [("pause", "clear_cache")]
