"""The lives of clients: made again, closed, dropped with requests in flight, in several loops and threads."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from fixtures.prompts import Prompts
from harness.checks.client_lives import ADDRESSES, ANOTHERS, CLIENT_LIVES, CLOSED, NOBODYS, TAKEN_PORT
from harness.checks.control_plane import FAN_OUT
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.pausing import KEPT
from harness.checks.request_cap import CAP
from harness.checks.routing import SESSIONLESS_SPREAD, STICKY
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.contract.messages import REQUEST_CAP, HttpRequest
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import ANSWER, long, sessions, until_idle, until_settled

ROWS = 8
AGAIN = "again"
"""Label of the answers of a client that is not closed."""
SESSIONS = sessions(ROWS)
PROXIES = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), "http://127.0.0.1:9")
"""Variables that curl, reqwest, httpx and others read. Nothing listens at the port (RFC 863)."""
LIMIT_S = 4
"""Seconds that the configured proxy waits for an answer; a pause takes twice as long."""
CHECKS: list[Any] = [CLIENT_LIVES, greedy()]


async def in_flight(stack: Stack, prompts: Prompts, tasks: asyncio.TaskGroup, label: str | None = None) -> None:
    """A batch of long answers, begun."""
    asked = stack.generate(prompts.unique(ROWS), session_ids=SESSIONS, label=label, **long(stack))
    tasks.create_task(stack.attempt(asked))
    await stack.until_generating(requests=ROWS, tokens=ROWS)


async def answers(stack: Stack, prompts: Prompts, label: str | None = None) -> None:
    await stack.attempt(stack.generate(prompts.unique(ROWS), session_ids=SESSIONS, label=label, **ANSWER))


async def beside_each_other(
    stack: Stack, prompts: Prompts, life: Literal["made again", "in another thread"], clients: int
) -> None:
    """Number of clients, each made while the others have requests in flight."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            await in_flight(stack, prompts, tasks)
            await stack.client_life(life)
            await answers(stack, prompts)


