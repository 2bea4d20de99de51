"""Token in, token out: conversations whose turns are lists of ids, with a session that keeps them on one server."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts, plain_ids
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.routing import STICKY
from harness.checks.tokens import greedy
from harness.checks.turns import TURNS_KEEP_TOKENS
from harness.contract import SessionId
from harness.scenario import scenario
from harness.stack import Stack

ANSWER: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
TURNS = 4
CHECKS = [TURNS_KEEP_TOKENS, STICKY, greedy(), ALL_COMPLETE]


async def converse(stack: Stack, session: SessionId, first: list[int], *later: list[int]) -> None:
    """One conversation: each turn's prompt is the turn before, its response, and new ids."""
    context = first
    for new in (*later, None):
        answer = await stack.generate([context], session_ids=[session], **ANSWER)
        context = context + answer.response_ids[0] + (new or [])


@scenario(task=6, promise="a conversation's tokens stay what they are from turn to turn", checks=CHECKS)
async def test_turns_keep_their_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 6: "Token IDs preserved across turns (no re-tokenization)"."""
    for session in ("conversation-1", "conversation-2", 3):
        await converse(stack, session, *prompts.unique(TURNS))


@scenario(task=6, promise="conversations side by side keep their tokens, and their servers", checks=CHECKS)
async def test_conversations_side_by_side(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 6: "Same session → same backend (hash-based routing)"; SkyRL #899: multi-turn conversations."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(12):
            tasks.create_task(converse(stack, f"conversation-{number}", *prompts.ragged(TURNS, 3, 30)))


@scenario(task=6, promise="the turns of many conversations may come in one batch", checks=CHECKS)
async def test_turns_in_batches(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInput.session_ids: one for each prompt of a batch."""
    sessions: list[SessionId] = [f"conversation-{number}" for number in range(8)]
    contexts = prompts.unique(8)
    for _ in range(TURNS):
        answers = await stack.generate(contexts, session_ids=sessions, **ANSWER)
        turns = zip(contexts, answers.response_ids, prompts.unique(8, length=6), strict=True)
        contexts = [context + response + new for context, response, new in turns]
    await stack.generate(contexts, session_ids=sessions, **ANSWER)


@scenario(
    task=6, promise="turns that end within a character, and words spelled in letters, stay as they are", checks=CHECKS
)
async def test_turns_that_text_cannot_hold(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 6. No text has a part of a character, and a tokenizer spells "the" in fewer ids than letters."""
    spelled = [plain_ids(word) for word in ("theother", "sometimes", "themselves")]
    for number, first in enumerate(prompts.broken_off(4)):
        await converse(stack, f"conversation-{number}", first, *spelled, *prompts.broken_off(1))
