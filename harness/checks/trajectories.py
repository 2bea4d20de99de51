"""Right gym trajectories, derived from the prompts, the engines' executions, and the environment's rule.

A trajectory takes nothing from a generator's result, which only tells apart several executions of one prompt. Queries are
asked turn by turn, since each turn's prompt depends on the text of the turn before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec

from harness.checks.base import Evidence, Execution, kept, stop_strings
from harness.contract import gym_rule
from harness.contract.messages import GymRequest
from harness.records.recording import Call
from harness.records.reference import DecodeRequest, EncodeRequest, Query, RenderRequest, UnansweredQuery

BASE = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "I am a user."}]
"""Messages before an observation, so that the template renders it as part of a conversation (SkyRL, fixed-base approach)."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `prompt` is what the engine had to read; `kept` is the part of `tokens` that stays in the trajectory.

    `execution` is None if no engine read that prompt. `stopped`: a stop string ended the answer, and no end-of-sequence token.
    `added` is that token, where the generator puts it (SkyRL, append_eos_token_after_stop_str_in_multi_turn). `observed` is empty
    after the last turn, unless each turn is a trajectory of its own.
    """

    prompt: tuple[int, ...]
    execution: Execution | None
    kept: tuple[int, ...] = ()
    stopped: bool = False
    added: tuple[int, ...] = ()
    reward: float = 0.0
    observed: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return () if self.execution is None else self.execution.tokens

    @property
    def others(self) -> tuple[int, ...]:
        """The tokens after the answer that the policy did not make."""
        return (*self.added, *self.observed)


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a gym_generate()'s result as it must be. `whole`: True if engines read every prompt of it."""

    call: Call
    index: int
    """Its row in the result."""
    asked: int
    """Row of its prompt in the request."""
    prompt: tuple[int, ...]
    session: str | None
    turns: tuple[Turn, ...]
    cut: bool
    """True if it ended because the next prompt would have been too long. Of steps, only the last one can be."""
    end: tuple[int, ...]
    """The end-of-sequence token if the generator adds it (SkyRL: without use_conversation_multi_turn, unless by length)."""
    last: bool | None = None
    """Of a step that is a trajectory of its own: whether no step follows it."""
    retokenized: tuple[tuple[int, bool], ...] | None = None
    """With a chat template of the generator's own: each token that is made of the texts, and whether the policy is trained on it."""

    @property
    def whole(self) -> bool:
        return bool(self.turns) and all(turn.execution is not None for turn in self.turns)

    @property
    def response(self) -> list[int]:
        if self.retokenized is not None:
            return [token for token, _ in self.retokenized]
        found = [token for turn in self.turns for token in (*turn.kept, *turn.others)]
        return [*found, *self.end]

    @property
    def sampled_end(self) -> tuple[int, ...]:
        """`end` if the policy itself ended its last answer with it, and the generator only put it back."""
        return self.end if self.end and self.turns[-1].tokens[-1:] == self.end else ()

    @property
    def fed(self) -> list[int]:
        """All tokens that engines read. Nothing follows the last answer, so its last token was not read."""
        return [*self.turns[-1].prompt, *self.turns[-1].tokens][:-1]

    @property
    def loss_mask(self) -> list[int]:
        """1 on the policy's own tokens and on an added end-of-sequence token (SkyRL, SkyRLGymGenerator). With overlong filtering 0
        everywhere if the trajectory was cut short (DAPO)."""
        if self.call.request.get("overlong_filtering") and self.stop_reason != "stop":
            return [0] * len(self.response)
        if self.retokenized is not None:
            return [int(own) for _, own in self.retokenized]
        found = [mask for turn in self.turns for mask in ([1] * len(turn.kept) + [0] * len(turn.others))]
        return [*found, *[1] * len(self.end)]

    @property
    def rewards(self) -> list[float]:
        """`earned`; nothing if trajectories that were cut short are to have no reward, and this one was."""
        nothing = self.call.request.get("zero_reward_on_non_stop") and self.stop_reason != "stop"
        return [0.0] * len(self.earned) if nothing else self.earned

    @property
    def earned(self) -> list[float]:
        """Each turn's reward at its last token, which may be an added end-of-sequence token. Retokenized trajectories have the last
        turn's reward alone (SkyRL, SkyRLGymGenerator)."""
        if self.retokenized is not None:
            return [*[0.0] * (len(self.retokenized) - 1), self.turns[-1].reward] if self.turns else []
        found: list[float] = []
        for turn in self.turns:
            found += [0.0] * (len(turn.kept) + len(turn.added))
            if found:
                found[-1] += turn.reward
            found += [0.0] * len(turn.observed)
        return [*found[:-1], 0.0, found[-1]] if self.end else found

    @property
    def stop_reason(self) -> str | None:
        """How it ended. A step has its own answer's reason."""
        if self.cut and self.last is None:
            return "length"
        last = self.turns[-1].execution if self.turns else None
        return None if last is None else last.finish_reason


