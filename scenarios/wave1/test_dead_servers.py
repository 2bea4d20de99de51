"""A server or the router dies: pending calls end, and health() reports a dead server."""

from __future__ import annotations

import asyncio
from typing import Literal

from fixtures.prompts import Prompts
from harness.checks.control_plane import HEALTH_FOLLOWS_SERVERS, HEALTHY
from harness.checks.liveness import EVERY_CALL_ENDS
from harness.contract.capability import Capability
from harness.contract.clock import monotonic
from harness.contract.messages import ROUTER
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants

NOTICED_S = 10.0
"""Seconds that a stack may take to notice a dead server."""


async def until_unhealthy(stack: Stack) -> None:
    """Ask health() until it is false, fails, or `NOTICED_S` has passed; the last answer counts."""
    deadline = monotonic() + NOTICED_S
    while monotonic() < deadline and await stack.attempt(stack.health()):
        await asyncio.sleep(0.25)


@scenario(
    task=0,
    promise="health() is true with one server dead and no longer with all of them",
    needs={Capability.HEALTH, Capability.KILL_SERVER},
    checks=[HEALTH_FOLLOWS_SERVERS, HEALTHY],
)
async def test_health_follows_the_servers(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #899, review of /health: "if at least one engine exists that is healthy it should return true"."""
    await stack.generate(prompts.unique(2), max_tokens=4, temperature=0.0)
    await stack.health()
    *first, last = stack.servers
    for server in first:
        await stack.kill_server(server)
        await stack.attempt(stack.health())
    await stack.kill_server(last)
    await until_unhealthy(stack)


NEEDS = frozenset({Capability.KILL_SERVER, Capability.PAUSE_KEEP, Capability.RESET_PREFIX_CACHE})


@variants(
    {
        "test_a_dead_server_leaves_no_request_waiting": {"killed": None, "part": "server"},
        "test_a_dead_engine_leaves_no_request_waiting": {"killed": None, "part": "engine"},
        "test_the_router_dies": {
            "killed": ROUTER,
            "part": "server",
            "promise": "when the router dies, every pending call and every later one ends: well, or with an error that has a name",
            "needs": NEEDS | {Capability.BROKEN_ROUTER_HOP},
        },
    },
    task=0,
    promise="when a server dies, every pending call and every later one ends: well, or with an error that has a name",
    needs=NEEDS,
    topologies=["colocated"],  # the first scenario ends the disaggregated stack: this one would take another start
    checks=[EVERY_CALL_ENDS],
    deadline_s=120.0,
)
async def every_call_ends(
    stack: Stack, prompts: Prompts, *, killed: str | None, part: Literal["server", "engine"]
) -> None:
    """SkyRL #904: requests are proxied to one server; a caller must learn that it is gone. A pause and its resume() reach the living
    servers all the same, or their requests would wait for ever."""
    pending, later, last = prompts.unique(16), prompts.unique(8), prompts.unique(8)
    async with asyncio.TaskGroup() as callers:
        for prompt in pending:
            answer = stack.generate([prompt], max_tokens=200, temperature=0.0, ignore_eos=True)
            callers.create_task(stack.attempt(answer))
        await stack.until_generating(requests=len(pending), tokens=4 * len(pending))
        await stack.kill_server(killed or stack.servers[0], part)
        for prompt in later:
            callers.create_task(stack.attempt(stack.generate([prompt], max_tokens=4, temperature=0.0)))
    await stack.attempt(stack.pause("keep"))
    await stack.attempt(stack.resume())
    await stack.attempt(stack.reset_prefix_cache())
    await asyncio.gather(*(stack.attempt(stack.generate([prompt], max_tokens=4, temperature=0.0)) for prompt in last))
