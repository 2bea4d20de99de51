"""tokenize() and detokenize(): the model's own tokenizer, and its round trip."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.client_lives import CLIENT_LIVES
from harness.checks.text import text_of_tokens
from harness.checks.tokenization import DECODED, ENCODED, RENDERED, ROUND_TRIP
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import special_often

HARD = (
    "",
    " ",
    "  two  spaces and a line end\n",
    "tab\tand\r\nreturn",
    "naïve café, Ελληνικά, 日本語, 🎉👩‍🚀",
    "<|im_start|>user\nwith special tokens<|im_end|>",
    "<|im_start| not quite one",
    "\x00\x07 control characters",
)


@scenario(
    task=0,
    promise="texts survive tokenize() and detokenize(), many at a time",
    needs={Capability.TOKENIZE},
    checks=[ENCODED, DECODED, ROUND_TRIP],
)
async def test_texts_go_there_and_back(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, "Data plane": tokenize(), detokenize(). Unicode, white space, special tokens, an empty text."""
    texts = [*prompts.texts(24), *HARD]
    await stack.detokenize(await stack.tokenize(texts))


@variants(
    {
        "test_special_tokens_are_added_or_not": {"by_servers": False, "needs": {Capability.TOKENIZE}},
        "test_special_tokens_that_servers_add": {
            "by_servers": True,
            "needs": {Capability.TOKENIZE, Capability.CLIENT_LIVES},
        },
    },
    task=0,
    promise="add_special_tokens is heeded",
    checks=[ENCODED],
    topologies=["llama"],
)
async def special_tokens_are_added(stack: Stack, prompts: Prompts, *, by_servers: bool) -> None:
    """SkyRL #904: tokenize(texts, add_special_tokens). Llama's tokenizer begins a text with a token of its own. A client without a
    tokenizer asks its servers."""
    if by_servers:
        await stack.client_life("made again", without_tokenizer=True)
    texts = [*prompts.texts(4), *HARD]
    for add in (True, False):
        await stack.tokenize(texts, add_special_tokens=add)
    if by_servers:
        await stack.client_life("made again")


@scenario(
    task=0,
    promise="render_chat() gives the prompt that the model's chat template makes of a conversation",
    needs={Capability.RENDER_CHAT},
    checks=[RENDERED],
)
async def test_conversations_are_rendered(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, RemoteInferenceClient.render_chat_completion: "apply chat template + tokenize". SkyRL's vision generator asks for it
    before each turn. One message, one of each role, and texts that are hard to read."""
    roles = ("system", "user", "assistant", "user")
    mixed = [{"role": role, "content": text} for role, text in zip(roles, prompts.texts(4), strict=True)]
    hard = [[{"role": "user", "content": text}] for text in HARD]
    for conversation in (*prompts.conversations(4), mixed, *hard):
        await stack.render_chat(conversation)


@scenario(task=0, promise="generated and special tokens are read back", needs={Capability.TOKENIZE}, checks=[DECODED])
async def test_tokens_are_read_back(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904: detokenize(token_ids). Special tokens, bytes that are no character, ids without a text."""
    special, two = stack.vocabulary.some_special(3), stack.vocabulary.plain[37:39]
    await stack.detokenize([*prompts.unique(8, 16), special, [special[1], *two, special[2]], []])


@scenario(
    task=0,
    promise="a client that is given no tokenizer of its own reads and writes the same texts",
    needs={Capability.CLIENT_LIVES, Capability.TOKENIZE},
    checks=[CLIENT_LIVES, ENCODED, DECODED, text_of_tokens(special=True)],
)
async def test_a_client_without_a_tokenizer(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, RemoteInferenceClient.tokenizer: "Optional HF tokenizer for local tokenize/detokenize (avoids HTTP round-trips)"; the
    example of its documentation gives none. Its servers are asked for each text."""
    await stack.client_life("made again", without_tokenizer=True)
    await stack.tokenize([*prompts.texts(8), *HARD])
    await stack.detokenize([*prompts.unique(8), stack.vocabulary.some_special(3)])
    await stack.generate(prompts.unique(8), skip_special_tokens=False, **special_often(stack))
    await stack.client_life("made again")
    await stack.detokenize(prompts.unique(2))
