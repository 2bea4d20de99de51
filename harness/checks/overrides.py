"""A configuration made of values by key holds these values, and its sampling parameters reach the requests."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.checks.errors import error_of

KINDS: dict[type, str] = {type(None): "None", bool: "a switch", int: "a number", float: "a number", str: "a text"}
"""Type of a value → its name in a reason."""
LOST = "nothing"
NAMES_A_KEY = re.compile(r"\b(generator|trainer)\.\w")
"""An error that names a key of the configuration: what is refused may be two values that do not go together."""


def _judge(evidence: Evidence) -> Finding:
    facts = 0
    wrong: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for call in evidence.calls("override_configuration"):
        error, message, _ = error_of(call)
        for key, given in (call.request.get("overrides") or {}).items():
            facts += 1
            got = LOST if call.result is None else call.result["values"].get(key, LOST)
            if error is not None:
                if key not in message and not NAMES_A_KEY.search(message):
                    wrong["an override is refused by an error that names no key"].append({"key": key, "given": given})
            elif type(got) is not type(given) or got != given:
                reason = f"{KINDS[type(given)]} in an override is another value in the configuration"
                wrong[reason].append({"key": key, "given": given, "got": got})
    if not facts:
        return untestable("no key of the configuration was overridden")
    return concluded(facts, [(reason, {"keys": len(found), "first": found[:6]}) for reason, found in wrong.items()])


OVERRIDES = Check(
    name="overrides",
    fault="a value that overrides a key of the configuration is lost, or read again as text on its way there",
    next_step="follow the value from the dict of overrides into the configuration: a text may be made of it, and parsed",
    source='SkyRL, SkyRLTrainConfig.from_cli_overrides: "a dict mapping dot-notation keys to values"',
    judge=_judge,
)


VALID, CONTRADICTION = "valid", "contradiction"
"""Labels of configurations: without and with two settings that exclude each other."""


def _judge_contradictions(evidence: Evidence) -> Finding:
    """Judges only if the configuration without the contradictions is valid. An error may write a key's underscores as spaces."""
    calls = evidence.calls("override_configuration")
    valid = [call for call in calls if call.label == VALID]
    if not valid or any(call.error is not None for call in valid):
        return untestable("the configuration without a contradiction is refused too")
    facts, wrong = len(valid), []
    for call in (call for call in calls if call.label == CONTRADICTION):
        facts += 1
        known = valid[0].request["overrides"]
        given = {key: value for key, value in call.request["overrides"].items() if known.get(key) != value}
        error, message, _ = error_of(call)
        if error is None:
            wrong.append(("settings that exclude each other are accepted without a word", {"settings": given}))
        elif not any(key.rpartition(".")[2] in message.replace(" ", "_") for key in given):
            wrong.append(
                ("settings that exclude each other are refused by an error that names none", {"settings": given})
            )
    return concluded(facts, wrong)


CONTRADICTIONS = Check(
    name="contradictions",
    fault="two settings that exclude each other are accepted, and one of them has no effect; or the error does not say which",
    next_step="look at what checks the configuration before anything starts, and under which condition",
    source="SkyRL, validate_cfg",
    judge=_judge_contradictions,
)


SAMPLING = "generator.sampling_params."
"""What keys of sampling parameters begin with."""
OTHER_NAMES = {"max_generate_length": "max_tokens"}
"""Sampling parameter of the configuration → its name in a request (vLLM, SamplingParams), if that is another one."""


def _judge_sampling(evidence: Evidence) -> Finding:
    facts, lost = 0, []
    for call in evidence.succeeded("override_configuration"):
        if "sampling" not in (call.result or {}):
            return untestable("the stack does not say what requests get of the configuration")
        for key, given in (call.request.get("overrides") or {}).items():
            name = key.removeprefix(SAMPLING)
            if name == key or isinstance(given, str | None):
                continue
            facts += 1
            got = (call.result or {})["sampling"].get(OTHER_NAMES.get(name, name), LOST)
            if got != given:
                lost.append(
                    (
                        f"a sampling parameter of the configuration does not reach requests: {name}",
                        {"given": given, "got": got},
                    )
                )
    if not facts:
        return untestable("no sampling parameter of the configuration was overridden")
    return concluded(facts, lost)


CONFIGURED_SAMPLING = Check(
    name="configured_sampling",
    fault="a sampling parameter of the configuration is dropped or changed on its way to the requests of training",
    next_step="follow the parameter from generator.sampling_params to what is given to generate(): who picks the fields",
    source="SkyRL documentation, Configuration Overview, generator.sampling_params",
    judge=_judge_sampling,
)
