"""Token in, token out: conversations whose turns are lists of ids, with a session that keeps them on one server."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.continuation import CONTINUATION
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.routing import STICKY
from harness.checks.tokens import greedy
from harness.checks.turns import TEXT_TURNS, TURNS_KEEP_TOKENS
from harness.contract.capability import Capability
from harness.contract.messages import PauseMode, SessionId
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.pauses import pause_in_flight
from scenarios.requests import ANSWER

TURNS = 4
LONG: dict[str, Any] = {**ANSWER, "max_tokens": 160}
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
    for session in ("conversation-1", "conversation-2", "conversation-3", 4):
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
    spelled = [stack.vocabulary.spelled(word) for word in ("theother", "sometimes", "themselves")]
    for number, first in enumerate(prompts.broken_off(4)):
        await converse(stack, f"conversation-{number}", first, *spelled, *prompts.broken_off(1))


@scenario(
    task=6,
    promise="a session that is over disturbs no other, and none that is unknown",
    needs={Capability.FINISH_SESSION},
    checks=[STICKY, greedy(), ALL_COMPLETE],
)
async def test_finished_sessions(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.3.0, RemoteInferenceClient.finish_session: "unknown session ids are ignored"; failures are "never raised"."""
    over, others = [[f"{name}-{number}" for number in range(6)] for name in ("over", "other")]
    await stack.generate(prompts.unique(12), session_ids=[*over, *others], **ANSWER)
    going_on = asyncio.create_task(stack.generate(prompts.unique(6), session_ids=[*others], **LONG))
    await stack.until_generating(requests=6, tokens=6)
    unknown: list[SessionId] = ["nobody's", 7]
    for session in (*over, *unknown):
        await stack.finish_session(session)
    await going_on
    await stack.generate(prompts.unique(6), session_ids=[*others], **ANSWER)


CONVERSATIONS = 6


async def converse_through_a_pause(stack: Stack, prompts: Prompts, mode: PauseMode) -> None:
    """Conversations side by side, all paused in the middle of their second turn."""
    sessions = [f"conversation-{number}" for number in range(CONVERSATIONS)]

    async def turn(contexts: list[list[int]], **params: Any) -> list[list[int]]:
        async with asyncio.TaskGroup() as callers:
            answers = [
                callers.create_task(stack.generate([context], session_ids=[session], **params))
                for session, context in zip(sessions, contexts, strict=True)
            ]
        made = [answer.result().response_ids[0] for answer in answers]
        new = prompts.unique(CONVERSATIONS, length=6)
        return [context + response + more for context, response, more in zip(contexts, made, new, strict=True)]

    second = await turn(prompts.unique(CONVERSATIONS), **ANSWER)
    async with asyncio.TaskGroup() as tasks:
        pending = tasks.create_task(turn(second, **LONG))
        async with pause_in_flight(stack, mode, requests=CONVERSATIONS):
            pass
    await turn(pending.result(), **ANSWER)


@scenario(
    task=6,
    promise="conversations that pause(abort) interrupts within a turn keep their tokens, and their servers",
    needs={Capability.PAUSE_ABORT, Capability.RETRY_ABORTED},
    checks=[*CHECKS, CONTINUATION],
)
async def test_interrupted_conversations_keep_their_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 6: "Token IDs preserved across turns (no re-tokenization)", "Same session → same backend", with
    the interruptions of task 5: a retry is part of its turn."""
    await converse_through_a_pause(stack, prompts, "abort")


@scenario(
    task=6,
    promise="conversations that pause(keep) freezes within a turn keep their tokens, and their servers",
    needs={Capability.PAUSE_KEEP},
    checks=CHECKS,
)
async def test_frozen_conversations_keep_their_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 6, with the pauses of task 13."""
    await converse_through_a_pause(stack, prompts, "keep")


@scenario(
    task=6,
    promise="each turn of a conversation by messages is what the chat template makes of all messages so far",
    needs={Capability.CHAT_COMPLETION},
    checks=[TEXT_TURNS, STICKY, greedy(methods=("chat_completion",)), ALL_COMPLETE],
)
async def test_chat_turns_are_rendered_by_the_template(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 6: "Chat template applied correctly". Each turn tokenizes the text again; the verdict shows how many of
    the made tokens that changes."""
    shown: dict[str, Any] = {"model": stack.model_name, "return_token_ids": True, **ANSWER}

    async def chat(number: int, asked: list[str]) -> None:
        messages: list[dict[str, str]] = []
        for text in asked:
            messages.append({"role": "user", "content": text})
            body = {**shown, "messages": list(messages), "session_id": f"conversation-{number}"}
            answer = await stack.chat_completion(body)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    async with asyncio.TaskGroup() as callers:
        for number in range(6):
            callers.create_task(chat(number, prompts.texts(3)))


@scenario(
    task=6,
    promise="a conversation by text is tokenized anew in each turn",
    needs={Capability.COMPLETION},
    checks=[TEXT_TURNS, STICKY, greedy(methods=("completion",)), ALL_COMPLETE],
)
async def test_a_conversation_by_text_is_tokenized_anew(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server, Completions API: a prompt may be text. SkyRL #1014, task 6, why token ids:
    the verdict shows how many of the made tokens the text changes."""
    shown: dict[str, Any] = {"model": stack.model_name, "return_token_ids": True, **ANSWER}
    for number, text in enumerate(prompts.texts(6)):
        context = text
        for more in (*prompts.texts(2), ""):
            body = {**shown, "prompt": context, "session_id": f"conversation-{number}"}
            answer = await stack.completion(body)
            context = f"{context}{answer['choices'][0]['text']} {more}"
