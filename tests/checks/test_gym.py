"""Each check of the gym generator's trajectories: green by the environment's rule, red on one damage."""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec
import pytest

from harness.checks import gym
from harness.checks.conservation import CONSERVATION
from harness.checks.experts import TRAJECTORY_EXPERTS
from harness.contract import gym_rule
from harness.contract.errors import Blame
from harness.contract.messages import GymOutput, GymRequest, TrajectoryId
from harness.contract.vocabulary import TINY
from harness.records.recording import CallError
from harness.records.reference import Noise, NoiseRequest
from tests import traces
from tests.checks.scene import GREEDY, SERVERS, STEP, Scene, home

PROMPTS = [[{"role": "user", "content": word}] for word in ("three", "blind", "mice")]
TURNS = [1, 2, 3]


def trajectories(scene: Scene, *, logprobs: bool = False) -> GymOutput:
    """Appends trajectories of one to three turns to the scene as one call, as a correct generator makes them."""
    params = {**GREEDY, **({"logprobs": 1} if logprobs else {})}
    request = GymRequest(
        prompts=PROMPTS,
        env_extras=[{"turns": turns} for turns in TURNS],
        trajectory_ids=[TrajectoryId(instance_id=str(row), repetition_id=0) for row in range(len(PROMPTS))],
        max_turns=3,
        sampling_params=params,
    )
    started = scene.pass_time()
    columns: dict[str, list[Any]] = {name: [] for name in (*gym.COLUMNS, "rollout_logprobs")}
    for row, messages in enumerate(PROMPTS):
        prompt = scene.reference.render(messages)
        response, mask, rewards, numbers = [], [], [], []
        for turn in range(1, TURNS[row] + 1):
            context = prompt + response
            answer = list(scene.reference.greedy(context, 6, version=0))
            seen = traces.executed(
                context, answer, server=home(f"{row}_0"), params=params, from_ns=scene.pass_time(), step_ns=STEP
            )
            scene.seen += seen
            scene.pass_time(8)
            said = gym_rule.step(traces.decode(answer), turn, request.env_extras[row], 3)
            observed = (
                []
                if said.done
                else traces.encode("\n" + TINY.rendered([{"role": "user", "content": said.observation}]))
            )
            response += answer + observed
            mask += [1] * len(answer) + [0] * len(observed)
            rewards += [0.0] * (len(answer) - 1) + [said.reward] + [0.0] * len(observed)
            question = gym.ScoreRequest(version=0, prompt=context, tokens=answer)
            numbers += [*scene.reference.score(question).logprobs, *[0.0] * len(observed)]
        for name, value in zip(columns, (prompt, response, rewards, mask, "length", numbers), strict=True):
            columns[name].append(value)
    lengths = [len(response) for response in columns["response_ids"]]
    if not logprobs:
        columns["rollout_logprobs"] = []
    output = GymOutput(
        **(columns | {"rollout_logprobs": columns["rollout_logprobs"] or None}),  # type: ignore[arg-type]
        rollout_expert_indices=[
            scene.reference.routed([*prompt, *response][:-1])
            for prompt, response in zip(columns["prompt_token_ids"], columns["response_ids"], strict=True)
        ],
        rollout_metrics={
            "generate/min_num_tokens": min(lengths),
            "generate/max_num_tokens": max(lengths),
            "generate/avg_num_tokens": statistics.fmean(lengths),
            "generate/std_num_tokens": statistics.pstdev(lengths),
            "generate/avg_tokens_non_zero_rewards": statistics.fmean(
                [n for n, rewards in zip(lengths, columns["rewards"], strict=True) if sum(rewards) > 0] or [0]
            ),
            "generate/avg_tokens_zero_rewards": statistics.fmean(
                [n for n, rewards in zip(lengths, columns["rewards"], strict=True) if sum(rewards) == 0] or [0]
            ),
            "environment/turns": sum(TURNS) / 3,
        },
    )
    scene.calls.append(traces.call("gym_generate", request, output, started_ns=started, ended_ns=scene.pass_time()))
    return output


