"""Weights that a trainer holds in Megatron's layout, over tensor- and pipeline-parallel ranks."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.client_lives import CLIENT_LIVES
from harness.checks.history import EXPLAINED
from harness.checks.staleness import SAME_VERSION_SAME_OUTPUT
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS
from harness.contract.capability import Capability
from harness.contract.messages import Layout
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import ANSWER, SPREAD, ask_as_configured


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


@scenario(
    task=9,
    promise="a client of a configuration whose adapter Megatron merges asks for the model: engines know of no adapter",
    needs={Capability.CLIENT_LIVES, Capability.CHAT_COMPLETION, Capability.COMPLETION},
    checks=[CLIENT_LIVES],
)
async def test_the_client_of_a_merged_adapter(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, LoRA Support, Megatron: the adapter is merged into the weights before each sync, so engines start without
    LoRA (SkyRL 0.2.0, build_vllm_cli_args), and a request names the model that they serve."""
    await stack.client_life("as configured", merged_adapter=True)
    await ask_as_configured(stack, prompts)
    await stack.client_life("made again")
    await stack.generate(prompts.unique(4), **ANSWER)
