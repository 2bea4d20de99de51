"""JSON Schemas of what a caller may ask of vLLM's engines and servers, from vLLM's own types.

Both SkyRL clients pass sampling parameters on to `SamplingParams`, and OpenAI bodies to vLLM's server. Written for vLLM 0.16 and 0.19.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

OWN = ("output_kind", "skip_clone", "output_text_buffer_length")
"""Fields of SamplingParams that vLLM sets itself: its documentation says so, or does not list them. Those of private name too."""
OPENAI = {
    "chat_completion": ("ChatCompletionRequest", "vllm.entrypoints.openai.chat_completion.protocol"),
    "completion": ("CompletionRequest", "vllm.entrypoints.openai.completion.protocol"),
}
"""Call → class of its body, and that class's module. Releases before these modules have one for all bodies."""
ALL_BODIES = "vllm.entrypoints.openai.protocol"


def of_requests() -> dict[str, dict[str, Any]]:
    """Call of the contract → JSON Schema of its sampling parameters or its body."""
    params = _sampling_params()
    return {"generate": params, "sample": params, **{call: _body(*where) for call, where in OPENAI.items()}}


def _sampling_params() -> dict[str, Any]:
    from vllm import SamplingParams

    # {}: of any type, where JSON has none for it
    schema = msgspec.json.schema(SamplingParams, schema_hook=lambda _: {})
    inner = schema["$defs"].pop(SamplingParams.__name__)
    public = {name: one for name, one in inner["properties"].items() if name not in OWN and not name.startswith("_")}
    return {"type": "object", "properties": public, "$defs": schema["$defs"]}


def _body(name: str, module: str) -> dict[str, Any]:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        found = importlib.import_module(ALL_BODIES)
    schema: dict[str, Any] = getattr(found, name).model_json_schema()
    return schema