def damaged(scene: Scene, **columns: Any) -> Scene:
    """The same call with other columns in its result."""
    call = scene.calls[-1]
    scene.change(call, result={**(call.result or {}), **columns})
    return scene


@pytest.mark.parametrize("check", gym.TRAJECTORIES, ids=lambda check: check.name)
def test_right_trajectories_pass(check):
    scene = Scene()
    trajectories(scene)
    assert scene.judge(check).status == "pass"


def test_every_turn_is_a_row_that_an_engine_served():
    scene = Scene()
    trajectories(scene)
    assert scene.judge(CONSERVATION).status == "pass"


def test_a_turn_whose_server_died_was_made_by_the_other():
    scene = Scene()
    trajectories(scene)
    whole = next(one for one in scene.seen if one.kind == "request" and one.data["sampling_params"] == GREEDY)
    other = next(server for server in SERVERS if server != whole.server)
    prompt = whole.data["prompt_token_ids"]
    begun = scene.reference.greedy(prompt, 2, version=0)
    scene.seen += traces.executed(
        prompt, begun, server=other, params=GREEDY, reason=None, from_ns=whole.at_ns - 1, step_ns=1
    )
    scene.calls.append(traces.call("kill_server", {"server": other}, {}))
    for check in (gym.TOKENS, gym.REWARDS, CONSERVATION):
        assert scene.judge(check).status == "pass"


def test_what_a_generator_that_failed_left_behind_goes_on():
    scene = Scene()
    trajectories(scene)
    first = min(one.at_ns for one in scene.seen if one.data.get("sampling_params") == GREEDY)
    failed = CallError(kind="ConnectionError", message="the server is gone", blame=Blame.STACK)
    scene.change(scene.calls[-1], result=None, error=failed, ended_ns=first + 1)
    assert scene.judge(CONSERVATION).status == "pass"


@pytest.mark.parametrize(
    ("fails", "of_the_first", "extras", "status"),
    [
        (True, True, {}, "fail"),
        (True, False, {}, "pass"),
        (True, False, {"fails": 1}, "untestable"),
        (False, False, {}, "untestable"),
    ],
    ids=["others go on", "none goes on", "no others", "no error"],
)
def test_trajectories_end_with_the_error_of_their_request(fails, of_the_first, extras, status):
    scene = Scene()
    trajectories(scene)
    if fails:
        first = min(one.at_ns for one in scene.seen if one.data.get("sampling_params") == GREEDY)
        failed = CallError(kind="RuntimeError", message="the environment breaks in turn 1", blame=Blame.STACK)
        ended = first + 1 if of_the_first else max(one.at_ns for one in scene.seen) + 1
        request = scene.calls[-1].request
        asked = [one | extras for one in request["env_extras"]]
        changed = request | {"env_extras": asked, "max_turns": 3 if of_the_first else 4}
        scene.change(scene.calls[-1], result=None, error=failed, ended_ns=ended, request=changed)
    assert scene.judge(gym.FAILED).status == status


def swap(rows: list[Any]) -> list[Any]:
    return [rows[1], rows[0], *rows[2:]]


