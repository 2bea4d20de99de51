"""Trainer and inference: the figures of a gap, and a gap that only one stack has."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest

from backends.miniature.engine import Engine
from harness.checks import gaps
from harness.checks.base import Evidence
from harness.checks.training import GAP
from harness.contract.messages import FIRST_TRAINED
from harness.judging.judge import judge_evidence
from harness.judging.parity import Judged, compare
from harness.machine.progress import silent
from harness.records.recording import ScenarioTrace
from harness.records.reference import Noise, NoiseRequest
from harness.records.verdict import Parity, Verdict
from harness.running.catalogue import body, declared
from harness.running.run import judge_run
from harness.running.session import Options, Seat, Session
from scenarios.wave1 import test_training_run
from tests import recordings, traces

STEPS, PROMPTS, GROUP, TOKENS = 6, 8, 6, 16
SCENARIO = recordings.declared(checks=(GAP,))
BFLOAT16 = Noise(numbers=5120, largest=0.48, rms=0.068, weights=0.51)
"""Noise of the tiny model, measured on an H100."""
FLOAT32 = msgspec.structs.replace(traces.NOISE, weights=5e-4)
EXACT, SHORT = "float32", "bfloat16"
NOISE = {EXACT: FLOAT32, SHORT: BFLOAT16}
ROUNDING = {EXACT: 1e-6, SHORT: 0.065}
"""Root mean square of the rounding error of a log-probability, in nats."""
LOGPROBS = {EXACT: (0.6, 3.9), SHORT: (0.6, 7.6)}
"""In float32, log-probabilities whose rounding to float16 stays within a token's bound; in bfloat16, the tiny model's spread."""
Fault = Callable[[float, int], float]
"""A rollout's log-probability and its prompt → the value from a broken stack."""


def right(logprob: float, _prompt: int) -> float:
    return logprob


def run(seed: int, dtype: str = EXACT, fault: Fault = right, *, steps: int = STEPS, **about) -> ScenarioTrace:
    """A training run whose engines round, and whose rollouts have different tokens for each seed."""
    rng = random.Random(seed)
    calls = []
    for step in range(steps):
        prompts = [[prompt] for prompt in range(PROMPTS) for _ in range(GROUP)]
        trained = [[-rng.uniform(*LOGPROBS[dtype]) for _ in range(TOKENS)] for _ in prompts]
        rollouts = [
            [min(0.0, fault(x + rng.gauss(0, ROUNDING[dtype]), prompt)) for x in row]
            for row, (prompt,) in zip(trained, prompts, strict=True)
        ]
        request = {"prompt_token_ids": prompts, "rollout_logprobs": rollouts}
        result = {"version": FIRST_TRAINED + step, "response_logprobs": trained}
        calls.append(traces.call("train", request, result, label=f"train {step}"))
    return traces.trace(*calls, model={"name": "m", "sha256": "0" * 64, "dtype": dtype}, **about)


def side(trace: ScenarioTrace) -> Judged:
    book = traces.FakeReference()
    book.set(NoiseRequest(), NOISE[trace.header.model["dtype"]])
    evidence = Evidence(trace, book)
    return Judged(evidence=evidence, verdicts=[v for v in judge_evidence(SCENARIO, evidence) if v.check == GAP.name])


def compared(
    dtype: str, fault: Fault = right, *, baseline: Fault = right, twin: Fault | None = right, **about
) -> list[Verdict]:
    """Verdicts on the gap between two stacks that both pass `training.gap`."""
    sides = side(run(1, dtype, baseline, target="old", **about)), side(run(2, dtype, fault, target="new", **about))
    assert all(one.conforms for one in sides), "the bound on single tokens lets both pass"
    again = None if twin is None else run(3, dtype, twin, target="old", **about)
    return [v for v in compare(SCENARIO, *sides, again, []) if v.check == gaps.CHECK]


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_step():
    gap = gaps.gap_of([[-1.0] * 99], [[-1.0] * 98 + [-1.2]], step=3)
    assert (gap.step, gap.tokens, gap.p99) == (3, 99, pytest.approx(0.2))
    assert gap.mean == pytest.approx(0.2 / 99)
    assert gap.largest == pytest.approx(0.2)
    assert gap.outside == pytest.approx(1 / 99)
    assert gap.k3 == pytest.approx((math.exp(-0.2) - 1 + 0.2) / 99)
    assert gaps.gap_of([[-1.0] * 200], [[-1.0] * 198 + [-1.09, -1.2]]).p99 == 0


def test_steps_that_cannot_be_compared_have_no_figures_and_keep_their_number():
    odd = [
        ({"rollout_logprobs": None}, [[-1.0]]),
        ({"rollout_logprobs": [[-1.0, -1.0]]}, [[-1.0]]),
        ({"rollout_logprobs": [[-1.0]]}, [[None]]),
        ({"rollout_logprobs": [[]]}, [[]]),
        ({"rollout_logprobs": [[-1.0]]}, [[-1.0]]),
    ]
    calls = [traces.call("train", request, {"version": 1, "response_logprobs": rows}) for request, rows in odd]
    failed = traces.call("train", {"rollout_logprobs": [[-1.0]]}, error=traces.error())
    assert [gap.step for gap in gaps.by_step(traces.trace(*calls, failed))] == [4]


