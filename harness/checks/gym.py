"""Trajectories of the gym generator: order, tokens, loss masks, rewards, stop reasons, log-probabilities.

`trajectories` derives the right ones from the prompts, the engines' executions and the environment's rule.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.checks import matching
from harness.checks.answers import short, unexpected
from harness.checks.base import Check, Evidence, Finding, Tap, concluded, failed, passed, together, untestable
from harness.checks.logprobs import Distances, farthest, seeded
from harness.checks.trajectories import Trajectory, trajectories
from harness.contract.faults import NOTHING, ROWS, Fact
from harness.records.differing import parting
from harness.records.recording import Call
from harness.records.reference import Query, ScoreRequest
from harness.records.verdict import Margin

SOURCE = "SkyRL, GeneratorInterface.generate and GeneratorOutput; SkyRL documentation, SkyRLGymGenerator"
COLUMNS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")
BROKEN = "a turn's prompt was read by no engine"
REWARD_EPSILON = 1e-9
"""Sums of rewards are exact, since rewards are sixteenths: this tolerates only how they are written."""

METRIC_EPSILON = 1e-6
"""Means of some dozens of numbers: far above what the order of summation changes, far below the share of one token."""

Rule = Callable[[Trajectory, dict[str, Any]], tuple[int, str | None, dict[str, Any]]]
"""(right trajectory, the result's columns in this row) → (facts, what is wrong or None, both sides)."""


def with_columns(evidence: Evidence) -> Finding | list[tuple[Trajectory, dict[str, Any]]]:
    """Each right trajectory with the columns that came back; or a finding if they cannot be compared."""
    calls = evidence.calls("gym_generate")
    if not calls:
        return untestable("no call of gym_generate was recorded")
    wrong = [unexpected(call) for call in calls if call.error is not None]
    wrong += [finding for call in calls if call.error is None and (finding := _uneven(evidence, call)) is not None]
    return together(wrong) if wrong else [(t, _columns(t)) for t in trajectories(evidence)]


def _uneven(evidence: Evidence, call: Call) -> Finding | None:
    """A result with another number of rows than of prompts, or of steps."""
    result, what = call.result or {}, "steps" if call.request.get("step_wise") else "prompts"
    right = len(call.request["prompts"])
    if call.request.get("step_wise"):
        right = sum(t.call.id == call.id for t in trajectories(evidence))
    uneven = [name for name in COLUMNS if len(result[name]) != right]
    if not uneven:
        return None
    shown = {"call": call.id, what: right, "returned": {name: len(result[name]) for name in COLUMNS}}
    return failed(1, f"gym_generate() returned another number of {', '.join(uneven)} than of {what}", [shown])


def _columns(trajectory: Trajectory) -> dict[str, Any]:
    result = trajectory.call.result or {}
    row = {name: result[name][trajectory.index] for name in COLUMNS}
    labels = {name: result.get(name) for name in ("rollout_logprobs", "trajectory_ids", "is_last_step")}
    here = trajectory.index
    return row | {name: column[here] if column and here < len(column) else None for name, column in labels.items()}


Unseen = Callable[[Evidence, Sequence[Trajectory]], str]
"""What the trajectories cannot show; empty if they can show all. A fault that they show nevertheless is red."""


def _check(
    name: str,
    fault: str,
    rule: Rule,
    *,
    source: str = SOURCE,
    falsifies: Fact = NOTHING,
    unseen: Unseen = lambda _evidence, _found: "",
) -> Check:
    def judge(evidence: Evidence) -> Finding:
        found = with_columns(evidence)
        if isinstance(found, Finding):
            return found
        facts, wrong = 0, []
        for trajectory, row in found:
            judged, reason, shown = rule(trajectory, row)
            facts += judged
            if reason is not None:
                wrong.append((reason, shown_trajectory(trajectory) | shown))
        lacks = "" if wrong else unseen(evidence, [trajectory for trajectory, _ in found])
        return untestable(lacks) if lacks else concluded(facts, wrong)

    reads = Fact.ANSWERS | Fact.TEXT
    return Check(
        name=name,
        fault=fault,
        next_step="compare the trajectory in the evidence turn by turn with the executions of its session: the first "
        "turn that differs is the place",
        source=source,
        reads=reads,
        falsifies=falsifies,
        tap=Tap.READ,
        judge=judge,
        queries=matching.queries,
    )


def shown_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    call = trajectory.call
    return {**call.named, "row": trajectory.index, "request": short(call.request)}


def _both(expected: Any, got: Any) -> dict[str, Any]:
    """Both sides; lists where they part."""
    lists = isinstance(expected, list) and isinstance(got, list)
    return parting(expected=expected, got=got) if lists else {"expected": expected, "got": got}


def _order(trajectory: Trajectory, row: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    expected, got = list(trajectory.prompt), row["prompt_token_ids"]
    wrong = None if got == expected else "a trajectory does not begin with its own prompt"
    return 1, wrong, _both(expected, got)


ORDER = _check(
    "gym.order",
    "trajectories come back in another order than their prompts, or under another prompt",
    _order,
    falsifies=ROWS,
)


def _tokens(trajectory: Trajectory, row: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    if not trajectory.whole:
        unread = trajectory.turns[-1].prompt if trajectory.turns else trajectory.prompt
        return 1, BROKEN, {"turns": len(trajectory.turns), "the prompt ends in": list(unread[-16:])}
    expected, got = trajectory.response, row["response_ids"]
    wrong = None if got == expected else "a trajectory is not what the engines made and the environment said"
    return len(expected), wrong, _both(expected, got)


def _unstopped(_evidence: Evidence, found: Sequence[Trajectory]) -> str:
    asked = [t for t in found if t.call.request["sampling_params"].get("include_stop_str_in_output")]
    if not asked or any(turn.stopped for t in asked for turn in t.turns):
        return ""
    return "no stop string ended an answer in a conversation"


TOKENS = _check(
    "gym.tokens",
    "a turn is lost, changed, or read by the engine as other tokens than the trajectory has",
    _tokens,
    unseen=_unstopped,
    source=f'{SOURCE}: "token-in-token-out"',
    falsifies=ROWS,
)


def _masks(trajectory: Trajectory, row: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    if len(row["loss_masks"]) != len(row["response_ids"]):
        return 1, "a loss mask is not as long as its response", _both(row["response_ids"], row["loss_masks"])
    expected, got = trajectory.loss_mask, row["loss_masks"]
    wrong = None if got == expected else "a loss mask is not 1 on the policy's own tokens and 0 on all others"
    return len(expected), wrong, _both(expected, got)


def _unfiltered(evidence: Evidence, found: Sequence[Trajectory]) -> str:
    return _one_kind_only(evidence, [t for t in found if t.call.request.get("overlong_filtering")])


def _one_kind_only(evidence: Evidence, asked: Sequence[Trajectory]) -> str:
    whole = [t for t in asked if t.whole]
    cut = any(t.stop_reason != "stop" for t in whole)
    stopped = any(t.stop_reason == "stop" and t.response[-1] != evidence.header.vocabulary.eos for t in whole)
    return "" if not whole or (cut and stopped) else "no answer was cut short, or none was ended by a stop token"


LOSS_MASKS = _check(
    "gym.loss_masks",
    "the policy is trained on what the environment said, or not on what it said itself, or overlong filtering takes the wrong answers",
    _masks,
    unseen=_unfiltered,
)


def _rewards(trajectory: Trajectory, row: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    got = row["rewards"]
    per_token = isinstance(got, list)
    expected: Any = trajectory.rewards if per_token else sum(trajectory.rewards)
    if per_token and len(got) != len(row["response_ids"]):
        return 1, "there is not one reward a token", _both(row["response_ids"], got)
    ours, theirs = (expected, got) if per_token else ([expected], [got])
    same = len(ours) == len(theirs) and all(abs(a - b) <= REWARD_EPSILON for a, b in zip(ours, theirs, strict=True))
    return len(trajectory.turns), None if same else "a reward is not the environment's", _both(expected, got)


def _unearned(evidence: Evidence, found: Sequence[Trajectory]) -> str:
    zeroed = [t for t in found if t.call.request.get("zero_reward_on_non_stop")]
    return _one_kind_only(evidence, zeroed) or _read_no_special(evidence, found)


def _read_no_special(evidence: Evidence, found: Sequence[Trajectory]) -> str:
    strict = [t for t in found if t.call.request["env_extras"][t.asked].get("strict")]
    special = set(evidence.header.vocabulary.special)
    if not strict or any(special.intersection(turn.tokens) for t in strict for turn in t.turns):
        return ""
    return "no environment that minds special tokens read an answer with one"


REWARDS = _check(
    "gym.rewards",
    "a reward is another trajectory's, another turn's, lies on another token, or is one for an answer that is to have none",
    _rewards,
    unseen=_unearned,
)


def _stop_reasons(trajectory: Trajectory, row: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    expected, got = trajectory.stop_reason, row["stop_reasons"]
    wrong = None if got == expected else f"a trajectory ended by {got}, and is to end by {expected}"
    return 1, wrong, _both(expected, got)


STOP_REASONS = _check(
    "gym.stop_reasons", "a truncated trajectory passes for a whole one, or the other way round", _stop_reasons
)


def _steps(trajectory: Trajectory, row: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    ids = trajectory.call.request["trajectory_ids"]
    expected = {"trajectory": ids[trajectory.asked], "last": trajectory.last}
    got = {"trajectory": row["trajectory_ids"], "last": row["is_last_step"]}
    wrong = None if got == expected else "a step has another trajectory's id, or is wrongly the last"
    return 2, wrong, _both(expected, got)


def _without_history(evidence: Evidence, found: Sequence[Trajectory]) -> str:
    special = set(evidence.header.vocabulary.special)
    ended = [t for t in found if not t.call.request["sampling_params"].get("ignore_eos")]
    if not any(t.last is False for t in found):
        return "no trajectory has a second step"
    if ended and not any(t.last is False and special.intersection(t.turns[0].tokens) for t in ended):
        return "no step follows an answer with a special token"
    return ""


STEPS = _check(
    "gym.steps",
    "a step is another trajectory's, or the wrong one is called the last: advantages go to the wrong steps",
    _steps,
    unseen=_without_history,
    source="SkyRL documentation, Step-Wise Training; SkyRL, GeneratorOutput.is_last_step",
)


def _input_length(trajectory: Trajectory, _row: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    most = trajectory.call.request["max_input_length"]
    lengths = [len(turn.prompt) for turn in trajectory.turns]
    over = max(lengths, default=0) > most
    wrong = "a turn began although its prompt is longer than max_input_length" if over else None
    return len(lengths), wrong, {"max_input_length": most, "the turns' prompts": lengths}


def _uncut(_evidence: Evidence, found: Sequence[Trajectory]) -> str:
    return "" if any(t.cut for t in found) else "no trajectory ended by its length"


INPUT_LENGTH = _check(
    "gym.input_length",
    "a turn begins on a prompt longer than the configuration allows, because another one's length was compared",
    _input_length,
    unseen=_uncut,
    source='SkyRL, GeneratorConfig.max_input_length: "the maximum input length used for the conversation at each turn"',
)


def _turn_scores(evidence: Evidence, trajectory: Trajectory) -> Iterator[tuple[int, ScoreRequest]]:
    """Each turn's offset in the response, and the question for its teacher-forced scores."""
    at = 0
    for turn in trajectory.turns:
        version = evidence.version_at(trajectory.call.started_ns)
        end = trajectory.sampled_end if turn is trajectory.turns[-1] else ()
        yield at, ScoreRequest(version=version, prompt=list(turn.prompt), tokens=[*turn.kept, *end])
        at += len(turn.kept) + len(turn.others)


def _asks(evidence: Evidence) -> Iterator[Query]:
    yield from matching.queries(evidence)
    for trajectory in trajectories(evidence):
        yield from (question for _, question in _turn_scores(evidence, trajectory) if question.tokens)


def _judge_logprobs(evidence: Evidence) -> Finding:
    found = with_columns(evidence)
    if isinstance(found, Finding):
        return found
    facts, faults, turns, bound = 0, dict[str, float](), Distances(evidence), evidence.noise.near
    others = 0.0
    wrong: list[tuple[str, dict[str, Any]]] = []
    for trajectory, row in found:
        if (trajectory.call.request.get("sampling_params") or {}).get("logprobs") is None:
            continue
        got = row["rollout_logprobs"]
        if not isinstance(got, list) or len(got) != len(row["response_ids"]):
            wrong.append(("there is not one log-probability per token", shown_trajectory(trajectory)))
            continue
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in got):
            wrong.append(("a log-probability is not a finite number", shown_trajectory(trajectory)))
            continue
        whole = trajectory.call.request.get("batched") or len(got) == len(trajectory.response)
        if not whole or row["response_ids"] != trajectory.response[: len(got)]:
            continue  # `gym.tokens` reports tokens that are not the engines', and those that are missing at the end
        expected = _expected(evidence, trajectory, got, turns)
        for name, size in seeded(expected, exact=evidence.exact).items():
            faults[name] = max(faults.get(name, 0.0), size)
        facts += len(got)
        off, at = farthest(got, expected)
        others = max(others, off)
        if off > bound:
            reason = (
                "log-probabilities of a trajectory are not the reference's on the policy's tokens and 0 on the others"
            )
            shown = {"position": at, "got": got[at], "expected": expected[at]}
            wrong.append((reason, shown_trajectory(trajectory) | shown))
    if not facts and not wrong:
        return untestable("no trajectory has log-probabilities that were asked for")
    if not wrong and (lacks := _unended([trajectory for trajectory, _ in found])):
        return untestable(lacks)
    worst = max(others, turns.worst)
    if wrong:
        return concluded(facts + len(wrong), wrong, max_abs_error=worst, bound=bound)
    margin = Margin(unit="nats", measured=worst, bound=turns.bound, faults=faults)
    return passed(facts, margin=margin, max_abs_error=worst)


def _unended(found: Sequence[Trajectory]) -> str:
    asked = [t.call.request for t in found]
    if all(one["use_conversation_multi_turn"] or one["batched"] for one in asked) or any(t.sampled_end for t in found):
        return ""
    return "no trajectory of one message ended with an end of sequence that the policy made"


def _expected(evidence: Evidence, trajectory: Trajectory, got: list[float], turns: Distances) -> list[float]:
    """The reference's log-probabilities on the policy's own tokens, and 0 on all others (SkyRL: dummy values), for as many tokens as
    `got` has. Where a turn's rounding explains what `got` has for it, that. Adds each turn to `turns`."""
    expected = [0.0] * len(trajectory.response)
    for at, question in _turn_scores(evidence, trajectory):
        if question.tokens:
            score = evidence.reference.score(question)
            given = got[at : at + len(question.tokens)]
            off, _ = farthest(given, score.logprobs[: len(given)])
            turns.beyond(score, off)
            right = given if evidence.explained(score, off) else score.logprobs[: len(given)]
            expected[at : at + len(given)] = right
    return expected[: len(got)]


LOGPROBS = Check(
    name="gym.logprobs",
    fault="log-probabilities are another turn's, shifted against the tokens, on tokens that the policy did not make, or "
    "missing on one of its own",
    next_step="look at how the turns' numbers are joined: `position` in the evidence tells the turn, or the "
    "observation between two turns",
    reads=Fact.ANSWERS | Fact.TEXT | Fact.LOGPROBS | Fact.POLICY,
    source=SOURCE,
    tap=Tap.READ,
    judge=_judge_logprobs,
    queries=_asks,
)


def _judge_metrics(evidence: Evidence) -> Finding:
    found = with_columns(evidence)
    if isinstance(found, Finding):
        return found
    facts, told = 0, list[tuple[str, dict[str, Any]]]()
    for call in evidence.calls("gym_generate"):
        got = (call.result or {})["rollout_metrics"]
        expected, optional = _metrics([t for t, _ in found if t.call.id == call.id])
        expected |= {name: value for name, value in optional.items() if name in got}
        facts += len(expected)
        wrong = sorted(
            name for name, value in expected.items() if not abs(got.get(name, math.inf) - value) <= METRIC_EPSILON
        )
        shown = {"call": call.id, "expected": expected, "got": got}
        told += [(f"a rollout metric is wrong: {name}", shown) for name in wrong]
    return concluded(facts, told)


def _metrics(mine: Sequence[Trajectory]) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a call's trajectories: those of every release, and those of later ones (tokens of the policy's own). The latter
    are left out with overlong filtering: whether they count before it or after it is open. So are, for the same reason, those that
    look at rewards if some are taken back, and the environment's turns if each is a trajectory of its own."""
    tokens = [len(t.response) for t in mine]
    rewarded = [len(t.response) for t in mine if sum(t.earned) > 0]
    unrewarded = [len(t.response) for t in mine if sum(t.earned) == 0]
    always = {
        "generate/min_num_tokens": float(min(tokens)),
        "generate/max_num_tokens": float(max(tokens)),
        "generate/avg_num_tokens": statistics.fmean(tokens),
        "generate/std_num_tokens": statistics.pstdev(tokens),
        "generate/avg_tokens_non_zero_rewards": statistics.fmean(rewarded or [0]),
        "generate/avg_tokens_zero_rewards": statistics.fmean(unrewarded or [0]),
        "environment/turns": statistics.fmean(len(t.turns) for t in mine),
    }
    asked = mine[0].call.request
    if asked.get("zero_reward_on_non_stop"):
        always = {name: value for name, value in always.items() if not name.endswith("zero_rewards")}
    if asked.get("step_wise"):
        del always["environment/turns"]
    if asked.get("overlong_filtering"):
        return always, {}
    own = [sum(t.loss_mask) for t in mine]
    return always, {
        "generate/min_assistant_tokens": float(min(own)),
        "generate/max_assistant_tokens": float(max(own)),
        "generate/avg_assistant_tokens": statistics.fmean(own),
        "generate/std_assistant_tokens": statistics.pstdev(own),
    }


METRICS = Check(
    name="gym.metrics",
    fault="metrics leave out trajectories or turns",
    reads=Fact.ANSWERS | Fact.TEXT,
    source="SkyRL, get_rollout_metrics",
    tap=Tap.READ,
    judge=_judge_metrics,
    queries=matching.queries,
)


def _judge_failed(evidence: Evidence) -> Finding:
    calls = [call for call in evidence.calls("gym_generate") if call.error is not None]
    if not calls:
        return untestable("no call of gym_generate failed")
    cut_off, wrong = 0, []
    for trajectory in trajectories(evidence):
        call, asked = trajectory.call, trajectory.call.request
        begun = [turn.execution.started_ns for turn in trajectory.turns if turn.execution is not None]
        late = [at for at in begun if at > call.ended_ns]
        if call not in calls or asked["env_extras"][trajectory.asked].get("fails"):
            continue
        cut_off += len(begun) - len(late) < asked["max_turns"]
        if len(late) > 1:  # a single request may have been on its way
            shown = {"turns begun before the error": len(begun) - len(late), "after it": len(late)}
            wrong.append(
                (
                    "a trajectory goes on turn by turn after gym_generate() has failed",
                    shown_trajectory(trajectory) | shown,
                )
            )
    return concluded(cut_off, wrong) if cut_off else untestable("every other trajectory ended before the error")


FAILED = Check(
    name="gym.failed",
    fault="after an error that ends the whole request, its other trajectories go on at the engines, beside the next step's",
    next_step="look at how the generator gathers its trajectories: an error has to cancel the others, or to be kept until they end",
    reads=Fact.ANSWERS | Fact.TEXT,
    source="SkyRL #1613: one failed rollout ends the whole batch",
    tap=Tap.READ,
    judge=_judge_failed,
    queries=matching.queries,
)

TRAJECTORIES = (ORDER, TOKENS, LOSS_MASKS, REWARDS, STOP_REASONS, METRICS)
"""The checks of every scenario of the generator."""