@pytest.mark.parametrize(
    ("check", "column", "change"),
    [
        (gym.ORDER, "prompt_token_ids", swap),
        (gym.TOKENS, "response_ids", lambda rows: [*rows[:2], rows[2][:-1]]),
        (gym.LOSS_MASKS, "loss_masks", lambda rows: [*rows[:1], [1] * len(rows[1]), *rows[2:]]),
        (gym.LOSS_MASKS, "loss_masks", lambda rows: [rows[0][:-1], *rows[1:]]),
        (gym.REWARDS, "rewards", lambda rows: [[0.0, *rows[0][:-1]], *rows[1:]]),
        (gym.REWARDS, "rewards", lambda rows: [rows[0], [*rows[1], 0.0], rows[2]]),
        (gym.STOP_REASONS, "stop_reasons", lambda rows: ["stop", *rows[1:]]),
        (gym.METRICS, "rollout_metrics", lambda metrics: metrics | {"environment/turns": 1.0}),
        (gym.METRICS, "rollout_metrics", lambda metrics: metrics | {"generate/std_num_tokens": 0.0}),
        (gym.METRICS, "rollout_metrics", lambda metrics: metrics | {"generate/avg_assistant_tokens": 0.0}),
        (gym.METRICS, "rollout_metrics", lambda metrics: {**metrics, "generate/min_num_tokens": math.nan}),
        (gym.METRICS, "rollout_metrics", lambda _: {}),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_a_damaged_column_is_red(check, column, change):
    scene = Scene()
    output = trajectories(scene)
    assert damaged(scene, **{column: change(getattr(output, column))}).judge(check).status == "fail"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: None, "routed experts are missing"),
        (lambda rows: [rows[0], None, rows[2]], "routed experts are missing"),
        (
            lambda rows: [*rows[:2], [*rows[2], [[0, 1], [0, 1]]]],
            "there are not routed experts for each token that was fed to the model",
        ),
        (
            lambda rows: [rows[0], rows[1], rows[2][:-1]],
            "there are not routed experts for each token that was fed to the model",
        ),
        (lambda rows: [*rows[:2], [rows[2][0], *rows[2][:-1]]], "routed experts are shifted against the tokens"),
    ],
)
def test_experts_of_trajectories_are_the_references_but_for_the_last_token(change, reason):
    scene = Scene()
    output = trajectories(scene)
    assert scene.judge(TRAJECTORY_EXPERTS).status == "pass"
    found = damaged(scene, rollout_expert_indices=change(output.rollout_expert_indices)).judge(TRAJECTORY_EXPERTS)
    assert (found.status, found.reason) == ("fail", reason)


def test_fewer_trajectories_than_prompts_are_red():
    scene = Scene()
    output = trajectories(scene)
    assert damaged(scene, response_ids=output.response_ids[:2]).judge(gym.TOKENS).status == "fail"


def test_log_probabilities_are_the_references_and_zero_on_observations():
    scene = Scene()
    output = trajectories(scene, logprobs=True)
    assert scene.judge(gym.LOGPROBS).status == "pass"
    first, second, third = output.rollout_logprobs or []
    assert second is not None
    shifted = [first, [0.0, *second[:-1]], third]
    assert damaged(scene, rollout_logprobs=shifted).judge(gym.LOGPROBS).status == "fail"


@pytest.mark.parametrize(
    ("place", "rounded", "status"),
    [(0, "first", "pass"), (0, "last", "fail"), (6, "first", "fail")],
    ids=["the turn's own rounding", "another turn's", "an observation, which has none"],
)
def test_in_16_bits_only_the_rounding_of_the_turn_itself_counts(place, rounded, status):
    scene = Scene()
    output = trajectories(scene, logprobs=True)
    scene.reference.set(NoiseRequest(), Noise(largest=0.2, rms=0.05))
    prompt, response = output.prompt_token_ids[1], output.response_ids[1]
    start, stop = (0, 6) if rounded == "first" else (len(response) - 6, len(response))
    asked = gym.ScoreRequest(version=0, prompt=[*prompt, *response[:start]], tokens=response[start:stop])
    scene.reference.set(asked, msgspec.structs.replace(scene.reference.score(asked), rounding=(0.3,) * 6))
    first, second, third = output.rollout_logprobs or []
    assert second is not None
    moved = [x - 0.5 if at == place else x for at, x in enumerate(second)]
    found = damaged(scene, rollout_logprobs=[first, moved, third]).judge(
        gym.LOGPROBS, model={"name": "tiny", "sha256": "0" * 64, "dtype": "bfloat16"}
    )
    assert found.status == status


def test_an_environment_ends_by_turns_and_by_what_it_reads():
    assert not gym_rule.step("abc", 1, {}, 3).done
    assert gym_rule.step("abc", 3, {}, 3).done
    assert gym_rule.step("abc", 1, {"until": "xc"}, 3).done
    assert gym_rule.step("<|im_end|>", 1, {"until": "i"}, 3).done is False
    assert gym_rule.step("<|im_end|>", 1, {"until": "i", "strict": True}, 3).done


# --- all turns one message ------------------------------------------------------------------------------------------


