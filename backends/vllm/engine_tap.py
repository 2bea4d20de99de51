"""The engine tap: records an engine's requests, steps, control calls and HTTP answers inside the engine's own process.

It wraps methods of vLLM's frontend classes (`AsyncLLM`, `OutputProcessor`) and the application that uvicorn serves, and passes
everything through unchanged. Both SkyRL stacks and a plain vLLM server run these classes, so the same instrument observes every
stack at the same place, behind every hop.
Each engine appends JSON lines to ``$PARITY_TAP_DIR/<pid>-<n>.jsonl``; `tap_reader` reads them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from backends.vllm.schedule import Schedule

CONTROLS = (
    "pause_generation",
    "resume_generation",
    "sleep",
    "wake_up",
    "reset_prefix_cache",
    "collective_rpc",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "add_lora",
)
"""Methods of AsyncLLM that are control calls, by vLLM's names. The tap wraps those that the release has."""

OWN = "parity_"
"""Prefix of the harness's own worker methods."""

_INSTALLED = "_parity_tap"


class _Log:
    """The file of one engine. Each line is one unbuffered write, so that a reader sees complete lines."""

    count = 0
    last: _Log | None = None
    """The file of this process's engine, once it has one. A process that serves HTTP has one engine."""

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        _Log.count += 1
        _Log.last = self
        self.server = f"{self.pid}-{_Log.count}"
        self.answered = False
        """True once an HTTP answer is written down, which shows that the tap hears them: of later ones, only errors are of use."""
        self._schedule = Schedule(folder)
        self._file = (folder / f"{self.server}.jsonl").open("ab", buffering=0)

    async def late(self, what: str) -> None:
        """Let a message wait for its turn under an adverse schedule, if the host has set one."""
        seconds = self._schedule.next_s(self.server)
        if seconds is not None:
            await asyncio.sleep(seconds)
            self.write("delay", {"what": what, "seconds": seconds})

    def write(self, kind: str, data: dict[str, Any], at_ns: int | None = None) -> None:
        line = {"kind": kind, "server": self.server, "at_ns": at_ns or time.time_ns(), "data": data}
        self._file.write(json.dumps(line, default=_plain).encode() + b"\n")


def _plain(value: Any) -> Any:
    """A JSON value in place of one that JSON lacks. Tensors and pickles are named, not recorded."""
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    if type(value).__module__ == "numpy":
        return value.tolist()
    if type(value).__name__ == "LoRARequest":
        return {"name": value.lora_name, "tensors": _tensors_of(Path(value.lora_path))}
    return f"<{type(value).__name__}>"


