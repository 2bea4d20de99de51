"""The compared facets of a call's outcome, each a mapping from a place ("row 3") to a value. Pure.

Log-probabilities are not here: they are numbers, and `harness/judging/noise.py` derives their bound. Sampled output without
a seed is not here either: two right answers may differ, so only conformance judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from harness.checks.matching import is_error
from harness.contract.messages import CHOICES
from harness.records.recording import Call

TOKENS = "outputs.tokens"
TEXT = "outputs.text"
LOGPROBS = "outputs.logprobs"
STOP_REASONS = "outputs.stop_reasons"
EXPERTS = "outputs.experts"
ERRORS = "outputs.errors"
BODIES = "outputs.bodies"
STATE = "outputs.state"
LOSS_MASKS = "outputs.loss_masks"
REWARDS = "outputs.rewards"
PARTITION = "routing.partition"
DIGESTS = "weights.digests"

Outputs = dict[str, dict[str, Any]]
"""Facet → place → value, of one call."""

NOT_THERE = "(not there)"
"""In place of a value that a side does not have."""
WHOLE = "(a list or an object)"
"""In place of all that lies within one that the other side lacks, or has as null."""

_OWN_TO_A_CALL = frozenset({"id", "created", "request_id", "system_fingerprint"})
"""Fields of an OpenAI-style body that differ from call to call (OpenAI API reference, completion object)."""


def deterministic(call: Call) -> bool:
    """True if the call must give the same output twice: greedy, or seeded. Without a temperature vLLM samples; a seed of -1 is
    none."""
    asked = call.request.get("body") if call.method in CHOICES else None
    params = asked if asked is not None else call.request.get("sampling_params") or {}
    return params.get("temperature") == 0 or params.get("seed") not in (None, -1)


def error_of(call: Call) -> dict[str, Any] | None:
    """How a call failed: kind, HTTP status, the parameter that it blames, and whether it raised or returned an error body. None if it
    succeeded."""
    if call.error is not None:
        return {"kind": call.error.kind, "status": call.error.status, "param": None, "how": "raised"}
    body = (call.result or {}).get("body")
    if not isinstance(body, dict) or not is_error(body):
        return None
    inner = body["error"] if isinstance(body.get("error"), dict) else body
    return {"kind": inner.get("type"), "status": inner.get("code"), "param": inner.get("param"), "how": "returned"}


def outputs(call: Call) -> Outputs:
    """All compared facets of a successful call; empty for a failed one."""
    if error_of(call) is not None or call.result is None:
        return {}
    read = _READERS.get(call.method)
    return {} if read is None else read(call, call.result)


def _generation(call: Call, result: dict[str, Any]) -> Outputs:
    if not deterministic(call):
        return {}
    return {
        TOKENS: _rows(result.get("response_ids")),
        TEXT: _rows(result.get("responses")),
        STOP_REASONS: _rows(result.get("stop_reasons")),
        EXPERTS: _rows(result.get("routed_experts")),
    }


def _trajectories(call: Call, result: dict[str, Any]) -> Outputs:
    if not deterministic(call):
        return {}
    return {
        TOKENS: _rows([list(both) for both in zip(result["prompt_token_ids"], result["response_ids"], strict=False)]),
        LOSS_MASKS: _rows(result["loss_masks"]),
        REWARDS: _rows(result["rewards"]),
        STOP_REASONS: _rows(result["stop_reasons"]),
        EXPERTS: _rows(result.get("rollout_expert_indices")),
        STATE: dict(result["rollout_metrics"]),
    }


def _body(call: Call, result: dict[str, Any]) -> Outputs:
    return {BODIES: dict(_leaves(result["body"], ""))} if deterministic(call) else {}


def _digests(_call: Call, result: dict[str, Any]) -> Outputs:
    """Servers are numbered by their digests, since each stack has names of its own."""
    servers = sorted(result["servers"].values(), key=lambda ranks: msgspec.json.encode(ranks, order="deterministic"))
    return {
        DIGESTS: {
            f"server {number}, rank {rank}, {name}": digest
            for number, ranks in enumerate(servers)
            for rank, parameters in enumerate(ranks)
            for name, digest in parameters.items()
        }
    }


_READERS: dict[str, Callable[[Call, dict[str, Any]], Outputs]] = {
    "generate": _generation,
    "sample": _generation,
    "gym_generate": _trajectories,
    "completion": _body,
    "chat_completion": _body,
    "tokenize": lambda _, result: {TOKENS: _rows(result["token_ids"])},
    "detokenize": lambda _, result: {TEXT: _rows(result["texts"])},
    "digests": _digests,
    "health": lambda _, result: {STATE: {"healthy": result["healthy"]}},
    "is_paused": lambda _, result: {STATE: {"paused": sorted(result["servers"].values())}},
    "world_size": lambda _, result: {STATE: {"world size": result["world_size"]}},
    "weight_labels": lambda _, result: {STATE: {"labels": sorted(result["servers"].values())}},
}


def _rows(values: list[Any] | None) -> dict[str, Any]:
    return {f"row {number}": value for number, value in enumerate(values or ())}


def side_by_side(*calls: Call | None) -> list[Outputs]:
    """The outputs of two paired calls, then of others like the first. A list or an object of a body that one of the two lacks, or has
    as null, is one place."""
    found = [{} if call is None else outputs(call) for call in calls]
    bodies = [
        call.result["body"] if call and call.result and BODIES in one else None
        for call, one in zip(calls, found, strict=True)
    ]
    left, right = bodies[:2]
    if left is None or right is None or found[0][BODIES].keys() == found[1][BODIES].keys():
        return found
    whole = frozenset(_of_one(left, right, ""))
    for one, body in zip(found, bodies, strict=True):
        if whole and body is not None:
            one[BODIES] = dict(_leaves(body, "", whole))
    return found


def _of_one(left: Any, right: Any, path: str) -> Iterator[str]:
    """Paths of the lists and objects of one side that the other lacks, or has as null."""
    ours, theirs = dict(_within(left, path)), dict(_within(right, path))
    if (ours and right in (None, NOT_THERE)) or (theirs and left in (None, NOT_THERE)):
        yield path
        return
    for place in {**ours, **theirs}:
        yield from _of_one(ours.get(place, NOT_THERE), theirs.get(place, NOT_THERE), place)


def _within(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path → value of what a list or an object holds; nothing for an empty one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in _OWN_TO_A_CALL and not (name == "model" and not path):
                yield f"{path}.{name}" if path else name, inner
    elif isinstance(value, list):
        yield from ((f"{path}[{number}]", inner) for number, inner in enumerate(value))


def _leaves(value: Any, path: str, whole: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Path → value of each leaf, and of the lists and objects that are taken as a whole. An empty list or object is a leaf, so that it
    differs from an absent one."""
    inner = list(_within(value, path))
    if inner and path in whole:
        yield path, WHOLE
    elif inner or (isinstance(value, dict) and value):
        for place, one in inner:
            yield from _leaves(one, place, whole)
    else:
        yield path, value


def size_of(call: Call, place: str) -> int:
    """Size of the input behind the value at `place`: prompt tokens, or characters of the request."""
    prompt = prompt_of(call, place)
    return len(prompt) if isinstance(prompt, list) else len(str(prompt))


def prompt_of(call: Call, place: str) -> Any:
    """The part of the request that the value at `place` answers."""
    request = call.request
    row = int(place.removeprefix("row ")) if place.startswith("row ") else None
    match call.method:
        case "gym_generate":
            batch = request["prompts"]
        case "generate":
            batch = request.get("prompt_token_ids") or request.get("prompts") or []
        case "tokenize":
            batch = request["texts"]
        case "detokenize":
            batch = request["token_ids"]
        case "sample":
            return request["prompt_token_ids"]
        case "chat_completion" | "completion":
            return request["body"]
        case _:
            return request
    return batch[row] if row is not None and row < len(batch) else batch
