"""pause(abort) in the middle of generation, for stacks that continue by themselves after resume()."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.continuation import CONTINUATION
from harness.checks.control_plane import FAN_OUT, PAUSE_STATES
from harness.checks.history import answered, explained, waited
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.logprobs import are_numbers, of_reference
from harness.checks.pausing import FROZEN, HELD, PAUSED, SAME_AS_UNINTERRUPTED, UNINTERRUPTED
from harness.checks.stopping import ends_as_asked
from harness.checks.text import text_of_tokens
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.pauses import interrupted, pause_in_flight
from scenarios.requests import ANSWER, SPREAD, long, sessions, until_settled

NEEDS = {Capability.PAUSE_ABORT, Capability.RETRY_ABORTED}


async def ask(stack: Stack, prompts: list[list[int]], *, batched: bool = False, **params: Any) -> None:
    """One call per prompt, all at once; or one for all if `batched`."""
    async with asyncio.TaskGroup() as callers:
        for batch in [prompts] if batched else [[prompt] for prompt in prompts]:
            callers.create_task(stack.generate(batch, **params))


async def with_and_without(
    stack: Stack, prompts: list[list[int]], *, interruptions: int = 1, batched: bool = False, **params: Any
) -> None:
    """The prompts without a pause, then again with `interruptions` pauses."""
    await ask(stack, prompts, batched=batched, label=UNINTERRUPTED, **params)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(stack, prompts, batched=batched, label=PAUSED, **params))
        for _ in range(interruptions):
            async with pause_in_flight(stack, "abort", requests=len(prompts)):
                pass


@scenario(
    task=5,
    promise="greedy requests that pause(abort) interrupts end as if nothing had happened",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, FROZEN, ALL_COMPLETE],
)
async def test_interrupted_requests_end_as_if_nothing_had_happened(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Partial responses accumulated correctly", "Retry-on-abort works (re-feed accumulated
    tokens)". One call per prompt, as SkyRL's fully asynchronous trainer sends them."""
    await with_and_without(stack, prompts.unique(SPREAD), **long(stack))


