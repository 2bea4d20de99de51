"""Compile `*.in` here into hashed `*.txt`, one file per environment: `tox -e lock`, or this script with names.

A lock holds pins and hashes, but no download address and no index option: the installing machine decides where packages come
from. The script keeps the pins of an existing lock where they still fit; `--upgrade` moves them.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import uv

HERE = Path(__file__).resolve().parent
PYTHON = "3.12"
PLATFORM = "x86_64-manylinux_2_28"
MARKED = re.compile(r"^(?P<requirement>[^#\s]+)\s+# (?P<mark>alone|forced)\b")
PINNED = re.compile(r"^[^#\s]+==", re.M)


def main() -> int:
    """Compile the named sources, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="such as skyrl-0.2.0.cpu; default: every .in file here")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    options = parser.parse_args()
    sources = [HERE / f"{name}.in" for name in options.names] or sorted(HERE.glob("*.in"))
    for source in sources:
        target = source.with_suffix(".txt")
        lock = compiled(source, target, upgrade=options.upgrade)
        target.write_text(lock)
        sys.stdout.write(f"{target.name}: {len(PINNED.findall(lock))} packages\n")
    return 0


def compiled(source: Path, target: Path, *, upgrade: bool) -> str:
    """The lock of one source. Lines marked `alone` are resolved without dependencies; lines marked `forced` override others."""
    text = source.read_text()
    marked = [(m["requirement"], m["mark"]) for line in text.splitlines() if (m := MARKED.match(line))]
    alone = [requirement for requirement, mark in marked if mark == "alone"]
    forced = [requirement for requirement, mark in marked if mark == "forced"]
    rest = [line for line in text.splitlines() if (m := MARKED.match(line)) is None or m["mark"] != "alone"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "forced.txt").write_text("\n".join(forced) + "\n")
        body = resolve(folder, "rest", rest, target, ["--override", "forced.txt", *["--upgrade"] * upgrade])
        body += resolve(folder, "alone", alone, target, ["--no-deps", *["--upgrade"] * upgrade])
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    command = f"python backends/envs/compile.py {source.stem}"
    return (
        f"# Made by `tox -e lock` ({command}) for Python {PYTHON} on x86-64 Linux.\n"
        f"# Source: {source.name}, sha256 {digest}. Edit that, not this.\n"
        f"{body}"
    )


def resolve(folder: Path, name: str, requirements: list[str], kept: Path, options: list[str]) -> str:
    """Run the resolver once. Returns sorted pins with hashes, without comments."""
    (folder / f"{name}.in").write_text("\n".join(requirements) + "\n")
    if kept.exists():
        shutil.copy(kept, folder / f"{name}.txt")  # the resolver prefers the pins of its output file
    subprocess.run([uv.find_uv_bin(), *arguments(name), *options], cwd=folder, check=True)
    return (folder / f"{name}.txt").read_text()


def arguments(name: str) -> list[str]:
    """uv's arguments to compile NAME.in in the working folder into NAME.txt."""
    return [
        *("pip", "compile", f"{name}.in", "--output-file", f"{name}.txt", "--quiet"),
        *("--python-version", PYTHON, "--python-platform", PLATFORM, "--generate-hashes"),
        *("--no-emit-index-url", "--no-emit-find-links", "--no-header", "--no-annotate"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
