"""Every placement gives right answers, sticky sessions and weight sync. Disaggregated engines never sleep."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.control_plane import FAN_OUT, NO_SLEEP
from harness.checks.history import EXPLAINED
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import of_reference
from harness.checks.routing import STICKY
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER, UNIFORM_SERVERS
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import EVERYWHERE, SPREAD, sessions

ANSWER: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "logprobs": 1}
EVERY_CALL = [
    greedy("tokens"),
    greedy("completion", methods=("completion",)),
    greedy("chat", methods=("chat_completion",)),
    ALL_COMPLETE,
]


@scenario(
    task=1,
    promise="greedy answers are the reference's and sessions stick, before a weight sync and after it",
    needs={Capability.WEIGHT_SYNC},
    checks=[greedy(), of_reference(), STICKY, EVERY_PARAMETER, UNIFORM_SERVERS, EXPLAINED, ALL_COMPLETE],
    topologies=EVERYWHERE,
)
async def test_the_basics_hold_in_every_placement(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, tasks 1 to 3: routing, weight sync and generation, colocated, on separate GPUs and with servers that
    were started on their own."""
    for version in (0, 1, 2):
        if version:
            await stack.sync_weights(version)
        await stack.digests()
        for _ in range(3):
            await stack.generate(prompts.unique(SPREAD), session_ids=sessions(SPREAD), **ANSWER)


@scenario(
    task=2,
    promise="engines with their own accelerators are neither put to sleep nor woken around a sync",
    needs={Capability.WEIGHT_SYNC, Capability.PAUSE_KEEP},
    checks=[NO_SLEEP, FAN_OUT, EVERY_PARAMETER, EXPLAINED],
    topologies=["disaggregated"],
    fixed_placement=True,
)
async def test_disaggregated_engines_never_sleep(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 2: "No sleep/wake needed (separate GPUs)". The trainer pauses, syncs and resumes."""
    for version in (1, 2):
        await stack.generate(prompts.unique(SPREAD), max_tokens=8, temperature=0.0)
        await stack.pause("keep")
        await stack.sync_weights(version)
        await stack.resume()
        await stack.digests()
    await stack.generate(prompts.unique(SPREAD), max_tokens=8, temperature=0.0)


@scenario(
    task=3,
    promise="servers of vLLM's own command serve every call of the data plane",
    needs={Capability.SAMPLE, Capability.CHAT_COMPLETION, Capability.COMPLETION},
    checks=EVERY_CALL,
    topologies=["remote-plain"],
)
async def test_servers_of_vllms_own_command(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 3: "standalone vLLM". vLLM documentation, vllm serve."""
    await every_call(stack, prompts)


@scenario(
    task=0,
    promise="where the environment has a key for the engines' API, every call of the client is answered all the same",
    needs={Capability.SAMPLE, Capability.CHAT_COMPLETION, Capability.COMPLETION},
    checks=EVERY_CALL,
    topologies=["keyed"],
)
async def test_a_key_in_the_environment(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Environment Variables, VLLM_API_KEY: servers take it as --api-key does, and refuse who does not send it. The
    stack starts both its servers and its client."""
    await every_call(stack, prompts)


async def every_call(stack: Stack, prompts: Prompts) -> None:
    """Greedy answers by each call of the data plane. Each may be refused."""
    body = {"model": stack.model_name, "temperature": 0, "max_tokens": 16, "return_token_ids": True}
    await stack.attempt(stack.generate(prompts.unique(SPREAD), label="tokens", temperature=0.0, max_tokens=16))
    await stack.attempt(stack.sample(prompts.one(), 1, label="tokens", temperature=0.0, max_tokens=16))
    await stack.attempt(stack.completion({**body, "prompt": prompts.unique(4)}, label="completion"))
    for messages in prompts.conversations(2):
        await stack.attempt(stack.chat_completion({**body, "messages": messages}, label="chat"))
