"""The miniature's gym generator: trajectories over its client (SkyRL documentation, SkyRLGymGenerator)."""

from __future__ import annotations

import statistics
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from backends.miniature import tokenizer
from backends.miniature.client import Client, T, all_or_none
from backends.miniature.engine import BadRequest
from backends.miniature.tokenizer import EOS
from harness.contract import gym_rule
from harness.contract.messages import GenerateRequest, GymOutput, GymRequest, TrajectoryId


class Trajectory(msgspec.Struct, kw_only=True):
    """One conversation of policy and environment in progress. `mask`, `rewards` and `logprobs` are as long as `response`."""

    prompt: list[int]
    response: list[int] = []
    mask: list[int] = []
    rewards: list[float] = []
    logprobs: list[float] | None = None
    experts: list[list[list[int]]] = []
    """Of each token that engines were fed."""
    reason: str | None = None
    turns: int = 0
    row: int = 0
    """Of its prompt."""
    last: bool = True
    """False for all steps of a trajectory but the last."""
    said: list[dict[str, str]] = []
    """The messages of policy and environment."""
    dropped: list[float] = []
    """The log-probability of the end of sequence that the last answer lost."""

    def add(self, tokens: list[int], mask: int, logprobs: list[float] | None) -> None:
        self.response += tokens
        self.mask += [mask] * len(tokens)
        self.rewards += [0.0] * len(tokens)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs[: len(tokens)]

    def cut(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        for column in (self.response, self.mask, self.rewards, self.logprobs):
            if column is not None:
                del column[length:]


class Generator:
    """Each method is a step that a fault may break."""

    def __init__(self) -> None:
        self.fired = 0
        self.client: Client

    async def generate(self, request: GymRequest) -> GymOutput:
        """SkyRL, GeneratorInterface.generate: results in the order of the prompts. Raises BadRequest before any request."""
        if len(request.env_extras) != len(request.prompts):
            raise BadRequest(f"{len(request.env_extras)} env_extras for {len(request.prompts)} prompts")
        if request.step_wise and (request.batched or request.trajectory_ids is None):
            raise BadRequest("step_wise needs trajectory_ids, and no batch")
        if request.chat_template not in {None, gym_rule.CHAT_TEMPLATE} or (
            request.chat_template and (request.batched or request.step_wise)
        ):
            raise BadRequest(f"chat_template {request.chat_template!r} is unknown, or excludes batched and step_wise")
        if request.batched:
            return self.output(request, await self.batch(request))
        rows = range(len(request.prompts))
        if request.step_wise:
            steps = await self.together([self.steps(request, row) for row in rows])
            return self.output(request, [step for each in steps for step in each])
        one = self.trajectory if request.chat_template is None else self.retokenized
        return self.output(request, await self.together([one(request, row) for row in rows]))

    async def together(self, rollouts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """All rollouts. If one fails, the others end with it."""
        return await all_or_none(rollouts)

    def salt(self) -> str:
        """Names the engines' weights, so that no prompt meets keys and values of earlier ones (SkyRL, use_cache_salt)."""
        return f"sync {self.client.syncs_of_engines()}"

    def session(self, request: GymRequest, row: int) -> str:
        """The session that all turns of a trajectory share."""
        return uuid4().hex if request.trajectory_ids is None else request.trajectory_ids[row].session

    def start(self, request: GymRequest, row: int) -> Trajectory:
        asked = request.sampling_params.get("logprobs") is not None
        return Trajectory(prompt=tokenizer.render(request.prompts[row]), logprobs=[] if asked else None, row=row)

    async def batch(self, request: GymRequest) -> list[Trajectory]:
        """One batch request for all trajectories, one turn each."""
        made = [self.start(request, row) for row in range(len(request.prompts))]
        asked = GenerateRequest(
            prompt_token_ids=[t.prompt for t in made],
            sampling_params=request.sampling_params,
            cache_salt=self.salt(),
        )
        answers = await self.client.generate(asked)
        for row, trajectory in enumerate(made):
            tokens = answers.response_ids[row]
            text = self.read(tokens, (answers.responses or [])[row])
            trajectory.add(tokens, 1, self.numbers(answers.response_logprobs, row))
            trajectory.experts = self.routed(request, trajectory, (answers.routed_experts or [])[row])
            reward = gym_rule.step(text, 1, request.env_extras[row], request.max_turns).reward
            trajectory.rewards[-1:] = [reward]
            trajectory.reason, trajectory.turns = answers.stop_reasons[row], 1
        return made

    async def trajectory(self, request: GymRequest, row: int) -> Trajectory:
        """Turns of policy and environment, until the environment ends or the next prompt would be too long."""
        made, session, end = self.start(request, row), self.session(request, row), 0
        done = False
        while not done:
            prompt = made.prompt + made.response
            if self.too_long(request, prompt, prompt):
                made.reason = "length"
                break
            done, end = await self.turn(request, row, made, session)
        made.cut(end)  # the policy never reads the last observation
        if not request.use_conversation_multi_turn and made.reason != "length" and made.response[-1:] != [EOS]:
            made.add([EOS], 1, self.ending(made))
            made.rewards[-2:] = [0.0, made.rewards[-2]]
        return made

    async def steps(self, request: GymRequest, row: int) -> list[Trajectory]:
        """Each turn as a trajectory of its own (SkyRL documentation, Step-Wise Training)."""
        made: list[Trajectory] = []
        session, done = self.session(request, row), False
        while not done:
            step = self.start(request, row)
            step.prompt, step.turns = self.history(request, row, made), len(made)
            if self.too_long(request, step.prompt, made[-1].prompt if made else step.prompt):
                break
            done, _ = await self.turn(request, row, step, session)
            step.last = False
            made.append(step)
        for step in made[-1:]:
            step.last = True
        return made

    async def retokenized(self, request: GymRequest, row: int) -> Trajectory:
        """All tokens, those to train on as well, are made of the texts (SkyRL, GeneratorConfig.chat_template)."""
        made, session, done = self.start(request, row), self.session(request, row), False
        made.prompt, reward = tokenizer.encode(gym_rule.templated(request.prompts[row])), 0.0
        before = made.prompt
        while not done:
            step = self.start(request, row)
            step.prompt = tokenizer.encode(gym_rule.templated([*request.prompts[row], *made.said]))
            if self.too_long(request, step.prompt, before):
                made.reason = "length"
                break
            before = step.prompt
            step.turns = made.turns
            done, _ = await self.turn(request, row, step, session)
            made.turns, made.reason, reward = step.turns, step.reason, sum(step.rewards)
            made.said += step.said
        for text, own in self.trained(made.said[:-1]):
            made.add(tokenizer.encode(text), int(own), None)
        made.rewards[-1:] = [reward]
        return made

    def too_long(self, request: GymRequest, prompt: list[int], _before: list[int]) -> bool:
        """True if no turn is to begin on `prompt`, after one on `_before` (SkyRL, GeneratorConfig.max_input_length)."""
        return len(prompt) > request.max_input_length

    def trained(self, said: list[dict[str, str]]) -> Iterable[tuple[str, bool]]:
        """The texts that become a trajectory's tokens, and whether the policy is trained on each."""
        return gym_rule.pieces(said)

    def history(self, request: GymRequest, row: int, made: list[Trajectory]) -> list[int]:
        """The tokens of the conversation so far, rendered anew from its texts."""
        return tokenizer.render([*request.prompts[row], *(message for step in made for message in step.said)])

    async def turn(self, request: GymRequest, row: int, made: Trajectory, session: str) -> tuple[bool, int]:
        """Add one answer and the environment's observation. Returns whether it is over, and where the answer ends."""
        prompt = made.prompt + made.response
        asked = GenerateRequest(
            prompt_token_ids=[prompt],
            session_ids=[session],
            sampling_params=request.sampling_params,
            cache_salt=self.salt(),
        )
        answer = await self.client.generate(asked)
        made.turns += 1
        made.reason = answer.stop_reasons[0]
        kept, numbers = self.kept(request, answer.response_ids[0]), self.numbers(answer.response_logprobs, 0)
        made.add(kept, 1, numbers)
        made.dropped = (numbers or [])[len(kept) :]
        made.experts = self.routed(request, made, (answer.routed_experts or [])[0])
        text = self.read(answer.response_ids[0], (answer.responses or [""])[0])
        if self.closes(request, kept, text):
            made.add([EOS], self.closing_mask, None)
        end = len(made.response)
        said = gym_rule.step(text, made.turns, request.env_extras[row], request.max_turns)
        made.rewards[end - 1] += said.reward
        made.add(self.observed(request, said.observation, last=said.done), self.observation_mask, None)
        spoken = self.spoken(answer.response_ids[0], (answer.responses or [""])[0])
        made.said += [{"role": "assistant", "content": spoken}, {"role": "user", "content": said.observation}]
        return said.done, end

    observation_mask = closing_mask = 0
    """The loss ignores the environment's tokens, and an end of sequence that the policy did not make."""

    def closes(self, request: GymRequest, kept: list[int], text: str) -> bool:
        """True if a stop string ended the answer: the conversation then lacks the end of the assistant's message."""
        stop = tuple(request.sampling_params.get("stop") or ())
        asked = request.use_conversation_multi_turn and request.close_stopped
        return asked and kept[-1:] != [EOS] and text.endswith(stop or ("\0",))

    def ending(self, made: Trajectory) -> list[float]:
        """The log-probability of the end of one assistant message: the policy's own, if its answer had ended so."""
        return made.dropped or [0.0]

    def read(self, _tokens: list[int], text: str) -> str:
        """The text of an answer that the environment reads."""
        return text

    def spoken(self, _tokens: list[int], text: str) -> str:
        """The text of an answer that later steps read."""
        return text

    def numbers(self, logprobs: list[Any] | None, row: int) -> list[float] | None:
        return None if logprobs is None else logprobs[row]

    def routed(self, _request: GymRequest, _made: Trajectory, experts: Any) -> list[list[list[int]]]:
        """The experts of a trajectory so far: a turn's answer tells those of its prompt as well."""
        return experts or []

    def kept(self, request: GymRequest, tokens: list[int]) -> list[int]:
        """The answer's tokens. Within one assistant message, they lose a final end of sequence."""
        return tokens if request.use_conversation_multi_turn or tokens[-1:] != [EOS] else tokens[:-1]

    def observed(self, request: GymRequest, observation: str, *, last: bool) -> list[int]:
        """The tokens that the policy reads from the environment: a user's message, or the plain text. The `last` one has no
        generation prompt: nothing follows."""
        if not request.use_conversation_multi_turn:
            return tokenizer.encode(observation)
        # The template adds a line break after the end of the answer's message.
        messages = [{"role": "user", "content": observation}]
        return tokenizer.encode("\n") + tokenizer.render(messages, add_generation_prompt=not last)

    def cut_short(self, made: Trajectory) -> bool:
        """True if a trajectory did not end by itself."""
        return made.reason != "stop"

    def unrewarded(self, made: Trajectory) -> bool:
        """True if a trajectory that did not end by itself is to earn nothing."""
        return made.reason != "stop"

    def rewards(self, request: GymRequest, made: Trajectory) -> float | list[float]:
        nothing = request.zero_reward_on_non_stop and self.unrewarded(made)
        rewards = [0.0] * len(made.rewards) if nothing else made.rewards
        return sum(rewards) if request.batched or request.chat_template else rewards

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        """Trajectories as columns."""
        asked = request.sampling_params.get("logprobs") is not None
        return GymOutput(
            prompt_token_ids=[t.prompt for t in made],
            response_ids=[t.response for t in made],
            rewards=[self.rewards(request, t) for t in made],
            loss_masks=[
                [0] * len(t.mask) if request.overlong_filtering and self.cut_short(t) else t.mask for t in made
            ],
            stop_reasons=[t.reason for t in made],
            rollout_logprobs=[t.logprobs for t in made] if asked else None,  # type: ignore[misc]
            rollout_expert_indices=[t.experts for t in made],
            trajectory_ids=[self.identity(request, t) for t in made] if request.step_wise else None,
            is_last_step=[t.last for t in made] if request.step_wise else None,
            rollout_metrics=self.metrics(made) if made else {},
        )

    def identity(self, request: GymRequest, made: Trajectory) -> TrajectoryId:
        """Whose step this is."""
        assert request.trajectory_ids is not None
        return request.trajectory_ids[made.row]

    def metrics(self, made: list[Trajectory]) -> dict[str, float]:
        """SkyRL, get_rollout_metrics."""
        tokens, own = [len(t.response) for t in made], [sum(t.mask) for t in made]
        rewarded = [len(t.response) for t in made if sum(t.rewards) > 0]
        unrewarded = [len(t.response) for t in made if sum(t.rewards) == 0]
        return {
            "generate/avg_tokens_non_zero_rewards": statistics.fmean(rewarded or [0]),
            "generate/avg_tokens_zero_rewards": statistics.fmean(unrewarded or [0]),
            "environment/turns": statistics.fmean(t.turns for t in made if t.last),
            **_spread("num_tokens", tokens),
            **_spread("assistant_tokens", own),
        }


def _spread(name: str, counts: list[int]) -> dict[str, float]:
    return {
        f"generate/min_{name}": min(counts),
        f"generate/max_{name}": max(counts),
        f"generate/avg_{name}": statistics.fmean(counts),
        f"generate/std_{name}": statistics.pstdev(counts),
    }
