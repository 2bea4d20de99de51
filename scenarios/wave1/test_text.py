"""The text of an answer is the decoding of its tokens."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.text import text_of_tokens
from harness.checks.tokenization import DECODED
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.requests import special_often


@scenario(task=0, promise="text is the decoded tokens", checks=[text_of_tokens()])
async def test_text_is_the_decoded_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineOutput: "it is guaranteed that
    tokenizer.decode(response_token_ids, skip_special_tokens=True) == responses"."""
    await stack.generate(
        prompts.unique(16), temperature=1.0, seed=8, max_tokens=24, allowed_token_ids=stack.vocabulary.plain
    )


@scenario(task=0, promise="text leaves special tokens out by default", checks=[text_of_tokens(special=True)])
async def test_special_tokens_are_skipped(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineOutput: decode(…, skip_special_tokens=True), which is vLLM's default as well."""
    await stack.generate(prompts.unique(12), **special_often(stack))


@scenario(task=0, promise="text keeps special tokens when asked to", checks=[text_of_tokens(special=True)])
async def test_special_tokens_are_kept(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.skip_special_tokens: "Whether to skip special tokens in the output." """
    await stack.generate(prompts.unique(12), skip_special_tokens=False, **special_often(stack))


@scenario(task=0, promise="text holds the ordinary stop token that ended it", checks=[text_of_tokens()])
async def test_text_holds_its_stop_token(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, SamplingParams.stop_token_ids: "The returned output will contain the stop tokens unless the
    stop tokens are special tokens." """
    await stack.generate(
        prompts.unique(12),
        temperature=1.0,
        seed=8,
        max_tokens=24,
        allowed_token_ids=stack.vocabulary.plain[:12],
        stop_token_ids=stack.vocabulary.plain[:4],
    )


@scenario(task=0, promise="text is the decoded tokens where characters are cut in two", checks=[text_of_tokens()])
async def test_text_of_bytes_that_are_no_characters(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineOutput: the guarantee has no exception for bytes that form no whole character."""
    some = [*stack.vocabulary.parts, *stack.vocabulary.plain]
    await stack.generate(prompts.unique(12), temperature=1.0, seed=8, max_tokens=16, allowed_token_ids=some)


@scenario(
    task=0, promise="text is the decoded response alone, whatever the prompt ends with", checks=[text_of_tokens()]
)
async def test_a_prompt_that_ends_within_a_character(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineOutput: responses are decoded from response_ids; the prompt is no part of them. A prompt
    of token ids may end within a character, such as a cut-off response that becomes the next prompt."""
    await stack.generate(
        prompts.broken_off(8),
        temperature=1.0,
        seed=8,
        max_tokens=8,
        ignore_eos=True,
        allowed_token_ids=stack.vocabulary.plain,
    )


@scenario(
    task=0,
    promise="text is the decoded response alone, whichever spaces the tokenizer adds or leaves out",
    checks=[text_of_tokens(spaced=True)],
    topologies=["llama"],
)
async def test_text_of_a_tokenizer_that_marks_spaces(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineOutput: the guarantee. Llama 2's tokenizer has spaces in its tokens and leaves out the one that a text
    begins with. The checkpoint also asks for a clean-up (Transformers documentation, clean_up_tokenization_spaces): Transformers 4
    does it for such a tokenizer, Transformers 5 does not."""
    some = [stack.vocabulary.one_space, *stack.vocabulary.spelled("ab.,?!")]
    await stack.generate(prompts.unique(24), temperature=1.0, seed=8, max_tokens=16, allowed_token_ids=some)


@scenario(task=0, promise="detokenize() reads response tokens back", needs={Capability.TOKENIZE}, checks=[DECODED])
async def test_detokenized_responses(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, "Data plane": detokenize(), for generated tokens, including special ones."""
    answer = await stack.generate(prompts.unique(8), **special_often(stack))
    await stack.detokenize(answer.response_ids)
