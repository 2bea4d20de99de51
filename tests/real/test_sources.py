"""Every cited line of a release is there: the ledger's files name code, and a line that moved misleads who reads it.

Read from the installed releases. A citation without a release's environment on this machine is left out, but not all of them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness import PROJECT
from harness.machine import environments
from harness.machine.targets import known

pytestmark = pytest.mark.real

FILES = ("known_divergences", "open_differences", "client_changes")
CITED = re.compile(r"\b(?P<file>(?:skyrl|vllm|ray)/[\w./-]+\.py):(?P<line>\d+)")
SHORT = re.compile(r"(vllm/vllm_engine|vllm/vllm_server|skyrl/endpoint)\.py")
"""The end of a longer path, or a file of this project (backends/skyrl/endpoint.py): no path of a release."""
RELEASE = re.compile(r"skyrl-(\d+\.\d+\.\d+)")
FEWEST = 300


class Citation(NamedTuple):
    """A line that an entry cites. `releases`: the one that it is of, or both of a pair."""

    entry: str
    releases: tuple[str, ...]
    file: str
    line: int


def citations() -> Iterator[Citation]:
    for name in FILES:
        content = tomllib.loads((PROJECT / "scenarios" / f"{name}.toml").read_text())
        entries = [entry for found in content.values() if isinstance(found, list) for entry in found]
        for number, entry in enumerate(entries):
            of = entry.get("targets") or entry.get("pairs") or [entry.get("pair", "")]
            texts = [(of[0], entry.get("source", "")), *(entry.get("also") or {}).items()]
            for target, text in texts:
                for found in CITED.finditer(text):
                    if SHORT.fullmatch(found["file"]) is None:
                        releases = tuple(dict.fromkeys(RELEASE.findall(target)))
                        yield Citation(
                            f"{name}[{number}] {entry.get('id', '')}", releases, found["file"], int(found["line"])
                        )


def site_of(release: str) -> Path | None:
    """The installed packages of a release, if its environment is on this machine."""
    home = environments.location(str(known(f"skyrl-{release}:http").environment), "cpu", root=PROJECT)
    return next(home.glob("lib/python3.*/site-packages"), None)


def test_every_cited_line_is_there():
    every = list(citations())
    sites = {release: site_of(release) for one in every for release in one.releases}
    read: dict[Path, list[str]] = {}
    checked, missing = 0, []
    for one in every:
        there = [site for release in one.releases if (site := sites[release]) is not None]
        if len(there) < len(one.releases) or not there:
            continue
        checked += 1
        lines = [
            read.setdefault(path, path.read_text(encoding="utf-8").splitlines())
            for site in there
            if (path := site / one.file).is_file()
        ]
        if not any(one.line <= len(text) and text[one.line - 1].strip() for text in lines):
            missing.append(f"{one.entry}: {one.file}:{one.line} of {', '.join(one.releases)}")
    assert missing == []
    assert checked >= FEWEST, "too few releases are installed here: parity setup"
