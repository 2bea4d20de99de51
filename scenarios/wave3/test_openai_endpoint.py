"""The stack's OpenAI address through the openai client, as a user's own generator would call it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from fixtures.openai_client import openai_client, unless_refused
from fixtures.prompts import Prompts
from harness.checks.errors import answered_or_named, names_error, returns_error
from harness.checks.liveness import ALL_COMPLETE, EVERY_CALL_ENDS
from harness.checks.openai import CUT, REQUEST_IDS, TOOL_CALLS, envelope, usage
from harness.checks.routing import SESSIONLESS_SPREAD, STICKY
from harness.checks.stopping import ends_as_asked
from harness.checks.tokens import greedy
from harness.checks.wire import LOGPROBS, STATUS, STREAMS, answered
from harness.contract.capability import Capability
from harness.contract.messages import GymRequest, HttpRequest
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import has_to_call

ENDPOINT = {Capability.HTTP_ENDPOINT}
STREAMING = {Capability.HTTP_ENDPOINT, Capability.HTTP_STREAMING}
COMPLETION = [STATUS, envelope("completion"), usage("completion"), greedy(methods=("completion",)), ALL_COMPLETE]
CHAT = [
    STATUS,
    envelope("chat_completion"),
    usage("chat_completion"),
    greedy(methods=("chat_completion",)),
    ALL_COMPLETE,
]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
OURS: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
"""Fields of vLLM's bodies that OpenAI's lack; the client sends them as `extra_body`."""
OURS_IN_A_CHAT: dict[str, Any] = {"ignore_eos": True}
"""Without the token ids, which `chat` (wave 1) asks for: here the checks judge what engines made."""
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


async def complete(stack: Stack, client: Any, prompt: Any, **more: Any) -> Any:
    """A /v1/completions, greedy unless `more` says otherwise."""
    asked = {"model": stack.model_name, "prompt": prompt, "extra_body": OURS, **GREEDY, **more}
    return await unless_refused(client.completions.create(**asked))


async def chat(stack: Stack, client: Any, messages: list[dict[str, str]], **more: Any) -> Any:
    """A /v1/chat/completions, greedy unless `more` says otherwise."""
    asked = {"model": stack.model_name, "messages": messages, "extra_body": OURS_IN_A_CHAT, **GREEDY, **more}
    return await unless_refused(client.chat.completions.create(**asked))


async def still_answers(stack: Stack, prompts: Prompts, *, each: int = 2) -> None:
    """`each` good requests per server, labelled "after"."""
    async with openai_client(stack, label="after") as client:
        for prompt in prompts.unique(each * stack.topology.engines):
            await complete(stack, client, prompt)


@scenario(
    task=7, promise="/v1/completions continues token ids, alone and in a batch", needs=ENDPOINT, checks=COMPLETION
)
async def test_completions_of_tokens(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions: a prompt is a text, texts, token ids, or lists of these; SkyRL #1014, task 7."""
    async with openai_client(stack) as client:
        await complete(stack, client, prompts.one())
        await complete(stack, client, prompts.ragged(7))


