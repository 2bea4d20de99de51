"""The miniature's trainer: its gradient is the derivative of its loss, and a trained version is found again by its number."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from backends.miniature import model
from backends.miniature.trainer import Trainer, keep, parameters
from backends.policies import versions as policy
from harness.contract.clock import SimulatedLoop
from harness.contract.messages import FIRST_TRAINED, TrainRequest

REQUEST = TrainRequest(
    base_version=0,
    prompt_token_ids=[[5, 6, 7], [50, 60]],
    response_ids=[[8, 9, 10], [70, 80]],
    loss_masks=[[1, 0, 1], [1, 1]],
    advantages=[1.5, -0.5],
    learning_rate=0.3,
)


@pytest.fixture
def trainer(tmp_path):
    made = Trainer()
    made.policies = str(tmp_path / "policies")
    return made


def train(trainer, request=REQUEST):
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(trainer.train(request))


def test_the_gradient_is_the_slope_of_the_loss(trainer):
    base = {name: tensor.astype(np.float64) for name, tensor in model.policy(0).items()}
    _, _, gradient = trainer.gradient(REQUEST, base)
    for row, column in ((8, 0), (9, 3), (200, 5)):
        losses = []
        for by in (-1e-4, 1e-4):
            out = base["out"].copy()
            out[row, column] += by
            losses.append(trainer.gradient(REQUEST, {**base, "out": out})[1])
        assert (losses[1] - losses[0]) / 2e-4 == pytest.approx(gradient[row, column], rel=1e-4, abs=1e-9)


def test_a_step_lowers_the_loss_by_its_length(trainer):
    first = train(trainer)
    again = train(trainer, msgspec.structs.replace(REQUEST, base_version=first.version))
    assert again.loss < first.loss
    before, after = model.policy(0), parameters(first.version, trainer.policies)
    assert np.sqrt(((after["out"] - before["out"]) ** 2).sum()) == pytest.approx(0.3, rel=1e-3)
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {"out"}


def test_log_probabilities_are_those_of_the_base_version(trainer):
    network = model.network(model.policy(0), np.float64)
    node = network.root
    for token in (5, 6, 7):
        node = network.feed(node, token)
    assert train(trainer).response_logprobs[0][0] == pytest.approx(network.row(node)[8])


def test_nothing_to_learn_moves_nothing(trainer):
    assert train(trainer, msgspec.structs.replace(REQUEST, advantages=[0.0, 0.0])).grad_norm == 0


def test_a_number_follows_from_content(trainer):
    one, again = train(trainer), train(trainer)
    other = train(trainer, msgspec.structs.replace(REQUEST, learning_rate=0.2))
    assert one.version == again.version != other.version
    assert FIRST_TRAINED <= min(one.version, other.version) < 2**48


def test_a_version_that_nobody_trained_is_not_made_up(tmp_path):
    with pytest.raises(FileNotFoundError):
        parameters(FIRST_TRAINED + 7, str(tmp_path))


def test_a_version_is_kept_whole(tmp_path):
    number = keep(model.policy(3), str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == [f"{number}.npz"]
    assert model.digest(parameters(number, str(tmp_path))["embed"]) == model.digest(model.policy(3)["embed"])


def test_numbers_tell_names_and_bytes_apart():
    assert policy.number_of([("a", b"1")]) != policy.number_of([("a", b"2")])
    assert policy.number_of([("a", b"1")]) != policy.number_of([("b", b"1")])
