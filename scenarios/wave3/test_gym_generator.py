"""SkyRL's gym generator over the stack: trajectories of policy and environment, as a trainer gets them."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.errors import names_error
from harness.checks.gym import FAILED, INPUT_LENGTH, LOGPROBS, STEPS, TRAJECTORIES
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.routing import SESSIONLESS_SPREAD, STICKY
from harness.contract import gym_rule
from harness.contract.capability import Capability
from harness.contract.errors import ModelLacks
from harness.contract.messages import GymRequest, TrajectoryId
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, variants
from scenarios.requests import meets_a_stop_string, until_idle, until_settled

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
FULL: dict[str, Any] = {**GREEDY, "ignore_eos": True}
NEEDS = {Capability.GYM_GENERATOR}
CHECKS = (*TRAJECTORIES, ALL_COMPLETE)
BY_STEP = (*CHECKS, STEPS, LOGPROBS)
Messages = list[dict[str, str]]


async def roll_out(stack: Stack, conversations: list[Messages], extras: list[dict[str, Any]], **asked: Any) -> None:
    """A request of one trajectory per conversation, each with what its environment gets (`extras`)."""
    await stack.gym_generate(
        GymRequest(prompts=conversations, env_extras=extras, **{"sampling_params": GREEDY, **asked})
    )


async def roll_out_turns(stack: Stack, conversations: list[Messages], **asked: Any) -> None:
    """A request of trajectories that have one, two and three turns, in turn."""
    count = len(conversations)
    extras = [{"turns": 1 + row % 3} for row in range(count)]
    await roll_out(stack, conversations, extras, trajectory_ids=trajectories(count), max_turns=3, **asked)


async def roll_out_until_too_long(stack: Stack, prompts: Prompts, **asked: Any) -> None:
    """A request of eight trajectories: most go on until a prompt would be longer than max_input_length."""
    await roll_out(
        stack,
        [messages[-1:] for messages in prompts.conversations(8)],
        [{"turns": 1 if row % 4 == 0 else 9} for row in range(8)],
        trajectory_ids=trajectories(8),
        max_turns=9,
        max_input_length=160,
        **asked,
    )


def without_spaces(stack: Stack) -> dict[str, Any]:
    """Parameters of answers that are made of `Vocabulary.plain` alone."""
    return {"allowed_token_ids": [*stack.vocabulary.plain, stack.vocabulary.eos]}


def trajectories(prompts: int, samples: int = 1) -> list[TrajectoryId]:
    """Ids of `samples` trajectories for each of `prompts` prompts."""
    return [
        TrajectoryId(instance_id=f"instance-{prompt}", repetition_id=sample)
        for prompt in range(prompts)
        for sample in range(samples)
    ]


def needs_a_template(stack: Stack) -> None:
    """`gym_rule.CHAT_TEMPLATE` is for models that end messages by <|im_end|>. Raises ModelLacks for others."""
    if stack.vocabulary.named.get("eos_token") != "<|im_end|>":
        raise ModelLacks("messages that end by <|im_end|>")


@scenario(task=7, promise="one turn a prompt, all prompts in one request", needs=NEEDS, checks=[*CHECKS, LOGPROBS])
async def test_one_turn_in_a_batch(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, GeneratorConfig.batched; SkyRL, GeneratorInterface.generate: "in the same order as the input batch"."""
    await roll_out(stack, prompts.conversations(12), [{}] * 12, batched=True, sampling_params={**GREEDY, "logprobs": 1})


