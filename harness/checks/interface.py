"""The client offers the documented interface: each method, async or not, with its parameters and their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.contract.interface import DocumentedClient
from harness.contract.messages import CensusResult, Offer

_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _judge(evidence: Evidence) -> Finding:
    found = evidence.succeeded("census")
    if not found:
        return untestable("no census was taken of the client")
    facts, wrong = 0, []
    for call in found:
        offered = {offer.name: offer for offer in msgspec.convert(call.result, CensusResult).offers}
        for name, method in vars(DocumentedClient).items():
            if inspect.isfunction(method):
                facts += len(inspect.signature(method).parameters)  # the method itself, and each of its arguments
                shown = {"call": call.id, "documented": f"{name}{inspect.signature(method)}"}
                wrong += [(reason, {**shown, "offered": _shown(name, offered)}) for reason in _differs(method, offered)]
    return concluded(facts, wrong, documented=facts)


def _differs(method: Any, offered: Mapping[str, Offer]) -> Iterator[str]:
    """Why a call that is documented fails or means something else."""
    name, form = method.__name__, "async" if inspect.iscoroutinefunction(method) else "sync"
    own = offered.get(name)
    if own is None or own.kind != "method":
        yield f"the client has no method {name}()"
        return
    if own.form != form:
        yield f"{name}() is {own.form} and documented as {form}"
    documented = list(inspect.signature(method).parameters.values())[1:]
    for parameter in documented:
        there = offered.get(f"{name}({parameter.name})")
        if parameter.kind in _STARS:
            continue
        if there is None:
            yield f"{name}() has no parameter {parameter.name}"
        elif parameter.default is not inspect.Parameter.empty and there.default != repr(parameter.default):
            yield f"{name}() has the default {there.default or 'none'} for {parameter.name}, and {parameter.default!r} is documented"
    known = {parameter.name for parameter in documented}
    for argument, other in _arguments(name, offered).items():
        if argument not in known and not argument.startswith("*") and other.default is None:
            yield f"{name}() cannot be called as documented: it needs {argument}"


def _arguments(name: str, offered: Mapping[str, Offer]) -> dict[str, Offer]:
    begin = f"{name}("
    return {key.removeprefix(begin)[:-1]: offer for key, offer in offered.items() if key.startswith(begin)}


def _shown(name: str, offered: Mapping[str, Offer]) -> str:
    own = offered.get(name)
    if own is None:
        return "nothing of that name"
    arguments = _arguments(name, offered).items()
    texts = [argument + (f"={offer.default}" if offer.default else "") for argument, offer in arguments]
    return f"{own.form} {name}({', '.join(texts)})"


def _judge_variables(evidence: Evidence) -> Finding:
    facts, wrong = 0, []
    for call in evidence.succeeded("census"):
        census = msgspec.convert(call.result, CensusResult)
        facts += sum(offer.kind == "variable" for offer in census.offers)
        wrong += [
            (f"{name} stays in the user's shell", {"call": call.id, "variable": name}) for name in census.kept_back
        ]
    return concluded(facts, wrong)


VARIABLES = Check(
    name="variables_passed_on",
    fault="an environment variable that the stack documents has no effect, since its processes never see it",
    next_step="look at what the entry point gives to the cluster's processes (runtime_env)",
    source="SkyRL #1800; SkyRL, env_vars; Ray documentation, Environment Dependencies: env_vars",
    judge=_judge_variables,
)
DOCUMENTED_INTERFACE = Check(
    name="documented_interface",
    fault="a method of the documented interface is gone, is async instead of sync, or has other parameters or defaults",
    source="SkyRL API reference, InferenceEngineInterface and InferenceEngineClient",
    judge=_judge,
)
