"""The engine applies the arguments that the caller gave, through every hop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from harness.checks.base import UNTOLD, Check, Evidence, Execution, Finding, Tap, concluded
from harness.checks.matching import WITH_ROWS, Row, assignment, queries
from harness.contract.capability import Capability
from harness.contract.faults import Fact
from harness.contract.messages import LISTS
from harness.records.argument_forms import NO_NUMBERS
from harness.records.differing import parting
from harness.records.recording import Call

ENGINE_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
}
"""Value of a field of SamplingParams that the tap does not show (vLLM documentation, SamplingParams)."""

OBJECTS = frozenset({"structured_outputs"})
"""Parameters of which the tap shows only that there is one (vLLM makes an object of them)."""

SAMPLING_EPSILON = 1e-5
"""Below this temperature vLLM samples greedily and ignores top_p, top_k and min_p (vLLM, SamplingParams)."""

FLOAT32 = 2**-23
"""Relative distance of neighbouring float32 numbers."""

GREEDY_OVERRIDES = frozenset({"top_p", "top_k", "min_p"})

_Accepts = Callable[[Row, Any, Any], bool]
"""(row, the caller's value, the engine's value) → True if the engine's value is what the caller meant."""


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or ())


TRANSLATIONS: dict[str, tuple[str, _Accepts]] = {
    "n": (
        "an engine runs n choices as n requests of one (vLLM, parallel sampling)",
        lambda _row, _given, seen: seen == 1,
    ),
    "seed": (
        "the choices of n run with seed, seed + 1, … (vLLM, parallel sampling), in any order; -1 is no seed",
        lambda row, given, seen: seen is None if given == -1 else seen in range(given, given + _copies(row)),
    ),
    "temperature": (
        "vLLM raises temperatures between 0 and 0.01 to 0.01",
        lambda _row, given, seen: _same(max(given, 0.01) if given > 0 else given, seen),
    ),
    "top_k": ("-1 and 0 both mean all tokens", lambda _row, given, seen: max(given, 0) == max(seen, 0)),
    "thinking_token_budget": (
        "-1 is unlimited, as null is",
        lambda _row, given, seen: seen == (None if given == -1 else given),
    ),
    "stop": ("a single stop string is a list of one", lambda _row, given, seen: _as_list(given) == _as_list(seen)),
    "stop_token_ids": ("the model's own end tokens are added", lambda _row, given, seen: set(given) == set(seen)),
    "bad_words": ("none is an empty list", lambda _row, given, seen: list(given or ()) == list(seen or ())),
    "logprobs": (
        "True means 1, and in a chat top_logprobs; none if logprob_token_ids take precedence",
        lambda row, given, seen: seen in _logprobs(row, given),
    ),
    "prompt_logprobs": ("True means 1", lambda _row, given, seen: seen == (1 if given is True else given)),
    "max_completion_tokens": ("is max_tokens in a chat", lambda _row, given, seen: seen == given),
    "logit_bias": (
        "JSON keys are strings, tokens are ints; values are held within ±100",
        lambda _row, given, seen: _bias(given) == _bias(seen),
    ),
}
"""Documented translations: field → (why the engine may hold another value, test for a right one)."""


def _copies(row: Row) -> int:
    """How many rows its call requested for each prompt."""
    return int(row.params.get("n") or 1 if row.call.method != "sample" else row.call.request["num_samples"])


def _logprobs(row: Row, given: Any) -> set[Any]:
    number = 1 if given is True else given
    none = {None} if row.params.get("logprob_token_ids") else set()
    if row.call.method == "chat_completion":
        return {None} if given is False else none | {row.params.get("top_logprobs") or 0, number}
    return none | {number}


def _same(given: Any, seen: Any) -> bool:
    """Equal, and for numbers with a fraction equal as float32: vllm-router reads them as such, and engines compute in it."""
    if isinstance(given, float) and isinstance(seen, float):
        return math.isclose(given, seen, rel_tol=FLOAT32)
    return bool(given == seen)


def _bias(value: Any) -> dict[int, float]:
    return {int(token): max(-100.0, min(100.0, float(bias))) for token, bias in (value or {}).items()}


def parameters(evidence: Evidence, row: Row, execution: Execution) -> Iterator[tuple[str, Any, Any, bool]]:
    """(field, given, seen, True if right) for every sampling parameter, and the salt of the cache, that the caller gave. None if it
    gave NaN or infinity, which the recording cannot hold."""
    if any(str(raw.formed).endswith(tuple(NO_NUMBERS)) for raw in row.call.raw or ()):
        return
    if (salt := row.call.request.get("cache_salt")) is not None and execution.cache_salt != UNTOLD:
        yield "cache_salt", salt, execution.cache_salt, salt == execution.cache_salt
    ends = set(evidence.header.vocabulary.ends)
    temperature = row.params.get("temperature")
    greedy = isinstance(temperature, int | float) and temperature < SAMPLING_EPSILON
    for field, given in row.params.items():
        if field == "max_tokens" and row.params.get("max_completion_tokens") is not None:
            continue  # the newer name of the two counts (vLLM, ChatCompletionRequest)
        at = "max_tokens" if field == "max_completion_tokens" else field
        if given is None or (greedy and field in GREEDY_OVERRIDES):
            continue
        if at not in ENGINE_DEFAULTS:
            # Fields of an OpenAI body that are not sampling parameters (model, messages, …) are judged by other checks.
            if row.call.method in LISTS:
                seen = execution.sampling_params.get(field)
                yield field, given, seen, _right(row, field, given, seen) or (field in OBJECTS and seen is not None)
            continue
        seen = execution.sampling_params.get(at, ENGINE_DEFAULTS[at])
        if at == "stop_token_ids":
            seen = [token for token in seen or () if token in given or token not in ends]
        yield field, given, seen, _right(row, field, given, seen)