@scenario(
    task=7,
    promise="a large batch of one turn each is spread over the servers",
    needs=NEEDS,
    checks=[*CHECKS, SESSIONLESS_SPREAD],
)
async def test_a_large_batch_is_spread(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, generate_batched: no session ids; SkyRL API reference, InferenceEngineClient: "random load-balancing"."""
    batch = prompts.conversations(32)
    await roll_out(stack, batch, [{}] * len(batch), batched=True, sampling_params={**GREEDY, "max_tokens": 4})


@scenario(task=7, promise="one turn a prompt, each trajectory by itself", needs=NEEDS, checks=CHECKS)
async def test_one_turn_each(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, SkyRLGymGenerator.agent_loop with max_turns=1."""
    await roll_out(stack, prompts.conversations(12), [{}] * 12, trajectory_ids=trajectories(12))


@variants(
    {
        "test_a_batch_with_its_own_parameters": {
            "promise": "a batch is generated with the parameters of its call, not with those of the configuration",
            "batched": True,
        },
        "test_trajectories_with_their_own_parameters": {
            "promise": "trajectories are generated with the parameters of their call, not with those of the configuration",
            "batched": False,
        },
    },
    task=7,
    needs=NEEDS,
    checks=[*CHECKS, LOGPROBS],
)
async def parameters_of_their_own(stack: Stack, prompts: Prompts, *, batched: bool) -> None:
    """SkyRL, GeneratorInput.sampling_params; GeneratorConfig.eval_sampling_params: an evaluation's answers are longer than the
    configuration's, and have log-probabilities that it does not ask for."""
    await roll_out(
        stack,
        prompts.conversations(12),
        [{}] * 12,
        batched=batched,
        configured={"max_tokens": 16},
        sampling_params={**FULL, "max_tokens": 32, "logprobs": 1},
    )


@variants(
    {
        "test_a_batch_without_what_was_cut_short": {
            "batched": True,
            "option": "overlong_filtering",
            "promise": "with overlong filtering the loss leaves out answers that were cut short, and no others",
        },
        "test_trajectories_without_what_was_cut_short": {
            "batched": False,
            "option": "overlong_filtering",
            "promise": "with overlong filtering the loss leaves out answers that were cut short, and no others",
        },
        "test_a_batch_in_which_what_was_cut_short_earns_nothing": {
            "batched": True,
            "option": "zero_reward_on_non_stop",
            "promise": "with zero_reward_on_non_stop answers that were cut short have no reward, and all others theirs",
        },
        "test_trajectories_that_were_cut_short_earn_nothing": {
            "batched": False,
            "option": "zero_reward_on_non_stop",
            "promise": "with zero_reward_on_non_stop answers that were cut short have no reward, and all others theirs",
        },
    },
    task=7,
    needs=NEEDS,
    checks=CHECKS,
)
async def cut_short(stack: Stack, prompts: Prompts, *, batched: bool, option: str) -> None:
    """SkyRL, GeneratorConfig.apply_overlong_filtering and zero_reward_on_non_stop; DAPO, Overlong Filtering. Answers of one token
    are cut short; of long ones some end by a stop token, which is no end of sequence. Stop tokens have no letters: whether a text
    shows its stop token is judged elsewhere."""
    letters, stops = stack.vocabulary.spelled("abcdefghijkl"), stack.vocabulary.spelled("012")
    sampled = {"temperature": 2.0, "seed": 5, "allowed_token_ids": [*letters, *stops], "stop_token_ids": stops}
    for most in (1, 32):
        await roll_out(
            stack,
            prompts.conversations(8),
            [{}] * 8,
            batched=batched,
            sampling_params={**sampled, "max_tokens": most, "ignore_eos": True},
            **{option: True},
        )


@variants(
    {
        "test_several_turns": {"plain": False},
        "test_several_turns_where_texts_begin_with_a_token": {"plain": True, "topologies": ["llama"]},
    },
    task=7,
    promise="trajectories of several turns end when the environment says so, or at max_turns",
    needs=NEEDS,
    checks=[*CHECKS, LOGPROBS, STICKY],
)
async def several_turns(stack: Stack, prompts: Prompts, *, plain: bool) -> None:
    """SkyRL documentation, SkyRLGymGenerator: multi-turn tokenization; BaseTextEnv.step: done. Trajectories of 1 to 4 turns;
    the environment would end some of them only after max_turns. `plain`: answers without spaces, whose text is the same
    everywhere."""
    await roll_out(
        stack,
        prompts.conversations(10),
        [{"turns": 1 + row % 5} for row in range(10)],
        trajectory_ids=trajectories(10),
        max_turns=4,
        sampling_params={**GREEDY, "logprobs": 1, **(without_spaces(stack) if plain else {})},
    )


@scenario(
    task=7,
    promise="a trajectory ends when the environment meets what it looks for in an answer",
    needs=NEEDS,
    checks=[*CHECKS, STICKY],
)
async def test_the_environment_ends_a_trajectory(stack: Stack, prompts: Prompts) -> None:
    """SkyRL documentation, SkyRLGymGenerator: BaseTextEnv.step: done, as a function of the answer."""
    await roll_out(
        stack,
        prompts.conversations(10),
        [{"until": letters} for letters in ("qjz", "ab", "xyz", "e", "Z") * 2],
        trajectory_ids=trajectories(10),
        max_turns=5,
        sampling_params={**FULL, "max_tokens": 6},
    )


@scenario(
    task=7,
    promise="no turn begins beyond max_input_length, and the trajectory ended by length",
    needs=NEEDS,
    checks=[*CHECKS, LOGPROBS],
)
async def test_trajectories_end_by_length(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, GeneratorConfig.max_input_length: "Max generator input length for multi-turn conversations"."""
    await roll_out_until_too_long(
        stack,
        prompts,
        sampling_params={**FULL, "max_tokens": 16, "logprobs": 1},
    )


@variants(
    {
        "test_steps_end_by_length": {"step_wise": True, "checks": [*BY_STEP, INPUT_LENGTH]},
        "test_trajectories_of_a_template_end_by_length": {"step_wise": False, "checks": [*CHECKS, INPUT_LENGTH]},
    },
    task=7,
    promise="no turn begins beyond max_input_length, also where each turn's prompt is made anew of the texts",
    needs=NEEDS,
)
async def made_anew_until_too_long(stack: Stack, prompts: Prompts, *, step_wise: bool) -> None:
    """SkyRL, GeneratorConfig.max_input_length: "the maximum input length used for the conversation at each turn"; SkyRL #1539."""
    if not step_wise:
        needs_a_template(stack)
    own = {"step_wise": True} if step_wise else {"chat_template": gym_rule.CHAT_TEMPLATE}
    await roll_out_until_too_long(
        stack,
        prompts,
        sampling_params={
            "max_tokens": 16,
            "temperature": 2.0,
            "seed": 11,
            "ignore_eos": True,
            "allowed_token_ids": stack.vocabulary.spelled("abcdefgh"),
            **({"logprobs": 1} if step_wise else {}),
        },
        **own,
    )


@scenario(
    task=7,
    promise="several samples of each prompt are trajectories of their own, each on one server",
    needs=NEEDS,
    checks=[*CHECKS, LOGPROBS, STICKY],
)
async def test_samples_of_each_prompt(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, GeneratorConfig.n_samples_per_prompt and TrajectoryID.repetition_id; each prompt is repeated in place."""
    conversations = [messages for messages in prompts.conversations(4) for _ in range(4)]
    await roll_out(
        stack,
        conversations,
        [{}] * len(conversations),
        trajectory_ids=trajectories(4, samples=4),
        max_turns=2,
        sampling_params={"max_tokens": 14, "temperature": 1.0, "logprobs": 1},
    )


@variants(
    {
        "test_turns_that_a_stop_string_ends": {
            "close": True,
            "promise": "an answer that a stop string ends is closed by an end-of-sequence token that takes no part in the loss",
        },
        "test_turns_that_end_within_a_token": {
            "close": True,
            "within": True,
            "promise": "an answer whose stop string ends within a token ends its turn like any other",
        },
        "test_turns_that_a_stop_string_ends_stay_open": {
            "close": False,
            "promise": "without append_eos_token_after_stop_str_in_multi_turn nothing follows an answer that a stop string ends",
        },
    },
    task=7,
    needs=NEEDS,
    checks=[*CHECKS, LOGPROBS],
    within=False,
)
async def a_stop_string_ends_turns(stack: Stack, prompts: Prompts, *, close: bool, within: bool) -> None:
    """SkyRL, GeneratorConfig.append_eos_token_after_stop_str_in_multi_turn. SkyRL always asks for texts with their stop
    strings. Answers of a few tokens sooner or later spell one."""
    await roll_out_turns(
        stack,
        prompts.conversations(10),
        close_stopped=close,
        sampling_params={
            "include_stop_str_in_output": True,
            "logprobs": 1,
            **meets_a_stop_string(stack, within_a_token=within),
            "max_tokens": 16,
        },
    )


@variants(
    {
        "test_each_turn_a_trajectory": {},
        "test_each_turn_a_trajectory_with_an_end_of_sequence": {"ends": True},
        "test_each_turn_a_trajectory_with_special_tokens": {"special": True, "checks": BY_STEP},
    },
    ends=False,
    special=False,
    task=7,
    promise="step by step, each turn is a trajectory that reads the texts before it, and says whose it is and whether it is the last",
    needs=NEEDS,
    checks=[*BY_STEP, STICKY],
)
async def step_by_step(stack: Stack, prompts: Prompts, *, ends: bool, special: bool) -> None:
    """SkyRL documentation, Step-Wise Training; SkyRL, GeneratorConfig.step_wise_trajectories. The chat template is applied to the
    texts of the answers. A text has no special tokens (SkyRL, InferenceEngineOutput: decode(…, skip_special_tokens=True)), so the
    end of sequence that an answer ended with stands once in the next turn's prompt."""
    letters = stack.vocabulary.spelled("abcdefgh")
    more = stack.vocabulary.some_special(3) if special else [stack.vocabulary.eos] if ends else []
    await roll_out_turns(
        stack,
        prompts.conversations(12),
        step_wise=True,
        sampling_params={
            "max_tokens": 24 if ends else 12,
            "temperature": 2.0,
            "seed": 11,
            "logprobs": 1,
            "ignore_eos": not ends,
            "allowed_token_ids": [*letters, *more],
        },
    )


@variants(
    {
        "test_a_chat_template_of_its_own": {},
        "test_a_chat_template_of_its_own_with_special_tokens": {"special": True, "checks": CHECKS},
    },
    special=False,
    task=7,
    promise="with a chat template of the generator's own, the policy is trained on the template's tokens of the answers' texts",
    needs=NEEDS,
    checks=[*CHECKS, STICKY],
)
async def a_chat_template_of_its_own(stack: Stack, prompts: Prompts, *, special: bool) -> None:
    """SkyRL, GeneratorConfig.chat_template and CUSTOM_CHAT_TEMPLATES; SkyRL, SkyRLGymGenerator.agent_loop: "We always re-tokenize the
    entire chat history every turn and at the end". A text has no special tokens (SkyRL, InferenceEngineOutput: decode(…,
    skip_special_tokens=True)), and the template ends each message once. With `special`, trajectories have one turn, so
    that no prompt differs, and only the trained tokens can."""
    needs_a_template(stack)
    some = stack.vocabulary.some_special(3) if special else [stack.vocabulary.eos]
    count = 12
    await roll_out(
        stack,
        prompts.conversations(count),
        [{"turns": 1 if special else 1 + row % 3} for row in range(count)],
        trajectory_ids=trajectories(count),
        max_turns=3,
        chat_template=gym_rule.CHAT_TEMPLATE,
        sampling_params={
            "max_tokens": 12,
            "temperature": 2.0,
            "seed": 11,
            "ignore_eos": special,
            "allowed_token_ids": [*stack.vocabulary.spelled("abcdefgh"), *some],
        },
    )


@variants(
    {
        "test_turns_within_one_message": {"plain": False},
        "test_turns_within_one_message_where_texts_begin_with_a_token": {"plain": True, "topologies": ["llama"]},
    },
    task=7,
    promise="turns and observations may be one assistant message",
    needs=NEEDS,
    checks=[*CHECKS, STICKY],
)
async def turns_within_one_message(stack: Stack, prompts: Prompts, *, plain: bool) -> None:
    """SkyRL, GeneratorConfig.use_conversation_multi_turn: "If False, they are appended to the original assistant response"."""
    await roll_out_turns(
        stack,
        prompts.conversations(12),
        use_conversation_multi_turn=False,
        sampling_params={**FULL, **(without_spaces(stack) if plain else {})},
    )


@scenario(
    task=7,
    promise="the policy's own end of sequence, which ends one assistant message, keeps its log-probability",
    needs=NEEDS,
    checks=[*CHECKS, LOGPROBS, STICKY],
)
async def test_turns_within_one_message_that_the_policy_ends(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #2148: it is trained on, and as a token of probability 1 it would bias the importance ratio. Every answer has a letter
    before its end; only the last one's end of sequence stays in the message."""
    await roll_out_turns(
        stack,
        prompts.conversations(12),
        use_conversation_multi_turn=False,
        sampling_params={
            "max_tokens": 24,
            "min_tokens": 1,
            "temperature": 2.0,
            "seed": 11,
            "logprobs": 1,
            "allowed_token_ids": [*stack.vocabulary.spelled("abcdefgh"), stack.vocabulary.eos],
        },
    )


@scenario(task=7, promise="the environment reads an answer without special tokens", needs=NEEDS, checks=CHECKS)
async def test_the_environment_reads_no_special_tokens(stack: Stack, prompts: Prompts) -> None:
    """SkyRL, InferenceEngineOutput: decode(…, skip_special_tokens=True). Here an answer gets another reward if its
    text shows special tokens. A trained model takes none while it has another choice."""
    some = [*stack.vocabulary.some_special(3), *([] if stack.slow else stack.vocabulary.spelled("abcdefghi"))]
    letters = {"allowed_token_ids": some, "ignore_eos": True}
    await roll_out(
        stack,
        prompts.conversations(12),
        [{"strict": True}] * 12,
        trajectory_ids=trajectories(12),
        sampling_params={"max_tokens": 24, "temperature": 2.0, "seed": 11, **letters},
    )


@scenario(
    task=7,
    promise="an environment's error ends its request by name, and with it the request's other trajectories",
    needs=NEEDS,
    checks=[names_error("breaks", "the environment breaks"), FAILED],
)
async def test_an_environment_that_breaks(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1613: one failed rollout ends the whole batch. Whoever has the error starts the next step: nothing of the failed one is
    to run beside it. The first of five trajectories breaks in its first turn, the others have six turns each."""
    await stack.attempt(
        stack.gym_generate(
            GymRequest(
                prompts=prompts.conversations(5),
                env_extras=[{"fails": 1}, *[{}] * 4],
                trajectory_ids=trajectories(5),
                max_turns=6,
                sampling_params=FULL,
            ),
            label="breaks",
        )
    )
    await until_idle(stack)
    await until_settled(stack)
