"""The scenarios' skyrl-gym environment: `harness.contract.gym_rule` as a `BaseTextEnv`. Imported in a stack's environment only."""

from __future__ import annotations

from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from harness.contract import gym_rule


class LettersEnv(BaseTextEnv):
    """Rewards letters. Ignores `env_config`."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - as called
        super().__init__()
        self.extras = extras or {}
        self.max_turns = int(self.extras["max_turns"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        reward, done, observation = gym_rule.step(action, self.turns, self.extras, self.max_turns)
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": observation}], reward=reward, done=done, metadata={}
        )

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns}


def register() -> None:
    """Register the environment with skyrl-gym, once."""
    if gym_rule.ENV_CLASS not in skyrl_gym.registry:
        skyrl_gym.register(id=gym_rule.ENV_CLASS, entry_point="backends.skyrl.gym_env:LettersEnv")
