"""What a request leaves out has one default, and it is a documented one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from harness.checks.base import Check, Evidence, Execution, Finding, Tap, concluded, untestable
from harness.checks.echo import ENGINE_DEFAULTS
from harness.checks.matching import Row, assignment, queries
from harness.contract.faults import Fact
from harness.contract.messages import MAX_MODEL_LEN


def _judge(evidence: Evidence) -> Finding:
    recommended = evidence.header.vocabulary.sampling
    found = assignment(evidence)
    facts, wrong = 0, []
    taken: dict[tuple[str, str], dict[bool, Row]] = defaultdict(dict)
    for row in found.rows:
        for execution in found.of(row)[:1]:
            for field in (name for name in recommended if row.params.get(name) is None):
                facts += 1
                seen = execution.sampling_params.get(field, ENGINE_DEFAULTS[field])
                if seen == recommended[field] or seen in _own(field, row, execution):
                    taken[row.call.method, field].setdefault(seen == recommended[field], row)
                else:
                    reason = f"{row.call.method}() without {field} gets neither the checkpoint's nor the engine's"
                    wrong.append((reason, {**row.shown, "engine": seen, "checkpoint": recommended[field]}))
    wrong += [
        (f"{method}() without {field} gets the checkpoint's at times, and at times the engine's", _both(rows))
        for (method, field), rows in taken.items()
        if len(rows) > 1
    ]
    return concluded(facts, wrong) if facts else untestable("no request left out what the checkpoint recommends")


def _own(field: str, row: Row, execution: Execution) -> list[Any]:
    """vLLM's own defaults. A chat goes on to the end of the context, and generate() does in some releases (vLLM, get_max_tokens)."""
    whole = [MAX_MODEL_LEN - len(execution.prompt)] if field == "max_tokens" else []
    return whole if whole and row.call.method == "chat_completion" else [*whole, ENGINE_DEFAULTS[field]]


def _both(rows: dict[bool, Row]) -> dict[str, Any]:
    return {"the checkpoint's": rows[True].shown, "the engine's": rows[False].shown}


LEFT_OUT = Check(
    name="left_out",
    fault="a sampling parameter that a request leaves out has a default of nobody's, or now one and now another",
    next_step="find who fills in the parameter: the server reads the checkpoint's generation_config.json when it starts",
    reads=Fact.ANSWERS | Fact.ROUTES,
    falsifies=Fact.CHANCE,
    source="vLLM documentation, OpenAI-Compatible Server: generation_config.json; SamplingParams",
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)
