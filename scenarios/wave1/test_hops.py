"""Hops between client, router and servers break, are slow or hang, and carry messages in every legal form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, get_args

from fixtures.prompts import Prompts
from harness.checks.control_plane import PAUSE_STATES
from harness.checks.hops import AFTER, BROKEN, BROKEN_CONTROL, BROKEN_HOPS
from harness.checks.liveness import ALL_COMPLETE
from harness.contract.capability import Capability
from harness.contract.messages import HopFault, HopForm
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.hops import AFTER_THE_ENGINE, CONTROL_FAULTS

PARAMS: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
STATUSES = (400, 404, 408, 409, 413, 422, 429, 500, 502, 503, 504)
BODIES = ("json", "string", "html", "text", "empty", "cut")
FAULTS: tuple[dict[str, Any], ...] = (
    *({"status": status} for status in STATUSES),
    *({"status": status, "body": body} for status in (400, 422, 500) for body in BODIES),
    *({"status": status, "moment": "after"} for status in (400, 500, 503)),
    {"connection": "closed"},
    *({"connection": how, "moment": "after"} for how in ("closed", "reset", "torn")),
)
SLOW = HopFault(hop="server", connection="whole", form="slow")
HANGING = HopFault(hop="server", connection="hanging")
FORMS: tuple[HopForm, ...] = tuple(form for form in get_args(HopForm) if form != "slow")
PLAIN = 2
"""Plain requests after each fault."""
Act = Callable[[Stack, dict[str, Any]], Coroutine[Any, Any, None]]
Ask = Callable[[Stack, list[int], str], Coroutine[Any, Any, Any]]


def by_generate(stack: Stack, prompt: list[int], label: str) -> Coroutine[Any, Any, Any]:
    return stack.generate([prompt], label=label, **PARAMS)


def by_sample(stack: Stack, prompt: list[int], label: str) -> Coroutine[Any, Any, Any]:
    return stack.sample(prompt, 1, label=label, **PARAMS)


def by_completion(stack: Stack, prompt: list[int], label: str) -> Coroutine[Any, Any, Any]:
    return stack.completion({"model": stack.model_name, "prompt": prompt, **PARAMS}, label=label)


def by_chat(stack: Stack, prompt: list[int], label: str) -> Coroutine[Any, Any, Any]:
    messages = [{"role": "user", "content": f"Number {sum(prompt)} of {prompt[0]} and {prompt[1]}"}]
    return stack.chat_completion({"model": stack.model_name, "messages": messages, **PARAMS}, label=label)


SERVER, ROUTER = {Capability.BROKEN_HOPS}, {Capability.BROKEN_HOPS, Capability.BROKEN_ROUTER_HOP}


@variants(
    {
        "test_generate_to_a_server": {"hop": "server", "send": by_generate, "needs": SERVER},
        "test_sample_to_a_server": {"hop": "server", "send": by_sample, "needs": {*SERVER, Capability.SAMPLE}},
        "test_completion_to_a_server": {
            "hop": "server",
            "send": by_completion,
            "needs": {*SERVER, Capability.COMPLETION},
        },
        "test_chat_to_a_server": {"hop": "server", "send": by_chat, "needs": {*SERVER, Capability.CHAT_COMPLETION}},
        "test_generate_to_the_router": {"hop": "router", "send": by_generate, "needs": ROUTER},
        "test_completion_to_the_router": {
            "hop": "router",
            "send": by_completion,
            "needs": {*ROUTER, Capability.COMPLETION},
        },
    },
    task=0,
    promise="a request that meets a broken hop ends once, names the cause, and runs at most once; the next one is unharmed",
    checks=[BROKEN_HOPS],
    deadline_s=120,
    bulk=True,
)
async def every_fault(stack: Stack, prompts: Prompts, *, hop: Literal["router", "server"], send: Ask) -> None:
    """SkyRL #904: requests are proxied to one server. RemoteInferenceClient._post: client errors will not succeed on retry."""
    for fault in stack.within_budget(FAULTS):
        await stack.break_hop(HopFault(hop=hop, **fault))
        await stack.attempt(send(stack, prompts.one(), BROKEN))
        await stack.break_hop(None)
        for prompt in prompts.unique(PLAIN):
            await stack.attempt(send(stack, prompt, AFTER))


@variants(
    {
        "test_generate_over_a_stale_connection": {"send": by_generate, "needs": ROUTER},
        "test_sample_over_a_stale_connection": {"send": by_sample, "needs": {*ROUTER, Capability.SAMPLE}},
        "test_completion_over_a_stale_connection": {"send": by_completion, "needs": {*ROUTER, Capability.COMPLETION}},
        "test_chat_over_a_stale_connection": {"send": by_chat, "needs": {*ROUTER, Capability.CHAT_COMPLETION}},
    },
    task=0,
    promise="a request whose connection to the router had gone stale goes over another one, and is answered once",
    checks=[BROKEN_HOPS, ALL_COMPLETE],
)
async def a_stale_connection(stack: Stack, prompts: Prompts, *, send: Ask) -> None:
    """RFC 9112, 9.3.1: connections that are kept may be closed at any time; SkyRL, RemoteInferenceClient._post: "POST with retry +
    backoff on transient connection errors". No server has taken the request yet."""
    for how in ("closed", "reset"):
        await stack.break_hop(HopFault(hop="router", connection=how))
        await stack.attempt(send(stack, prompts.one(), BROKEN))
        await stack.break_hop(None)
        for prompt in prompts.unique(PLAIN):
            await stack.attempt(send(stack, prompt, AFTER))


