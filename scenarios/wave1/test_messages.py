"""generate() from chat messages is generate() from their rendered tokens."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.logprobs import of_reference
from harness.checks.ordering import in_order
from harness.checks.tokens import greedy, same_output
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "logprobs": 0, "ignore_eos": True}


@variants(
    {
        "test_messages_are_rendered_by_the_models_template": {},
        "test_messages_are_rendered_where_texts_begin_with_a_token": {"topologies": ["llama"]},
    },
    task=0,
    promise="messages are rendered with the model's chat template and a prompt to answer",
    needs={Capability.GENERATE_MESSAGES},
    checks=[greedy(), of_reference(), in_order()],
)
async def messages_are_rendered(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineClient.generate: `prompts` go through apply_chat_template with
    add_generation_prompt."""
    await stack.generate_messages(prompts.conversations(10), **GREEDY)


@scenario(
    task=0,
    promise="messages and their rendered tokens give the same output",
    needs={Capability.GENERATE_MESSAGES, Capability.TOKENIZE},
    checks=[same_output("messages", "tokens")],
)
async def test_messages_equal_their_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, InferenceEngineInput: "Either prompts or prompt_token_ids must be provided"."""
    conversations = prompts.conversations(6)
    token_ids = await stack.tokenize([stack.vocabulary.rendered(c) for c in conversations], add_special_tokens=False)
    await stack.generate_messages(conversations, label="messages", **GREEDY)
    await stack.generate(token_ids, label="tokens", **GREEDY)
