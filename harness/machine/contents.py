"""Hashes of file contents, remembered: a file is read again only after its times, its size or its inode have changed."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from harness.machine.progress import Progress

MEMORY = "hashes.json"
"""The memory of an environment, a file in its folder: rows of `Key` and hash."""
SHOWN_BYTES = 10**9
"""From this size on reading takes several seconds, and its progress is shown."""
SETTLED_NS = 2 * 10**9
"""Age of a file's last change before its hash is remembered: a second change within one step of a file system's clock leaves the
same times. The coarsest clock has steps of 2 s."""
UNREADABLE = "unreadable"

Key = tuple[int, int, int, int]
"""A file's inode, its size in bytes, the time of its last write (mtime) and of its inode's last change (ctime), both in ns. An editor
can put back the mtime, but not the ctime."""


def hashes(files: Iterable[str], site: Path, home: Path, show: Progress) -> dict[str, str]:
    """File → hash of its contents, as RECORD writes it ("sha256=…"). Files that are gone are left out; others may be `UNREADABLE`.

    `files`: paths from the folder `site` of the environment `home`. Reads only files that neither this environment's memory nor
    that of one beside it knows: environments share files by hard links. A memory that cannot be written costs time, no more.
    """
    now = time.time_ns()
    keys: dict[str, Key] = {}
    for file in files:
        with contextlib.suppress(OSError):
            keys[file] = _key(site / file)
    known = _remembered(home)
    if any(key not in known for key in keys.values()):
        for beside in home.parent.glob(f"*/{MEMORY}"):
            known |= _remembered(beside.parent)
        unknown = {key: site / file for file, key in keys.items() if key not in known}
        known |= _read(unknown, home.name, show)
        settled = {key: known[key] for key in keys.values() if key[3] < now - SETTLED_NS}
        _remember(home, {key: digest for key, digest in settled.items() if digest != UNREADABLE})
    return {file: known[key] for file, key in keys.items()}


def _key(path: Path) -> Key:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(unknown: Mapping[Key, Path], environment: str, show: Progress) -> dict[Key, str]:
    size = sum(key[1] for key in unknown)
    what = f"environment {environment}: reading {len(unknown)} files ({size / 1e9:.1f} GB) to compare their contents"
    with show(what) if size >= SHOWN_BYTES else contextlib.nullcontext(), ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(unknown, pool.map(_digest, unknown.values()), strict=True))


def _digest(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return UNREADABLE
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _remembered(home: Path) -> dict[Key, str]:
    try:
        rows = msgspec.json.decode((home / MEMORY).read_bytes(), type=list[tuple[Key, str]])
    except (OSError, msgspec.DecodeError):
        return {}
    return dict(rows)


def _remember(home: Path, known: Mapping[Key, str]) -> None:
    half = home / f"{MEMORY}.{secrets.token_hex(4)}"
    try:
        half.write_bytes(msgspec.json.encode(list(known.items())))
        half.replace(home / MEMORY)
    except OSError:
        half.unlink(missing_ok=True)
