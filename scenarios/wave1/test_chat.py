"""chat_completion(): an OpenAI-style conversation in, one assistant message out."""

from __future__ import annotations

import asyncio
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.errors import names_error, returns_error
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.openai import REQUEST_IDS, envelope, usage
from harness.checks.stopping import ends_as_asked
from harness.checks.text import text_of_tokens
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import EVERYWHERE

CHAT = {Capability.CHAT_COMPLETION}
METHODS = ("chat_completion",)
AFTER = greedy("after", methods=METHODS)


def body(stack: Stack, messages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A greedy request that shows its tokens."""
    common = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    return {"model": stack.model_name, "messages": messages, **common, **changes}


@scenario(
    task=0,
    promise="chat_completion() answers with an assistant message: the greedy continuation of the rendered template",
    needs=CHAT,
    checks=[
        envelope("chat_completion"),
        usage("chat_completion"),
        greedy(methods=METHODS),
        ends_as_asked(causes=["length"], methods=METHODS),
    ],
)
async def test_a_conversation_is_answered(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface.chat_completion; vLLM documentation, OpenAI-Compatible Server."""
    async with asyncio.TaskGroup() as callers:
        for messages in prompts.conversations(6):
            callers.create_task(stack.chat_completion(body(stack, messages)))


@scenario(
    task=0,
    promise="chat_completion() gives several choices",
    needs=CHAT,
    checks=[envelope("chat_completion"), usage("chat_completion"), ALL_COMPLETE],
)
async def test_several_choices(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, chat completions: "n". `conservation` counts them, `echo` compares their seeds."""
    for messages in prompts.conversations(2):
        await stack.chat_completion(body(stack, messages, n=3, temperature=1.0, seed=5, return_token_ids=False))


def conversation(prompts: Prompts, first: str = "system") -> list[dict[str, Any]]:
    """One message of each role, and the user's at the end."""
    texts = prompts.texts(4)
    return [{"role": r, "content": t} for r, t in zip((first, "user", "assistant", "user"), texts, strict=True)]


@variants(
    {
        "test_a_users_text_in_parts": {"role": "user"},
        "test_a_systems_text_in_parts": {"role": "system"},
        "test_an_answers_text_in_parts": {"role": "assistant"},
    },
    task=0,
    promise="the content of a message may be a list of parts, whatever its role",
    needs=CHAT,
    checks=[greedy(methods=METHODS)],
)
async def content_in_parts(stack: Stack, prompts: Prompts, *, role: str) -> None:
    """OpenAI API reference, chat completions: content of system, user and assistant messages, "string or array"; vLLM
    documentation, OpenAI-Compatible Server: --chat-template-content-format, "string": the texts of the parts."""
    for _ in range(2):
        messages = conversation(prompts)
        for message in messages:
            if message["role"] == role:
                message["content"] = [{"type": "text", "text": message["content"]}]
        await stack.chat_completion(body(stack, messages))


@scenario(
    task=0,
    promise="a chat may begin with the developer's message",
    needs=CHAT,
    checks=[greedy(methods=METHODS)],
)
async def test_a_developers_message(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, chat completions: the developer's message. The template has its say on roles."""
    await stack.chat_completion(body(stack, conversation(prompts, "developer")))


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Counts the words of a text.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
]


@scenario(
    task=0,
    promise="a chat may offer tools and leave the choice to the model",
    needs=CHAT,
    checks=[ALL_COMPLETE],
    topologies=EVERYWHERE,
)
async def test_a_chat_that_offers_tools(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Tool Calling: --enable-auto-tool-choice and --tool-call-parser. SkyRL #322 takes them in
    engine_init_kwargs."""
    for messages in prompts.conversations(2):
        await stack.chat_completion(body(stack, messages, tools=TOOLS, tool_choice="auto", return_token_ids=False))


@scenario(
    task=0,
    promise="the id that the header X-Request-Id gives to a chat is that of its answer",
    needs=CHAT,
    checks=[REQUEST_IDS],
)
async def test_a_request_id_in_the_header(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server, Extra HTTP Headers; SkyRL API reference, chat_completion: "Accepts a JSON
    payload: {"json": <request-body>, "headers": <headers-dict>}"."""
    for number, messages in enumerate(prompts.conversations(2)):
        await stack.chat_completion(body(stack, messages), headers={"X-Request-Id": f"rollout-{number}"})


@scenario(
    task=0,
    promise="the content of the answer is its decoded tokens",
    needs=CHAT,
    checks=[text_of_tokens(methods=METHODS)],
)
async def test_content_is_the_decoded_tokens(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: message content; return_token_ids shows its tokens."""
    for messages in prompts.conversations(4):
        await stack.chat_completion(body(stack, messages, allowed_token_ids=stack.vocabulary.plain))


@scenario(
    task=0,
    promise="the end-of-sequence token ends an answer",
    needs=CHAT,
    checks=[ends_as_asked(causes=["eos"], methods=METHODS), usage("chat_completion")],
)
async def test_an_answer_ends(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: finish_reason "stop"."""
    few = {"logit_bias": {str(stack.vocabulary.eos): 100.0}, "ignore_eos": False, "max_tokens": 40}
    for messages in prompts.conversations(4):
        await stack.chat_completion(body(stack, messages, temperature=1.0, seed=9, **few))


@scenario(
    task=0,
    promise="an unknown model and malformed messages are error responses, and the next request works",
    needs=CHAT,
    checks=[
        names_error("unknown_model", "model"),
        returns_error("unknown_model"),
        names_error("malformed", "role", "temperature"),
        returns_error("malformed"),
        AFTER,
    ],
    deadline_s=160,
)
async def test_wrong_conversations(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInterface.chat_completion: "Returns a plain dict, either a
    ChatCompletionResponse or an ErrorResponse." """
    one, other, last = prompts.conversations(3)
    await stack.attempt(stack.chat_completion(body(stack, one, model="no-such-model"), label="unknown_model"))
    await stack.attempt(stack.chat_completion(body(stack, [{"content": "no role"}]), label="malformed"))
    await stack.attempt(stack.chat_completion(body(stack, other, temperature=-1), label="malformed"))
    await stack.chat_completion(body(stack, last), label="after")


@scenario(
    task=0,
    promise="a conversation longer than the context is an error response, and the next request works",
    needs=CHAT,
    checks=[
        names_error("over_long", "context length", "input length", "maximum", "tokens"),
        returns_error("over_long"),
        AFTER,
    ],
    deadline_s=100,
)
async def test_a_conversation_that_is_too_long(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, OpenAI-Compatible Server: a prompt longer than max_model_len is refused."""
    long = [{"role": "user", "content": "seven times nine " * 200}]
    await stack.attempt(stack.chat_completion(body(stack, long), label="over_long"))
    await stack.chat_completion(body(stack, prompts.conversations(1)[0]), label="after")