@variants(
    {
        "test_forms_of_messages_to_a_server": {"hop": "server", "needs": ROUTER},
        "test_forms_of_messages_to_the_router": {"hop": "router", "needs": ROUTER},
    },
    task=0,
    promise="requests and answers are read in every form that HTTP allows, as if they had their usual one",
    checks=[BROKEN_HOPS],
    bulk=True,
)
async def every_form(stack: Stack, prompts: Prompts, *, hop: Literal["router", "server"]) -> None:
    """RFC 9112, 3.2.2 (absolute form), 7.1 (chunked), 9.3 (connections that are kept); RFC 9110, 5.1 (names in any case), 5.2 (several
    headers of one name), 8.3.1 (charset). Requests in turn: one that follows on the same connection is judged too."""
    for form in FORMS:
        await stack.break_hop(HopFault(hop=hop, connection="whole", form=form))
        for prompt in prompts.unique(1 + PLAIN):
            await stack.attempt(by_generate(stack, prompt, BROKEN))
        await stack.break_hop(None)


@scenario(
    task=0,
    promise="control calls read a server's answer in every form that HTTP allows",
    needs={*SERVER, Capability.PAUSE_KEEP, Capability.IS_PAUSED},
    checks=[BROKEN_CONTROL, PAUSE_STATES],
)
async def test_forms_of_control_answers(stack: Stack, prompts: Prompts) -> None:
    """As above (RFC 9112 and 9110), for calls to all servers: a proxy in front of a server may leave the length of answers open."""

    async def ask(
        form: HopForm, call: Literal["pause", "is_paused", "resume"], asked: Coroutine[Any, Any, Any]
    ) -> None:
        await stack.break_hop(HopFault(hop="server", connection="whole", form=form, call=call))
        await stack.attempt(asked)
        await stack.break_hop(None)

    await stack.generate(prompts.unique(PLAIN), **PARAMS)
    for form in FORMS:
        await ask(form, "pause", stack.pause("keep"))
        await ask(form, "is_paused", stack.is_paused())
        await ask(form, "resume", stack.resume())
        await stack.is_paused()


@scenario(
    task=0,
    promise="a slow answer is waited for, and a request that hangs goes on when its hop does, while others are answered",
    needs=SERVER,
    checks=[BROKEN_HOPS],
    bulk=True,
)
async def test_slow_and_hanging_hops(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, RemoteInferenceClient: requests have no time limit, since generations may be long. One request per server hangs;
    those after it are answered meanwhile."""
    await stack.break_hop(SLOW)
    await stack.attempt(by_generate(stack, prompts.one(), BROKEN))
    await stack.break_hop(HANGING)
    batch = prompts.unique(len(stack.servers) + 4)
    asked = [asyncio.create_task(stack.attempt(by_generate(stack, prompt, BROKEN))) for prompt in batch]
    while sum(task.done() for task in asked) < len(asked) - len(stack.servers):
        await asyncio.wait([task for task in asked if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    await stack.break_hop(None)
    await asyncio.gather(*asked)
    await stack.generate(prompts.unique(PLAIN), label=AFTER, **PARAMS)


async def pauses(stack: Stack, fault: dict[str, Any]) -> None:
    await stack.break_hop(HopFault(hop="server", call="pause", **fault))
    await stack.attempt(stack.pause("keep"))
    await stack.break_hop(None)
    await stack.attempt(stack.pause("keep"))
    await stack.break_hop(HopFault(hop="server", call="resume", **fault))
    await stack.attempt(stack.resume())
    await stack.break_hop(None)
    await stack.attempt(stack.resume())


async def resets(stack: Stack, fault: dict[str, Any]) -> None:
    await stack.break_hop(HopFault(hop="server", call="reset_prefix_cache", **fault))
    await stack.attempt(stack.reset_prefix_cache())
    await stack.break_hop(None)
    await stack.attempt(stack.reset_prefix_cache())


async def sleeps(stack: Stack, fault: dict[str, Any]) -> None:
    await stack.break_hop(HopFault(hop="server", call="sleep", **fault))
    await stack.attempt(stack.sleep(1))
    await stack.break_hop(None)
    await stack.attempt(stack.sleep(1))
    await stack.break_hop(HopFault(hop="server", call="wake_up", **fault))
    await stack.attempt(stack.wake_up())
    await stack.break_hop(None)
    await stack.attempt(stack.wake_up())


@variants(
    {
        "test_pause_and_resume_at_one_server": {
            "act": pauses,
            "own": ({"body": "sentence"},),
            "needs": {*SERVER, Capability.PAUSE_KEEP},
        },
        "test_pause_and_resume_at_one_worker": {
            "act": pauses,
            "needs": {*SERVER, Capability.PAUSE_KEEP},
            "topologies": ["moe-dp2"],
        },
        "test_reset_prefix_cache_at_one_server": {"act": resets, "needs": {*SERVER, Capability.RESET_PREFIX_CACHE}},
        "test_sleep_and_wake_up_at_one_server": {
            "act": sleeps,
            "needs": {*SERVER, Capability.SLEEP},
            "topologies": ["colocated"],
        },
    },
    task=0,
    promise="a control call that meets a broken hop to one server says so and where, and works when it is called again",
    checks=[BROKEN_CONTROL],
    bulk=True,
    own=(),
)
async def every_control_fault(stack: Stack, prompts: Prompts, *, act: Act, own: tuple[dict[str, Any], ...]) -> None:
    """SkyRL #904, "Control plane (fan-out)"; architecture, uniform fleet. Engines answer after each fault. vLLM's /pause and
    /resume have a form of their own for errors."""
    for fault in (*CONTROL_FAULTS, *own, *AFTER_THE_ENGINE):
        await act(stack, fault)
        await stack.attempt(stack.generate(prompts.unique(PLAIN), **PARAMS))
