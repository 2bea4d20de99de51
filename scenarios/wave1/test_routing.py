"""Which server a request goes to: a session's own, or any."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.routing import SAME_SESSION, SESSIONLESS_SPREAD, SESSIONS_SPREAD, STICKY
from harness.contract.capability import Capability
from harness.contract.messages import HttpRequest, SessionId
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, under_delays, variants
from scenarios.requests import EVERYWHERE, sessions

ANSWER: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
SHORT: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}


@scenario(
    task=1,
    promise="a session's turns all run on one server, whether they come alone or in batches with other sessions",
    checks=[STICKY, ALL_COMPLETE],
    topologies=EVERYWHERE,
)
async def test_sessions_stick_over_turns_and_batches(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #899: "Session-aware hashing: sticky routing for multi-turn conversations".

    Each batch holds the sessions in another order, so that a row's place says nothing about its session."""
    sessions: list[SessionId] = [f"conversation-{number}" for number in range(8)]
    for turn in range(5):
        order = sessions[turn:] + sessions[:turn]
        await stack.generate(prompts.unique(8), session_ids=order, **ANSWER)
    for session in sessions:
        await stack.generate(prompts.unique(1), session_ids=[session], **ANSWER)


@scenario(task=1, promise="many sessions are spread over all servers", checks=[SESSIONS_SPREAD, STICKY])
async def test_many_sessions_use_every_server(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #934: a session's server is hash(session_id) % engines. With 32 sessions per engine, a fair hash leaves
    out one of two engines with probability 2^-63."""
    count = 32 * stack.topology.engines
    sessions: list[SessionId] = [f"session-{number}" for number in range(count)]
    for _ in range(2):
        await stack.generate(prompts.unique(count), session_ids=sessions, max_tokens=2, temperature=0.0)


@scenario(
    task=6,
    promise="sessions of every kind of call are spread over all servers",
    needs={Capability.SAMPLE, Capability.CHAT_COMPLETION, Capability.COMPLETION},
    checks=[SESSIONS_SPREAD, ALL_COMPLETE],
)
async def test_sessions_of_every_call_use_every_server(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #934: a session's server is hash(session_id) % engines, for sample() and OpenAI bodies alike."""
    short: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}
    count = 16 * stack.topology.engines
    given = zip(prompts.unique(count), prompts.unique(count), prompts.conversations(count), strict=True)
    for number, (sampled, completed, messages) in enumerate(given):
        body = {"model": stack.model_name, "session_id": f"session-{number}", **short}
        async with asyncio.TaskGroup() as callers:
            callers.create_task(stack.sample(sampled, 1, session_id=f"session-{number}", **short))
            callers.create_task(stack.completion({**body, "prompt": completed}))
            callers.create_task(stack.chat_completion({**body, "messages": messages}))


