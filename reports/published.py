"""What every JSON file with a published schema shares: its bytes, its schema, how it replaces an older file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


def encode(report: msgspec.Struct) -> bytes:
    """The bytes of the file."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def schema(kind: type[msgspec.Struct], title: str, description: str) -> dict[str, Any]:
    """The JSON schema of the file."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "description": description}
    return head | msgspec.json.schema(kind)


def write_schema(path: Path, schema: dict[str, Any]) -> None:
    """Renew a published schema."""
    path.write_text(json.dumps(schema, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Write files into `folder`. Returns file name → path. Each is replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / name for name in contents}
    for name, content in contents.items():
        partial = paths[name].with_name(f".{name}.partial")
        partial.write_bytes(content)
        partial.replace(paths[name])
    return paths
