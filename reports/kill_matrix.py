"""kill_matrix.json and its page, the output of `parity prove`. Published schema: ``reports/kill_matrix.schema.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, final

import msgspec

from harness.contract.errors import UsageError
from harness.proving.kill_matrix import CheckProof, Figures, KillMatrix
from reports import kill_matrix_html
from reports.json_report import plain

FORMAT: Literal[1] = 1
"""Version of kill_matrix.json. A reader refuses any other."""
SCHEMA = Path(__file__).with_name("kill_matrix.schema.json")


@final
class KillReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which seeded fault is caught by which check, on each stack of one run, and what that comes to."""

    format: Literal[1] = FORMAT
    exit_status: int
    """0 only if every fault was killed, every required check has a killed fault, and the correct stacks are green."""
    figures: Figures
    problems: list[str]
    """Everything that is red, worst first."""
    checks: list[CheckProof]
    matrix: KillMatrix


def encode(matrix: KillMatrix) -> bytes:
    """The bytes of kill_matrix.json. The matrix must have been settled."""
    report = KillReport(
        exit_status=matrix.exit_status,
        figures=matrix.figures,
        problems=matrix.problems,
        checks=matrix.checks,
        matrix=matrix,
    )
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read(path: Path) -> KillMatrix:
    """The matrix in a kill_matrix.json. Raises `UsageError` for a file that is not one, or of another format."""
    try:
        found = msgspec.json.decode(path.read_bytes())
        declared = found.get("format") if isinstance(found, dict) else None
        if declared != FORMAT:
            raise UsageError(f"{path} has format {declared!r}, this version reads {FORMAT}", next_step="prove it again")
        return msgspec.convert(found, KillReport).matrix
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}", next_step="name a kill_matrix.json") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not a kill matrix: {e}", next_step="name a kill_matrix.json") from e


def schema() -> dict[str, Any]:
    """The JSON schema of kill_matrix.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rollout-parity kill matrix",
        "description": "kill_matrix.json of one run of `parity prove`: seeded faults × checks, and faults × scenarios.",
        **msgspec.json.schema(KillReport),
    }


def settle(matrix: KillMatrix) -> KillMatrix:
    """The same matrix, with values that JSON cannot hold written as text."""
    return msgspec.convert(plain(msgspec.to_builtins(matrix), as_number=False), KillMatrix)


def write_all(matrix: KillMatrix, folder: Path) -> dict[str, Path]:
    """Write kill_matrix.json and kill_matrix.html into `folder`. Returns file name → path. Each is replaced whole."""
    settled = settle(matrix)
    contents = {"kill_matrix.json": encode(settled), "kill_matrix.html": kill_matrix_html.render(settled).encode()}
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / name for name in contents}
    for name, content in contents.items():
        partial = paths[name].with_name(f".{name}.partial")
        partial.write_bytes(content)
        partial.replace(paths[name])
    return paths


def write_schema() -> None:
    """Renew ``reports/kill_matrix.schema.json``: ``python -m reports.kill_matrix``."""
    SCHEMA.write_text(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_schema()
