"""Routes that may be open at the addresses of SkyRL's stacks: every route outside the data plane of vLLM 0.16, 0.19, 0.23 and 0.30,
of SkyRL's servers 0.1.0 to 0.4.0 and of vllm-router 0.1.12, and every route that unpickles. Taken from their sources.

A probe must have no effect. It POSTs an empty object if the handler then finds a field missing. It uses GET if no field could be
missing and the call would have an effect. A server passes with 404 for a route that it lacks.
"""

from __future__ import annotations

import json

from harness.contract.messages import HttpRequest
from harness.driving.probing import JSON, PICKLE, PLAIN_PICKLE, Route

SESSION = {"X-Session-ID": "parity-probe"}
"""Makes a router send the requests of one attempt to one server."""

ROUTES = (
    # vLLM with VLLM_SERVER_DEV_MODE=1, which SkyRL's server actor sets (vllm/entrypoints/serve)
    Route("control", "GET", "/pause"),
    Route("control", "POST", "/resume", "{}"),
    Route("control", "GET", "/is_paused"),
    Route("control", "GET", "/sleep"),
    Route("control", "GET", "/wake_up"),
    Route("control", "GET", "/is_sleeping"),
    Route("control", "GET", "/reset_prefix_cache"),
    Route("control", "GET", "/reset_mm_cache"),
    Route("control", "GET", "/reset_encoder_cache"),
    Route("control", "POST", "/collective_rpc", "{}"),
    Route("control", "GET", "/start_profile"),
    Route("control", "GET", "/stop_profile"),
    Route("control", "GET", "/abort_requests"),
    Route("control", "POST", "/scale_elastic_ep", "{}"),
    Route("control", "POST", "/is_scaling_elastic_ep"),
    Route("weights", "POST", "/init_weight_transfer_engine", "{}"),
    Route("weights", "POST", "/update_weights", "{}"),
    Route("weights", "POST", "/v1/load_lora_adapter", "{}"),
    Route("weights", "POST", "/v1/unload_lora_adapter", "{}"),
    Route("information", "GET", "/get_world_size"),
    Route("information", "GET", "/version"),
    Route("information", "GET", "/load"),
    Route("information", "GET", "/metrics"),
    Route("information", "GET", "/openapi.json"),
    Route("information", "GET", "/tokenizer_info"),
    Route("information", "POST", "/server_info", "{}"),  # GET would compute it for seconds
    # vLLM 0.23 and 0.30 (vllm/entrypoints/serve/dev/rlhf/api_router.py)
    Route("weights", "GET", "/start_weight_update"),
    Route("weights", "GET", "/start_draft_weight_update"),
    Route("weights", "GET", "/finish_weight_update"),
    Route("weights", "POST", "/update_weight_version", "{}"),
    Route("information", "GET", "/weight_info"),
    Route("information", "GET", "/fault_tolerance/status"),
    # SkyRL 0.3.0 and 0.4.0, vllm_server_actor.py
    Route("weights", "POST", "/fetch_weights", "{}"),
    Route("weights", "POST", "/skyrl/v1/load_lora_adapter", "{}"),
    # SkyRL 0.1.0, vllm_server_actor.py
    Route("information", "GET", "/get_server_info"),
    Route("weights", "POST", "/init_weight_transfer", "{}"),
    Route("weights", "GET", "/finalize_weight_update"),
    # SkyRL's standalone server (vllm_server.py); 0.1.0's actor has the second route too
    Route("weights", "POST", "/init_weight_update_communicator", "{}"),
    Route("weights", "POST", "/update_weights_skyrl", "{}"),
    Route("weights", "GET", "/destroy_weights_update_group"),
    # vllm-router itself (src/server.rs): a caller that adds a worker receives users' requests
    Route("control", "POST", "/add_worker"),
    Route("control", "POST", "/remove_worker"),
    Route("control", "POST", "/workers", "{}"),
    Route("control", "GET", "/flush_cache"),
    Route("information", "GET", "/list_workers"),
    Route("information", "GET", "/get_loads"),
    # SkyRL 0.1.0's own (router.py)
    Route("information", "GET", "/servers"),
)


def _rpc(method: str, **arguments: object) -> HttpRequest:
    body = json.dumps({"method": method, "kwargs": arguments})
    return HttpRequest(path="/collective_rpc", headers=JSON | SESSION, body=body)


def _posted(path: str, **fields: object) -> HttpRequest:
    return HttpRequest(path=path, headers=JSON | SESSION, body=json.dumps(fields))


PICKLES = (
    PLAIN_PICKLE,
    # SkyRL 0.2.0, new_inference_worker_wrap.py, update_weights_chunk(): the worker unpickles between start and finish
    (
        _rpc("start_weight_update", is_checkpoint_format=False),
        _rpc(
            "update_weights_chunk", update_info={"names": [], "shapes": [], "sizes": [], "ipc_handles_pickled": PICKLE}
        ),
        _rpc("finish_weight_update"),
    ),
    # SkyRL 0.3.0, the same file, update_weights_ipc(): it reads the other fields first
    (
        _rpc("skyrl_start_weight_update", is_checkpoint_format=False),
        _rpc("update_weights_ipc", update_info={"names": [], "shapes": [], "sizes": [], "ipc_handles_pickled": PICKLE}),
        _rpc("skyrl_finish_weight_update"),
    ),
    # vLLM, ipc_engine.py: with the backend "ipc" and VLLM_ALLOW_INSECURE_SERIALIZATION=1, which SkyRL 0.2.0 sets
    (
        _posted(
            "/update_weights", update_info={"names": [], "dtype_names": [], "shapes": [], "ipc_handles_pickled": PICKLE}
        ),
    ),
    # SkyRL 0.1.0, cuda_ipc_strategy.py, from_json_dict(): unpickles before it checks the fields, one of which is unknown
    (_posted("/update_weights_skyrl", ipc_handles=PICKLE, nobodys=1),),
)
