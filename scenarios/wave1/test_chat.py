"""chat_completion(): an OpenAI-style conversation in, one assistant message out."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fixtures.prompts import Prompts
from harness.checks.errors import names_error, returns_error
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.openai import CUT, REQUEST_IDS, SCHEMA_ORDER, TOOL_CALLS, envelope, usage
from harness.checks.stopping import ends_as_asked
from harness.checks.text import text_of_tokens
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import EVERYWHERE, UNSORTED, has_to_call, in_a_shape

CHAT = {Capability.CHAT_COMPLETION}
METHODS = ("chat_completion",)
AFTER = greedy("after", methods=METHODS)


def body(stack: Stack, messages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A greedy request that shows its tokens."""
    common = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    return {"model": stack.model_name, "messages": messages, **common, **changes}


@variants(
    {
        "test_a_conversation_is_answered": {},
        "test_a_conversation_where_texts_begin_with_a_token": {
            "topologies": ["llama"],
            "checks": [greedy(methods=METHODS)],
        },
    },
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
async def a_conversation_is_answered(stack: Stack, prompts: Prompts) -> None:
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
        "test_a_tools_text_in_parts": {"role": "tool"},
    },
    task=0,
    promise="the content of a message may be a list of parts, whatever its role",
    needs=CHAT,
    checks=[greedy(methods=METHODS)],
)
async def content_in_parts(stack: Stack, prompts: Prompts, *, role: str) -> None:
    """OpenAI API reference, chat completions: content of system, user, assistant and tool messages, "string or array"; vLLM
    documentation, OpenAI-Compatible Server: --chat-template-content-format, "string": the texts of the parts."""
    for _ in range(2):
        messages = conversation(prompts) if role != "tool" else with_a_call(prompts)
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


PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
COUNT = {"name": "count", "description": "Counts the words of a text.", "parameters": PARAMETERS}
NOW = {"name": "now", "description": "The time of day."}


def tool(function: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**function, **more}}


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
        asked = body(stack, messages, tools=[tool(COUNT)], tool_choice="auto", return_token_ids=False)
        await stack.chat_completion(asked)


@variants(
    {
        "test_a_call_that_is_required": {"choice": "required", "cut": False},
        "test_a_call_of_a_named_tool": {"choice": "named", "cut": False},
        "test_a_required_call_that_is_cut": {"choice": "required", "cut": True},
        "test_a_named_call_that_is_cut": {"choice": "named", "cut": True},
    },
    task=0,
    promise="a model that has to call a tool calls it, and what max_tokens leaves of a call is in the answer",
    needs=CHAT,
    checks=[TOOL_CALLS],
)
async def a_call(stack: Stack, prompts: Prompts, *, choice: Literal["required", "named"], cut: bool) -> None:
    """OpenAI API reference, chat completions, tool_choice; vLLM documentation, Tool Calling: Required Function Calling, Named Function
    Calling."""
    asked = {"ignore_eos": False, "return_token_ids": False, **has_to_call(stack, choice, cut=cut)}
    for messages in prompts.conversations(2):
        await stack.chat_completion(body(stack, messages, **asked), label=CUT if cut else None)


@variants(
    {
        "test_a_tool_as_the_template_shows_it": {"offered": tool(COUNT)},
        "test_a_strict_tool_as_the_template_shows_it": {"offered": tool(COUNT, strict=True)},
    },
    task=0,
    promise="the template shows the tools of a chat as the caller wrote them",
    needs=CHAT,
    checks=[greedy(methods=METHODS)],
)
async def tools_in_the_prompt(stack: Stack, prompts: Prompts, *, offered: dict[str, Any]) -> None:
    """OpenAI API reference, chat completions: tools, "strict"; vLLM documentation, Tool Calling: with tool_choice="none" the prompt
    has the tools as well."""
    for messages in prompts.conversations(2):
        await stack.chat_completion(body(stack, messages, tools=[offered], tool_choice="none"))


@scenario(
    task=0,
    promise="a tool needs no parameters",
    needs=CHAT,
    checks=[ALL_COMPLETE],
)
async def test_a_tool_without_parameters(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, chat completions, tools: "Omitting parameters defines a function with an empty parameter list." """
    for messages in prompts.conversations(2):
        asked = body(stack, messages, tools=[tool(NOW)], tool_choice="none", return_token_ids=False)
        await stack.chat_completion(asked)


def with_a_call(prompts: Prompts) -> list[dict[str, Any]]:
    """The model has called a tool, which has answered."""
    asked, got = prompts.texts(2)
    call = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"text": "a b", "at": 0}'}}
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": got},
    ]


@scenario(
    task=0,
    promise="the template shows the calls of tools and their answers",
    needs=CHAT,
    checks=[greedy(methods=METHODS)],
)
async def test_a_call_of_a_tool_and_its_answer(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, chat completions: assistant messages with tool_calls, tool messages; Transformers documentation, Tool use:
    the arguments of a call are an object."""
    for _ in range(2):
        await stack.chat_completion(body(stack, with_a_call(prompts)))


@scenario(
    task=0,
    promise="the template shows the reasoning of earlier answers",
    needs=CHAT,
    checks=[greedy(methods=METHODS)],
)
async def test_an_answers_reasoning(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Reasoning Outputs, interleaved thinking: the field "reasoning" of an assistant's message."""
    for _ in range(2):
        messages = conversation(prompts)
        messages[2]["reasoning"] = prompts.texts(1)[0]
        await stack.chat_completion(body(stack, messages))


@scenario(
    task=0,
    promise="a part of a message that the model cannot read is a named error",
    needs=CHAT,
    checks=[names_error("unread", "audio", "multimodal", "modal"), returns_error("unread"), AFTER],
    deadline_s=100,
)
async def test_a_part_that_the_model_cannot_read(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, Multimodal Inputs: the models that read audio."""
    text, last = prompts.texts(1)[0], prompts.conversations(1)[0]
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, sound]}]
    await stack.attempt(stack.chat_completion(body(stack, messages), label="unread"))
    await stack.chat_completion(body(stack, last), label="after")


@scenario(
    task=0,
    promise="the fields of a structured answer come in the order of its schema",
    needs=CHAT,
    checks=[SCHEMA_ORDER],
)
async def test_fields_in_the_order_of_the_schema(stack: Stack, prompts: Prompts) -> None:
    """OpenAI documentation, Structured Outputs; vLLM documentation, Structured Outputs: response_format."""
    for messages in prompts.conversations(2):
        asked = body(stack, messages, **in_a_shape(stack, UNSORTED))
        await stack.chat_completion(asked)


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
    promise="a user's message without a content is an error that names it, and no message that nobody wrote",
    needs=CHAT,
    checks=[names_error("no_content", "content"), AFTER],
)
async def test_a_message_without_content(stack: Stack, prompts: Prompts) -> None:
    """OpenAI API reference, chat completions: the content of a user's message is required, a text or parts."""
    empty: list[Any] = [{"role": "user", "content": None}]
    await stack.attempt(stack.chat_completion(body(stack, empty), label="no_content"))
    await stack.chat_completion(body(stack, prompts.conversations(1)[0]), label="after")


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
