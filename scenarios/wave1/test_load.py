"""More requests at once than any limit of the stack: the client's cap and the places of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fixtures.openai_client import openai_client, unless_refused
from fixtures.prompts import Prompts
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.routing import SESSIONLESS_SPREAD, STICKY
from harness.checks.starvation import HEAVY, LIGHT, NOT_STARVED
from harness.checks.tokens import greedy
from harness.checks.waiting import WHO_WAITS
from harness.contract.capability import Capability
from harness.contract.messages import REQUEST_CAP
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import GREEDY, sessions, until_settled

SHORT: dict[str, Any] = {"max_tokens": 8, **GREEDY}
OURS = {"return_token_ids": True, "ignore_eos": True}

Send = Callable[[Stack, Prompts, int], Awaitable[None]]


async def at_once(calls: list[Coroutine[Any, Any, Any]]) -> None:
    async with asyncio.TaskGroup() as callers:
        for call in calls:
            callers.create_task(call)


async def by_generate(stack: Stack, prompts: Prompts, count: int) -> None:
    await at_once([stack.generate([prompt], **SHORT) for prompt in prompts.unique(count)])


async def by_a_batch(stack: Stack, prompts: Prompts, count: int) -> None:
    await stack.generate(prompts.unique(count), **SHORT)


async def by_sample(stack: Stack, prompts: Prompts, count: int) -> None:
    asked = {"max_tokens": SHORT["max_tokens"], "temperature": 0.0}
    await at_once([stack.sample(prompt, 1, **asked) for prompt in prompts.unique(count)])


async def by_completion(stack: Stack, prompts: Prompts, count: int) -> None:
    body = {"model": stack.model_name, "return_token_ids": True, **SHORT}
    await at_once([stack.completion({"prompt": text, **body}) for text in prompts.texts(count)])


async def by_a_batch_of_completions(stack: Stack, prompts: Prompts, count: int) -> None:
    body = {"model": stack.model_name, "return_token_ids": True, **SHORT}
    await stack.completion({"prompt": prompts.unique(count), **body})


async def by_chat(stack: Stack, prompts: Prompts, count: int) -> None:
    body = {"model": stack.model_name, "return_token_ids": True, **SHORT}
    await at_once([stack.chat_completion({"messages": chat, **body}) for chat in prompts.conversations(count)])


async def by_http_completions(stack: Stack, prompts: Prompts, count: int) -> None:
    asked: Any = {"model": stack.model_name, "max_tokens": SHORT["max_tokens"], "temperature": 0.0, "extra_body": OURS}
    async with openai_client(stack) as client:
        texts = prompts.texts(count)
        await at_once([unless_refused(client.completions.create(prompt=text, **asked)) for text in texts])


async def by_a_batch_of_http_completions(stack: Stack, prompts: Prompts, count: int) -> None:
    asked: Any = {"model": stack.model_name, "max_tokens": SHORT["max_tokens"], "temperature": 0.0, "extra_body": OURS}
    async with openai_client(stack) as client:
        await unless_refused(client.completions.create(prompt=prompts.unique(count), **asked))


async def by_http_chats(stack: Stack, prompts: Prompts, count: int) -> None:
    asked: Any = {"model": stack.model_name, "max_tokens": SHORT["max_tokens"], "temperature": 0.0}
    asked["extra_body"] = {"ignore_eos": True}
    async with openai_client(stack) as client:
        chats: list[Any] = prompts.conversations(count)
        await at_once([unless_refused(client.chat.completions.create(messages=chat, **asked)) for chat in chats])


RIGHT = [SESSIONLESS_SPREAD, ALL_COMPLETE, WHO_WAITS]


@variants(
    {
        "test_many_calls_of_generate": {"send": by_generate, "checks": [*RIGHT, greedy()]},
        "test_a_large_batch": {"send": by_a_batch, "checks": [*RIGHT, greedy()]},
        "test_many_calls_of_sample": {"send": by_sample, "needs": {Capability.SAMPLE}, "checks": [*RIGHT, greedy()]},
        "test_many_completions": {
            "send": by_completion,
            "needs": {Capability.COMPLETION},
            "checks": [*RIGHT, greedy(methods=("completion",))],
        },
        "test_a_large_batch_of_completions": {
            "send": by_a_batch_of_completions,
            "needs": {Capability.COMPLETION},
            "checks": [*RIGHT, greedy(methods=("completion",))],
        },
        "test_many_chats": {
            "send": by_chat,
            "needs": {Capability.CHAT_COMPLETION},
            "checks": [*RIGHT, greedy(methods=("chat_completion",))],
        },
        "test_many_completions_by_http": {
            "send": by_http_completions,
            "needs": {Capability.HTTP_ENDPOINT},
            "checks": [*RIGHT, greedy(methods=("completion",))],
        },
        "test_a_large_batch_of_completions_by_http": {
            "send": by_a_batch_of_http_completions,
            "needs": {Capability.HTTP_ENDPOINT},
            "checks": [*RIGHT, greedy(methods=("completion",))],
        },
        "test_many_chats_by_http": {
            "send": by_http_chats,
            "needs": {Capability.HTTP_ENDPOINT},
            "checks": [*RIGHT, greedy(methods=("chat_completion",))],
        },
    },
    task=0,
    promise="more requests at once than client and engines take are each answered once and right, in even shares over the servers",
    deadline_s=120,
    bulk=True,
)
async def more_than_fit(stack: Stack, prompts: Prompts, *, send: Send) -> None:
    """SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE: "the rest queue locally and proceed as slots free up"; SkyRL API reference,
    InferenceEngineClient: "If None, uses random load-balancing". Half as many again as the client sends at once, and three times
    what the engines run at once (max_num_seqs, 64). No prompt comes twice."""
    await send(stack, prompts, REQUEST_CAP * len(stack.servers) * 3 // 2)


@scenario(
    task=0,
    promise="one session's heavy load does not hold up other sessions until its end",
    checks=[NOT_STARVED, STICKY, ALL_COMPLETE, greedy(LIGHT)],
    deadline_s=120,
    bulk=True,
)
async def test_a_heavy_session_starves_no_other(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE: "the rest queue locally and proceed as slots free up". The heavy session asks for
    three times what the client sends at once, and for longer answers, so that it is still busy when twelve others ask for one answer
    each. With two servers all twelve share the heavy session's one time in 4,000."""
    heavy = prompts.unique(3 * REQUEST_CAP * len(stack.servers))
    async with asyncio.TaskGroup() as callers:
        asked = {**SHORT, "max_tokens": 3 * SHORT["max_tokens"]}
        callers.create_task(stack.generate(heavy, session_ids=[HEAVY] * len(heavy), label=HEAVY, **asked))
        await stack.until_generating(requests=1)
        for prompt, session in zip(prompts.unique(12), sessions(12), strict=True):
            callers.create_task(stack.generate([prompt], session_ids=[session], label=LIGHT, **SHORT))


CROWD = 1100
"""Requests per server: more than any stack lets into an engine's process at once (Ray: 1000 calls of an asynchronous actor)."""


@scenario(
    task=13,
    promise="a pause ends when it is told to, however many requests it has frozen",
    needs={Capability.PAUSE_KEEP},
    checks=[ALL_COMPLETE],
    deadline_s=100,
    bulk=True,
)
async def test_a_pause_over_a_crowd_of_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, pause_generation and resume_generation. Requests that come during the pause, each by a call of its own,
    as the trajectories of a large batch do. resume() must not wait for what only resume() ends."""
    async with asyncio.TaskGroup() as callers:
        await stack.pause("keep")
        for prompt in prompts.unique(CROWD * len(stack.servers)):
            callers.create_task(stack.generate([prompt], max_tokens=1, temperature=0.0))
        await until_settled(stack)
        await stack.resume()
