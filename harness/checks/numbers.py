"""Numbers are numbers: log-probabilities finite and ≤ 0, one per token, present for each row that asked.

Belongs to every scenario, so it judges returned rows and leaves failed calls to other checks.
"""

from __future__ import annotations

import math
from typing import Any

from harness.checks.base import Check, Evidence, Finding, concluded
from harness.checks.matching import Row, rows
from harness.contract.faults import Fact
from harness.contract.messages import LISTS

ABSENT = "log-probabilities were asked for and none came"
UNEVEN = "there is not one log-probability per token"
NOT_FINITE = "a log-probability is not a finite number"
STOOD_IN = "a log-probability is a number that stands for none"
STAND_IN = -9999.0
"""What vLLM and SkyRL write for a log-probability that is missing, or no finite number (vLLM, ChatCompletionLogProb)."""
POSITIVE = "a log-probability is above zero"


def _asked(row: Row) -> bool:
    wanted = row.params.get("logprobs")  # 0 asks for the sampled token's alone
    given = wanted is not None and wanted is not False
    return given and row.state == "returned" and row.call.method in LISTS


def _problem(row: Row) -> str | None:
    numbers: list[list[Any] | None] = (row.call.result or {}).get("response_logprobs") or []
    mine = numbers[row.index] if row.index < len(numbers) else None
    if mine is None:
        return ABSENT if row.tokens else None
    if len(mine) != len(row.tokens or ()):
        return UNEVEN
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in mine):
        return NOT_FINITE
    if STAND_IN in mine:
        return STOOD_IN
    return POSITIVE if any(n > 0 for n in mine) else None


def _judge(evidence: Evidence) -> Finding | None:
    asked = [row for row in rows(evidence) if _asked(row)]
    facts = sum(len(row.tokens or ()) for row in asked)
    if not facts:
        return None
    return concluded(facts, [(problem, row.shown) for row in asked if (problem := _problem(row))])


NUMBERS = Check(
    name="numbers_are_numbers",
    fault="NaN, missing, doubled or shifted log-probabilities reach the trainer's loss",
    next_step="look at where the client takes the numbers out of the engine's answer, and at the row that the evidence names",
    reads=Fact.ANSWERS | Fact.LOGPROBS,
    falsifies=Fact.LOGPROBS,
    source="SkyRL API reference, InferenceEngineOutput.response_logprobs",
    judge=_judge,
)