@scenario(task=7, promise="/v1/completions continues texts, alone and in a batch", needs=ENDPOINT, checks=COMPLETION)
async def test_completions_of_text(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions; SkyRL #1014, task 7."""
    async with openai_client(stack) as client:
        await complete(stack, client, prompts.texts(1)[0])
        await complete(stack, client, prompts.texts(5))


@scenario(
    task=7,
    promise="the OpenAI address is at host and port of the configuration",
    needs={*ENDPOINT, Capability.CONFIGURED_ADDRESS},
    checks=[ALL_COMPLETE, greedy(methods=("completion",))],
)
async def test_the_configured_address(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, generator.inference_engine: http_endpoint_host and http_endpoint_port."""
    async with openai_client(stack, configured=True) as client:
        await stack.attempt(complete(stack, client, prompts.one()))


@scenario(
    task=7, promise="/v1/chat/completions answers conversations, many callers at once", needs=ENDPOINT, checks=CHAT
)
async def test_chat_completions(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, chat completions; SkyRL #1014, task 7."""
    async with openai_client(stack) as client, asyncio.TaskGroup() as callers:
        for messages in prompts.conversations(16):
            callers.create_task(chat(stack, client, messages))


@scenario(
    task=7,
    promise="/v1/completions gives several choices of each prompt",
    needs=ENDPOINT | {Capability.HTTP_CHOICES},
    checks=[STATUS, envelope("completion"), usage("completion"), ALL_COMPLETE],
)
async def test_several_choices(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions: "n"."""
    async with openai_client(stack) as client:
        await complete(stack, client, prompts.unique(3), n=3, temperature=1.0)


@scenario(
    task=7,
    promise="/v1/chat/completions gives several choices",
    needs=ENDPOINT,
    checks=[STATUS, envelope("chat_completion"), usage("chat_completion"), ALL_COMPLETE],
)
async def test_several_choices_of_a_chat(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, chat completions: "n"."""
    async with openai_client(stack) as client:
        await chat(stack, client, prompts.conversations(1)[0], n=3, temperature=1.0)


@variants(
    {
        "test_a_required_call_as_a_stream": {"choice": "required", "cut": False},
        "test_a_named_call_as_a_stream": {"choice": "named", "cut": False},
        "test_a_required_call_that_is_cut_as_a_stream": {"choice": "required", "cut": True},
        "test_a_named_call_that_is_cut_as_a_stream": {"choice": "named", "cut": True},
    },
    task=7,
    promise="the call of a tool comes as a stream as it comes whole, and so does what max_tokens leaves of it",
    needs=STREAMING,
    checks=[STATUS, STREAMS, TOOL_CALLS],
)
async def a_streamed_call(stack: Stack, prompts: Prompts, *, choice: Literal["required", "named"], cut: bool) -> None:
    """OpenAI API reference, chat completions: tool_choice, stream; vLLM documentation, Tool Calling."""
    asked = {"extra_body": {}, "stream": True, **has_to_call(stack, choice, cut=cut)}
    async with openai_client(stack, label=CUT if cut else None) as client:
        for messages in prompts.conversations(2):
            await chat(stack, client, messages, **asked)


@scenario(
    task=7,
    promise="the id that the header X-Request-Id gives to a chat is that of its answer",
    needs=ENDPOINT,
    checks=[STATUS, REQUEST_IDS],
)
async def test_a_request_id_in_the_header(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server, Extra HTTP Headers: "x-request-id"."""
    async with openai_client(stack) as client:
        for number, messages in enumerate(prompts.conversations(2)):
            await chat(stack, client, messages, extra_headers={"X-Request-Id": f"rollout-{number}"})


@scenario(
    task=7,
    promise="bodies show the model's log-probabilities, one a token",
    needs=ENDPOINT,
    checks=[STATUS, LOGPROBS, ALL_COMPLETE],
)
async def test_logprobs(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions: "logprobs"; chat completions: "logprobs" and "top_logprobs"."""
    async with openai_client(stack) as client:
        await complete(stack, client, prompts.unique(4), logprobs=1)
        for messages in prompts.conversations(2):
            await chat(stack, client, messages, logprobs=True, top_logprobs=1)


@scenario(
    task=7,
    promise="bodies show the log-probabilities of several tokens at each place",
    needs=ENDPOINT,
    checks=[STATUS, LOGPROBS, ALL_COMPLETE],
)
async def test_several_logprobs(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions: "logprobs", at most 5; chat completions: "top_logprobs"."""
    async with openai_client(stack) as client:
        await complete(stack, client, prompts.unique(2), logprobs=5)
        for messages in prompts.conversations(2):
            await chat(stack, client, messages, logprobs=True, top_logprobs=5)


@scenario(
    task=7,
    promise="a stop token ends a choice",
    needs=ENDPOINT,
    checks=[STATUS, ends_as_asked(causes=["stop token", "length"], methods=("completion",))],
)
async def test_choices_stop(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server, extra parameters: stop_token_ids. Without a seed, which all would share, some
    choices meet a stop token and some do not."""
    plain = stack.vocabulary.plain
    ends = {"allowed_token_ids": plain[:48], "stop_token_ids": plain[2:4]}
    drawn: dict[str, Any] = {"temperature": 2.0, "extra_body": {**OURS, **ends}}
    async with openai_client(stack) as client:
        await complete(stack, client, prompts.unique(16), **drawn)


@scenario(
    task=7,
    promise="a stream of /v1/completions is the same answer in pieces",
    needs=STREAMING,
    checks=[*COMPLETION, STREAMS],
)
async def test_streamed_completions(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server; OpenAI API reference, completions: "stream" and "stream_options"."""
    async with openai_client(stack) as client:
        for prompt in (*prompts.unique(3), prompts.texts(1)[0]):
            await complete(stack, client, prompt, **STREAM)


@scenario(
    task=7,
    promise="a stream of /v1/chat/completions is the same answer in pieces",
    needs=STREAMING,
    checks=[*CHAT, STREAMS],
)
async def test_streamed_chats(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server; OpenAI API reference, chat completions: "stream"."""
    async with openai_client(stack) as client:
        for messages in prompts.conversations(4):
            await chat(stack, client, messages, **STREAM)


@scenario(
    task=7,
    promise="a request for a stream that is refused is answered by an error as any other, and by no stream",
    needs=STREAMING,
    checks=[names_error("refused", "temperature", "top_p"), STATUS, answered("after")],
)
async def test_a_stream_that_is_refused(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, errors; RFC 9110, 8.3: Content-Type names the form of the body."""
    async with openai_client(stack, label="refused") as client:
        for wrong in ({"temperature": -1.0}, {"top_p": 2.0}):
            await complete(stack, client, prompts.one(), **{**STREAM, **wrong})
            await chat(stack, client, prompts.conversations(1)[0], **{**STREAM, **wrong})
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="requests without a session are spread over the servers",
    needs=ENDPOINT,
    checks=[SESSIONLESS_SPREAD],
)
async def test_requests_are_spread(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, /v1/completions of the HTTP endpoint: "If unprovided, we will route to a random engine"."""
    async with openai_client(stack) as client, asyncio.TaskGroup() as callers:
        for prompt in prompts.unique(40):
            callers.create_task(complete(stack, client, prompt, max_tokens=2))


async def converse(stack: Stack, client: Any, first: list[int], later: list[list[int]], **session: Any) -> None:
    """Turns through /v1/completions: each prompt is the turn before, its answer, and new ids."""
    context = first
    for new in later:
        answer = await complete(stack, client, context, max_tokens=8, **session)
        if answer is None or not answer.choices:
            return  # the recording holds the failure for the checks
        context = context + answer.choices[0].token_ids + new


async def many(stack: Stack, prompts: Prompts, *, body: bool, header: bool) -> None:
    """Conversations side by side, each with a session in the body, the header or both."""
    async with openai_client(stack) as client, asyncio.TaskGroup() as callers:
        for number in range(12):
            name = f"conversation-{number}"
            session = {
                "extra_body": {**OURS, **({"session_id": name} if body else {})},
                "extra_headers": {"X-Session-ID": name} if header else {},
            }
            first, *later = prompts.ragged(4, 3, 30)  # of other lengths each, since a router may go by the length
            callers.create_task(converse(stack, client, first, later, **session))


SESSIONS = [STATUS, STICKY, greedy(methods=("completion",)), ALL_COMPLETE]


@scenario(
    task=7, promise="a session that is named in header and body stays on its server", needs=ENDPOINT, checks=SESSIONS
)
async def test_sessions_stick(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, tasks 6 and 7; SkyRL, /v1/completions of the HTTP endpoint: session_id."""
    await many(stack, prompts, body=True, header=True)


@scenario(task=7, promise="a session that the header names stays on its server", needs=ENDPOINT, checks=SESSIONS)
async def test_sessions_of_the_header_stick(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 6: X-Session-ID."""
    await many(stack, prompts, body=False, header=True)


@scenario(task=7, promise="a session that the body names stays on its server", needs=ENDPOINT, checks=SESSIONS)
async def test_sessions_of_the_body_stick(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, /v1/completions of the HTTP endpoint: "Make sure you add in session_id to ensure load balancing and sticky
    routing"."""
    await many(stack, prompts, body=True, header=False)


@scenario(
    task=7,
    promise="an unknown model is an error that the client can name",
    needs=ENDPOINT,
    checks=[names_error("unknown_model", "model"), returns_error("unknown_model"), STATUS, answered("after")],
)
async def test_an_unknown_model(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: NotFoundError; SkyRL's endpoint: 400, "Model name mismatch"."""
    async with openai_client(stack, label="unknown_model") as client:
        await complete(stack, client, prompts.one(), model="nobody/knows")
        await chat(stack, client, prompts.conversations(1)[0], model="nobody/knows")
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="a body that is no JSON is an error that the client can name",
    needs=ENDPOINT,
    checks=[names_error("malformed", "json"), STATUS, answered("after")],
)
async def test_a_malformed_body(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: BadRequestError; SkyRL's endpoint: 400, "Invalid JSON error"."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        request = HttpRequest(path=path, headers={"content-type": "application/json"}, body='{"model": "half')
        await stack.http(request, label="malformed")
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="a body without messages or prompt is an error that the client can name",
    needs=ENDPOINT,
    checks=[names_error("incomplete", "messages", "prompt", "required"), STATUS, answered("after")],
)
async def test_an_incomplete_body(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions and chat completions: "prompt" and "messages" are required."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = json.dumps({"model": stack.model_name})
        await stack.http(
            HttpRequest(path=path, headers={"content-type": "application/json"}, body=body), label="incomplete"
        )
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="a field of the wrong type is an error that the client can name",
    needs=ENDPOINT,
    checks=[names_error("wrong_type", "max_tokens"), STATUS, answered("after")],
)
async def test_a_field_of_a_wrong_type(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, completions and chat completions: max_tokens is an integer."""
    async with openai_client(stack, label="wrong_type") as client:
        await complete(stack, client, prompts.one(), max_tokens="many")
        await chat(stack, client, prompts.conversations(1)[0], max_tokens="many")
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="what an address does not offer is refused by an error that says so, and never answered by half",
    needs=ENDPOINT,
    checks=[
        answered_or_named("stream", "stream"),
        answered_or_named("choices", "n is", "n must", "n > 1", "`n`", "'n'"),
        answered_or_named("no_model", "model"),
        answered_or_named("sessions", "session"),
        STATUS,
        answered("after"),
    ],
)
async def test_what_an_address_may_refuse(stack: Stack, prompts: Prompts) -> None:
    """SkyRL's endpoint: "Streaming is not supported", "n is not supported", "The field `model` is required", "request.session_id
    must have the same length as request.prompt"; vLLM documentation, OpenAI-Compatible Server, which offers the first three."""
    messages = prompts.conversations(1)[0]
    async with openai_client(stack, label="stream") as client:
        await complete(stack, client, prompts.one(), **STREAM)
        await chat(stack, client, messages, **STREAM)
    async with openai_client(stack, label="choices") as client:
        await complete(stack, client, prompts.one(), n=2, temperature=1.0)
    async with openai_client(stack, label="sessions") as client:
        await complete(stack, client, prompts.unique(3), extra_body={**OURS, "session_id": ["a", "b"]})
        await complete(stack, client, prompts.one(), extra_body={**OURS, "session_id": ["a", "b"]})
        await chat(stack, client, messages, extra_body={**OURS_IN_A_CHAT, "session_id": ["a", "b"]})
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": prompts.one()},
        "chat/completions": {"messages": messages},
    }
    for route, body in bodies.items():
        text = json.dumps({**body, **GREEDY})
        asked = HttpRequest(path=f"/v1/{route}", headers={"content-type": "application/json"}, body=text)
        await stack.http(asked, label="no_model")
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="a conversation without a message is an error that the client can name",
    needs=ENDPOINT,
    checks=[names_error("empty", "messages", "empty"), STATUS, answered("after")],
)
async def test_an_empty_conversation(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, /v1/chat/completions of the HTTP endpoint: "The field `messages` … cannot be an empty list"."""
    async with openai_client(stack, label="empty") as client:
        await chat(stack, client, [])
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="a prompt that is too long is an error that the client can name",
    needs=ENDPOINT,
    checks=[
        names_error("over_long", "length", "long", "context", "tokens"),
        returns_error("over_long"),
        STATUS,
        answered("after"),
    ],
    deadline_s=100,
)
async def test_an_over_long_prompt(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Engine Arguments: --max-model-len; OpenAI API reference: context_length_exceeded."""
    long = prompts.over_long()
    plain = stack.vocabulary.plain
    spelled = stack.vocabulary.text(plain[token % len(plain)] for token in long)
    async with openai_client(stack, label="over_long") as client:
        await complete(stack, client, long)
        await chat(stack, client, [{"role": "user", "content": spelled}])
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="a route that does not exist is an error that the client can name",
    needs=ENDPOINT,
    checks=[names_error("unknown_route", "not found"), answered("after")],
)
async def test_an_unknown_route(stack: Stack, prompts: Prompts) -> None:
    """RFC 9110, 404 Not Found."""
    await stack.http(
        HttpRequest(path="/v1/nothing", headers={"content-type": "application/json"}, body="{}"), label="unknown_route"
    )
    await still_answers(stack, prompts)


@scenario(
    task=7,
    promise="when a server dies, each request and each batch of trajectories ends, well or by a named error; the next are answered",
    needs=ENDPOINT | {Capability.GYM_GENERATOR, Capability.KILL_SERVER},
    checks=[EVERY_CALL_ENDS, STATUS, answered("after")],
    deadline_s=120.0,
)
async def test_a_server_dies(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 7: "Server errors handled". Users of the address and SkyRL's generator side by side."""

    async def trajectories(rows: int) -> None:
        asked = {**GREEDY, "max_tokens": 60, "ignore_eos": True}
        conversations = prompts.conversations(rows)
        request = GymRequest(prompts=conversations, env_extras=[{}] * rows, max_turns=3, sampling_params=asked)
        await stack.attempt(stack.gym_generate(request))

    await trajectories(1)  # a generator's first imports take longer than the requests below
    batch = prompts.unique(16)
    async with openai_client(stack) as client, asyncio.TaskGroup() as callers:
        for _ in range(4):
            callers.create_task(trajectories(3))
        for prompt in batch:
            callers.create_task(complete(stack, client, prompt, max_tokens=200))
        await stack.until_generating(requests=len(batch) + 8, tokens=4 * len(batch))
        await stack.kill_server(stack.servers[0])
    await trajectories(4)
    await still_answers(stack, prompts, each=8)
