"""The client as an object: it survives serialization, and its callers do not disturb each other."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.control_plane import FAN_OUT
from harness.checks.errors import names_error
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import of_reference
from harness.checks.request_cap import CAP
from harness.checks.routing import STICKY
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.capability import Capability
from harness.contract.messages import REQUEST_CAP, SessionId
from harness.driving.stack import Stack
from harness.suite.scenario import scenario

ANSWER: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
SESSIONS: list[SessionId] = [f"conversation-{number}" for number in range(8)]


@scenario(
    task=0,
    promise="a client that was serialized and read back works like the one it was made from",
    needs={Capability.PICKLE_CLIENT, Capability.PAUSE_KEEP, Capability.WEIGHT_SYNC},
    checks=[greedy(), STICKY, FAN_OUT, EVERY_PARAMETER, ALL_COMPLETE],
)
async def test_the_client_survives_pickling(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904: "Serializable: Can be pickled and passed between Ray actors/processes". Sessions that began before
    stay on their servers; data plane, control plane and weight sync work."""
    await stack.generate(prompts.unique(8), session_ids=SESSIONS, **ANSWER)
    await stack.pickle_client()
    for _ in range(2):
        await stack.generate(prompts.unique(8), session_ids=SESSIONS, **ANSWER)
    await stack.pause("keep")
    await stack.resume()
    await stack.sync_weights(1)
    await stack.digests()
    await stack.generate(prompts.unique(8), session_ids=SESSIONS, **ANSWER)


@scenario(
    task=0,
    promise="a client can be serialized while it is in use, and twice in a row",
    needs={Capability.PICKLE_CLIENT},
    checks=[greedy(), ALL_COMPLETE],
)
async def test_pickling_disturbs_no_caller(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904: "Serializable". The trainer hands the client to its workers while rollouts are in flight."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stack.generate(prompts.unique(4), max_tokens=100, temperature=0.0, ignore_eos=True))
        await stack.until_generating(requests=4, tokens=4)
        await stack.pickle_client()
        await stack.pickle_client()
        await stack.generate(prompts.unique(4), **ANSWER)


@scenario(
    task=0,
    promise="a client that is serialized with more calls than its cap loses none of them, and its copy has the same cap",
    needs={Capability.PICKLE_CLIENT, Capability.REQUEST_CAP, Capability.PAUSE_KEEP},
    checks=[CAP, ALL_COMPLETE],
)
async def test_a_full_client_survives_pickling(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904: "Serializable"; SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE. Callers wait for the cap while it is serialized;
    the copy is filled once they have left."""
    cap = REQUEST_CAP * len(stack.servers)
    batches = [prompts.unique(cap * 5 // 8) for _ in range(2)] + [[prompt] for prompt in prompts.unique(8)]
    for _ in range(2):
        async with asyncio.TaskGroup() as callers:
            await stack.pause("keep")
            for batch in batches:
                callers.create_task(stack.generate(batch, max_tokens=2, temperature=0.0))
            frozen_or_not = f"{cap} requests that are held, or an answer"  # an answer: the engines are not frozen
            await stack.until(lambda seen: seen.requests >= cap or stack.pending < len(batches), frozen_or_not)
            await stack.pickle_client()
            await stack.resume()


@scenario(
    task=0,
    promise="concurrent callers of one client get their own answers, and sessions stick through it",
    checks=[greedy(), STICKY, ALL_COMPLETE],
)
async def test_concurrent_callers_do_not_mix(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, GeneratorInterface.generate: outputs in the order of the input batch, for each caller.

    16 callers with ragged prompts and lengths make their answers come back interleaved."""
    async with asyncio.TaskGroup() as tasks:
        for caller in range(16):
            batch = prompts.ragged(8)
            tasks.create_task(stack.generate(batch, session_ids=SESSIONS, max_tokens=4 + 3 * caller, temperature=0.0))


@scenario(
    task=0,
    promise="the client for single requests gives the model's tokens and log-probabilities, keeps sessions, and names its errors",
    needs={Capability.SINGLE_REQUESTS, Capability.PICKLE_CLIENT},
    checks=[
        greedy("right"),
        of_reference("right"),
        STICKY,
        names_error("over_long", "length", "long", "context", "tokens"),
    ],
)
async def test_single_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.4.0, RemoteGenerateClient: "Reusable HTTP client for one raw-token generation request"; it can be pickled."""
    for _ in range(2):
        for single in (True, False):
            batch = prompts.unique(8)
            await stack.generate(batch, session_ids=SESSIONS, single=single, label="right", logprobs=0, **ANSWER)
        await stack.pickle_client()
    await stack.attempt(stack.generate([prompts.over_long()], single=True, label="over_long", **ANSWER))
