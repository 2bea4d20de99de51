"""The arguments that SkyRL's legacy stack gives to vLLM under a configuration, by its own code. Written for skyrl 0.2.0.

Nothing starts: Ray's actors and placement groups, and vLLM's engine, are replaced while SkyRL's code runs.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

OTHER_NAMES = {"enable_auto_tools": "enable_auto_tool_choice", "tool_parser": "tool_call_parser"}
"""Option of the OpenAI address → its other name."""


class _MadeError(Exception):
    """Carries the arguments with which an engine would have been made."""


class _Actors:
    """Takes the place of the class of SkyRL's actors: keeps what each actor is given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def options(self, **_placement: Any) -> _Actors:
        return self

    def remote(self, **given: Any) -> Any:
        self.given.append(given)
        return mock.Mock()  # colocated engines are put to sleep as soon as they are made


def of_engine(cfg: Any, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """vLLM's arguments of the first engine, and those of the OpenAI address. Raises what SkyRL or vLLM raises about the
    configuration."""
    import skyrl.backends.skyrl_train.inference_engines.ray_wrapped_inference_engine as wrapped
    import skyrl.backends.skyrl_train.inference_engines.vllm.vllm_engine as shipped
    import vllm
    from skyrl.train.entrypoints import main_base
    from skyrl.train.utils import ray_logging, utils

    actors = _Actors()
    bundles = cfg.generator.inference_engine.num_engines * cfg.generator.inference_engine.tensor_parallel_size
    group = utils.ResolvedPlacementGroup(None)
    group._bundle_placement = [(bundle, "node", bundle) for bundle in range(bundles)]

    serving: dict[str, Any] = {}
    popped = shipped.pop_openai_kwargs

    def pop(given: dict[str, Any]) -> dict[str, Any]:
        serving.update(popped(given))
        return dict(serving)

    def made(arguments: Any, **_more: Any) -> None:
        raise _MadeError(arguments)

    with ExitStack() as replaced:
        for where, name, ours in (
            (shipped, "AsyncVLLMRayActor", actors),
            (wrapped, "ray", SimpleNamespace(get=lambda _asked: {})),
            (wrapped, "get_rendezvous_addr_port", lambda *_: ("127.0.0.1", 0)),
            (wrapped, "PlacementGroupSchedulingStrategy", lambda **_: None),
            (utils, "get_all_env_variables", SimpleNamespace(remote=lambda: None)),
            (ray_logging, "redirect_actor_output_to_file", lambda: None),
            (shipped, "pop_openai_kwargs", pop),
            (vllm.AsyncLLMEngine, "from_engine_args", made),
        ):
            replaced.enter_context(mock.patch.object(where, name, ours))
        replaced.enter_context(mock.patch.dict(os.environ))  # an actor sets variables of its own process
        main_base.create_ray_wrapped_inference_engines_from_config(cfg, group, tokenizer)
        try:
            shipped.AsyncVLLMInferenceEngine(**actors.given[0])
        except _MadeError as e:
            return e.args[0], serving
    raise AssertionError("SkyRL made an engine without vLLM's from_engine_args()")