def _tensors_of(adapter: Path) -> dict[str, int]:
    """tensor → bytes of the adapter in a folder, by its file's header (safetensors documentation, format). Empty without a file."""
    try:
        with (adapter / "adapter_model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError):
        return {}
    spans = {name: about["data_offsets"] for name, about in header.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in spans.items()}


def _sampling_params(params: Any) -> dict[str, Any]:
    """The public fields of vLLM's SamplingParams that are set."""
    fields = (name for name in params.__struct_fields__ if not name.startswith("_"))
    values = {name: getattr(params, name) for name in fields}
    if "output_kind" in values:
        values["output_kind"] = values["output_kind"].name
    return {name: value for name, value in values.items() if value is not None}


def _log_of(owner: Any, folder: Path) -> _Log:
    log: _Log | None = getattr(owner, "_parity_log", None)
    if log is None or log.pid != os.getpid():
        log = owner._parity_log = _Log(folder)
    return log


def install(folder: Path) -> None:
    """Wrap the frontend classes of this process once. `folder` must exist."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    if getattr(AsyncLLM, _INSTALLED, False):
        return
    setattr(AsyncLLM, _INSTALLED, True)
    _wrap_requests(OutputProcessor, folder)
    AsyncLLM.add_request = _wrapped_arrival(AsyncLLM.add_request, folder)
    for op in filter(functools.partial(hasattr, AsyncLLM), CONTROLS):
        setattr(AsyncLLM, op, _wrapped_control(getattr(AsyncLLM, op), op, folder))
    _wrap_servers()


def _wrap_requests(processor: type, folder: Path) -> None:
    add, process, abort = processor.add_request, processor.process_outputs, processor.abort_requests  # type: ignore[attr-defined]

    @functools.wraps(add)
    def add_request(self: Any, request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any) -> Any:
        data = {
            "request_id": request.request_id,
            "parent_id": parent_req.request_id if parent_req else None,
            "prompt_token_ids": request.prompt_token_ids,
            "sampling_params": _sampling_params(request.sampling_params) if request.sampling_params else {},
            "cache_salt": request.cache_salt,
        }
        log = _log_of(self, folder)
        log.write("request", data)
        try:
            return add(self, request, prompt, parent_req, *args, **kwargs)
        except BaseException:
            log.write("abort", {"request_ids": [request.request_id]})  # the frontend does not keep what it cannot take
            raise

    @functools.wraps(process)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        at_ns = time.time_ns()
        known = [o for o in engine_core_outputs if o.request_id in self.request_states]
        states = {o.request_id: self.request_states[o.request_id] for o in known}
        result = process(self, engine_core_outputs, *args, **kwargs)
        log = _log_of(self, folder)
        tokens = {o.request_id: list(o.new_token_ids) for o in known if len(o.new_token_ids)}
        if tokens:
            log.write("step", {"tokens": tokens}, at_ns)
        for output in known:
            if output.request_id not in self.request_states:
                # The frontend finds stop strings itself: the engine core reports no reason for them.
                reason = str(output.finish_reason) if output.finish_reason is not None else "stop"
                # prompt tokens from the prefix cache, counted by the engine
                cached = getattr(states[output.request_id], "num_cached_tokens", None)
                log.write("finish", {"request_id": output.request_id, "reason": reason, "cached_tokens": cached})
        return result

    @functools.wraps(abort)
    def abort_requests(self: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = abort(self, request_ids, *args, **kwargs)
        if aborted:
            _log_of(self, folder).write("abort", {"request_ids": list(aborted)})
        return aborted

    processor.add_request = add_request  # type: ignore[attr-defined]
    processor.process_outputs = process_outputs  # type: ignore[attr-defined]
    processor.abort_requests = abort_requests  # type: ignore[attr-defined]


def _wrapped_arrival(method: Any, folder: Path) -> Any:
    @functools.wraps(method)
    async def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        await _log_of(self.output_processor, folder).late("request")
        return await method(self, *args, **kwargs)

    return add_request


def _wrapped_control(method: Any, op: str, folder: Path) -> Any:
    import inspect

    signature = inspect.signature(method)

    @functools.wraps(method)
    async def control(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Requests are logged under the OutputProcessor. Controls use its log too, so that each engine has one file.
        log = _log_of(self.output_processor, folder)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        if not str(arguments.get("method", "")).startswith(OWN):
            await log.late(op)
        at_ns, error = time.time_ns(), None
        try:
            return await method(self, *args, **kwargs)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            log.write("control", {"op": op, "arguments": arguments, "ended_ns": time.time_ns(), "error": error}, at_ns)

    return control


def _wrap_servers() -> None:
    """Record the errors of this process's HTTP servers, and one answer of any kind. vLLM and SkyRL write them with FastAPI. The
    harness's own, such as the fault taps, are none. Answers that come before the first message to the engine belong to no scenario."""
    import uvicorn
    from fastapi import FastAPI

    load = uvicorn.Config.load

    @functools.wraps(load)
    def loaded(self: uvicorn.Config) -> None:
        load(self)
        if isinstance(self.app, FastAPI):
            self.loaded_app = _told(self.loaded_app)

    uvicorn.Config.load = loaded  # type: ignore[method-assign]


def _told(application: Any) -> Any:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            log = _Log.last
            if message["type"] == "http.response.start" and log is not None and log.pid == os.getpid():
                data = {"method": scope["method"], "path": scope["path"], "status": message["status"]}
                if message["status"] >= 400 or not log.answered:
                    log.answered = True
                    log.write("answer", data)
            await send(message)

        await application(scope, receive, answer)

    return serve