def one_message(scene: Scene, *, ended: bool = True) -> GymOutput:
    """Appends a trajectory of one turn as a call; it ends by an end of sequence that the policy made, or by a stop token."""
    params = {**GREEDY, "logprobs": 1, "stop_token_ids": [1]}
    request = GymRequest(
        prompts=PROMPTS[:1], env_extras=[{}], use_conversation_multi_turn=False, sampling_params=params
    )
    started, prompt = scene.pass_time(), scene.reference.render(PROMPTS[0])
    kept = list(scene.reference.greedy(prompt, 5, version=0))
    answer = [*kept, TINY.eos] if ended else kept
    scene.seen += traces.executed(
        prompt, answer, server=SERVERS[0], params=params, reason="stop", from_ns=scene.pass_time(), step_ns=STEP
    )
    scene.pass_time(8)
    numbers = scene.reference.score(gym.ScoreRequest(version=0, prompt=prompt, tokens=answer)).logprobs
    output = GymOutput(
        prompt_token_ids=[prompt],
        response_ids=[[*kept, TINY.eos]],
        rewards=[[0.0] * 5 + [gym_rule.step(traces.decode(answer), 1, {}, 1).reward]],
        loss_masks=[[1] * 6],
        stop_reasons=["stop"],
        rollout_logprobs=[[*numbers, *[0.0] * (6 - len(answer))]],
        rollout_metrics={},
    )
    scene.calls.append(traces.call("gym_generate", request, output, started_ns=started, ended_ns=scene.pass_time()))
    return output


@pytest.mark.parametrize("check", [gym.TOKENS, gym.LOSS_MASKS, gym.REWARDS, gym.LOGPROBS], ids=lambda check: check.name)
def test_a_message_that_the_policy_ends_passes(check):
    scene = Scene()
    one_message(scene)
    assert scene.judge(check).status == "pass"


def test_an_end_of_sequence_that_the_policy_made_has_its_log_probability():
    scene = Scene()
    first = (one_message(scene).rollout_logprobs or [])[0]
    assert damaged(scene, rollout_logprobs=[[*first[:-1], 0.0]]).judge(gym.LOGPROBS).status == "fail"


def test_an_end_of_sequence_that_the_policy_did_not_make_has_none():
    scene = Scene()
    first = (one_message(scene, ended=False).rollout_logprobs or [])[0]
    assert scene.judge(gym.LOGPROBS).status == "untestable"
    assert damaged(scene, rollout_logprobs=[[*first[:-1], -1.0]]).judge(gym.LOGPROBS).status == "fail"


# --- each turn a trajectory of its own ------------------------------------------------------------------------------


def steps(scene: Scene) -> GymOutput:
    """Appends the same conversations as one call, step by step."""
    ids = [TrajectoryId(instance_id=str(row), repetition_id=0) for row in range(len(PROMPTS))]
    request = GymRequest(
        prompts=PROMPTS,
        env_extras=[{"turns": turns} for turns in TURNS],
        trajectory_ids=ids,
        max_turns=3,
        step_wise=True,
        sampling_params={**GREEDY, "ignore_eos": True},
    )
    started = scene.pass_time()
    names = (*gym.COLUMNS, "trajectory_ids", "is_last_step")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row, messages in enumerate(PROMPTS):
        history = list(messages)
        for turn in range(1, TURNS[row] + 1):
            prompt = scene.reference.render(history)
            answer = list(scene.reference.greedy(prompt, 6, version=0))
            server, params = home(f"{row}_0"), request.sampling_params
            scene.seen += traces.executed(
                prompt, answer, server=server, params=params, from_ns=scene.pass_time(), step_ns=STEP
            )
            scene.pass_time(8)
            text = traces.decode(answer)
            said = gym_rule.step(text, turn, request.env_extras[row], 3)
            user = {"role": "user", "content": said.observation}
            observed = traces.encode("\n" + TINY.rendered([user], add_generation_prompt=not said.done))
            history += [{"role": "assistant", "content": text}, user]
            rewards = [0.0] * (len(answer) - 1) + [said.reward] + [0.0] * len(observed)
            mask = [1] * len(answer) + [0] * len(observed)
            one = (prompt, answer + observed, rewards, mask, "length", ids[row], turn == TURNS[row])
            for name, value in zip(names, one, strict=True):
                columns[name].append(value)
    lengths = [len(response) for response in columns["response_ids"]]
    output = GymOutput(
        **columns,
        rollout_metrics={
            "generate/min_num_tokens": min(lengths),
            "generate/max_num_tokens": max(lengths),
            "generate/avg_num_tokens": statistics.fmean(lengths),
            "generate/std_num_tokens": statistics.pstdev(lengths),
            "generate/avg_tokens_non_zero_rewards": statistics.fmean(lengths),
            "generate/avg_tokens_zero_rewards": 0.0,
        },
    )
    scene.calls.append(traces.call("gym_generate", request, output, started_ns=started, ended_ns=scene.pass_time()))
    return output


