"""Hops between client, router and servers break: statuses, kinds of body, connections, before and after an engine ran the request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal

from fixtures.prompts import Prompts
from harness.checks.hops import AFTER, BROKEN, BROKEN_HOPS
from harness.contract.capability import Capability
from harness.contract.messages import HopFault
from harness.driving.stack import Stack
from harness.suite.scenario import variants

PARAMS: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
STATUSES = (400, 404, 408, 409, 413, 422, 429, 500, 502, 503, 504)
BODIES: tuple[Literal["json", "html", "text", "empty", "cut"], ...] = ("json", "html", "text", "empty", "cut")
FAULTS: tuple[dict[str, Any], ...] = (
    *({"status": status} for status in STATUSES),
    *({"status": status, "body": body} for status in (422, 500) for body in BODIES),
    *({"status": status, "moment": "after"} for status in (400, 500, 503)),
    {"connection": "closed"},
    *({"connection": how, "moment": "after"} for how in ("closed", "reset", "torn")),
)
PLAIN = 2
"""Plain requests after each fault."""
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
