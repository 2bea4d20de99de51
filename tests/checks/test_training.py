"""A training run: its evaluation curve, and the trainer's log-probabilities against the engines'."""

from __future__ import annotations

import math

import pytest

from harness.checks import curves
from harness.checks.training import GAP, RISES
from harness.contract.messages import FIRST_TRAINED
from harness.judging.pairing import identity
from harness.records.recording import Mark
from harness.records.reference import Noise, NoiseRequest
from harness.records.verdict import Parity
from tests import traces

ROLLOUTS = [[-1.0, -2.5, -0.1], [-3.0, -0.5, -1.5]]


def trained(logprobs=ROLLOUTS, rollouts=ROLLOUTS, **about):
    request = {"base_version": 0, "response_ids": [[1, 2, 3], [4, 5, 6]], "rollout_logprobs": rollouts}
    return traces.call("train", request, {"version": FIRST_TRAINED + 1, "response_logprobs": logprobs}, **about)


def curve(*rewards):
    return [
        Mark(name="evaluation", step=step, at_ns=traces.tick(), numbers={"reward": reward})
        for step, reward in enumerate(rewards)
    ]


def test_a_trainer_that_agrees_passes_and_says_what_it_could_have_seen():
    finding = traces.judge(GAP, trained([[x + 1e-5 for x in row] for row in ROLLOUTS]))
    assert finding.status == "pass"
    assert finding.facts == 6
    assert min(finding.margin.faults.values()) > finding.margin.bound


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([[x / 1.01 for x in row] for row in ROLLOUTS], "give the tokens of a rollout other probabilities"),
        (ROLLOUTS[::-1], "give the tokens of a rollout other probabilities"),
        ([ROLLOUTS[0], ROLLOUTS[1][:2]], "do not give one log-probability for each token"),
        ([ROLLOUTS[0], [-3.0, math.nan, -1.5]], "do not give one log-probability for each token"),
    ],
)
def test_a_trainer_that_disagrees_is_red(logprobs, reason):
    finding = traces.judge(GAP, trained(logprobs))
    assert finding.status == "fail"
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("moved", "status", "worst"),
    [(0.5, "pass", 0.5), (0.9, "pass", 0.1), (1.3, "fail", 1.3)],
    ids=["within the noise", "rounding moves this policy further", "further than that"],
)
def test_in_16_bits_a_peaked_policy_is_moved_as_its_own_noise_says(moved, status, worst):
    reference = traces.FakeReference()
    reference.set(NoiseRequest(), Noise(largest=0.2, weights=0.3))
    rows = [[8, 9, 1, 2, 3], [8, 4, 5, 6]]
    reference.set(NoiseRequest(version=FIRST_TRAINED, rows=rows), Noise(largest=0.2, weights=0.6))
    request = {
        "base_version": FIRST_TRAINED,
        "prompt_token_ids": [[8, 9], [8]],
        "response_ids": [[1, 2, 3], [4, 5, 6]],
        "rollout_logprobs": ROLLOUTS,
    }

    def stepped(by: float):
        logprobs = [[ROLLOUTS[0][0] - by, *ROLLOUTS[0][1:]], ROLLOUTS[1]]
        return traces.call("train", request, {"version": FIRST_TRAINED + 1, "response_logprobs": logprobs})

    model = {"name": "tiny", "sha256": "0" * 64, "dtype": "bfloat16"}
    finding = traces.judge(GAP, stepped(moved), stepped(0.1), reference=reference, model=model)
    assert (finding.status, finding.numbers["max_gap"]) == (status, pytest.approx(worst))
    alone = traces.judge(GAP, stepped(moved), reference=reference, model=model)
    assert alone.numbers == pytest.approx(finding.numbers | {"max_gap": moved, "bound": 1.2 if moved == 0.9 else 0.6})


def test_no_training_step_is_untestable():
    assert traces.judge(GAP).status == "untestable"
    assert traces.judge(GAP, trained(rollouts=None)).status == "untestable"
    assert traces.judge(RISES, marks=curve(0.1, 0.9)).status == "untestable"
    assert traces.judge(RISES, trained(), marks=curve(0.1)).status == "untestable"


def test_a_training_step_that_failed_is_red():
    assert traces.judge(GAP, traces.call("train", {}, error=traces.error())).status == "fail"


@pytest.mark.parametrize(
    ("rewards", "status"), [((0.2, 0.3, 0.8), "pass"), ((0.2, 0.8, 0.2), "fail"), ((0.5, 0.1), "fail")]
)
def test_the_evaluation_must_rise(rewards, status):
    assert traces.judge(RISES, trained(), marks=curve(*rewards)).status == status


def compare(ours, theirs, again=None):
    one, other = traces.trace(marks=curve(*ours)), traces.trace(marks=curve(*theirs))
    return curves.compare(one, other, None if again is None else traces.trace(marks=curve(*again)))


def test_scenarios_that_evaluate_nothing_have_no_curves():
    assert compare((), ()) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "status"),
    [
        ((0.2, 0.5, 0.9), (0.2, 0.5, 0.9), Parity.PARITY),
        ((0.2, 0.5, 0.9), (0.2, 0.9, 0.9), Parity.PARITY),
        ((0.2, 0.5, 0.9), (0.2, 0.3, 0.4), Parity.REGRESSION),
        ((0.2, 0.5, 0.9), (0.2, 0.5), Parity.UNTESTABLE),
        ((0.2, 0.2, 0.2), (0.2, 0.2, 0.2), Parity.UNTESTABLE),
    ],
)
def test_the_candidates_curve_is_at_least_the_baselines(ours, theirs, status):
    assert compare(ours, theirs).status == status


def test_what_the_baseline_differs_from_its_twin_is_noise():
    ours, theirs = (0.1, 0.5, 0.9), (0.1, 0.4, 0.7)
    assert compare(ours, theirs).status == Parity.REGRESSION
    assert compare(ours, theirs, again=(0.1, 0.4, 0.8)).status == Parity.PARITY


def test_what_was_trained_is_paired_by_its_label():
    """Versions depend on a side's own rollouts: two sides train different versions, and still do the same work."""
    one, other = trained(label="train 1"), trained([[-9.0]], rollouts=[[-9.0]], label="train 1")
    assert identity(one, traces.trace(one)) == identity(other, traces.trace(other))
    syncs = [
        traces.call("sync_weights", {"version": version}) for version in (FIRST_TRAINED + 1, FIRST_TRAINED + 2, 1, 2)
    ]
    made, again, one, two = (identity(call, traces.trace(call)) for call in syncs)
    assert made == again
    assert one != two
