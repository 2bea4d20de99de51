"""What a request leaves out has one default, and it is a documented one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded, untestable
from harness.checks.echo import ENGINE_DEFAULTS
from harness.checks.matching import Row, assignment, queries
from harness.contract.faults import Fact
from harness.contract.messages import LISTS, MAX_MODEL_LEN

LENGTH = "max_tokens"


def _judge(evidence: Evidence) -> Finding:
    recommended = evidence.header.vocabulary.sampling
    found = assignment(evidence)
    facts, wrong = 0, []
    taken: dict[tuple[str, str], dict[bool, Row]] = defaultdict(dict)
    ends: dict[tuple[str, str], Row] = {}
    for row in found.rows:
        for execution in found.of(row)[:1]:
            for field in (name for name in {**recommended, LENGTH: None} if row.params.get(name) is None):
                facts += 1
                seen = execution.sampling_params.get(field, ENGINE_DEFAULTS[field])
                theirs = field in recommended and seen == recommended[field]
                if theirs or seen in _own(field, row, execution):
                    taken[row.call.method, field].setdefault(theirs, row)
                    if field == LENGTH and row.call.method in LISTS:
                        ends.setdefault((row.call.method, _end(seen, theirs=theirs)), row)
                else:
                    reason = f"{row.call.method}() without {field} gets neither the checkpoint's nor the engine's"
                    wrong.append((reason, {**row.shown, "engine": seen, "checkpoint": recommended.get(field)}))
    wrong += [
        (f"{method}() without {field} gets the checkpoint's at times, and at times the engine's", _both(rows))
        for (method, field), rows in taken.items()
        if len(rows) > 1
    ]
    if len({end for _, end in ends}) > 1:
        reason = ", and ".join(f"{method}() without {LENGTH} ends {end}" for method, end in sorted(ends))
        wrong.append((reason, {f"{method}() {end}": row.shown for (method, end), row in ends.items()}))
    return concluded(facts, wrong) if facts else untestable("no request left out a parameter that has a default here")


def _end(seen: Any, *, theirs: bool) -> str:
    """Where an answer of token ids ends whose request names no max_tokens."""
    if theirs:
        return "at the checkpoint's length"
    return f"after {seen} tokens" if seen == ENGINE_DEFAULTS[LENGTH] else "at the end of the context"


def _own(field: str, row: Row, execution: Execution) -> list[Any]:
    """vLLM's own defaults. A chat goes on to the end of the context, and generate() does in some releases (vLLM, get_max_tokens)."""
    whole = [MAX_MODEL_LEN - len(execution.prompt)] if field == "max_tokens" else []
    return whole if whole and row.call.method == "chat_completion" else [*whole, ENGINE_DEFAULTS[field]]


def _both(rows: dict[bool, Row]) -> dict[str, Any]:
    return {"the checkpoint's": rows[True].shown, "the engine's": rows[False].shown}


LEFT_OUT = Check(
    name="left_out",
    fault="a sampling parameter that a request leaves out has a default of nobody's, or now one and now another: by the request, or "
    "by the call that asks for tokens",
    next_step="find who fills in the parameter: the server reads the checkpoint's generation_config.json when it starts",
    reads=Fact.ANSWERS | Fact.ROUTES,
    falsifies=Fact.CHANCE,
    source="vLLM documentation, OpenAI-Compatible Server: generation_config.json; SamplingParams",
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)
