"""Engines that hold quantized weights and get full-precision ones in each sync."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.client_lives import CLIENT_LIVES
from harness.checks.history import EXPLAINED
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import of_reference
from harness.checks.quantization import quantization_effect
from harness.checks.staleness import FORCED_EFFECT, SAME_VERSION_SAME_OUTPUT
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import SPREAD, ask_as_configured, sync_and_answer

ANSWER: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
NEEDS = {Capability.QUANTIZED}
NEEDS_LIVES = {*NEEDS, Capability.CLIENT_LIVES, Capability.CHAT_COMPLETION, Capability.COMPLETION}
NEEDS_SYNC = {*NEEDS, Capability.QUANTIZED_SYNC, Capability.WEIGHT_SYNC}


@scenario(
    task=12,
    promise="quantized engines answer as the quantized model does, and not as the model in full precision",
    needs=NEEDS,
    checks=[greedy(), of_reference(), quantization_effect(), ALL_COMPLETE],
    topologies=["int8", "fp8"],
)
async def test_quantized_engines_answer(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 12: FlashRL engines are created and generate."""
    await stack.generate(prompts.ragged(16), **ANSWER)


@scenario(
    task=12,
    promise="a sync of full-precision weights is quantized anew: scales and all",
    needs=NEEDS_SYNC,
    checks=[
        EVERY_PARAMETER,
        UNIFORM_SERVERS,
        EXPLAINED,
        FORCED_EFFECT,
        greedy(),
        of_reference(),
        quantization_effect(),
        ALL_COMPLETE,
    ],
    topologies=["int8", "fp8"],
)
async def test_syncs_into_quantized_engines(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 12: "Weight sync works with quantized models". Several syncs also show later failures."""
    batch = prompts.unique(SPREAD)
    await stack.digests()
    await stack.generate(batch, **ANSWER)
    await sync_and_answer(stack, batch, (1, 1), (2, 4), (3, 1), logprobs=0)


@scenario(
    task=12,
    promise="quantized engines take the same version again, whole or in chunks, and nothing moves",
    needs=NEEDS_SYNC,
    checks=[EVERY_PARAMETER, SAME_VERSION_SAME_PARAMETERS, SAME_VERSION_SAME_OUTPUT, of_reference(), EXPLAINED],
    topologies=["int8", "fp8"],
)
async def test_quantized_syncs_are_idempotent(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 12. Quantized weights must not be quantized again, since they would drift."""
    await sync_and_answer(stack, prompts.unique(SPREAD), (1, 1), (1, 1), (2, 4), (1, 4), (2, 1), logprobs=0)


@scenario(
    task=12,
    promise="the client that is made of the configuration reaches engines that serve the model under another name than its path",
    needs=NEEDS_LIVES,
    checks=[CLIENT_LIVES],
    topologies=["int8"],
)
async def test_the_client_of_the_configuration(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, Configuration Overview, served_model_name: the name of the model in place of its path. Quantized engines
    lie at another path than the model that they serve."""
    await stack.client_life("as configured")
    await ask_as_configured(stack, prompts)
    await stack.client_life("made again")
    await stack.generate(prompts.unique(4), **ANSWER)
