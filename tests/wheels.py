"""Tiny pure-Python wheels and hashed requirement files, so that tests make real environments without a network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path


def wheel(folder: Path, name: str, version: str = "1.0", requires: Iterable[str] = (), **modules: str) -> Path:
    """A wheel with one module of that name, and further modules by name and text. `requires`: its requirements."""
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    name = name.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        **{f"{module}.py": text for module, text in modules.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_encoded(text)},{len(text)}\n" for path, text in files.items())
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(inner, (2026, 1, 1, 0, 0, 0)), text)
    return path


def requirement(built: Path, *, digest: str | None = None) -> str:
    """The line that pins a wheel by its hash, or by a wrong one."""
    name, version, *_ = built.name.split("-")
    return f"{name}=={version} --hash=sha256:{digest or hashlib.sha256(built.read_bytes()).hexdigest()}\n"


def _encoded(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
