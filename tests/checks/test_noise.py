"""Dtypes with noise: rounding errors pass, larger errors are red, and a bound that would hide a fault judges nothing."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.checks import ties
from harness.checks.base import Evidence
from harness.checks.logprobs import Distances, of_reference, over_many
from harness.checks.sampling import allowed, draws_repeat
from harness.checks.tokens import greedy, same_output
from harness.judging.judge import run
from harness.records.reference import Noise, NoiseRequest, Score, ScoreRequest, UnansweredQuery
from tests import traces
from tests.traces import FakeReference, generate, judge

BFLOAT16 = {"name": "tiny", "sha256": "0" * 64, "dtype": "bfloat16"}
NOISE = Noise(numbers=5120, largest=0.2, rms=0.05, weights=0.3, router=0.1)
GREEDY = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": 0}


@pytest.fixture
def reference() -> FakeReference:
    noisy = FakeReference()
    noisy.set(NoiseRequest(), NOISE)
    return noisy


@pytest.mark.parametrize(
    ("behind", "noise", "status"),
    [(0.3, NOISE, "pass"), (0.3, traces.NOISE, "fail"), (0.5, NOISE, "fail")],
    ids=["noise explains it", "float32 has no such noise", "further than the noise"],
)
def test_a_token_within_the_noise_is_a_near_tie_whatever_its_rank(reference, behind, noise, status):
    reference.set(NoiseRequest(), noise)
    one = generate([[3, 4]], [[20, 21]], params=GREEDY)
    score = Score(logprobs=[-1, -1], ranks=[2, 0], margins=[0.1, 3.0], behind=(behind, 0.0))
    reference.set(ScoreRequest(version=0, prompt=[3, 4], tokens=[20, 21]), score)
    assert judge(greedy(), one, reference=reference).status == status


@pytest.mark.parametrize(
    ("behind", "rounding", "status"),
    [(0.5, (0.1, 0.3), "pass"), (0.7, (0.1, 0.3), "fail"), (0.5, (0.1, 0.1), "fail"), (0.3, (0.0, 0.0), "pass")],
    ids=[
        "rounding of this answer explains it",
        "further",
        "rounding moves this answer less",
        "never less than the noise",
    ],
)
def test_in_doubt_the_rounding_of_the_answer_itself_counts(reference, behind, rounding, status):
    one = generate([[3, 4]], [[20, 21]], params=GREEDY)
    score = Score(logprobs=[-1, -1], ranks=[2, 0], margins=[0.1, 3.0], behind=(behind, 0.0), rounding=rounding)
    reference.set(ScoreRequest(version=0, prompt=[3, 4], tokens=[20, 21]), score)
    assert judge(greedy(), one, reference=reference, model=BFLOAT16).status == status


def test_noise_that_was_never_measured_judges_nothing():
    silent = FakeReference()
    silent.noise = lambda _: (_ for _ in ()).throw(UnansweredQuery("no"))  # type: ignore[method-assign]
    evidence = Evidence(traces.trace(model=BFLOAT16), silent)
    assert evidence.noise_question == NoiseRequest()
    with pytest.raises(UnansweredQuery):
        _ = evidence.noise


@pytest.mark.parametrize(("off", "status"), [(0.1, "pass"), (0.5, "fail")])
def test_a_single_log_probability_may_be_off_by_the_noise(reference, off, status):
    ids = [[20, 21, 22, 23]]
    numbers = [[x - off for x in reference.logprobs([3, 4], ids[0])]]
    one = generate([[3, 4]], ids, params=GREEDY | {"max_tokens": 4}, logprobs=numbers)
    assert judge(of_reference(), one, reference=reference, model=BFLOAT16).status == status


@pytest.mark.parametrize(
    ("off", "rounding", "status", "measured"),
    [(0.5, 0.3, "pass", 0.05), (0.7, 0.3, "fail", None), (0.5, 0.1, "fail", None), (0.1, 0.3, "pass", 0.1)],
    ids=["explained, and left out of the margin", "further", "this answer is moved less", "no doubt"],
)
def test_a_single_log_probability_may_be_off_by_the_rounding_of_its_answer(reference, off, rounding, status, measured):
    ids = [20, 21, 22, 23]
    asked = ScoreRequest(version=0, prompt=[3, 4], tokens=ids)
    right = reference.score(asked)
    reference.set(asked, msgspec.structs.replace(right, rounding=(rounding,) * 4))
    other = reference.logprobs([5, 6], ids)
    numbers = [[right.logprobs[0] - off, *right.logprobs[1:]], [other[0] - 0.05, *other[1:]]]
    both = generate([[3, 4], [5, 6]], [ids, ids], params=GREEDY | {"max_tokens": 4}, logprobs=numbers)
    found = judge(of_reference(), both, reference=reference, model=BFLOAT16)
    assert (found.status, found.margin and found.margin.measured) == (status, measured and pytest.approx(measured))
    assert found.numbers["bound"] == NOISE.near


@pytest.mark.parametrize(("rounding", "status"), [(0.3, "pass"), (50.0, "untestable")])
def test_if_rounding_explains_every_answer_the_bound_is_theirs_and_may_hide_a_fault(reference, rounding, status):
    ids = [20, 21, 22, 23]
    asked = ScoreRequest(version=0, prompt=[3, 4], tokens=ids)
    right = reference.score(asked)
    reference.set(asked, msgspec.structs.replace(right, rounding=(rounding,) * 4))
    numbers = [[right.logprobs[0] - 0.5, *right.logprobs[1:]]]
    one = generate([[3, 4]], [ids], params=GREEDY | {"max_tokens": 4}, logprobs=numbers)
    found = run(of_reference(), Evidence(traces.trace(one, model=BFLOAT16), reference))
    assert (found.status, found.numbers["bound"]) == (status, 2 * rounding)
    if status == "pass":
        assert found.margin.measured == pytest.approx(0.5)


def test_distances_of_right_answers_count_where_rounding_does_not_explain_them():
    reference = FakeReference()
    reference.set(NoiseRequest(), NOISE)
    evidence = Evidence(traces.trace(model=BFLOAT16), reference)
    score = reference.score(ScoreRequest(version=0, prompt=[3, 4], tokens=[20, 21]))
    moved = msgspec.structs.replace(score, rounding=(0.4, 0.3))
    near, own = NOISE.near, 0.8
    assert near < 0.6 < own
    distances = Distances(evidence)
    assert (distances.worst, distances.bound) == (0.0, near)
    assert not distances.beyond(moved, 0.6)
    assert (distances.worst, distances.bound) == (0.6, own), "there is no other"
    assert not distances.beyond(score, 0.1)
    assert (distances.worst, distances.bound) == (0.1, near)
    assert [distances.beyond(moved, 0.9), distances.beyond(score, 0.6), distances.beyond(score, math.nan)] == [True] * 3


def many(*, constant=0.0, slope=0.0, noise=0.05, rows=32, length=80):
    """Rows of a model without near certainties, and the check's finding."""
    reference = FakeReference(sharpness=1.0)
    reference.set(NoiseRequest(), NOISE)
    dice = random.Random(1)
    prompts = [[row + 3, 7] for row in range(rows)]
    ids = [reference.drawn(prompt, length, seed=row) for row, prompt in enumerate(prompts)]
    numbers = [
        [min(0.0, x * (1 + slope) + constant + dice.gauss(0, noise)) for x in reference.logprobs(prompt, tokens)]
        for prompt, tokens in zip(prompts, ids, strict=True)
    ]
    params = {"temperature": 1.0, "max_tokens": length, "logprobs": 0}
    call = generate(prompts, ids, params=params, logprobs=numbers)
    return run(over_many(), Evidence(traces.trace(call, model=BFLOAT16), reference))


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        ({}, "pass"),
        ({"constant": -0.03}, "fail"),
        ({"slope": 0.03}, "fail"),
        ({"noise": 0.5}, "untestable"),
        ({"rows": 8}, "untestable"),
    ],
    ids=["noise alone", "each off", "tempered", "noise hides a hundredth", "too few"],
)
def test_over_many_tokens_noise_cancels(damage, status):
    found = many(**damage)
    assert found.status == status, found.reason