@scenario(
    task=0,
    promise="several clients of one stack work side by side, on the same sessions, and none leaves anything",
    needs={Capability.CLIENT_LIVES},
    checks=[*CHECKS, STICKY],
)
async def test_several_clients(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, "Serializable: Can be pickled and passed between Ray actors/processes": each process has a client of its own. Four,
    each made while the others have requests in flight."""
    await beside_each_other(stack, prompts, "made again", 4)
    await stack.client_life("looked at")


@scenario(
    task=0,
    promise="a closed client's requests end once, with an answer or a named error, and a new client works",
    needs={Capability.CLIENT_LIVES, Capability.CLIENT_CLOSES},
    checks=[CLIENT_LIVES, greedy(AGAIN)],
)
async def test_closed_and_made_again(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, RemoteInferenceClient.teardown: "Close HTTP session". Closed with requests in flight, asked after that,
    closed twice, and made again."""
    await answers(stack, prompts, label=AGAIN)
    async with asyncio.TaskGroup() as tasks:
        await in_flight(stack, prompts, tasks, label=CLOSED)
        await stack.client_life("closed")
    await answers(stack, prompts, label=CLOSED)
    await stack.client_life("closed")
    await stack.client_life("closed")
    await stack.client_life("made again")
    await answers(stack, prompts, label=AGAIN)
    await until_idle(stack)
    await stack.client_life("looked at")


@scenario(
    task=0,
    promise="the OpenAI address of a client stays its own when another client gets one",
    needs={Capability.CLIENT_LIVES, Capability.HTTP_ENDPOINT},
    checks=[CLIENT_LIVES, SESSIONLESS_SPREAD, ALL_COMPLETE],
    spoils=True,
)
async def test_another_client_with_an_address(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, Configuration Overview: enable_http_endpoint is a client's own setting, as are its host and port. The other
    client, say of an evaluation, has the first server alone: it must not get the requests for all of them.

    It spoils the stack: an address that is taken over does not come back."""
    stack.spoil("another client's address")
    await stack.client_life("beside")
    for text in prompts.texts(32 * stack.topology.engines):
        body = json.dumps({"model": stack.model_name, "prompt": text, "max_tokens": 2, "temperature": 0.0})
        await stack.http(HttpRequest(path="/v1/completions", headers={"content-type": "application/json"}, body=body))


@scenario(
    task=0,
    promise="a client that its owner drops while its requests are in flight loses none, and leaves nothing open",
    needs={Capability.CLIENT_LIVES},
    checks=CHECKS,
)
async def test_collected_in_flight(stack: Stack, prompts: Prompts) -> None:
    """Python documentation, weakref and gc: an object without references is gone at any moment; asyncio documentation: what is not
    closed is told to the loop's exception handler."""
    async with asyncio.TaskGroup() as tasks:
        await in_flight(stack, prompts, tasks)
        await stack.client_life("collected")
        await answers(stack, prompts)
    await stack.client_life("looked at")


@scenario(
    task=0,
    promise="a client works on if it is all that its owner keeps of what the entry point made",
    needs={Capability.CLIENT_LIVES},
    checks=[CLIENT_LIVES],
    spoils=True,
)
async def test_the_client_alone_is_kept(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, BasePPOExp.get_inference_client: the client is what it returns. Python documentation, gc: an object without references is
    gone at any moment. The engines have three seconds to go with the owner of their handles."""
    await answers(stack, prompts)
    await stack.client_life("alone")
    for _ in range(3):
        await asyncio.sleep(1.0)
        await answers(stack, prompts)
    await stack.client_life("looked at")


@scenario(
    task=0,
    promise="clients in other threads, each in its own event loop, work beside each other",
    needs={Capability.CLIENT_LIVES, Capability.CLIENT_THREADS},
    checks=[*CHECKS, STICKY],
)
async def test_in_other_threads(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, RemoteInferenceClient._get_session: "aiohttp.ClientSession is tied to the event loop". Three, each made while the others
    have requests in flight."""
    await beside_each_other(stack, prompts, "in another thread", 3)
    await stack.client_life("made again")
    await answers(stack, prompts)
    await stack.client_life("looked at")


@scenario(
    task=0,
    promise="one client works in two event loops by turns, and leaves nothing in either",
    needs={Capability.CLIENT_LIVES, Capability.CLIENT_THREADS},
    checks=CHECKS,
)
async def test_one_client_in_two_loops(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, RemoteInferenceClient._get_session: "we also create a new session object if the event loop has changed". The trainer's
    loop and a thread's ask by turns, also while the other's requests are in flight."""
    await stack.client_life("in two loops")
    for _ in range(2):
        await answers(stack, prompts)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            await in_flight(stack, prompts, tasks)
            await answers(stack, prompts)
    await stack.client_life("made again")
    await answers(stack, prompts)
    await stack.client_life("looked at")


@scenario(
    task=0,
    promise="a client has one cap for all its event loops",
    needs={Capability.CLIENT_LIVES, Capability.CLIENT_THREADS, Capability.REQUEST_CAP, Capability.PAUSE_KEEP},
    checks=[CAP, ALL_COMPLETE],
    deadline_s=90,
    bulk=True,
)
async def test_the_cap_of_a_client_in_two_loops(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE: "max concurrent generate requests per engine". Both loops ask by turns while the
    engines are frozen, for two and a half times the cap."""
    await stack.client_life("in two loops")
    batch = REQUEST_CAP * len(stack.servers) * 5 // 8
    async with asyncio.TaskGroup() as callers:
        await stack.pause("keep")
        for _ in range(4):
            callers.create_task(stack.generate(prompts.unique(batch), max_tokens=2, temperature=0.0))
        await until_settled(stack)
        await stack.resume()
    await stack.client_life("made again")


@scenario(
    task=0,
    promise="the client that the configuration makes can be made within a running event loop",
    needs={Capability.CLIENT_LIVES},
    checks=CHECKS,
    topologies=["colocated"],
)
async def test_made_within_a_loop(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, BasePPOExp.get_inference_client: entry points of users call it, in a coroutine or a notebook too (asyncio documentation,
    asyncio.run: "cannot be called when another asyncio event loop is running")."""
    await stack.attempt(stack.client_life("as configured", in_loop=True))
    await answers(stack, prompts)
    await stack.client_life("made again")
    await answers(stack, prompts)


@scenario(
    task=0,
    promise="the client of a configuration that names the proxy alone reaches every server with its control calls",
    needs={Capability.CLIENT_LIVES, Capability.PAUSE_KEEP, Capability.RESET_PREFIX_CACHE},
    checks=[CLIENT_LIVES, FAN_OUT],
)
async def test_the_proxy_alone_is_configured(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, BasePPOExp.get_inference_client: "external_proxy_url only → Use proxy for both data + control plane"; SkyRL #904,
    "Control plane (fan-out)"."""
    await stack.client_life("as configured", names="proxy")
    await answers(stack, prompts)
    await stack.attempt(stack.pause("keep"))
    await stack.attempt(stack.resume())
    await stack.attempt(stack.reset_prefix_cache())
    await stack.client_life("made again")
    await stack.resume()
    await answers(stack, prompts)


@scenario(
    task=3,
    promise="the addresses of servers under the keys of another implementation are used, or refused by name",
    needs={Capability.CLIENT_LIVES},
    checks=[ADDRESSES],
)
async def test_the_addresses_of_another_implementation(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 3: remote servers. SkyRL documentation, Configuration Overview: remote_urls and run_engines_locally, and
    external_proxy_url and external_server_urls; a user who changes the implementation still has the other keys."""
    await stack.attempt(stack.client_life("as configured", names=ANOTHERS))
    await stack.client_life("made again")
    await answers(stack, prompts)


@scenario(
    task=3,
    promise="an error names the address of a server that does not answer",
    needs={Capability.CLIENT_LIVES},
    checks=[ADDRESSES],
)
async def test_a_server_that_does_not_answer(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 3: remote servers. An address may be misspelt, or its server may not be up yet."""
    await stack.attempt(stack.client_life("as configured", names=NOBODYS))
    await stack.attempt(stack.generate(prompts.unique(1), max_tokens=4, temperature=0.0))
    await stack.client_life("made again")
    await answers(stack, prompts)


@scenario(
    task=0,
    promise="if another process has the configured port of the OpenAI address, no client is made, and the error says why",
    needs={Capability.CLIENT_LIVES, Capability.HTTP_ENDPOINT},
    checks=[TAKEN_PORT],
)
async def test_a_configured_port_that_is_taken(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, Configuration Overview: http_endpoint_port; router_init_kwargs, with the router's port. A user's client
    asks at that port, and would reach the other process."""
    await stack.attempt(stack.client_life("as configured", names="servers", port_taken=True))
    await stack.client_life("made again")
    await answers(stack, prompts)


@scenario(
    task=0,
    promise="a client reaches its servers where the environment names a proxy for HTTP",
    needs={Capability.CLIENT_LIVES, Capability.RESET_PREFIX_CACHE},
    checks=[*CHECKS, FAN_OUT],
)
async def test_made_behind_an_http_proxy(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904: the new client's requests replace calls of Ray's actors, which reach each other where HTTP_PROXY is set, as on many
    clusters. This proxy takes no connection."""
    await stack.attempt(stack.client_life("as configured", names="servers", variables=PROXIES))
    await answers(stack, prompts)
    await stack.attempt(stack.reset_prefix_cache())
    await stack.client_life("made again")
    await answers(stack, prompts)


@scenario(
    task=0,
    promise="requests that a pause holds for longer than a proxy waits for an answer end whole once it is over",
    needs={Capability.CLIENT_LIVES, Capability.PAUSE_KEEP},
    checks=[CLIENT_LIVES, KEPT, ALL_COMPLETE],
)
async def test_a_pause_beyond_the_proxys_limit(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #899: "keep" freezes requests until resume, however long the trainer takes. A proxy has a longest time for an answer: 1800
    seconds by vllm-router's own choice (request_timeout_secs), which a long step of the trainer, or a long rollout, exceeds."""
    await stack.client_life("as configured", names="servers", answer_limit_s=LIMIT_S)
    await answers(stack, prompts)
    async with asyncio.TaskGroup() as tasks:
        await in_flight(stack, prompts, tasks)
        await stack.pause("keep")
        await asyncio.sleep(2 * LIMIT_S)
        await stack.resume()
    await stack.client_life("made again")
    await answers(stack, prompts)