@scenario(
    task=6,
    promise="a session in the body of chat completions sticks",
    needs={Capability.CHAT_COMPLETION},
    checks=[STICKY, ALL_COMPLETE],
)
async def test_chat_sessions_stick(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #899, review: the session id comes in the request's body and decides its engine."""
    for session in ("trial-a", "trial-b", "trial-c"):
        for messages in prompts.conversations(12):
            body = {"model": stack.model_name, "messages": messages, "session_id": session, **ANSWER}
            await stack.chat_completion(body)


@scenario(
    task=6,
    promise="a session in the body of completions sticks",
    needs={Capability.COMPLETION},
    checks=[STICKY, ALL_COMPLETE],
)
async def test_completion_sessions_stick(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient.completion: "we route by request["session_id"] if present"."""
    for session in ("trial-a", "trial-b", "trial-c"):
        for prompt in prompts.unique(12):
            body = {"model": stack.model_name, "prompt": prompt, "session_id": session, **ANSWER}
            await stack.completion(body)


@scenario(
    task=6,
    promise="each prompt of a batched completion runs on the server of its own session",
    needs={Capability.COMPLETION},
    checks=[STICKY, ALL_COMPLETE],
)
async def test_sessions_of_a_batched_completion_stick(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient.completion: "For batched, we route by request["session_id"] if present", a list
    with one session for each prompt. The batch comes in 16 orders, so that a stack that takes the list for one session sends all of
    them to one of two servers once in 2^15 runs."""
    named = sessions(8)
    for turn in range(2 * len(named)):
        order = named[turn % 8 :] + named[: turn % 8]
        body = {"model": stack.model_name, "prompt": prompts.unique(8), **ANSWER}
        await stack.completion(body | {"session_id": order if turn < len(named) else order[::-1]})


@scenario(
    task=6, promise="sample() with a session runs on the session's server", needs={Capability.SAMPLE}, checks=[STICKY]
)
async def test_sample_with_a_session_sticks(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #934: "session_id provided: sticky routing via hash"."""
    for prompt in prompts.unique(16):
        await stack.sample(prompt, 2, session_id="sampling", max_tokens=4, temperature=1.0)


@scenario(
    task=0,
    promise="sample() without a session balances over the servers",
    needs={Capability.SAMPLE},
    checks=[SESSIONLESS_SPREAD],
)
async def test_sample_without_a_session_is_spread(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #934: "session_id=None: random load-balancing". All calls have one prompt: its content must not decide.

    With 32 calls per engine, a fair choice leaves out one of two engines with probability 2^-63."""
    prompt = prompts.one()
    for _ in range(32 * stack.topology.engines):
        await stack.sample(prompt, 1, max_tokens=2, temperature=1.0)


@scenario(task=0, promise="single requests without a session are spread", checks=[SESSIONLESS_SPREAD])
async def test_single_requests_without_a_session_are_spread(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient: "If None, uses random load-balancing". With 32 requests per engine,
    a fair choice leaves out one of two engines with probability 2^-63."""
    for prompt in prompts.unique(32 * stack.topology.engines):
        await stack.generate([prompt], max_tokens=2, temperature=0.0)


@scenario(task=0, promise="identical requests without a session are spread", checks=[SESSIONLESS_SPREAD])
async def test_identical_requests_without_a_session_are_spread(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient: "If None, uses random load-balancing". A GRPO group asks one prompt
    many times: its content must not decide. Probability of a false alarm with two engines: 2^-63."""
    prompt = prompts.one()
    for _ in range(32 * stack.topology.engines):
        await stack.generate([prompt], max_tokens=2, temperature=0.0)


@scenario(task=0, promise="a batch without sessions is spread", checks=[SESSIONLESS_SPREAD, ALL_COMPLETE])
async def test_a_batch_without_sessions_is_spread(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient.completion: "if not we split evenly across engines", as generate()."""
    await stack.generate(prompts.unique(32 * stack.topology.engines), max_tokens=2, temperature=0.0)


@scenario(task=0, promise="a batch of one prompt, repeated, without sessions is spread", checks=[SESSIONLESS_SPREAD])
async def test_a_batch_of_one_prompt_is_spread(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient: "split evenly across engines". Group sampling repeats each prompt."""
    count = 32 * stack.topology.engines
    await stack.generate([prompts.one()] * count, max_tokens=2, temperature=0.0)


@variants(
    {
        "test_texts_like_a_user_are_spread": {"head": "user: "},
        "test_texts_like_a_session_are_spread": {"head": "session_id: "},
    },
    task=6,
    promise="completions without a session are spread, whatever their texts begin with",
    needs={Capability.COMPLETION},
    checks=[SESSIONLESS_SPREAD, ALL_COMPLETE],
)
async def texts_like_a_field(stack: Stack, prompts: Prompts, *, head: str) -> None:
    """SkyRL API reference, InferenceEngineClient: "If None, uses random load-balancing". A dialogue that is a text begins with its
    speaker. The texts differ after their second word."""
    for text in prompts.texts(32 * stack.topology.engines):
        await stack.completion({"model": stack.model_name, "prompt": f"{head}Please {text}", **SHORT})


@variants(
    {
        "test_requests_with_x_user_id_are_spread": {"name": "x-user-id"},
        "test_requests_with_x_request_id_are_spread": {"name": "x-request-id"},
    },
    task=6,
    promise="a header that is not the session's leaves requests to any server",
    needs={Capability.HTTP_ENDPOINT},
    checks=[SESSIONLESS_SPREAD, ALL_COMPLETE],
)
async def requests_with_a_header(stack: Stack, prompts: Prompts, *, name: str) -> None:
    """SkyRL #899: X-Session-ID is the header of a session. A gateway adds headers of its own, such as one for all requests of a user,
    or of a job."""
    headers = {"content-type": "application/json", name: "job-7"}
    for text in prompts.texts(32 * stack.topology.engines):
        body = json.dumps({"model": stack.model_name, "prompt": text, **SHORT})
        await stack.http(HttpRequest(path="/v1/completions", headers=headers, body=body))


IDS: dict[str, tuple[Any, ...]] = {
    "test_integer_session_sticks": (7, "a session whose id is a positive integer sticks"),
    "test_session_zero_sticks": (0, "the session whose id is 0 sticks"),
    "test_negative_session_sticks": (-1, "a session whose id is a negative integer sticks"),
    "test_large_session_sticks": (2**53 + 1, "a session whose id is a large integer sticks"),
    "test_session_of_digits_sticks": ("0", 'the session whose id is the text "0" sticks'),
    "test_empty_session_sticks": ("", "the session whose id is the empty string sticks"),
    "test_session_beyond_ascii_sticks": ("Gespräch-対話-🙂", "a session whose id is not ASCII sticks", ALL_COMPLETE),
    "test_session_with_spaces_sticks": ("turn one of two", "a session whose id has spaces sticks", ALL_COMPLETE),
    "test_session_of_two_lines_sticks": ("row 7\nof 9", "a session whose id has a line break sticks", ALL_COMPLETE),
    "test_long_session_sticks": ("trajectory/" * 100, "a session with a long id sticks", ALL_COMPLETE),
}
"""Scenario → the session's id, the promise, and checks beside `STICKY`."""


@variants(
    {
        name: {"session": session, "promise": promise, "checks": [STICKY, *more]}
        for name, (session, promise, *more) in IDS.items()
    },
    task=6,
)
async def session_sticks(stack: Stack, prompts: Prompts, *, session: SessionId) -> None:
    """SkyRL API reference: session_id is "Optional[Union[str, int]]": any text, without a limit of length, and any integer,
    such as 2^53 + 1, the first one that JSON readers with floating-point numbers get wrong. Only None means no session.

    24 turns, in a batch and one by one. A stack that drops the id passes with probability 2^-23."""
    await stack.generate(prompts.unique(16), session_ids=[session] * 16, **ANSWER)
    for prompt in prompts.unique(8):
        await stack.generate([prompt], session_ids=[session], **ANSWER)


@scenario(task=6, promise='the session ids 7 and "7" name one session', checks=[SAME_SESSION])
async def test_an_integer_session_is_its_text(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #899, review: a session's engine is "hash_with_sha256(str(session_id)) % len(self.engines)".

    Sixteen ids, as integer and as text: on two engines, two unrelated hashes agree on all with probability 2^-16."""
    for session in range(1, 17):
        pair: list[SessionId] = [session, str(session)]
        await stack.generate(prompts.unique(2), session_ids=pair, **ANSWER)


@scenario(task=6, promise="sessions stick while several callers use them at once", checks=[STICKY, ALL_COMPLETE])
async def test_sessions_stick_under_concurrent_callers(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #899: sticky routing for multi-turn conversations; rollouts of many conversations run side by side."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            sessions: list[SessionId] = [f"conversation-{number}" for number in range(8)]
            tasks.create_task(stack.generate(prompts.unique(8), session_ids=sessions, **ANSWER))
            for session in sessions:
                tasks.create_task(stack.generate(prompts.unique(1), session_ids=[session], **ANSWER))


test_sessions_stick_under_concurrent_callers_under_delays = under_delays(test_sessions_stick_under_concurrent_callers)