def queries(evidence: Evidence) -> Iterator[Query]:
    """The questions to the oracle for every trajectory, as far as it is known. Each round asks all that it can, so there are as
    many rounds as turns. Raises UnansweredQuery after these if a trajectory still lacks an answer."""
    known, waiting = _known(evidence)
    yield from known
    if waiting:
        raise UnansweredQuery("the texts of a trajectory's turns")


@kept
def _known(evidence: Evidence) -> tuple[list[Query], bool]:
    """The queries of a round, and True if more will follow. Shared by all checks that ask."""
    walk = _Walk(evidence)
    return list(walk.queries()), walk.waiting


@kept
def trajectories(evidence: Evidence) -> tuple[Trajectory, ...]:
    """The trajectories of every gym_generate(); those of a failed one as far as engines made them.

    Raises UnansweredQuery if the oracle was not asked about the recording."""
    walk = _Walk(evidence)
    for _ in walk.queries():
        pass
    if walk.waiting:
        raise UnansweredQuery("the texts of a trajectory's turns")
    return tuple(walk.found)


class _Walk:
    """Goes through all calls; each execution is assigned once. Where each prompt is made anew of the texts, a turn that an engine read
    although it is too long is followed: `gym.input_length` reports it."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self._eos = evidence.trace.header.vocabulary.eos
        self.found: list[Trajectory] = []
        self.waiting = False
        """True if a trajectory is incomplete for lack of an answer."""
        self._taken: set[int] = set()
        self._by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, execution in enumerate(evidence.executions):
            self._by_prompt[execution.prompt].append(number)

    def queries(self) -> Iterator[Query]:
        for call in self.evidence.calls("gym_generate"):
            asked = msgspec.convert(call.request, GymRequest)
            for index, messages in enumerate(asked.prompts):
                yield RenderRequest(messages=messages)
                try:
                    yield from self._walk_of(asked)(call, asked, index)
                except UnansweredQuery:
                    self.waiting = True

    def _walk_of(self, asked: GymRequest) -> Callable[[Call, GymRequest, int], Iterator[Query]]:
        if asked.chat_template is not None:
            return self._retokenized
        return self._steps if asked.step_wise else self._trajectory

    def _trajectory(self, call: Call, asked: GymRequest, index: int) -> Iterator[Query]:
        prompt = tuple(self.evidence.reference.render(asked.prompts[index]))
        turns: list[Turn] = []
        context, done = prompt, False
        while not done and (asked.batched or len(context) <= asked.max_input_length):
            execution = self._take(call, index, prompt, context)
            turn, ended, _ = yield from self._turn(asked, index, len(turns) + 1, context, execution)
            done = asked.batched or ended
            turns.append(turn)
            context = (*context, *turn.kept, *turn.others)
        if turns:
            turns[-1] = msgspec.structs.replace(turns[-1], observed=())
        final = turns[-1].execution if turns else None
        one_message = not asked.batched and not asked.use_conversation_multi_turn
        closed = one_message and done and final is not None and final.finish_reason != "length"
        self.found.append(
            Trajectory(
                call=call,
                index=index,
                asked=index,
                prompt=prompt,
                session=_session(asked, index),
                turns=tuple(turns),
                cut=not done and final is not None,
                end=(self._eos,) if closed else (),
            )
        )

    def _steps(self, call: Call, asked: GymRequest, index: int) -> Iterator[Query]:
        """Each turn as a trajectory of its own."""
        messages, done, number = list(asked.prompts[index]), False, 0
        while not done:
            yield RenderRequest(messages=list(messages))
            context = tuple(self.evidence.reference.render(messages))
            row = sum(one.call.id == call.id for one in self.found)
            execution = self._take(call, row, context, context)
            if execution is None and len(context) > asked.max_input_length:
                if number:
                    self.found[-1] = msgspec.structs.replace(self.found[-1], cut=True, last=True)
                return
            number += 1
            turn, done, said = yield from self._turn(asked, index, number, context, execution)
            messages += said
            self.found.append(
                Trajectory(
                    call=call,
                    index=row,
                    asked=index,
                    prompt=context,
                    session=_session(asked, index),
                    turns=(turn,),
                    cut=False,
                    end=(),
                    last=done,
                )
            )

    def _retokenized(self, call: Call, asked: GymRequest, index: int) -> Iterator[Query]:
        """A trajectory of which all tokens are made of the texts, by a chat template of the generator's own."""
        said: list[dict[str, str]] = []
        turns: list[Turn] = []
        prompt = context = yield from self._encoded(gym_rule.templated(asked.prompts[index]))
        done = False
        while not done:
            execution = self._take(call, index, context, context)
            if execution is None and len(context) > asked.max_input_length:
                break
            turn, done, more = yield from self._turn(asked, index, len(turns) + 1, context, execution)
            turns.append(turn)
            said += more
            if not done:
                context = yield from self._encoded(gym_rule.templated([*asked.prompts[index], *said]))
        tokens: list[tuple[int, bool]] = []
        for text, own in gym_rule.pieces(said[:-1]):  # nothing follows the last answer
            tokens += [(token, own) for token in (yield from self._encoded(text))]
        self.found.append(
            Trajectory(
                call=call,
                index=index,
                asked=index,
                prompt=prompt,
                session=_session(asked, index),
                turns=tuple(turns),
                cut=not done and bool(turns),
                end=(),
                retokenized=tuple(tokens),
            )
        )

    def _encoded(self, text: str) -> Generator[Query, None, tuple[int, ...]]:
        yield EncodeRequest(text=text, add_special_tokens=False)
        return tuple(self.evidence.reference.encode(text, add_special_tokens=False))

    def _turn(
        self, asked: GymRequest, index: int, number: int, context: tuple[int, ...], execution: Execution | None
    ) -> Generator[Query, None, tuple[Turn, bool, list[dict[str, str]]]]:
        """Turn `number` of a trajectory, whether nothing follows it, and the messages of policy and environment."""
        if execution is None:
            return Turn(prompt=context, execution=None), True, []
        decode = DecodeRequest(tokens=list(execution.tokens), skip_special_tokens=True)
        yield decode
        text, stopped = _up_to_stop(
            self.evidence.reference.decode(decode.tokens, skip_special_tokens=True), execution, asked.sampling_params
        )
        if asked.env_extras[index].get("fails") == number:
            return Turn(prompt=context, execution=execution, kept=execution.tokens), True, []
        said = gym_rule.step(text, number, asked.env_extras[index], asked.max_turns)
        kept, conversation = execution.tokens, asked.use_conversation_multi_turn and not asked.batched
        stopped = stopped and kept[-1] != self._eos
        if not asked.batched and not asked.use_conversation_multi_turn and kept[-1:] == (self._eos,):
            kept = kept[:-1]
        observed = yield from self._observed(asked, said.observation, last=said.done)
        turn = Turn(
            prompt=context,
            execution=execution,
            kept=kept,
            stopped=stopped,
            added=(self._eos,) if stopped and conversation and asked.close_stopped else (),
            reward=said.reward,
            observed=observed,
        )
        messages = [{"role": "assistant", "content": text}, {"role": "user", "content": said.observation}]
        return turn, said.done, messages

    def _observed(self, asked: GymRequest, observation: str, *, last: bool) -> Generator[Query, None, tuple[int, ...]]:
        """The token ids in which the policy reads an observation. Only the last step of a trajectory keeps the one after the last
        answer: no generation prompt is in it, since nothing follows (SkyRL, SkyRLGymGenerator.get_obs_ids_from_obs)."""
        book = self.evidence.reference
        if not asked.use_conversation_multi_turn:
            return (yield from self._encoded(observation))
        longer = [*BASE, {"role": "user", "content": observation}]
        yield RenderRequest(messages=BASE)
        more = not (last and asked.step_wise)
        yield RenderRequest(messages=longer, add_generation_prompt=more)
        base, full = book.render(BASE), book.render(longer, add_generation_prompt=more)
        shared = next((at for at, (a, b) in enumerate(zip(base, full, strict=False)) if a != b), len(base))
        end = max((at for at in range(shared) if base[at] == self._eos), default=-1)
        return tuple(full[end + 1 :])

    def _take(self, call: Call, index: int, prompt: tuple[int, ...], context: tuple[int, ...]) -> Execution | None:
        """An execution of this prompt in the call's time: the one whose tokens the result has here, if there is one. An execution
        that a dead engine did not end comes last, since another engine may have got the request. Requests of a failed generator
        may start after the call."""
        until_ns = call.ended_ns if call.error is None else math.inf
        open_ = [
            number
            for number in self._by_prompt.get(context, ())
            if number not in self._taken and call.started_ns <= self._execution(number).started_ns <= until_ns
        ]
        open_.sort(key=lambda number: self._execution(number).finish_reason is None)
        rows = (call.result or {}).get("response_ids") or []
        here = rows[index][len(context) - len(prompt) :] if index < len(rows) else []

        def fits(number: int) -> bool:
            tokens = list(self._execution(number).tokens)
            return here[: len(tokens)] == tokens

        chosen = next((number for number in open_ if fits(number)), open_[0] if open_ else None)
        if chosen is None:
            return None
        self._taken.add(chosen)
        return self._execution(chosen)

    def _execution(self, number: int) -> Execution:
        return self.evidence.executions[number]


def _session(asked: GymRequest, index: int) -> str | None:
    ids = None if asked.batched else asked.trajectory_ids
    return None if ids is None else ids[index].session


def _up_to_stop(text: str, execution: Execution, params: dict[str, Any]) -> tuple[str, bool]:
    """The text of an answer as the engine returns it, and whether it ends in a stop string (vLLM documentation, SamplingParams.stop
    and include_stop_str_in_output)."""
    met = [(text.find(s), s) for s in stop_strings(params) if s in text]
    if execution.finish_reason != "stop" or not met:
        return text, False
    at, string = min(met)
    return (text[: at + len(string)], True) if params.get("include_stop_str_in_output") else (text[:at], False)
