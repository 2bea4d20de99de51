"""SkyRL's own gym generator over an adapter's client, made as SkyRL's entry point makes it (main_base.py, get_generator).

Written for skyrl 0.1.0 to 0.4.0.
"""

from __future__ import annotations

import copy
from typing import Any

from backends.skyrl import results
from harness.contract import gym_rule
from harness.contract.messages import GymOutput, GymRequest
from harness.driving import raw

NAMES_POLICY = "resolve_policy_model_name"
"""SkyRL's function for the name of the policy, from 0.3.0 on."""


def generator(cfg: Any, client: Any, tokenizer: Any, request: GymRequest) -> Any:
    """A `SkyRLGymGenerator` with the request's settings and SkyRL's defaults. From 0.3.0 on it names the policy in each call."""
    from skyrl.backends.skyrl_train.inference_servers import utils
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

    from backends.skyrl import gym_env

    gym_env.register()
    raw.watch(SkyRLGymGenerator, "generator")
    generator_cfg = copy.deepcopy(cfg.generator)
    generator_cfg.max_turns = request.max_turns
    generator_cfg.max_input_length = request.max_input_length
    generator_cfg.batched = request.batched
    generator_cfg.step_wise_trajectories = request.step_wise
    generator_cfg.append_eos_token_after_stop_str_in_multi_turn = request.close_stopped
    generator_cfg.apply_overlong_filtering = request.overlong_filtering
    generator_cfg.zero_reward_on_non_stop = request.zero_reward_on_non_stop
    generator_cfg.use_conversation_multi_turn = request.use_conversation_multi_turn
    generator_cfg.chat_template.name_or_path = request.chat_template
    params = request.sampling_params if request.configured is None else request.configured
    generator_cfg.sampling_params.max_generate_length = params.get("max_tokens", 16)
    generator_cfg.sampling_params.logprobs = params.get("logprobs")
    generator_cfg.sampling_params.stop = params.get("stop")
    return SkyRLGymGenerator(
        generator_cfg=generator_cfg,
        skyrl_gym_cfg=cfg.environment.skyrl_gym,
        inference_engine_client=client,
        tokenizer=tokenizer,
        **({"policy_model_name": utils.resolve_policy_model_name(cfg)} if hasattr(utils, NAMES_POLICY) else {}),
    )


async def generate(cfg: Any, client: Any, tokenizer: Any, request: GymRequest) -> GymOutput:
    """One batch of trajectories. Raises SkyRL's errors."""
    from skyrl.train.generators.base import TrajectoryID

    made = generator(cfg, client, tokenizer, request)
    ids = request.trajectory_ids
    batch: dict[str, Any] = {
        "prompts": [list(messages) for messages in request.prompts],
        "env_classes": [gym_rule.ENV_CLASS] * len(request.prompts),
        "env_extras": [dict(extras) for extras in request.env_extras],
        "sampling_params": dict(request.sampling_params),
        "trajectory_ids": None if ids is None else [TrajectoryID(i.instance_id, i.repetition_id) for i in ids],
        "batch_metadata": None,
    }
    output = await made.generate(batch, disable_tqdm=True)
    if made.env_executor is not None:  # after an error other trajectories may still need it
        made.env_executor.shutdown(wait=False)
    return results.trajectories(output)
