"""Rollouts, a toy reward and steps of training, for scenarios that train."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import msgspec

from harness.contract.messages import TrainRequest, TrainResult
from harness.contract.vocabulary import Vocabulary
from harness.driving.stack import Stack
from scenarios.requests import ANSWER

PROMPTS = 8
GROUP = 6
"""Samples per prompt: an advantage is a sample's reward in units of its group."""
LEARNING_RATE = 12.0
"""Length of a step that teaches the tiny model. The trainer takes a part of it if all of it would ruin a policy (`MOST_KL`)."""
REWARDED = range(3, 97)
SAMPLED: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """One row per sample, group after group."""

    prompts: list[list[int]]
    responses: list[list[int]]
    logprobs: list[list[float]]


def reward(response: list[int], vocabulary: Vocabulary) -> float:
    """The share of tokens in one sixth of the frequent ones, which are only plain characters for the tiny models."""
    wanted = set(vocabulary.scattered(REWARDED))
    return sum(token in wanted for token in response) / len(response) if response else 0.0


async def roll_out(stack: Stack, prompts: list[list[int]], *, step: int) -> Rollouts:
    """`GROUP` samples of each prompt, with seeds of this step."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                stack.generate(prompts, label=f"rollout {step}", seed=1000 * (step + 1) + sample, **SAMPLED)
            )
            for sample in range(GROUP)
        ]
    rounds = [task.result() for task in tasks]
    rows = [(prompt, at, one) for at, prompt in enumerate(prompts) for one in rounds]
    return Rollouts(
        prompts=[prompt for prompt, _, _ in rows],
        responses=[one.response_ids[at] for _, at, one in rows],
        logprobs=[[float(x or 0.0) for x in (one.response_logprobs or [])[at] or ()] for _, at, one in rows],
    )


async def train(stack: Stack, rollouts: Rollouts, *, base: int, step: int) -> TrainResult:
    """One step of group-relative policy optimization (GRPO) from version `base`."""
    request = TrainRequest(
        base_version=base,
        prompt_token_ids=rollouts.prompts,
        response_ids=rollouts.responses,
        loss_masks=[[1] * len(response) for response in rollouts.responses],
        advantages=advantages([reward(response, stack.vocabulary) for response in rollouts.responses]),
        rollout_logprobs=rollouts.logprobs,
        learning_rate=LEARNING_RATE,
    )
    return await stack.train(request, label=f"train {step}")


def advantages(rewards: list[float]) -> list[float]:
    """Each reward minus its group's mean, over the group's standard deviation (SkyRL, compute_grpo_outcome_advantage)."""
    found = []
    for start in range(0, len(rewards), GROUP):
        group = rewards[start : start + GROUP]
        mean, spread = statistics.fmean(group), statistics.pstdev(group)
        found += [(one - mean) / (spread + 1e-6) for one in group]
    return found


async def evaluate(stack: Stack, prompts: list[list[int]], *, step: int) -> None:
    """Marks the mean reward of greedy answers to prompts that are not trained on."""
    done = await stack.generate(prompts, label=f"evaluation {step}", **ANSWER)
    rewards = [reward(response, stack.vocabulary) for response in done.response_ids]
    stack.mark("evaluation", step=step, reward=statistics.fmean(rewards))
