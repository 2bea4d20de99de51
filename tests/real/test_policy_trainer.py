"""The trainer's step has the requested length unless that ruins the policy. Runs in a stack's environment, with the tiny model."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real

STEPS = """
import json, math, sys, tempfile
import torch
from backends.policies import versions as policy, trainer
from harness.contract.messages import TrainRequest

path = sys.argv[1]
rows = [[(7 * at + 31 * row) % 300 + 3 for at in range(24)] for row in range(8)]
request = TrainRequest(
    base_version=0,
    prompt_token_ids=[row[:12] for row in rows],
    response_ids=[row[12:] for row in rows],
    advantages=[1.0, -1.0] * 4,
    learning_rate=1.0,
)

def step(length, most_kl):
    trainer.MOST_KL = most_kl
    folder = tempfile.mkdtemp()
    learner = trainer.PolicyTrainer(path, folder)
    moves = []
    moved = learner._moved
    learner._moved = lambda *given: moves.append(moved(*given)) or moves[-1]
    asked = TrainRequest(**{name: getattr(request, name) for name in request.__struct_fields__} | {"learning_rate": length})
    made = policy.version(path, learner.train(asked).version, folder)
    before = policy.checkpoint(path)
    return [math.sqrt(sum(float((made[n] - before[n]).square().sum()) for n in made)), [one for one in moves if one <= most_kl][-1]]

print(json.dumps([step(0.01, 6.0), step(40.0, math.inf), step(40.0, 6.0)]))
"""


def test_a_step_is_halved_until_the_policy_is_still_of_use(run, model):
    short, ruinous, halved = run(STEPS, model)
    assert short[0] == pytest.approx(0.01, rel=1e-2)
    assert ruinous[0] == pytest.approx(40.0, rel=1e-2)
    assert ruinous[1] > 6.0 >= halved[1], "the fault beside the right one"
    assert 40.0 / halved[0] == pytest.approx(round(40.0 / halved[0]), rel=1e-2)