# --- two stacks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [EXACT, SHORT])
def test_two_right_stacks_are_parity_and_the_weakest_fault_would_be_red(dtype):
    for twin in (right, None):
        (found,) = compared(dtype, twin=twin)
        assert (found.status, found.red) == (Parity.PARITY, False)
        assert found.margin.measured < found.margin.bound < found.margin.faults[found.margin.weakest]
        assert found.facts == 2 * STEPS * PROMPTS * GROUP * TOKENS


FAULTS: dict[str, tuple[str, Fault]] = {
    "rounded to float16": (EXACT, lambda x, _: gaps._float16(x)),
    "off by half the bound of a token": (EXACT, lambda x, _: x - 5e-4),
    "a temperature of 1.0002": (EXACT, lambda x, _: x / 1.0002),
    "one prompt of eight off": (EXACT, lambda x, prompt: x - 5e-4 * (prompt == 3)),
    "off by 0.02": (SHORT, lambda x, _: x - 0.02),
    "a temperature of 1.01, not renormalized": (SHORT, lambda x, _: x / 1.01),
    "a temperature of 1.015, renormalized": (SHORT, lambda x, _: x + (1 - 1 / 1.015) * (-4.1 - x)),
    "one of two servers at a temperature of 1.03": (SHORT, lambda x, prompt: x / 1.03 if prompt % 2 else x),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_gap_of_one_stack_alone_is_red_though_no_token_is_beyond_its_bound(name):
    dtype, fault = FAULTS[name]
    (found,) = compared(dtype, fault)
    assert (found.status, found.red) == (Parity.REGRESSION, True)
    assert "the candidate's rollouts are further from the trainer than the baseline's" in found.reason
    own, found = compared(dtype, baseline=fault, twin=fault)
    assert (found.status, found.baseline, found.target) == (Parity.BASELINE_DEFECT, "old", "new")
    assert (own.status, own.red, own.baseline, own.target) == ("fail", True, None, "old")


@pytest.mark.parametrize("dtype", [EXACT, SHORT])
def test_a_gap_of_both_stacks_is_no_difference(dtype):
    fault = {EXACT: lambda x, _: x - 5e-4, SHORT: lambda x, _: x - 0.05}[dtype]
    assert [v.status for v in compared(dtype, fault, baseline=fault, twin=fault)] == [Parity.PARITY]


def test_what_the_baseline_differs_from_its_twin_is_no_gap():
    def little(x: float, _: int) -> float:
        return x - 2e-5

    assert [v.status for v in compared(EXACT, little)] == [Parity.REGRESSION]
    assert [v.status for v in compared(EXACT, little, twin=little)] == [Parity.PARITY]


def test_a_baseline_that_hides_the_weakest_fault_is_untestable():
    (found,) = compared(EXACT, twin=lambda x, _: x - 5e-4)
    assert (found.status, found.reason) == (Parity.UNTESTABLE, "the bound hides a seeded fault: rounded to float16")


def test_noise_is_never_a_gap():
    """The bound allows one false alarm in a million; no pair of 66 comes near it."""
    sides = [run(seed, SHORT, steps=2) for seed in range(12)]
    for at, one in enumerate(sides):
        for other in sides[at + 1 :]:
            found = gaps.compare(one, other, None, BFLOAT16, exact=False)
            for name in ("mean absolute difference", "mean difference", "slope"):
                assert found.numbers[f"{name}, apart"] < 0.8 * found.numbers[f"{name}, bound"]


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (run(2, SHORT, steps=1), "the bound hides a seeded fault"),
        (run(2, SHORT, steps=2), "the two sides did not train on the same prompts"),
    ],
)
def test_where_no_bound_can_be_given_it_is_untestable(candidate, says):
    found = gaps.compare(run(1, SHORT, steps=1), candidate, None, BFLOAT16, exact=False)
    assert found.status == Parity.UNTESTABLE
    assert says in found.reason


def test_a_single_prompt_is_untestable():
    call = traces.call(
        "train",
        {"prompt_token_ids": [[1]], "rollout_logprobs": [[-1.0]]},
        {"version": 1, "response_logprobs": [[-1.0]]},
    )
    found = gaps.compare(traces.trace(call), traces.trace(call), None, Noise(), exact=True)
    assert found.status == Parity.UNTESTABLE


# --- a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [0.0, 5e-4])
def test_a_run_is_red_in_the_gap_alone_when_engines_of_the_candidate_are_off_within_its_bound(
    tmp_path, monkeypatch, off
):
    name, pair = "training_run.test_a_small_training_run_learns", ("miniature", "miniature:retry")
    scenario, logprob = declared()[name], Engine.logprob
    options = Options(baseline=pair[0], candidate=pair[1], engine="cpu", start="fork", run_dir=tmp_path / "run")
    session = Session(options, silent)
    monkeypatch.setattr(Engine, "logprob", lambda *about: logprob(*about) - off)
    session.drive(scenario, Seat(target=pair[1], topology=scenario.driven_in(2)[0]), body(name))
    monkeypatch.undo()
    session.drive(scenario, Seat(target=pair[0], topology=scenario.driven_in(2)[0]), body(name))
    session.close()
    judged = judge_run(tmp_path / "run")
    assert [v.check for v in judged.verdicts if v.red] == ([gaps.CHECK] if off else [])
    assert [(curve.target, len(curve.steps)) for curve in judged.gaps] == [
        (one, test_training_run.STEPS) for one in pair
    ]
    assert all(off < curve.bound < 2 * off for curve in judged.gaps if off)
    means = [max(step.mean for step in curve.steps) for curve in judged.gaps]
    assert means == pytest.approx([0, off], abs=1e-5)
