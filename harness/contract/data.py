"""Data files that ship with the scenarios, read whole or refused by name."""

from __future__ import annotations

import tomllib
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.contract.errors import UsageError

T = TypeVar("T")


def read(path: Path | None, shipped: str, kind: type[T], *, holds: str) -> T:
    """The TOML file as `kind`. `path` None means the file `shipped` beside the scenarios. Raises `UsageError` for a malformed file;
    `holds` says what it should hold."""
    if path is None:
        with as_file(files("scenarios") / shipped) as file:
            return read(file, shipped, kind, holds=holds)
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as e:
        raise UsageError(f"{path} holds no {holds}: {e}", next_step="its head says what an entry is") from e
