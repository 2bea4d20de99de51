"""Options that the configuration gives to the engine: each takes effect, or is refused by its name."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.checks.errors import error_of

NOT_TOLD = "the stack does not say what it starts its engines with"
SHOWN = 12
"""Names in the evidence of one reason, at most."""


def _judge(evidence: Evidence) -> Finding:
    calls = evidence.calls("engine_arguments")
    plain = next((call.result for call in calls if call.result is not None and not call.request.get("options")), None)
    if plain is None:
        return untestable(NOT_TOLD)
    known, configured = set(plain["arguments"]), set(plain.get("configured", ()))
    wrong: dict[str, list[str]] = defaultdict(list)
    facts = 0
    for call in calls:
        kind, message, _ = error_of(call)
        for name, value in (call.request.get("options") or {}).items():
            facts += 1
            given = {} if call.result is None else call.result["arguments"]
            if kind is not None:
                told = re.search(rf"\b{re.escape(name)}\b", message) is not None
                why = "" if told else "an option for the engines is refused by an error that does not name it"
            elif name not in known:
                why = "an option that engines do not have is ignored"
            elif name in configured:
                why = "an option for the engines replaces what the configuration has a key for"
            else:
                why = "" if given.get(name) == value else "an option for the engines does not reach them"
            wrong[why].append(name)
    shown: list[tuple[str, dict[str, Any]]] = [
        (why, {"options": len(names), "first": names[:SHOWN]}) for why, names in wrong.items() if why
    ]
    return concluded(facts, shown)


ENGINE_OPTIONS = Check(
    name="engine_options",
    fault="an option that the configuration gives to the engine is ignored, or silently replaces another key of the configuration",
    next_step="follow engine_init_kwargs to the engine's arguments: who compares its names with those that there are",
    source='SkyRL documentation, Configuration Overview, generator.engine_init_kwargs: "Inference engine arguments passed directly to '
    "the vLLM or SGLang engine. … If duplicate kwargs are passed or kwargs clash with existing generator arguments …, an error is "
    'raised"',
    judge=_judge,
)
