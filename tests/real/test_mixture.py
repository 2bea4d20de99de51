"""The reference takes an engine's experts only at near ties. Runs in a stack's environment, with a tiny mixture."""

from __future__ import annotations

import pytest

from harness.driving import models
from harness.machine.progress import console_progress
from tests.real.scripts import interpreter

pytestmark = pytest.mark.real

FOLLOWED = """
import asyncio, json, sys
from backends.oracle.reference import Reference
from harness.contract.messages import StartRequest
from harness.records.reference import ExpertsRequest, NoiseRequest, ScoreRequest
from harness.contract.topology import Topology

async def found(path):
    oracle = Reference()
    request = StartRequest(
        target="reference", topology=Topology(), model_path=path, dtype="bfloat16", scratch="", logs=""
    )
    await oracle.start(request)
    noise = await oracle.noise(NoiseRequest())
    fed = [(7 * at) % 300 + 3 for at in range(64)]
    plain = await oracle.experts(ExpertsRequest(version=0, tokens=fed))

    async def scored(routed):
        given = [] if routed is None else routed
        return await oracle.score(ScoreRequest(version=0, prompt=fed[:1], tokens=[*fed[1:], 5], routed=given))

    def swapped(of):  # the last chosen expert there gives way to the next one
        others = [e for e in range(plain.count) if e not in of]
        return [*of[:-1], others[0]]

    own = await scored(None)
    again = await scored(plain.indices)
    damaged = [[swapped(layer) for layer in layers] for layers in plain.indices]
    judged = await oracle.experts(ExpertsRequest(version=0, tokens=fed, routed=damaged))
    other = await scored(damaged)
    behind = [x for layers in judged.behind for x in layers]
    same = await oracle.experts(ExpertsRequest(version=0, tokens=fed, routed=plain.indices))
    return {
        "noise": [noise.largest, noise.router],
        "own choice": max(abs(a - b) for a, b in zip(own.logprobs, again.logprobs)),
        "own is behind by": max(x for layers in same.behind for x in layers),
        "others are": [min(behind), max(behind)],
        "moved by others": max(abs(a - b) for a, b in zip(own.logprobs, other.logprobs)),
        "taken": sum(x <= 2 * noise.router for x in behind),
        "of": len(behind),
    }

print(json.dumps([asyncio.run(found(path)) for path in sys.argv[1:]]))
"""


@pytest.mark.parametrize("environment", ["skyrl-0.2.0", "skyrl-0.4.0"])
def test_the_references_own_experts_change_nothing_and_others_are_taken_at_near_ties_alone(run, environment):
    """SkyRL 0.2.0 has Transformers 4, with one module per expert; 0.4.0 has Transformers 5, which packs them."""
    made = [models.tiny_model(interpreter(), console_progress(), family) for family in ("qwen3_moe", "olmoe")]
    for found in run(FOLLOWED, *made, environment=environment):
        largest, router = found["noise"]
        assert 0 < router < largest < 1.0, found
        assert found["own choice"] < 1e-4, found
        assert found["own is behind by"] == 0, found
        assert found["others are"][1] > 2 * router, found
        assert 0 < found["taken"] < found["of"], found
        assert found["moved by others"] > 1e-3, found
