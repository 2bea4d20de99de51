"""CUDA IPC, the fast path of colocated engines. It needs CUDA: on a CPU no stack offers it, so no scenario here passes."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.failed_sync import FAILED_SYNC
from harness.checks.history import EXPLAINED
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.staleness import FORCED_EFFECT
from harness.checks.transfer import BY_IPC
from harness.checks.weights import EVERY_PARAMETER, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import ANSWER, SPREAD

IPC = {Capability.WEIGHT_SYNC, Capability.CUDA_IPC}


@scenario(
    task=15,
    promise="colocated engines take weights through CUDA IPC, every parameter of them",
    needs=IPC,
    checks=[BY_IPC, EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED, FORCED_EFFECT, ALL_COMPLETE],
    topologies=["colocated"],
)
async def test_colocated_engines_take_weights_through_ipc(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 15; SkyRL 0.2.0, get_transfer_strategy: "Uses CUDA IPC when weight_sync_backend is "nccl" and colocate_all
    is True"."""
    batch = prompts.unique(SPREAD)
    await stack.generate(batch, **ANSWER)
    for version, chunks in ((1, 1), (2, 4)):
        await stack.sync_weights(version, chunks=chunks)
        await stack.workers()
        await stack.digests()
        await stack.generate(batch, **ANSWER)


@scenario(
    task=15,
    promise="a sync through CUDA IPC that fails in the middle leaves nothing behind that the next one would not put right",
    needs=IPC,
    checks=[BY_IPC, FAILED_SYNC, EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED],
    topologies=["colocated"],
    deadline_s=120.0,
    spoils=True,
)
async def test_a_failed_sync_through_ipc(stack: Stack, prompts: Prompts) -> None:
    """architecture, idempotent sync: "a failed sync followed by a good one is a good one"; SkyRL 0.2.0, NewInferenceWorkerWrap:
    start_weight_update() is refused while an update is active."""
    batch = prompts.unique(SPREAD)
    for after in (1, 3):
        await stack.attempt(stack.sync_weights(2, chunks=4, fail_after_chunks=after))
        await stack.attempt(stack.prepare_weight_sync())
        await stack.attempt(stack.sync_weights(1, chunks=4))
        await stack.workers()
        await stack.attempt(stack.digests())
        await stack.attempt(stack.generate(batch, **ANSWER))