@pytest.mark.parametrize("check", [*gym.TRAJECTORIES, gym.STEPS, CONSERVATION], ids=lambda check: check.name)
def test_right_steps_pass(check):
    scene = Scene()
    assert len(steps(scene).response_ids) == sum(TURNS)
    assert scene.judge(check).status == "pass"


@pytest.mark.parametrize(
    ("check", "column", "change"),
    [
        (gym.STEPS, "is_last_step", lambda rows: [*rows[:-1], False]),
        (gym.STEPS, "is_last_step", lambda rows: None),
        (gym.STEPS, "trajectory_ids", swap),
        (gym.STEPS, "trajectory_ids", lambda rows: rows[:-1]),
        (gym.ORDER, "prompt_token_ids", swap),
        (gym.TOKENS, "response_ids", lambda rows: rows[:-1]),
        (gym.LOSS_MASKS, "loss_masks", lambda rows: [[1] * len(rows[0]), *rows[1:]]),
        (gym.REWARDS, "rewards", lambda rows: [*rows[:-1], rows[-1][::-1]]),
    ],
)
def test_a_damaged_column_of_steps_is_red(check, column, change):
    scene = Scene()
    output = steps(scene)
    changed = msgspec.to_builtins(change(getattr(output, column)))
    assert damaged(scene, **{column: changed}).judge(check).status == "fail"


def test_steps_say_nothing_of_single_turns_or_without_a_special_token():
    scene = Scene()
    output = steps(scene)
    call = scene.calls[-1]
    params = {**call.request["sampling_params"], "ignore_eos": False}
    scene.change(call, request={**call.request, "sampling_params": params})
    plain = msgspec.structs.replace(TINY, special=())
    assert scene.judge(gym.STEPS, vocabulary=plain).reason == "no step follows an answer with a special token"
    alone = {name: column[:1] for name, column in msgspec.to_builtins(output).items() if isinstance(column, list)}
    one = {name: call.request[name][:1] for name in ("prompts", "env_extras", "trajectory_ids")}
    scene.change(scene.calls[-1], request={**call.request, **one}, result={**(call.result or {}), **alone})
    assert scene.judge(gym.STEPS).reason == "no trajectory has a second step"


@pytest.mark.parametrize("step_wise", [False, True])
def test_what_was_cut_short_earns_nothing_where_that_is_asked(step_wise):
    scene = Scene()
    output = (steps if step_wise else trajectories)(scene)
    call = scene.calls[-1]
    scene.change(call, request={**call.request, "zero_reward_on_non_stop": True})
    assert scene.judge(gym.REWARDS).status == "fail"
    damaged(scene, rewards=[[0.0] * len(row) for row in output.rewards if isinstance(row, list)])
    found = scene.judge(gym.REWARDS)
    assert (found.status, found.reason) == (
        "untestable",
        "no answer was cut short, or none was ended by a stop token",
    )
    assert scene.judge(gym.METRICS).status == "pass"


# --- a chat template of the generator's own -------------------------------------------------------------------------


