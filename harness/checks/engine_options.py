"""Options that the configuration gives to the engine or its OpenAI address: each takes effect, or is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from harness.checks.base import EVERY, Check, Evidence, Finding, concluded, untestable
from harness.checks.errors import error_of
from harness.contract.messages import SEVERAL_TEXTS
from harness.records.recording import Call, saying

NOT_TOLD = "the stack does not say what it starts its engines with"
SHOWN = 12
"""Names of options in one reason, at most."""


class _Asked(NamedTuple):
    """One option of one question. `why` says what is wrong with the answer; empty if nothing is."""

    name: str
    kind: str
    why: str


def _names(message: str, option: str) -> bool:
    """True if an error names this option, as a word of its own."""
    return re.search(rf"\b{re.escape(option)}\b", message) is not None


def _asked(call: Call, known: Mapping[str, Any], configured: Collection[str]) -> Iterator[_Asked]:
    error, message, _ = error_of(call)
    got = {} if call.result is None else call.result["arguments"]
    for name, value in (call.request.get("options") or {}).items():
        kind, wrong = next(
            (kind, said)
            for kind, there, said in (
                ("misspelt", name not in known, "an option that engines do not have is ignored"),
                (
                    "configured",
                    name in configured,
                    "an option for the engines replaces what the configuration has a key for",
                ),
                ("other", True, "" if got.get(name) == value else "an option for the engines does not reach them"),
            )
            if there
        )
        if error is not None:
            wrong = (
                ""
                if _names(message, name)
                else "an option for the engines is refused by an error that does not name it"
            )
        yield _Asked(name, kind, wrong)


def _judge(evidence: Evidence) -> Finding:
    calls = evidence.calls("engine_arguments")
    plain = next((call.result for call in calls if call.result is not None and not call.request.get("options")), None)
    if plain is None:
        return untestable(NOT_TOLD)
    asked = [one for call in calls for one in _asked(call, plain["arguments"], plain.get("configured", ()))]
    wrong: list[tuple[str, dict[str, Any]]] = []
    for why in dict.fromkeys(one.why for one in asked if one.why):
        names = [one.name for one in asked if one.why == why]
        kinds = {one.kind for one in asked if one.why == why}
        every = len(names) == sum(one.kind in kinds for one in asked)
        said = "all of them" if every else ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
        wrong.append((f"{why}: {said}", {"options": len(names), "first": names[:SHOWN]}))
    return concluded(len(asked), wrong)


ENGINE_OPTIONS = Check(
    name="engine_options",
    fault="an option that the configuration gives to the engine is ignored, or silently replaces another key of the configuration",
    next_step="follow engine_init_kwargs to the engine's arguments: who compares its names with those that there are",
    errors_of=EVERY,
    source='SkyRL documentation, Configuration Overview, generator.engine_init_kwargs: "Inference engine arguments passed directly to '
    "the vLLM or SGLang engine. … If duplicate kwargs are passed or kwargs clash with existing generator arguments …, an error is "
    'raised"',
    judge=_judge,
)


def _judge_backend(evidence: Evidence) -> Finding:
    calls = [call for call in evidence.calls("engine_arguments") if call.request.get("sync_backend") is not None]
    wrong = []
    for call in calls:
        named, (error, message, _) = call.request["sync_backend"], error_of(call)
        got = str((call.result or {}).get("sync_backend"))
        if error is None and named not in got:
            wrong.append((f"weights travel by another backend than the configuration names: {named}", {"got": got}))
        elif error is not None and not _names(message, named):
            wrong.append((f"a backend is refused by an error that does not name it: {named}", {"said": message}))
    return concluded(len(calls), wrong)


SYNC_BACKEND = Check(
    name="sync_backend",
    fault="a configured backend of weight syncs is silently replaced by another, also one that is misspelt",
    next_step="follow weight_sync_backend to the transfer of weights: who maps it, and what becomes of a word that is not known",
    errors_of=EVERY,
    source='SkyRL documentation, Configuration Overview, weight_sync_backend: "Currently, we support nccl and gloo"',
    judge=_judge_backend,
)


def _judge_driver(evidence: Evidence) -> Finding:
    calls = evidence.calls("engine_arguments")
    plain = next((call.result for call in calls if call.result is not None and call.request.get("device", True)), None)
    asked = [call for call in calls if not call.request.get("device", True)]
    if plain is None or not asked:
        return untestable(NOT_TOLD)
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in asked:
        error, message, status = error_of(call)
        got = {} if call.result is None else call.result["arguments"]
        others = sorted(name for name, value in plain["arguments"].items() if got.get(name) != value)
        if error is not None:
            said = f"a driver without an accelerator cannot configure engines: {saying(error, message, status)}"
            wrong.append((said, {"said": message}))
        elif others:
            shown = {name: [plain["arguments"][name], got.get(name)] for name in others[:SHOWN]}
            wrong.append(("a driver without an accelerator configures engines otherwise", shown))
    return concluded(len(plain["arguments"]) * len(asked), wrong)


DRIVER_WITHOUT_A_DEVICE = Check(
    name="driver_without_a_device",
    fault="the command line of engines on other nodes is made with the driver's own device: a head node without one starts no stack",
    next_step="look at what the driver asks its own vLLM for when it makes the engines' arguments",
    errors_of=EVERY,
    source='SkyRL 0.3.0, build_vllm_cli_args: "This function may run a GPU-less Ray head node"',
    judge=_judge_driver,
)


def _unserved(call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is wrong with the answer about each option of the OpenAI address."""
    error, message, _ = error_of(call)
    got = {} if call.result is None else call.result["arguments"]
    for name, value in (call.request.get("options") or {}).items():
        several = name in SEVERAL_TEXTS
        expected = [value] if several and isinstance(value, str) else value
        if error is None and several and isinstance(got.get(name), str):
            yield f"a text for an option that holds several stands for each of its letters: {name}", {"given": value}
        elif error is None and got.get(name) != expected:
            yield f"an option for the OpenAI address does not reach it: {name}", {"given": value, "got": got.get(name)}
        elif error is not None and not _names(message, name):
            yield (
                f"an option for the OpenAI address is refused by an error that does not name it: {name}",
                {"said": message},
            )


def _judge_serving(evidence: Evidence) -> Finding:
    calls = evidence.calls("serving_arguments")
    facts = sum(len(call.request.get("options") or ()) for call in calls)
    return concluded(facts, (wrong for call in calls for wrong in _unserved(call)))


SERVING_OPTIONS = Check(
    name="serving_options",
    fault="an option that the configuration gives to the OpenAI address is ignored: tool calls and reasoning come back as text",
    next_step="follow the name from engine_init_kwargs to what serves chat completions: who knows it, and who drops it",
    errors_of=EVERY,
    source="SkyRL #322: arguments for tools are plumbed through engine_init_kwargs; SkyRL #358: under both of their names",
    judge=_judge_serving,
)
