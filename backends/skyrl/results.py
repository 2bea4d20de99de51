"""What SkyRL's client and generator return, as the contract's results: neither judged nor repaired."""

from __future__ import annotations

from typing import Any

from harness.contract.messages import Generation, GymOutput, TrajectoryId


def generation(output: Any) -> Generation:
    """SkyRL, InferenceEngineOutput."""
    logprobs = output.get("response_logprobs")
    return Generation(
        response_ids=_ids(output["response_ids"]),
        responses=list(output["responses"]),
        stop_reasons=list(output["stop_reasons"]),
        response_logprobs=None if logprobs is None else [None if row is None else list(row) for row in logprobs],
        routed_experts=_experts(output.get("rollout_expert_indices")),
    )


def trajectories(output: Any) -> GymOutput:
    """SkyRL, GeneratorOutput. That of 0.1.0 has no rollout_expert_indices, and a batch has no steps."""
    return GymOutput(
        prompt_token_ids=_ids(output["prompt_token_ids"]),
        response_ids=_ids(output["response_ids"]),
        rewards=[_numbers(reward) for reward in output["rewards"]],
        loss_masks=_ids(output["loss_masks"]),
        stop_reasons=output["stop_reasons"],
        rollout_logprobs=output["rollout_logprobs"],
        rollout_expert_indices=_experts(output.get("rollout_expert_indices")),
        trajectory_ids=_identities(output.get("trajectory_ids")),
        is_last_step=output.get("is_last_step"),
        rollout_metrics={name: float(value) for name, value in (output["rollout_metrics"] or {}).items()},
    )


def _identities(ids: list[Any] | None) -> list[TrajectoryId] | None:
    if ids is None:
        return None
    return [TrajectoryId(instance_id=one.instance_id, repetition_id=one.repetition_id) for one in ids]


def _ids(rows: list[Any]) -> list[list[int]]:
    return [[int(token) for token in row] for row in rows]


def _numbers(reward: Any) -> float | list[float]:
    return [float(x) for x in reward] if isinstance(reward, list) else float(reward)


def _experts(rows: Any) -> list[list[Any] | None] | None:
    """0.4.0 gives a row of routed experts as an array. The recorded form of the result tells the difference."""
    return None if rows is None else [_listed(row) for row in rows]


def _listed(row: Any) -> list[Any] | None:
    return row if row is None else row.tolist() if hasattr(row, "tolist") else list(row)
