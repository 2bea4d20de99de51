"""Everything that the documents mention exists: commands, options, files, links, and the example that a reader copies."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import typer

from fixtures.prompts import Prompts
from harness.commands import cli
from harness.running.catalogue import declared
from harness.suite.plan import load_plan
from harness.suite.scenario import declaration
from reports.catalogue import catalogue
from reports.text import MACHINE_PATH
from tests.miniature import bench

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]
LARGEST_PAGE = 3_000_000
"""Bytes of a made page that a repository bears."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OPTION = re.compile(r"--?[a-z][\w-]*")


def commands(text: str) -> list[list[str]]:
    """The words of every shell command in fences and code spans; `… && …` is split into its commands."""
    lines = [line for kind, body in FENCE.findall(text) if kind == "sh" for line in body.splitlines()]
    lines += SPAN.findall(FENCE.sub("", text))
    found = []
    for line in lines:
        for part in line.partition(" #")[0].split("&&"):
            if re.match(r"\s*(\.venv/bin/)?(parity|pytest|tox|python3?)\b", part):
                words = shlex.split(part)
                found.append([Path(words[0]).name, *words[1:]])
    return found


def options_of_parity() -> dict[str, set[str]]:
    group = typer.main.get_command(cli.app)
    every = {name: {o for p in command.params for o in p.opts} for name, command in group.commands.items()}
    for name, command in group.commands.items():
        every[name] |= every["run"] if command.context_settings.get("ignore_unknown_options") else set()  # handed on
    return {name: {*options, "--help"} for name, options in every.items()}


@pytest.fixture(scope="module")
def options_of_pytest(request) -> set[str]:
    parser = request.config._parser
    groups = [*parser._groups, parser._anonymous]
    return {name for group in groups for option in group.options for name in option.names()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_command_and_option_exists(document, options_of_pytest):
    known = options_of_parity()
    environments = set(re.findall(r"wave\d|\w+", (ROOT / "tox.ini").read_text()))
    for words in commands(document.read_text()):
        options = [word.partition("=")[0] for word in words[1:] if OPTION.fullmatch(word.partition("=")[0])]
        match words:
            case ["parity", command, *_] if command in known:
                handed_on = known["run"] if command == "matrix" and "--" in words else set()
                wrong = [o for o in options if o not in known[command] | handed_on | {"-x", "--pdb"}]
            case ["parity", *rest]:
                wrong = [] if rest in ([], ["COMMAND", "--help"]) else rest
            case ["pytest", *_]:
                wrong = [o for o in options if o not in options_of_pytest]
            case ["tox", "-e", environment, *_]:
                wrong = [] if environment in environments or re.fullmatch(r"wave[1-6]", environment) else [environment]
            case [("python" | "python3"), "-m", module, *_]:
                wrong = [] if module in {"venv", "pip"} or _module(module) else [module]
            case _:
                wrong = []
        assert not wrong, f"{document.name}: {shlex.join(words)}: there is no {wrong}"


def _module(name: str) -> bool:
    return (ROOT / (name.replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_options_in_the_text_exist(document, options_of_pytest):
    known = set().union(*options_of_parity().values()) | options_of_pytest
    known |= set(re.findall(r'"(--[a-z-]+)"', "".join(p.read_text() for p in (ROOT / "benchmarks").glob("*.py"))))
    known |= {"--upgrade", "--adapter", "--socket"}
    for span in SPAN.findall(FENCE.sub("", document.read_text())):
        assert not (lost := [o for o in re.findall(r"(?<!\S)--[a-z][a-z-]+", span) if o not in known]), (
            f"{span}: {lost}"
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_files_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path) if path else document
        assert linked.is_file(), target
        headings = {
            re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-")
            for h in re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
        }
        assert not anchor or anchor in headings, target
    rooms = r"(?:harness|scenarios|backends|fixtures|reports|tests|benchmarks|docs)/[\w./-]*\w(?:/|\.(?:py|toml|md|json|txt|in))"
    for named in SPAN.findall(FENCE.sub("", text)):
        assert not re.fullmatch(rooms, named) or (ROOT / named).exists(), f"{document.name}: there is no {named}"


def test_the_contract_names_every_promise_scenario_and_check():
    text = catalogue(declared(), load_plan())
    for promise in load_plan().bullets:
        assert f"| `{promise.slug}` | {promise.id} | {promise.level} | {promise.since} |" in text
    for scenario in declared().values():
        assert f"### `{scenario.name}`" in text
        for check in scenario.checks:
            assert f"| `{check.name.partition(':')[0]}` |" in text


def test_pages_of_the_documents_are_small_and_name_no_path_of_a_machine():
    """``docs/releases/matrix.html``, once it has been made."""
    for page in (ROOT / "docs").glob("**/*.html"):
        assert page.stat().st_size < LARGEST_PAGE, page
        assert MACHINE_PATH.findall(page.read_text()) == [], page


def test_lines_of_documents_fit_a_page():
    long = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in DOCUMENTS
        for number, line in enumerate(
            re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.M | re.S).split("\n"),
            1,
        )
        if len(line) > 100 and not line.startswith("|")
    }
    assert long == set()


def test_the_example_scenario_runs_and_passes_on_a_correct_stack(monkeypatch, tmp_path):
    [(_, source)] = [
        f for f in FENCE.findall((ROOT / "docs" / "writing-a-scenario.md").read_text()) if f[0] == "python"
    ]
    module = types.ModuleType("scenarios.wave1.test_company")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "docs/writing-a-scenario.md", "exec"), vars(module))
    function = module.test_company_changes_no_answer
    scenario = declaration(function)
    assert scenario.name == "company.test_company_changes_no_answer"
    with bench(tmp_path / "run") as stack:
        assert stack.red(scenario, lambda live: function(live, Prompts(scenario.name, live.vocabulary))) == {}


def test_every_patch_of_a_stack_is_in_the_table():
    named = re.compile(r'Patch\(\s*f?"([\w{}-]+)"|PATCH = \{\s*"name": "([\w-]+)"')
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "backends").rglob("*.py")]
    names = {one or other for source in sources for one, other in named.findall(source)}
    names = {name.format(kind=kind) for name in names for kind in ("int8", "fp8")}
    page = (ROOT / "docs" / "writing-an-adapter.md").read_text(encoding="utf-8")
    assert len(names) > 20
    assert not {name for name in names if f"`{name}`" not in page}
