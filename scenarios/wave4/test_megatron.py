"""Weights that a trainer holds in Megatron's layout, over tensor- and pipeline-parallel ranks."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.history import EXPLAINED
from harness.checks.staleness import SAME_VERSION_SAME_OUTPUT
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS
from harness.contract.capability import Capability
from harness.contract.messages import Layout
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import ANSWER, SPREAD


@scenario(
    task=9,
    promise="a sync of what Megatron-core's ranks hold equals the whole",
    needs={Capability.WEIGHT_SYNC, Capability.MEGATRON_TRAINER},
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, EXPLAINED],
    deadline_s=300.0,
)
async def test_a_sync_of_megatrons_layout_equals_the_whole(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 9: Megatron's weights mapped to vLLM's, TP2×PP2. Megatron-Bridge, QKVMapping and GatedMLPMapping:
    what Megatron-core fuses and interleaves. SkyRL 0.2.0, MegatronWeightExtractor: sent in Hugging Face's names, in buckets.
    Generation and training with Megatron are left to the trainer: here its ranks only hold the weights, on a CPU."""
    batch = prompts.unique(SPREAD)
    held: tuple[tuple[int, Layout, int], ...] = ((1, "single", 1), (0, "single", 1), (1, "megatron", 4))
    for version, layout, chunks in held:
        await stack.sync_weights(version, layout=layout, chunks=chunks)
        await stack.digests()
        await stack.generate(batch, **ANSWER)