def _right(row: Row, field: str, given: Any, seen: Any) -> bool:
    if isinstance(given, str) and isinstance(seen, int | float):  # a number or truth value that was written as text
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            return False
    if field not in TRANSLATIONS:
        return _same(given, seen)
    try:
        return TRANSLATIONS[field][1](row, given, seen)
    except (AttributeError, TypeError, ValueError):
        return False  # the caller gave a type that the field cannot hold, so another value took effect


CONTROL_OPS = {
    "pause": "pause_generation",
    "resume": "resume_generation",
    "sleep": "sleep",
    "wake_up": "wake_up",
    "reset_prefix_cache": "reset_prefix_cache",
}
"""Call of the contract → the engine's name for it (vLLM, AsyncLLM)."""

CONTROL_ARGUMENTS: dict[str, dict[str, Any]] = {
    "pause": {"mode": "abort", "clear_cache": True},
    "sleep": {"level": 1, "tags": None},
    "wake_up": {"tags": None},
    "reset_prefix_cache": {"reset_running_requests": False},
}
"""Arguments that are compared at the engine, with the engine's defaults (vLLM, AsyncLLM)."""

OFFERED_BY = {"clear_cache": Capability.PAUSE_CLEAR_CACHE}
"""Arguments that only stacks with this capability pass on. pause(keep) keeps the cache on each stack (SkyRL 0.2.0, PauseMode.KEEP)."""


def reached(evidence: Evidence, call: Call) -> list[Any]:
    """The engines' control observations of one control call, matched by operation and time."""
    return [
        seen for seen in evidence.controls(CONTROL_OPS[call.method]) if call.started_ns <= seen.at_ns <= call.ended_ns
    ]


def _arguments(evidence: Evidence) -> Iterator[tuple[Call, str, Any, str, Any]]:
    """(call, argument, given, server, seen) for every control call that reached an engine."""
    for method, defaults in CONTROL_ARGUMENTS.items():
        for call in (c for c in evidence.calls(method) if c.error is None):
            for control in reached(evidence, call):
                for name, default in defaults.items():
                    needed = None if call.request.get("mode") == "keep" else OFFERED_BY.get(name)
                    if needed and needed not in evidence.header.capabilities:
                        continue  # the caller cannot set it, and the contract does not define the engine's default
                    if name == "level" and evidence.header.topology.lora:
                        continue  # `base_model_kept` judges it: the model has to stay, whatever level the caller asks for
                    yield (
                        call,
                        name,
                        call.request.get(name),
                        control.server,
                        control.data["arguments"].get(name, default),
                    )


def _judge(evidence: Evidence) -> Finding | None:
    methods = (*WITH_ROWS, *CONTROL_ARGUMENTS)
    if not any(c.error is None for method in methods for c in evidence.calls(method)):
        return None
    found = assignment(evidence)
    facts, wrong = 0, []
    for row in found.rows:
        for execution in found.of(row)[:1]:
            facts += 1  # the prompt, by which rows are matched
            for field, given, seen, right in parameters(evidence, row, execution):
                facts += 1
                if not right:
                    wrong.append(
                        (
                            f"{row.call.method}() changed {field} on the way",
                            {**row.shown, "given": given, "engine": seen},
                        )
                    )
    for call, name, given, server, seen in _arguments(evidence):
        facts += 1
        if given != seen:
            wrong.append(
                (
                    f"{call.method}() changed {name} on the way",
                    {"call": call.id, "server": server, "given": given, "engine": seen},
                )
            )
    changed = _changed_prompts(evidence)
    facts += len(changed)
    wrong = [("a prompt was changed on the way", item) for item in changed] + wrong
    return concluded(facts, wrong) if facts or wrong else None


def _changed_prompts(evidence: Evidence) -> list[dict[str, Any]]:
    """Rows that no engine served as asked, although an engine ran a prompt of no call in that time."""
    found = assignment(evidence)
    altered = {(row.call.id, row.index) for row, _ in found.altered}
    items = []
    for row in found.rows:
        if row.state != "returned" or row.prompt is None or found.of(row) or (row.call.id, row.index) in altered:
            continue
        for stranger in found.strangers:
            if row.call.started_ns <= stranger.started_ns <= row.call.ended_ns and row.tokens in (
                None,
                stranger.tokens,
            ):
                items.append({**row.shown, **parting(given=row.prompt, engine=stranger.prompt)})
                break
    return items


ECHO = Check(
    name="echo",
    fault="an argument is dropped or changed between the caller and the engine",
    next_step="find the hop that drops or changes the argument: in the evidence `given` is the caller's, `engine` the engine's",
    reads=Fact.ANSWERS | Fact.TEXT | Fact.ERRORS,
    falsifies=Fact.ANSWERS | Fact.TEXT | Fact.CHANCE,
    source="SkyRL API reference, InferenceEngineInput; vLLM documentation, SamplingParams, /pause, /sleep, /wake_up",
    tap=Tap.READ,
    judge=_judge,
    queries=queries,
)
