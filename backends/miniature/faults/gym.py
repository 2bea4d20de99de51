"""Trajectories of the gym generator that would mislead a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from backends.miniature import model, tokenizer
from backends.miniature.client import T
from backends.miniature.engine import EngineDead
from backends.miniature.faults.registry import seeded
from backends.miniature.generator import Generator, Trajectory
from backends.miniature.tokenizer import EOS
from harness.contract.faults import Fact
from harness.contract.messages import GymOutput, GymRequest, TrajectoryId


@seeded("trajectories_swapped", caught_by=["gym.order"], corrupts=Fact.ANSWERS)
class TrajectoriesSwapped(Generator):
    """The first two trajectories of every batch are swapped."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        self.fired += len(made) > 1
        return super().output(request, [*made[1::-1], *made[2:]] if len(made) > 1 else made)


@seeded("rollouts_run_on", caught_by=["gym.failed"])
class RolloutsRunOn(Generator):
    """If one rollout fails, the others go on after the caller has its error."""

    async def together(self, rollouts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        try:
            return await asyncio.gather(*rollouts)
        except RuntimeError:
            self.fired += 1
            raise


@seeded("rewards_shifted", caught_by=["gym.rewards"])
class RewardsShifted(Generator):
    """Each trajectory has the previous one's rewards, cut or padded to its own length."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        right = super().output(request, made)
        before = [right.rewards[-1], *right.rewards[:-1]]
        self.fired += before != right.rewards
        return msgspec.structs.replace(
            right, rewards=[_as_long(r, len(t.response)) for r, t in zip(before, made, strict=True)]
        )


def _as_long(rewards: Any, length: int) -> Any:
    return rewards if isinstance(rewards, float) else (rewards + [0.0] * length)[:length]


@seeded("turn_reward_late", caught_by=["gym.rewards"])
class RewardOnTheObservation(Generator):
    """The reward of a turn lies on the first token of the environment's observation."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        for trajectory in made:
            for at in range(len(trajectory.rewards) - 1, 0, -1):
                if trajectory.mask[at] < trajectory.mask[at - 1]:
                    self.fired += 1
                    rewards = trajectory.rewards
                    rewards[at - 1], rewards[at] = rewards[at], rewards[at - 1]
        return super().output(request, made)


@seeded("loss_mask_wrong", "observations", caught_by=["gym.loss_masks"])
class TrainsOnObservations(Generator):
    """Loss masks are 1 on the environment's observations."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        right = super().output(request, made)
        self.fired += any(0 in mask for mask in right.loss_masks)
        return msgspec.structs.replace(right, loss_masks=[[1] * len(mask) for mask in right.loss_masks])


@seeded("loss_mask_wrong", "one_short", caught_by=["gym.loss_masks"])
class MaskOneShort(Generator):
    """The loss mask of each turn's last token is 0."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        right = super().output(request, made)
        self.fired += 1
        return msgspec.structs.replace(
            right, loss_masks=[[a & b for a, b in zip(mask, [*mask[1:], 0], strict=True)] for mask in right.loss_masks]
        )


@seeded("loss_mask_wrong", "stop_tokens_cut_short", caught_by=["gym.loss_masks"])
class OnlyTheEndOfSequenceEnds(Generator):
    """Overlong filtering takes an answer that a stop token ended for one that was cut short."""

    def cut_short(self, made: Trajectory) -> bool:
        self.fired += made.reason == "stop" and made.response[-1:] != [EOS]
        return made.response[-1:] != [EOS]


@seeded("cut_short_rewarded", "always", caught_by=["gym.rewards"])
class CutShortIsRewarded(Generator):
    """Answers that were cut short have their reward, although they are to have none."""

    def unrewarded(self, made: Trajectory) -> bool:
        self.fired += super().unrewarded(made)
        return False


@seeded("cut_short_rewarded", "stop_tokens_unrewarded", caught_by=["gym.rewards"])
class OnlyTheEndOfSequenceEarns(Generator):
    """An answer that a stop token ended has no reward, as if it had been cut short."""

    def unrewarded(self, made: Trajectory) -> bool:
        self.fired += made.reason == "stop" and made.response[-1:] != [EOS]
        return made.response[-1:] != [EOS]


@seeded("steps_mislabelled", "last", caught_by=["gym.steps"])
class FirstStepIsTheLast(Generator):
    """Each trajectory's first step is called the last."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        right = super().output(request, made)
        if right.is_last_step is None:
            return right
        self.fired += 1
        return msgspec.structs.replace(right, is_last_step=[step.turns == 1 for step in made])


@seeded("steps_mislabelled", "trajectory", caught_by=["gym.steps"])
class StepsOfAnother(Generator):
    """Every step has the id of the trajectory after its own."""

    def identity(self, request: GymRequest, made: Trajectory) -> TrajectoryId:
        ids = request.trajectory_ids or []
        self.fired += len(ids) > 1
        return ids[(made.row + 1) % len(ids)]


@seeded("step_reads_its_past", "tokens", caught_by=["gym.tokens"], corrupts=Fact.ANSWERS | Fact.TEXT)
class StepsGoOnFromTokens(Generator):
    """A step goes on from the tokens of the one before, as within one trajectory, and is not rendered anew."""

    def history(self, request: GymRequest, row: int, made: list[Trajectory]) -> list[int]:
        right = super().history(request, row, made)
        tokens = [*made[-1].prompt, *made[-1].response] if made else right
        self.fired += tokens != right
        return tokens


@seeded("step_reads_its_past", "last_turn_only", caught_by=["gym.tokens"], corrupts=Fact.ANSWERS | Fact.TEXT)
class StepsForget(Generator):
    """A step reads the first messages and the last turn, and none between."""

    def history(self, request: GymRequest, row: int, made: list[Trajectory]) -> list[int]:
        self.fired += len(made) > 1
        return super().history(request, row, made[-1:])


@seeded("step_reads_its_past", "special_tokens", caught_by=["gym.tokens"], corrupts=Fact.ANSWERS | Fact.TEXT)
class StepsReadSpecialTokens(Generator):
    """The texts that a step reads still have the special tokens of the answers, which the template adds once more."""

    def spoken(self, tokens: list[int], text: str) -> str:
        if tokenizer.SPECIAL.keys().isdisjoint(tokens):
            return text
        self.fired += 1
        return tokenizer.decode(tokens, skip_special_tokens=False)


@seeded("last_turn_dropped", caught_by=["gym.tokens"], corrupts=Fact.ANSWERS)
class LastTurnDropped(Generator):
    """A trajectory of several turns lacks the policy's last answer."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        for trajectory in made:
            if trajectory.turns > 1:
                self.fired += 1
                last = len(trajectory.mask) - trajectory.mask[::-1].index(0)
                trajectory.cut(trajectory.mask.index(0) if trajectory.turns == 2 else _end_before(trajectory, last))
        return super().output(request, made)


def _end_before(trajectory: Trajectory, start: int) -> int:
    """End of the turn before the one that starts at `start`."""
    return max(at + 1 for at in range(start) if trajectory.mask[at])


@seeded("stop_reason_wrong", "trajectory", caught_by=["gym.stop_reasons"])
class EveryTrajectoryStops(Generator):
    """Trajectories that ended by length have the stop reason "stop"."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        right = super().output(request, made)
        self.fired += "length" in right.stop_reasons
        return msgspec.structs.replace(right, stop_reasons=["stop"] * len(made))


@seeded("configuration_over_the_call", "logprobs", caught_by=["gym.logprobs"])
class LogprobsAsConfigured(Generator):
    """Trajectories have log-probabilities if the configuration asks for them, whatever the call asks for."""

    def start(self, request: GymRequest, row: int) -> Trajectory:
        made = super().start(request, row)
        if request.configured is not None and request.configured.get("logprobs") is None:
            self.fired += made.logprobs is not None
            made.logprobs = None
        return made


@seeded("configuration_over_the_call", "length", caught_by=["gym.tokens"], corrupts=Fact.ANSWERS | Fact.LOGPROBS)
class CutAsConfigured(Generator):
    """In a batch, answers are cut to the length that the configuration allows."""

    async def batch(self, request: GymRequest) -> list[Trajectory]:
        made = await super().batch(request)
        most: int = (request.configured or request.sampling_params)["max_tokens"]
        for trajectory in made:
            self.fired += len(trajectory.response) > most
            trajectory.cut(most)
        return made


@seeded("turn_logprobs_late", caught_by=["gym.logprobs"])
class LogprobsOfTheTurnBefore(Generator):
    """From the second turn on, log-probabilities are those of the first turn."""

    _before: Any = None

    async def turn(self, request: GymRequest, row: int, made: Trajectory, session: str) -> tuple[bool, int]:
        begin = len(made.response)
        over, end = await super().turn(request, row, made, session)
        if made.logprobs is not None and begin:
            first = made.logprobs[: made.mask.index(0)]
            self.fired += 1
            made.logprobs[begin:end] = (first * (end - begin))[: end - begin]
        return over, end


@seeded("sampled_end_without_logprob", caught_by=["gym.logprobs"])
class EndsWithoutLogprob(Generator):
    """Within one message, the end of sequence that the policy made is put back with the log-probability 0 (SkyRL #2148)."""

    def ending(self, made: Trajectory) -> list[float]:
        self.fired += bool(made.dropped)
        return [0.0]


@seeded("turn_begins_too_long", caught_by=["gym.input_length"])
class LengthOfTheTurnBefore(Generator):
    """Where each prompt is made anew of the texts, a turn begins if the prompt of the one before was short enough (SkyRL #1539)."""

    def too_long(self, request: GymRequest, prompt: list[int], before: list[int]) -> bool:
        found = super().too_long(request, before, before)
        self.fired += found != super().too_long(request, prompt, before)
        return found


@seeded("trajectory_not_sticky", caught_by=["sticky_sessions"])
class EachTurnItsOwnSession(Generator):
    """Each turn has its own session."""

    async def turn(self, request: GymRequest, row: int, made: Trajectory, session: str) -> tuple[bool, int]:
        self.fired += made.turns > 0
        return await super().turn(request, row, made, f"{session}-{made.turns}")


@seeded("metrics_wrong", "turns", caught_by=["gym.metrics"])
class MetricsCountOneTurn(Generator):
    """Rollout metrics say that every trajectory has one turn."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        right = super().output(request, made)
        self.fired += any(t.turns > 1 for t in made)
        return msgspec.structs.replace(right, rollout_metrics=right.rollout_metrics | {"environment/turns": 1.0})


@seeded("metrics_wrong", "tokens", caught_by=["gym.metrics"])
class MetricsCountObservations(Generator):
    """Rollout metrics count the environment's tokens as the policy's own."""

    def metrics(self, made: list[Trajectory]) -> dict[str, float]:
        right = super().metrics(made)
        self.fired += any(0 in t.mask for t in made)
        return right | {"generate/avg_assistant_tokens": right["generate/avg_num_tokens"]}


@seeded("trajectory_experts", "padded", caught_by=["gym.routed_experts"])
class ExpertsOfTheLastToken(Generator):
    """The last token of a trajectory, which no engine was fed, has the experts 0 (SkyRL #1908)."""

    def output(self, request: GymRequest, made: list[Trajectory]) -> GymOutput:
        right = super().output(request, made)
        padding = [[0] * model.TOP_K] * model.LAYERS
        self.fired += len(made)
        return msgspec.structs.replace(right, rollout_expert_indices=[[*t.experts, padding] for t in made])


@seeded("trajectory_experts", "appended", caught_by=["gym.routed_experts"])
class ExpertsAppended(Generator):
    """Each answer's experts are put after those of the turns before, although they begin with those of its prompt."""

    def routed(self, request: GymRequest, made: Trajectory, experts: Any) -> list[list[list[int]]]:
        whole = super().routed(request, made, experts)
        self.fired += bool(made.experts)
        return [*made.experts, *whole][: len(whole)]


@seeded("stopped_turn_not_closed", caught_by=["gym.tokens"], corrupts=Fact.ANSWERS | Fact.TEXT)
class StoppedTurnsNotClosed(Generator):
    """A conversation goes on without an end of sequence after an answer that a stop string ended."""

    def closes(self, request: GymRequest, kept: list[int], text: str) -> bool:
        self.fired += super().closes(request, kept, text)
        return False


@seeded("stopped_turn_closed_unasked", caught_by=["gym.tokens"], corrupts=Fact.ANSWERS | Fact.TEXT)
class StoppedTurnsClosedUnasked(Generator):
    """An end of sequence follows an answer that a stop string ended, although the configuration wants none."""

    def closes(self, request: GymRequest, kept: list[int], text: str) -> bool:
        right = super().closes(request, kept, text)
        closed = super().closes(msgspec.structs.replace(request, close_stopped=True), kept, text)
        self.fired += closed != right
        return closed


@seeded("closing_token_trained", caught_by=["gym.loss_masks", "gym.metrics"])
class ClosingTokensTrained(Generator):
    """The policy is trained on the end of sequence that the generator put after a stop string."""

    closing_mask = 1

    def closes(self, request: GymRequest, kept: list[int], text: str) -> bool:
        closed = super().closes(request, kept, text)
        self.fired += closed
        return closed


@seeded("observation_retokenized", caught_by=["gym.tokens"], corrupts=Fact.TEXT)
class ObservationWithoutTemplate(Generator):
    """The environment's observation is appended without the chat template."""

    def observed(self, request: GymRequest, observation: str, *, last: bool) -> list[int]:
        plain = msgspec.structs.replace(request, use_conversation_multi_turn=False)
        self.fired += request.use_conversation_multi_turn
        return super().observed(plain, observation, last=last)


@seeded("error_becomes_empty", "trajectory", caught_by=["every_call_ends"], corrupts=Fact.ERRORS)
class DeadServersEndTrajectories(Generator):
    """A trajectory whose server dies ends with its tokens so far, as if it had stopped."""

    async def turn(self, request: GymRequest, row: int, made: Trajectory, session: str) -> tuple[bool, int]:
        try:
            return await super().turn(request, row, made, session)
        except EngineDead:
            self.fired += 1
            made.reason = "stop"
            return True, len(made.response)


@seeded("environment_reads_special_tokens", caught_by=["gym.rewards"], corrupts=Fact.TEXT)
class EnvironmentReadsEverything(Generator):
    """The environment reads answers with their special tokens."""

    def read(self, tokens: list[int], text: str) -> str:
        whole = tokenizer.decode(tokens, skip_special_tokens=False)
        self.fired += whole != text
        return whole


@seeded("loss_mask_wrong", "start_of_message", caught_by=["gym.loss_masks", "gym.metrics"])
class TrainsOnTheRole(Generator):
    """With a chat template of the generator's own, the policy is trained on the start of its messages as well."""

    def trained(self, said: list[dict[str, str]]) -> Iterable[tuple[str, bool]]:
        for text, own in super().trained(said):
            starts = text.endswith("assistant\n")
            self.fired += starts
            yield text, own or starts