def test_greedy_rows_may_part_at_a_near_tie_and_sampled_ones_rarely(reference):
    params = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
    once = generate([[3, 4]], [[20, 21]], params=params, label="once")
    again = generate([[3, 4]], [[20, 22]], params=params, label="again")
    for last in (21, 22):
        score = Score(logprobs=[-1, -1], ranks=[0, 1], margins=[3.0, 0.1], behind=(0.0, 0.1 * (last == 22)))
        reference.set(ScoreRequest(version=0, prompt=[3, 4], tokens=[20, last]), score)
    check = same_output("once", "again")
    assert judge(check, once, again, reference=reference, model=BFLOAT16).status == "pass"
    assert judge(check, once, again, reference=reference).status == "fail"
    assert judge(check, once, again, reference=reference, model=BFLOAT16, batch_invariant=True).status == "fail"


def test_seeded_draws_of_batch_invariant_engines_repeat_to_the_token(reference):
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    rows = [[random.Random(row).randrange(9) for _ in range(40)] for row in range(12)]
    late = [[*rows[0][:39], 99], *rows[1:]]
    prompts = [[row + 3, 7] for row in range(12)]
    quiet = FakeReference()
    quiet.set(NoiseRequest(), Noise(numbers=5120, largest=0.2, rms=0.002))
    once, same, parted = (
        generate(prompts, ids, params=params, label=label)
        for ids, label in ((rows, "once"), (rows, "again"), (late, "again"))
    )
    check = same_output("once", "again")

    def status(again, **header):
        return judge(check, once, again, reference=quiet, model=BFLOAT16, **header).status

    assert status(parted) == "pass", "rounding explains one late parting"
    assert status(parted, batch_invariant=True) == "fail"
    assert status(same, batch_invariant=True) == "pass"


