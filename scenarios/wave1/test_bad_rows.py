"""Batches with one bad row, beside other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.bad_rows import BAD_ROWS, OTHERS, ROW
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import variants
from scenarios.requests import BEYOND, until_idle

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
Rows = Callable[[Prompts], dict[str, Any]]
Send = Callable[[Stack, list[Any], str], Coroutine[Any, Any, Any]]


def of_tokens(prompts: Prompts) -> dict[str, Any]:
    """Kind → a row that is bad in this way. generate() takes token ids only."""
    plain = prompts.one()
    return {
        "empty": [],
        "too long": prompts.over_long(),
        "with a token beyond the vocabulary": [*plain, BEYOND],
        "with a negative token": [*plain, -1],
        "with a huge token": [*plain, 2**40],
    }


def of_any_type(prompts: Prompts) -> dict[str, Any]:
    """The same, and rows that are no list of ints."""
    plain = prompts.one()
    others = {
        "null": None,
        "a number": 0.5,
        "an object": {"a": 1},
        "with a fraction": [*plain, 0.5],
        "with a text among tokens": [*plain, "a"],
        "with a list among tokens": [*plain, [1]],
        "with a null among tokens": [*plain, None],
    }
    return of_tokens(prompts) | others


def by_generate(stack: Stack, batch: list[Any], label: str) -> Coroutine[Any, Any, Any]:
    return stack.generate(batch, label=label, **GREEDY)


def by_completion(stack: Stack, batch: list[Any], label: str) -> Coroutine[Any, Any, Any]:
    return stack.completion({"model": stack.model_name, "prompt": batch, **GREEDY}, label=label)


@variants(
    {
        "test_generate": {"send": by_generate, "rows": of_tokens, "topologies": ["disaggregated", "moe"]},
        "test_completion": {"send": by_completion, "rows": of_any_type, "needs": {Capability.COMPLETION}},
    },
    task=0,
    promise="a batch with a bad row is refused by an error that names it, and no other request is harmed",
    checks=[BAD_ROWS, greedy(OTHERS)],
    deadline_s=160,
    bulk=True,
)
async def a_bad_row(stack: Stack, prompts: Prompts, *, send: Send, rows: Rows) -> None:
    """SkyRL API reference, InferenceEngineInterface.generate and completion; vLLM documentation, LLM.generate.

    Each batch has three good rows around the bad one. Two good batches are in flight meanwhile, and one comes after it."""
    for kind, bad in stack.within_budget(rows(prompts).items()):
        async with asyncio.TaskGroup() as callers:
            for _ in range(2):
                callers.create_task(stack.attempt(by_generate(stack, prompts.unique(3), OTHERS)))
            first, second, third = prompts.unique(3)
            callers.create_task(stack.attempt(send(stack, [first, bad, second, third], f"{ROW}: {kind}")))
        await stack.attempt(by_generate(stack, prompts.unique(2), OTHERS))
    if not await until_idle(stack):
        stack.give_up()
