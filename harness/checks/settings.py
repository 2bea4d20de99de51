"""What engines run with, held against what the stack was told to start them with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.contract.messages import WorkersResult

NOT_TOLD = "the stack does not say what it was told to start its engines with"


def _judge(evidence: Evidence) -> Finding:
    answers = [msgspec.convert(call.result, WorkersResult) for call in evidence.calls("workers") if call.result]
    compared = [one for answer in answers for one in _compared(answer)]
    return concluded(len(compared), [one for one in compared if one[0]]) if compared else untestable(NOT_TOLD)


def _compared(answer: WorkersResult) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each worker and setting: what is wrong (empty if nothing is), with both values."""
    for server, workers in answer.servers.items():
        for worker in workers:
            for name, asked in answer.configured.items():
                has = worker.settings.get(name, "not told")
                why = "" if has == asked else f"an engine does not run with the configured {name}"
                yield why, {"server": server, "rank": worker.rank, "configured": asked, "runs with": has}


SETTINGS = Check(
    name="settings",
    fault="a setting of the stack's configuration is lost, misspelt or changed on its way to an engine",
    next_step="follow the setting from the configuration to the engine's arguments: each server gets its own copy",
    source="SkyRL documentation, Configuration Overview, generator.inference_engine",
    judge=_judge,
)
