"""report.json: the judgement, with its totals in front. Published schema: ``reports/schema.json``."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal, final

import msgspec

from harness.contract.errors import UsageError
from harness.records.verdict import Judgement
from reports import published
from reports.text import visible
from reports.view import Counts, count

FORMAT: Literal[2] = 2
"""Version of report.json. A reader refuses any other. Format 1 asked whether legacy may be removed."""
SURROGATE = re.compile("[\ud800-\udfff]")


@final
class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A parity report: the verdicts of one run, and what they come to."""

    format: Literal[2] = FORMAT
    exit_status: int
    """0 only when everything judged is green or in the ledger, and something was judged at all."""
    counts: Counts
    judgement: Judgement


SCHEMA = published.Schema(
    Report,
    "schema.json",
    "rollout-parity report",
    "report.json of one run: rollout inference stacks against the contract and each other.",
)


def encode(judgement: Judgement) -> bytes:
    """The bytes of report.json. The judgement must have been settled."""
    return published.encode(Report(exit_status=judgement.exit_status, counts=count(judgement), judgement=judgement))


def read_report(path: Path) -> Judgement:
    """The judgement in a report.json. Raises `UsageError` for a file that is not one, or of another format."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}", next_step="name the report.json of a run") from e
    try:
        found = msgspec.json.decode(raw)
        declared = found.get("format") if isinstance(found, dict) else None
        if declared != FORMAT:
            raise UsageError(
                f"{path} has format {declared!r}, this version reads {FORMAT}",
                next_step="judge the run's recordings again with `parity judge`",
            )
        return msgspec.convert(found, Report).judgement
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not a report: {e}", next_step="name the report.json of a run") from e


def settle(judgement: Judgement) -> Judgement:
    """The same judgement, with values that JSON cannot hold written out, so that every format shows the same.

    Numbers that are not finite move from `numbers` to `evidence`, as text; in margins, noise floors and gaps they become the
    largest float. Lone surrogates become ``\\ud800``.
    """
    raw = msgspec.to_builtins(judgement)
    for verdict in raw["verdicts"]:
        odd = {name: str(value) for name, value in verdict["numbers"].items() if not math.isfinite(value)}
        if odd:
            verdict["numbers"] = {name: value for name, value in verdict["numbers"].items() if name not in odd}
            verdict["evidence"] = [*verdict["evidence"], {"not finite": odd}]
    margins = [plain(verdict["margin"], as_number=True) for verdict in raw["verdicts"]]
    settled = plain(raw, as_number=False)
    for verdict, margin in zip(settled["verdicts"], margins, strict=True):
        verdict["margin"] = margin
    settled |= {name: plain(raw[name], as_number=True) for name in ("noise", "gaps")}
    return msgspec.convert(settled, Judgement)


def plain(value: Any, *, as_number: bool) -> Any:
    """A JSON value with non-finite numbers and lone surrogates written out, since JSON cannot hold them."""
    match value:
        case float() if not math.isfinite(value):
            return 1.7976931348623157e308 if as_number else str(value)
        case str():
            return SURROGATE.sub(lambda found: visible(found[0]), value)
        case dict():
            return {plain(str(k), as_number=as_number): plain(v, as_number=as_number) for k, v in value.items()}
        case list() | tuple():
            return [plain(v, as_number=as_number) for v in value]
        case _:
            return value
