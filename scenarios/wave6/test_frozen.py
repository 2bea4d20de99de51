"""pause(keep) in the middle of every kind of answer: sampled, ended by a stop string, of a chat, of a completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import are_numbers
from harness.checks.pausing import FROZEN, PAUSED, SAME_AS_UNINTERRUPTED, UNINTERRUPTED
from harness.contract.capability import Capability
from harness.contract.messages import SessionId
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.pauses import interrupted
from scenarios.requests import SPREAD, sessions

KEEP = {Capability.PAUSE_KEEP}
LONG: dict[str, Any] = {"max_tokens": 160, "temperature": 0.0, "ignore_eos": True}
Ask = Callable[[str], Coroutine[Any, Any, Any]]
CHECKS = [SAME_AS_UNINTERRUPTED, FROZEN, ALL_COMPLETE]


async def with_and_without(stack: Stack, asks: Sequence[Ask]) -> None:
    """All `asks` (label → call) at once, then again and frozen in the middle."""
    await asyncio.gather(*(ask(UNINTERRUPTED) for ask in asks))
    async with interrupted(stack, "keep", *(ask(PAUSED) for ask in asks), requests=len(asks)):
        pass


@scenario(
    task=13,
    promise="an answer that is drawn with a seed is the same with a pause(keep) in it",
    needs=KEEP,
    checks=[*CHECKS, are_numbers()],
)
async def test_frozen_draws_go_on(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, pause_generation: "will resume from where they left off"; vLLM documentation, SamplingParams.seed: a
    request's own generator is part of its state."""
    sampled: dict[str, Any] = {**LONG, "temperature": 1.0, "seed": 11, "logprobs": 0}

    def ask(prompt: list[int]) -> Ask:
        return lambda label: stack.generate([prompt], label=label, **sampled)

    await with_and_without(stack, [ask(prompt) for prompt in prompts.unique(SPREAD)])


@scenario(task=13, promise="a stop string that a pause(keep) comes within ends the answer", needs=KEEP, checks=CHECKS)
async def test_a_stop_string_across_a_freeze(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.stop; SkyRL API reference, pause_generation: "will resume from where they left off"."""
    batch = prompts.unique(SPREAD)
    spelled: dict[str, Any] = {
        "temperature": 0.0,
        "ignore_eos": True,
        "allowed_token_ids": stack.vocabulary.plain,
        "max_tokens": 200,
    }
    known = (await stack.generate(batch, **spelled)).response_ids

    def ask(prompt: list[int], tokens: list[int]) -> Ask:
        stop = [stack.vocabulary.text(tokens[8:180])]
        return lambda label: stack.generate([prompt], label=label, stop=stop, **spelled)

    await with_and_without(stack, [ask(prompt, tokens) for prompt, tokens in zip(batch, known, strict=True)])


@scenario(
    task=13,
    promise="conversations by messages are the same with a pause(keep) in them",
    needs={*KEEP, Capability.CHAT_COMPLETION},
    checks=CHECKS,
)
async def test_frozen_chats_go_on(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, pause_generation and InferenceEngineInterface.chat_completion."""
    shown: dict[str, Any] = {"model": stack.model_name, "return_token_ids": True, **LONG}

    def ask(messages: list[dict[str, str]], session: SessionId) -> Ask:
        return lambda label: stack.chat_completion({**shown, "messages": messages, "session_id": session}, label=label)

    chats = zip(prompts.conversations(SPREAD), sessions(SPREAD), strict=True)
    await with_and_without(stack, [ask(messages, session) for messages, session in chats])


@scenario(
    task=13,
    promise="completions are the same with a pause(keep) in them, single and batched",
    needs={*KEEP, Capability.COMPLETION},
    checks=CHECKS,
)
async def test_frozen_completions_go_on(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, pause_generation and InferenceEngineInterface.completion."""
    shown: dict[str, Any] = {"model": stack.model_name, "return_token_ids": True, **LONG}
    singles = zip(prompts.unique(SPREAD), sessions(SPREAD), strict=True)
    bodies = [{**shown, "prompt": prompt, "session_id": session} for prompt, session in singles]
    bodies.append({**shown, "prompt": prompts.unique(4)})

    def ask(body: dict[str, Any]) -> Ask:
        return lambda label: stack.completion(body, label=label)

    await with_and_without(stack, [ask(body) for body in bodies])