def test_another_seed_parts_at_once_and_noise_seldom():
    rows = [[random.Random(row).randrange(9) for _ in range(40)] for row in range(12)]
    late = [[*row[:35], 99, *row[36:]] if n == 0 else row for n, row in enumerate(rows)]
    soon = [[row[0], 99, *row[2:]] for row in rows]
    for others, red in ((rows, False), (late, False), (soon, True)):
        margin = draws_repeat(list(zip(rows, others, strict=True)), rms=0.002)
        assert (margin.measured > margin.bound) is red
        assert min(margin.faults.values()) > margin.bound
    blind = draws_repeat(list(zip(rows[:1], late[:1], strict=True)), rms=0.05)
    assert min(blind.faults.values()) < blind.bound


def test_the_edge_of_a_filter_moves_with_the_noise():
    def left(params, tolerance=0.0):
        found = allowed(np.array([0.5, 0.3, 0.15, 0.05]), params, tolerance)
        return set(np.flatnonzero(found).tolist())

    assert left({"top_k": 2}) == {0, 1}
    assert left({"top_k": 2}, 0.8) == {0, 1, 2}
    assert left({"top_p": 0.75}) == {0, 1}
    assert left({"top_p": 0.75}, 0.8) == {0, 1, 2}
    assert left({"min_p": 0.5}) == {0, 1}
    assert left({"min_p": 0.5}, 0.8) == {0, 1, 2}


def test_an_answer_that_rounding_moves_far_hides_no_swap_in_the_others():
    def near(score: Score) -> float:
        return 0.4 + 2 * max(score.rounding, default=0.0)

    evidence: Any = SimpleNamespace(noise=SimpleNamespace(near=0.4), near=near)
    one = Score(logprobs=[-1.0] * 2, ranks=[0, 0], margins=[0.9, 2.0], behind=(0.0, 0.0))
    far = Score(logprobs=[-1.0] * 2, ranks=[1, 0], margins=[0.7, 1.5], behind=(0.7, 0.0), rounding=(0.6, 0.0))
    found = ties.margin(evidence, [one, far])
    assert (found.bound, found.measured, list(found.faults.values())) == (0.4, 0.0, [0.9])
    assert ties.margin(evidence, [far]).faults == {}, "all of its decisions are within its own rounding"