@scenario(
    task=5,
    promise="a greedy batch that pause(abort) interrupts ends as if nothing had happened",
    needs={*NEEDS, Capability.RETRY_ABORTED_BATCH},
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, FROZEN, ALL_COMPLETE],
)
async def test_an_interrupted_batch_ends_as_if_nothing_had_happened(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Partial responses accumulated correctly", "Retry-on-abort works (re-feed accumulated
    tokens)"."""
    await with_and_without(stack, prompts.unique(SPREAD), batched=True, **long(stack))


@scenario(
    task=5,
    promise="requests that are interrupted again while they go on end as if nothing had happened",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, FROZEN, ALL_COMPLETE],
)
async def test_a_batch_may_be_interrupted_twice(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Resume continues generation": after each pause, with the tokens of all attempts."""
    await with_and_without(stack, prompts.unique(SPREAD), interruptions=2, **long(stack))


@scenario(
    task=5,
    promise="pausing twice before one resume() interrupts once",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, FROZEN, HELD, ALL_COMPLETE],
)
async def test_pausing_twice_interrupts_once(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause and /resume: a state, not a count."""
    batch = prompts.unique(SPREAD)
    await ask(stack, batch, label=UNINTERRUPTED, **long(stack))
    async with interrupted(
        stack, "abort", ask(stack, batch, label=PAUSED, **long(stack)), requests=len(batch)
    ) as tasks:
        await stack.attempt(stack.pause("abort"))
        tasks.create_task(ask(stack, prompts.unique(2), **ANSWER))


CROWD = 120
"""More than a client of aiohttp or httpx has connections at once unless it is told otherwise (100)."""


@scenario(
    task=5,
    promise="an interruption ends when it is told to, however many requests wait for its end",
    needs=NEEDS,
    checks=[ALL_COMPLETE],
)
async def test_a_crowd_waits_for_its_end(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1307: a batch of rollouts hung. resume() must not wait for what only resume() ends."""
    async with asyncio.TaskGroup() as callers:
        await stack.pause("abort")
        callers.create_task(ask(stack, prompts.unique(CROWD), max_tokens=4, temperature=0.0))
        await until_settled(stack)
        await stack.resume()


@scenario(
    task=5,
    promise="log-probabilities of an interrupted answer are those of its tokens, one each, over all parts",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, of_reference(), are_numbers()],
)
async def test_logprobs_of_an_interrupted_batch(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineOutput.response_logprobs; the trainer's loss is over the whole response."""
    await with_and_without(stack, prompts.unique(6), logprobs=0, **long(stack))


@scenario(
    task=5,
    promise="min_tokens and stop tokens hold over all parts of an interrupted answer",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, ends_as_asked(causes=["stop token"])],
)
async def test_min_tokens_of_an_interrupted_batch(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.min_tokens: counted from the response's start, which a retry gets in its prompt."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 300, "min_tokens": 96}
    await with_and_without(
        stack, prompts.unique(8), stop_token_ids=stack.vocabulary.scattered(range(100, 300)), **params
    )


@scenario(
    task=5,
    promise="penalties for tokens that an answer already has count those from before an interruption too",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
)
async def test_penalties_of_interrupted_requests(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.presence_penalty and frequency_penalty: they count "new tokens" in "the generated text so
    far", without the prompt, in which a retry gets them. SkyRL #1014, task 5: all parts form one answer."""
    await with_and_without(stack, prompts.unique(SPREAD), presence_penalty=1.5, frequency_penalty=0.5, **long(stack))


@scenario(
    task=5,
    promise="an interrupted answer of exactly so many tokens has exactly so many",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
)
async def test_answers_of_an_exact_length_are_interrupted(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams: "min_tokens must be less than or equal to max_tokens": this must also
    hold for the rest that a retry gets of both."""
    await with_and_without(stack, prompts.unique(4), min_tokens=160, **{**long(stack), "max_tokens": 160})


@scenario(
    task=5,
    promise="requests that come while others are interrupted wait for resume(), and both are answered",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, HELD, FROZEN, greedy("late"), ALL_COMPLETE],
)
async def test_requests_that_come_during_an_interruption(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, InferenceEngineClient.pause_generation: new requests are blocked until resume."""
    batch, late = prompts.unique(SPREAD), prompts.unique(4)
    await ask(stack, batch, label=UNINTERRUPTED, **long(stack))
    async with interrupted(
        stack, "abort", ask(stack, batch, label=PAUSED, **long(stack)), requests=len(batch)
    ) as tasks:
        tasks.create_task(ask(stack, late, label="late", **ANSWER))


@scenario(
    task=5,
    promise="a weight sync between interruption and retry: what was made stays, the rest is made by the new policy",
    needs={*NEEDS, Capability.WEIGHT_SYNC, Capability.RESET_PREFIX_CACHE},
    checks=[CONTINUATION, EVERY_PARAMETER, explained(waited, answered), ALL_COMPLETE],
)
async def test_a_sync_between_interruption_and_retry(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Weight sync during pause succeeds", "Resume continues generation"."""
    batch = prompts.unique(8)
    async with interrupted(stack, "abort", ask(stack, batch, **long(stack)), requests=len(batch)):
        await stack.sync_weights(1)
        await stack.reset_prefix_cache()
        await stack.digests()
    await ask(stack, prompts.unique(SPREAD), **ANSWER)


@scenario(
    task=5,
    promise="requests are interrupted for one sync after another: each part is made by the version of its time",
    needs={*NEEDS, Capability.WEIGHT_SYNC, Capability.RESET_PREFIX_CACHE},
    checks=[CONTINUATION, explained(waited), ALL_COMPLETE],
)
async def test_several_syncs_within_one_answer(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: in-flight weight update. A long answer may span several versions."""
    batch = prompts.unique(6)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(stack, batch, **long(stack)))
        for version in (1, 2):
            async with pause_in_flight(stack, "abort", requests=len(batch)):
                await stack.sync_weights(version)
                await stack.reset_prefix_cache()


@scenario(
    task=5,
    promise="the text of an interrupted answer is that of all its tokens, of every part",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, text_of_tokens(), ALL_COMPLETE],
)
async def test_text_of_interrupted_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineOutput: tokenizer.decode(response_token_ids, skip_special_tokens=True) == responses. The answers
    consist of whole characters, so that none is cut off at an end."""
    await with_and_without(stack, prompts.unique(4), allowed_token_ids=stack.vocabulary.plain, **long(stack))


@scenario(
    task=5,
    promise="an interrupted answer that is drawn by chance keeps what was drawn, and its log-probabilities",
    needs=NEEDS,
    checks=[CONTINUATION, of_reference(), are_numbers(), ALL_COMPLETE],
)
async def test_seeded_requests_are_interrupted(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Partial responses accumulated correctly". The contract does not define a seed's draws after
    an interruption: no release says that a generator's state survives it."""
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 160, "ignore_eos": True, "logprobs": 0}
    batch = prompts.unique(6)
    async with interrupted(stack, "abort", ask(stack, batch, **sampled), requests=len(batch)):
        pass


@scenario(
    task=5,
    promise="a stop string that an interruption runs through ends the answer as it would have without",
    needs=NEEDS,
    checks=[CONTINUATION, SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
)
async def test_a_stop_string_across_an_interruption(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.stop: "stop the generation when they are generated"; SkyRL #1014, task 5: all parts
    form one answer. The string is long enough that the pause comes within it."""
    prompt = prompts.one()
    spelled: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": stack.vocabulary.plain}
    known = (await stack.generate([prompt], max_tokens=280, **spelled)).response_ids[0]
    stop = stack.vocabulary.text(known[8:240])
    await with_and_without(stack, [prompt], max_tokens=280, stop=[stop], **spelled)


def conversation(stack: Stack, messages: list[dict[str, str]]) -> dict[str, Any]:
    """A greedy request whose answer survives decoding and encoding, since it consists only of signs."""
    signs = stack.vocabulary.spelled("!#$%&()*+-/0<=>?@[]^_{|}~")
    shown: dict[str, Any] = {"return_token_ids": True, "allowed_token_ids": signs}
    return {"model": stack.model_name, "messages": messages, **long(stack), **shown}


@scenario(
    task=5,
    promise="an interrupted chat_completion() goes on by itself and ends as if nothing had happened",
    needs={*NEEDS, Capability.CHAT_COMPLETION, Capability.RETRY_ABORTED_CHAT},
    checks=[SAME_AS_UNINTERRUPTED, FROZEN, ALL_COMPLETE],
)
async def test_interrupted_conversations(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient.chat_completion: "Always use the retry loop"; SkyRL 0.1.0,
    _chat_completion_with_retry: "with previous responses accumulated". A retry sends text, so the answers consist of
    signs that no tokenizer joins."""
    # Few: more of them find signs that a tokenizer joins.
    named = zip(prompts.conversations(4), sessions(4), strict=True)
    bodies = [{**conversation(stack, messages), "session_id": session} for messages, session in named]
    for body in bodies:
        await stack.chat_completion(body, label=UNINTERRUPTED)
    again = [stack.chat_completion(body, label=PAUSED) for body in bodies]
    async with interrupted(stack, "abort", *again, requests=len(bodies)):
        pass


@scenario(
    task=5,
    promise="an interruption that clears the cache leaves nothing of the old policy's for the retry",
    needs={*NEEDS, Capability.WEIGHT_SYNC, Capability.PAUSE_CLEAR_CACHE},
    checks=[CONTINUATION, explained(waited, answered), FAN_OUT, ALL_COMPLETE],
)
async def test_an_interruption_clears_the_cache(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, pause(clear_cache); vLLM documentation, /pause: "clear_cache". A retry is long enough to meet the cache."""
    batch = prompts.unique(6)
    async with interrupted(stack, "abort", ask(stack, batch, **long(stack)), requests=len(batch), clear_cache=True):
        await stack.sync_weights(1, chunks=4)
    await ask(stack, prompts.unique(SPREAD), **ANSWER)


@scenario(
    task=5,
    promise="is_paused() names every server and follows pause(abort) and resume()",
    needs={Capability.PAUSE_ABORT, Capability.IS_PAUSED},
    checks=[PAUSE_STATES, FAN_OUT],
)
async def test_is_paused_follows_an_abort(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - every scenario has both
    """SkyRL #899, review of /is_paused: "a mapping from server_urls to is_paused state of each engine"."""
    await stack.is_paused()
    await stack.pause("abort")
    await stack.is_paused()
    await stack.resume()
    await stack.is_paused()