def retokenized(scene: Scene) -> GymOutput:
    """Appends the same conversations as one call, each turn and the result made of the texts."""
    request = GymRequest(
        prompts=PROMPTS,
        env_extras=[{"turns": turns} for turns in TURNS],
        trajectory_ids=[TrajectoryId(instance_id=str(row), repetition_id=0) for row in range(len(PROMPTS))],
        max_turns=3,
        chat_template=gym_rule.CHAT_TEMPLATE,
        sampling_params=GREEDY,
    )
    started = scene.pass_time()
    columns: dict[str, list[Any]] = {name: [] for name in gym.COLUMNS}
    for row, messages in enumerate(PROMPTS):
        said: list[dict[str, str]] = []
        for turn in range(1, TURNS[row] + 1):
            context = traces.encode(gym_rule.templated([*messages, *said]))
            answer = list(scene.reference.greedy(context, 6, version=0))
            scene.seen += traces.executed(
                context, answer, server=home(f"{row}_0"), params=GREEDY, from_ns=scene.pass_time(), step_ns=STEP
            )
            scene.pass_time(8)
            text = traces.decode(answer)
            step = gym_rule.step(text, turn, request.env_extras[row], 3)
            said += [{"role": "assistant", "content": text}, {"role": "user", "content": step.observation}]
        made = [(token, int(own)) for text, own in gym_rule.pieces(said[:-1]) for token in traces.encode(text)]
        tokens, mask = map(list, zip(*made, strict=True))
        one = (traces.encode(gym_rule.templated(messages)), tokens, step.reward, mask, "length")
        for name, value in zip(gym.COLUMNS, one, strict=True):
            columns[name].append(value)
    lengths, own = [len(tokens) for tokens in columns["response_ids"]], [sum(mask) for mask in columns["loss_masks"]]
    output = GymOutput(
        **columns,
        rollout_metrics={
            "generate/min_num_tokens": min(lengths),
            "generate/max_num_tokens": max(lengths),
            "generate/avg_num_tokens": statistics.fmean(lengths),
            "generate/std_num_tokens": statistics.pstdev(lengths),
            "generate/avg_tokens_non_zero_rewards": statistics.fmean(lengths),
            "generate/avg_tokens_zero_rewards": 0.0,
            "generate/avg_assistant_tokens": statistics.fmean(own),
            "environment/turns": statistics.fmean(TURNS),
        },
    )
    scene.calls.append(traces.call("gym_generate", request, output, started_ns=started, ended_ns=scene.pass_time()))
    return output


@pytest.mark.parametrize("check", [*gym.TRAJECTORIES, CONSERVATION], ids=lambda check: check.name)
def test_right_trajectories_of_a_template_pass(check):
    scene = Scene()
    retokenized(scene)
    assert scene.judge(check).status == "pass"


@pytest.mark.parametrize(
    ("check", "column", "change"),
    [
        (gym.ORDER, "prompt_token_ids", swap),
        (gym.TOKENS, "response_ids", lambda rows: [rows[0][:-1], *rows[1:]]),
        (gym.LOSS_MASKS, "loss_masks", lambda rows: [[1] * len(rows[0]), *rows[1:]]),
        (gym.REWARDS, "rewards", swap),
    ],
)
def test_a_damaged_column_of_a_template_is_red(check, column, change):
    scene = Scene()
    output = retokenized(scene)
    assert damaged(scene, **{column: change(getattr(output, column))}).judge(check).status == "fail"


# --- the length of prompts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [steps, retokenized])
def test_no_turn_begins_on_a_prompt_that_is_too_long(make):
    scene = Scene()
    make(scene)
    assert scene.judge(gym.INPUT_LENGTH).reason == "no trajectory ended by its length"
    longest = max(len(one.data["prompt_token_ids"]) for one in scene.seen if one.kind == "request")
    going_on = scene.calls[-1].request | {"env_extras": [{"turns": 1}, {"turns": 2}, {}], "max_turns": 4}
    scene.change(scene.calls[-1], request=going_on | {"max_input_length": longest})
    for check in (gym.INPUT_LENGTH, gym.STOP_REASONS, CONSERVATION, *([gym.STEPS] if make is steps else [])):
        assert scene.judge(check).status == "pass"
    scene.change(scene.calls[-1], request=going_on | {"max_input_length": longest - 1})
    found = scene.judge(gym.INPUT_LENGTH)
    assert (found.status, found.reason) == (
        "fail",
        "a turn began although its prompt is longer than max_input_length",
    )
    assert scene.judge(CONSERVATION).status == "pass"
