"""SkyRL's engines compute as the run asked, or the start fails by name. Runs without SkyRL and vLLM."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import msgspec
import pytest

from backends.skyrl.base import OWN_DEADLINES, SkyRLStack
from backends.vllm.probes import BATCH_INVARIANT, parity_whoami
from backends.vllm.stack import GpuTooOld, check_gpu
from harness.contract.errors import Blame, StartFailed
from harness.contract.messages import StartRequest
from harness.contract.topology import Topology


def stack(**asked: Any) -> SkyRLStack:
    made = SkyRLStack()
    made.request = StartRequest(target="t", topology=Topology(), model_path="/m", scratch="/s", logs="/l", **asked)
    return made


def worker(mode: str) -> types.SimpleNamespace:
    """The attributes of vLLM's worker that the probe reads."""
    compilation = types.SimpleNamespace(cudagraph_mode=types.SimpleNamespace(name=mode))
    return types.SimpleNamespace(rank=0, vllm_config=types.SimpleNamespace(compilation_config=compilation))


@pytest.mark.parametrize(
    ("asked", "mode", "variable", "wrong"),
    [
        ({}, "NONE", "0", None),
        ({"cuda_graphs": True}, "PIECEWISE", "0", None),
        ({"batch_invariant": True}, "NONE", "1", None),
        ({"cuda_graphs": True}, "NONE", "0", "asked for cuda_graphs = True; on server-1 it is False"),
        ({}, "FULL", "0", "asked for cuda_graphs = False; on server-1 it is True"),
        ({"batch_invariant": True}, "NONE", "0", "asked for batch_invariant = True; on server-1 it is False"),
        ({}, "NONE", "1", "asked for batch_invariant = False; on server-1 it is True"),
    ],
)
def test_a_worker_that_computes_otherwise_than_asked_is_named(asked, mode, variable, wrong, monkeypatch):
    right = {"cuda_graphs": bool(asked.get("cuda_graphs")), "batch_invariant": bool(asked.get("batch_invariant"))}
    monkeypatch.setenv(BATCH_INVARIANT, variable)
    workers = {"server-0": [right], "server-1": [right, parity_whoami(worker(mode), "server-1")]}
    if wrong is None:
        stack(**asked)._check_arithmetic(workers)
        return
    with pytest.raises(StartFailed, match=wrong):
        stack(**asked)._check_arithmetic(workers)


@pytest.mark.parametrize(
    ("asked", "variable", "deadline"), [({}, "0", "390"), ({"engine": "cuda", "batch_invariant": True}, "1", "1800")]
)
def test_every_process_of_the_stack_inherits_choice_and_deadline(asked, variable, deadline, tmp_path, monkeypatch):
    made = stack(**asked)
    made.request = msgspec.structs.replace(made.request, logs=str(tmp_path))
    monkeypatch.setattr(os, "environ", {**os.environ, BATCH_INVARIANT: "of the user's shell"})
    monkeypatch.setattr(SkyRLStack, "vllm_patches", lambda _: [])
    monkeypatch.setattr(SkyRLStack, "_trainer_on_cpu", staticmethod(lambda **_: None))
    monkeypatch.setattr(SkyRLStack, "_only_loopback", staticmethod(lambda: None))
    made._prepare_process()
    assert os.environ[BATCH_INVARIANT] == variable
    assert {os.environ[name] for name in OWN_DEADLINES} == {deadline}


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), (None, True), ((9, 0), False), ((10, 3), False)])
def test_a_gpu_that_cannot_be_batch_invariant_is_refused(capability, refused, monkeypatch):
    class Capability(tuple):
        def as_version_str(self) -> str:
            return ".".join(map(str, self))

    platform = types.SimpleNamespace(
        has_device_capability=lambda least: capability is not None and capability >= least,
        get_device_capability=lambda: capability and Capability(capability),
    )
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=platform))
    if not refused:
        check_gpu()
        return
    with pytest.raises(GpuTooOld, match=f"the GPU here has {'8.0' if capability else None}") as caught:
        check_gpu()
    assert caught.value.blame == Blame.ENVIRONMENT
