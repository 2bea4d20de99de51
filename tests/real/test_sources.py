"""Every cited line of a release is there: the ledger's files name code, and a line that moved misleads who reads it.

Read from the installed releases. A citation without a release's environment on this machine is left out, but not all of them. A place
has to keep three rules. Its lines exist and hold words. A name beside it (`file.py:12: name()`, `name() (line 12)`) stands near it, or
belongs to a function or class around it. A place in another release that has no words of its own is a line like the first one.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness import PROJECT
from harness.machine import environments
from harness.machine.targets import known

pytestmark = pytest.mark.real

FILES = ("known_divergences", "open_differences", "client_changes", "concessions", "track_record")
PACKAGES = ("skyrl", "vllm", "vllm_router", "ray", "transformers", "httpx")
RELEASE = re.compile(r"skyrl-(\d+\.\d+\.\d+)")
PROSE = re.compile(r"\b0\.[1-9]\.0\b")
_LINES = r"\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*"
CITED = re.compile(
    rf"(?:\b(?P<file>[\w./-]+\.py)|(?<=[ (])):(?P<lines>{_LINES})\b|\blines? (?P<more>{_LINES})\b(?! column)|(?P<rust>[\w/]+\.rs:\d+)"
)
_NAME = r"(?:[\w.]*?\b)?(\w+)(?:\(\)|=)|\b((?:[A-Z][a-z0-9]+){2,})\b"
AFTER = re.compile(rf": (?:{_NAME})")
BEFORE = re.compile(rf"(?:{_NAME}) \($")
WORD = re.compile(r"[A-Za-z_]\w+")
NEAR = 3
"""Lines around a cited one in which a name beside the citation may stand."""
FEWEST = 600


class Place(NamedTuple):
    """Lines that an entry cites, in one of several releases. `name`: the word beside them, if it is a name."""

    entry: str
    releases: tuple[str, ...]
    file: str
    first: int
    last: int
    name: str = ""
    like: Place | None = None
    """The place in the release that the entry is about first, if the words are only there."""

    def __str__(self) -> str:
        return f"{self.entry}: {self.file}:{self.first} of {', '.join(self.releases)}"


def name_beside(text: str, found: re.Match[str]) -> str:
    """A function, an argument or a class. SkyRL and vLLM are none."""
    word = AFTER.match(text, found.end()) or BEFORE.search(text, 0, found.start())
    return next(filter(None, word.groups())) if word else ""


def places(entry: str, text: str, releases: tuple[str, ...], *, prose: bool = False) -> Iterator[Place]:
    """The places in a text, in order. `prose`: the release that the text has named last is the one of a place."""
    file = ""
    for found in CITED.finditer(text):
        file = found["rust"] or found["file"] or file
        if ".rs:" in file:
            continue  # of vllm-router's source distribution, which no environment has
        named = PROSE.findall(text, 0, found.start()) if prose else []
        several = re.split(", | and ", found["lines"] or found["more"])
        name = name_beside(text, found) if len(several) == 1 else ""
        for lines in several:
            first, _, last = lines.partition("-")
            yield Place(entry, (named[-1],) if named else releases, file, int(first), int(last or first), name)


def of_entry(label: str, entry: dict[str, Any]) -> Iterator[Place]:
    if "place" in entry:
        releases = tuple(dict.fromkeys(RELEASE.findall(" ".join(entry["stacks"])))) or tuple(sites())
        for key in ("what", "why", "hides", "take_back"):
            yield from places(label, entry.get(key, ""), releases, prose=True)
        return
    of = " ".join(entry.get("targets") or [entry.get("pair") or entry.get("with") or ""])
    source = entry.get("source", "")
    own = [*places(label, source, tuple(dict.fromkeys(RELEASE.findall(of))))]
    yield from own
    for target, text in (entry.get("also") or {}).items():
        releases = tuple(dict.fromkeys(RELEASE.findall(target)))
        there = [*places(label, text, releases)]
        if own and CITED.fullmatch(text):
            there = [one._replace(name=own[0].name, like=own[0]) for one in there]
        yield from there


def every() -> Iterator[Place]:
    for name in FILES:
        content = tomllib.loads((PROJECT / "scenarios" / f"{name}.toml").read_text())
        for entry in (entry for found in content.values() if isinstance(found, list) for entry in found):
            about = entry.get("id") or entry.get("cause") or ", ".join(entry["names"])
            yield from of_entry(f"{name} {about}", entry)


@cache
def sites() -> dict[str, Path]:
    """Release → the installed packages of each whose environment is on this machine."""
    found = {}
    for release in ("0.1.0", "0.2.0", "0.3.0", "0.4.0"):
        home = environments.location(str(known(f"skyrl-{release}:http").environment), "cpu", root=PROJECT)
        if (site := next(home.glob("lib/python3.*/site-packages"), None)) is not None:
            found[release] = site
    return found


def installed(place: Place) -> bool:
    """True if each release that the place may be in is installed: one that is not may be the one that has the line."""
    return set(place.releases) <= sites().keys()


@cache
def by_name(release: str) -> dict[str, list[Path]]:
    """File name → the files of that name in the packages of a release."""
    found: dict[str, list[Path]] = {}
    for package in PACKAGES[:3]:
        for path in (sites()[release] / package).rglob("*.py"):
            found.setdefault(path.name, []).append(path)
    return found


@cache
def files(release: str, file: str) -> list[Path]:
    """The file, or those whose paths end so."""
    whole = sites()[release] / file
    if file.startswith("backends/"):
        return [PROJECT / file]
    if file.startswith(tuple(f"{package}/" for package in PACKAGES)) and whole.is_file():
        return [whole]
    return [p for p in by_name(release).get(Path(file).name, []) if str(p).endswith(f"/{file}")]


@cache
def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@cache
def definitions(path: Path) -> list[tuple[int, int, str]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(n.lineno, n.end_lineno or n.lineno, n.name) for n in ast.walk(tree) if isinstance(n, kinds)]


def cited(place: Place) -> Iterator[tuple[Path, str]]:
    """Each file that the place may be in, with the text of its cited lines."""
    for path in (path for release in place.releases if release in sites() for path in files(release, place.file)):
        lines = lines_of(path)
        if place.last <= len(lines) and WORD.search(lines[place.first - 1]) and lines[place.last - 1].strip():
            yield path, "\n".join(lines[place.first - 1 : place.last])


def named(place: Place, path: Path) -> bool:
    """True if the name beside the place stands near it, or is that of a function or class around it."""
    near = "\n".join(lines_of(path)[max(0, place.first - 1 - NEAR) : place.last + NEAR])
    around = {name for first, last, name in definitions(path) if first <= place.first <= last}
    return not place.name or place.name in around or re.search(rf"\b{place.name}\b", near) is not None


def alike(one: str, other: str) -> bool:
    """True if the lines share half of the words of the one that has fewer."""
    ours, theirs = set(WORD.findall(one)), set(WORD.findall(other))
    return 2 * len(ours & theirs) >= min(len(ours), len(theirs))


def trouble(place: Place) -> str:
    found = [*cited(place)]
    if not found:
        return f"{place}: no such line, or one without words"
    if not any(named(place, path) for path, _ in found):
        return f"{place}: {place.name} is not there"
    first = [*cited(place.like)] if place.like is not None and installed(place.like) else []
    if first and not any(alike(theirs, ours) for _, ours in found for _, theirs in first):
        return f"{place}: {found[0][1].strip()!r} is not the line that {place.like} is: {first[0][1].strip()!r}"
    return ""


def test_every_cited_line_is_there():
    found = [one for one in every() if installed(one)]
    wrong = dict.fromkeys(said for one in found if (said := trouble(one)))
    assert "\n".join(wrong) == ""
    assert len(found) >= FEWEST, "too few releases are installed here: parity setup"
