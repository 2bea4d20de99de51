"""What every JSON file with a published schema shares: its bytes, its schema, how it replaces an older file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


def encode(report: msgspec.Struct) -> bytes:
    """The bytes of the file."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


class Schema(NamedTuple):
    """The JSON schema of such a file, which is published beside this module. `python -m reports.schemas` renews all of them."""

    kind: type[msgspec.Struct]
    file: str
    title: str
    description: str

    @property
    def path(self) -> Path:
        return Path(__file__).with_name(self.file)

    def made(self) -> dict[str, Any]:
        """The schema by today's code."""
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": self.title}
        return head | {"description": self.description} | msgspec.json.schema(self.kind)


def write(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Write files into `folder`. Returns file name → path. Each is replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / name for name in contents}
    for name, content in contents.items():
        partial = paths[name].with_name(f".{name}.partial")
        partial.write_bytes(content)
        partial.replace(paths[name])
    return paths
