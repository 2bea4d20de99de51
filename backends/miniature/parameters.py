"""The sampling parameters of the miniature, as JSON Schemas, and their check."""

from __future__ import annotations

import json
import math
from typing import Any

from backends.miniature.model import VOCABULARY

TOKENS = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": VOCABULARY - 1}}
PARAMETERS: dict[str, dict[str, Any]] = {
    "n": {"type": "integer", "minimum": 1, "maximum": 16},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1e6},
    "top_p": {"type": "number", "minimum": 1e-6, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": ["integer", "null"]},
    "max_tokens": {"type": "integer", "minimum": 1},
    "min_tokens": {"type": "integer", "minimum": 0},
    "stop": {"type": ["string", "array", "null"], "items": {"type": "string"}},
    "stop_token_ids": TOKENS,
    "allowed_token_ids": TOKENS,
    "include_stop_str_in_output": {"type": "boolean"},
    "skip_special_tokens": {"type": "boolean"},
    "ignore_eos": {"type": "boolean"},
}
"""Name → its type and range. Other parameters are recorded, and change nothing."""
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "boolean": (bool,),
    "null": (type(None),),
}


def wrong(params: dict[str, Any]) -> str | None:
    """Why the first wrong parameter is refused, with its name; None if all are right."""
    of_another_type = (wrong_type(name, value, PARAMETERS.get(name)) for name, value in params.items())
    return next(filter(None, of_another_type), None) or no_grammar(params.get("response_format")) or no_token(params)


def no_token(params: dict[str, Any]) -> str | None:
    """Why no first token can be chosen; None if one can. All allowed tokens may be stop tokens, which min_tokens excludes."""
    allowed = set(params.get("allowed_token_ids") or ())
    if allowed and params.get("min_tokens") and allowed <= set(params.get("stop_token_ids") or ()):
        return "allowed_token_ids leaves no token: min_tokens excludes stop_token_ids"
    return None


def no_grammar(response_format: Any) -> str | None:
    """Why no grammar can be made of a response format's schema; None if one can, as far as the miniature reads it."""
    match response_format:
        case {"json_schema": {"schema": {"minLength": int(least)}}} if least < 0:
            return f"response_format: minLength must be at least 0, not {least}"
        case {"type": "structural_tag", "format": tag} if not isinstance(tag, dict):
            return "response_format: the format of a structural tag must be an object"
        case _:
            return None


def in_shape(response_format: Any) -> str | None:
    """The one answer that a schema of truth values has here; None for other formats, which change nothing."""
    match response_format:
        case {"json_schema": {"schema": {"properties": dict(fields)}}} | {"json": {"properties": dict(fields)}}:
            return json.dumps(dict.fromkeys(fields, True), separators=(",", ":"))
        case _:
            return None


def wrong_type(name: str, value: Any, rule: dict[str, Any] | None) -> str | None:
    """Why a value is refused by its rule; None if it is right, or there is no rule."""
    if isinstance(value, float) and math.isnan(value):
        return f"{name} is not a number"
    if rule is None or value is None:
        return None  # null: as if it were left out
    named = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    kinds = tuple(kind for one in named for kind in _TYPES[one])
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return f"{name} must be of type {' or '.join(named)}"
    if "minimum" in rule and not isinstance(value, list) and not rule["minimum"] <= value <= rule.get("maximum", value):
        return f"{name} must be at least {rule['minimum']}, and at most {rule.get('maximum', 'anything')}"
    if isinstance(value, list) and (
        said := next((s for v in value if (s := wrong_type(name, v, rule["items"]))), None)
    ):
        return said
    return None


def settled(params: dict[str, Any]) -> dict[str, Any]:
    """Right parameters as vLLM's engine takes them: null is left out, a seed of -1 is none, a temperature above 0 is at least 0.01."""
    given = {name: value for name, value in params.items() if value is not None and (name, value) != ("seed", -1)}
    return given | ({"temperature": 0.01} if 0 < given.get("temperature", 1.0) < 0.01 else {})
