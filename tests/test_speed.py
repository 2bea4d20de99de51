"""Verdicts on speed are wrong as rarely as they say: whatever the noise, whenever the run stops, however many rows there are."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from harness.judging import speed
from harness.records.bench import Block, Metric, Pace

REST = Metric(name="rest", what="at rest")
SYNC = Metric(name="sync", what="a sync")
RUNS = 200


def noise(kind: str, chance: np.random.Generator, pairs: int) -> np.ndarray:
    """Log ratios of the second block to the first of a pair, of a stack against itself."""
    return {
        "even": lambda: chance.normal(0, 0.1, pairs),
        "heavy tails": lambda: chance.standard_cauchy(pairs) * 0.05,
        "drift": lambda: 0.3 + chance.normal(0, 0.02, pairs),
        "growing": lambda: np.linspace(0.01, 1, pairs) * chance.normal(0, 1, pairs),
        "in stretches": lambda: np.repeat(chance.normal(0, 0.4, pairs // 10 + 1), 10)[:pairs],
    }[kind]()


def ratios(kind: str, seed: int, pairs: int, times: float = 1.0) -> np.ndarray:
    """Log ratios of candidate to baseline, in the drawn order of blocks."""
    found = noise(kind, np.random.default_rng(seed), pairs)
    signs = [1 if speed.turns(seed, pair)[0] == "baseline" else -1 for pair in range(pairs)]
    return math.log(times) + np.array(signs) * found


def blocks(ratio: float, pairs: int, noise: float = 0.0, metrics: tuple[Metric, ...] = (REST,)) -> list[Block]:
    chance = random.Random(1)
    return [
        Block(
            pair=pair,
            side=side,
            started_ns=0,
            seconds=1.0,
            values={
                m.name: (ratio if side == "candidate" else 1.0) * math.exp(chance.gauss(0, noise)) for m in metrics
            },
        )
        for pair in range(pairs)
        for side in speed.turns(1, pair)
    ]


def row(ratio: float, pairs: int, noise: float = 0.0, precision: float = 0.1):
    [found], _ = speed.rows([REST], blocks(ratio, pairs, noise), seed=1, precision=precision)
    return found


@pytest.mark.parametrize("kind", ["even", "heavy tails", "drift", "growing", "in stretches"])
def test_a_stack_against_itself_is_called_different_as_rarely_as_stated_at_any_time(kind):
    error = 0.05
    alarms = sum(
        max(speed.log_capital(logs), speed.log_capital(-logs)) >= math.log(2 / error)  # the most of all times
        for logs in (ratios(kind, seed, 60) for seed in range(RUNS))
    )
    assert alarms <= RUNS * error


@pytest.mark.parametrize("seed", range(6))
def test_the_bounds_hold_every_ratio_that_is_not_refuted(seed):
    logs = ratios("even", seed, 24, times=1.3)
    low, high = speed.bounds(logs, 0.05)
    for at in (low, high):
        outside, inside = (at - 1e-6, at + 1e-6) if at == low else (at + 1e-6, at - 1e-6)
        sign = 1 if at == low else -1
        assert (
            speed.log_capital(sign * (logs - outside)) >= math.log(2 / 0.05) > speed.log_capital(sign * (logs - inside))
        )


def test_a_stack_that_is_a_third_slower_is_caught_on_a_noisy_machine():
    error = 0.05 / 12
    caught = sum(speed.verdict(ratios("even", seed, 40, times=1.3), error, 0.1) is Pace.SLOWER for seed in range(100))
    assert caught >= 95


def test_a_few_pairs_in_which_the_machine_did_something_else_hide_no_slowdown():
    logs = ratios("even", 3, 40, times=1.5)
    logs[5::10] = -3.0
    assert speed.verdict(logs, 0.05, 0.1) is Pace.SLOWER


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1.3, Pace.SLOWER), (0.7, Pace.FASTER), (1.0, Pace.SAME), (1.05, Pace.SAME), (1.12, Pace.SLOWER)],
)
def test_the_verdict_says_by_how_much(ratio, said):
    found = row(ratio, 30, noise=0.001)
    assert found.verdict is said
    difference = abs(ratio - 1) if ratio > 1 else 1 / ratio - 1
    if said is Pace.SAME:
        assert difference <= found.bound <= 0.1
    else:
        assert 0 < found.bound <= difference + 0.01
    assert found.interval.low < ratio < found.interval.high


def test_a_difference_below_the_precision_is_none():
    assert row(1.05, 30, noise=0.001, precision=0.1).verdict is Pace.SAME
    assert row(1.05, 30, noise=0.001, precision=0.01).verdict is Pace.SLOWER


def test_an_inconclusive_row_says_how_many_pairs_it_lacks():
    few = row(1.3, 6, noise=0.1)
    assert few.verdict is Pace.INCONCLUSIVE
    assert few.more is not None
    assert row(1.3, 6 + 3 * few.more, noise=0.1).verdict is Pace.SLOWER


def test_no_verdict_comes_before_the_coin_could_have_refuted_it():
    for rows in (1, 12):
        fewest = speed.fewest_pairs(rows)
        assert speed.verdict(np.full(fewest, 9.0), 0.05 / rows, 0.1) is Pace.SLOWER
        assert speed.verdict(np.full(fewest - 1, 9.0), 0.05 / rows, 0.1) is Pace.INCONCLUSIVE


def test_rows_share_the_error():
    one = row(1.3, 7)
    metrics = [REST, *(Metric(name=f"m{n}", what="") for n in range(11))]
    twelve, _ = speed.rows(metrics, blocks(1.3, 7, metrics=tuple(metrics)), seed=1)
    assert one.verdict is Pace.SLOWER
    assert {found.verdict for found in twelve} == {Pace.INCONCLUSIVE}
    pace = speed.paces(metrics, blocks(1.3, 7, metrics=tuple(metrics)))
    assert pace == [found.verdict for found in twelve]


def test_a_baseline_that_differs_from_itself_decides_nothing():
    coins = random.Random("1 rest")
    made = blocks(2.0, 24)
    pairs = [next(b for b in made if b.pair == n and b.side == "baseline") for n in range(24)]
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        second.values["rest"] = first.values["rest"] * 2.0 ** coins.choice((1, -1))
    [found], _ = speed.rows([REST], made, seed=1)
    assert found.verdict is Pace.INCONCLUSIVE
    assert found.reason == "the baseline differs from itself"


def test_half_a_pair_is_no_evidence():
    whole = blocks(1.3, 12)
    assert speed.rows([REST], whole[:-1], seed=1)[0][0].pairs == 11


def test_what_one_stack_lacks_has_no_row_and_a_reason():
    made = blocks(1.0, 3, metrics=(REST, SYNC))
    for block in made:
        if block.side == "candidate":
            del block.values["sync"]
        else:
            block.values["nothing"] = 0.0
    nothing = Metric(name="nothing", what="")
    for block in made:
        block.values["nothing"] = 0.0
    found, left_out = speed.rows([REST, SYNC, nothing, Metric(name="never", what="")], made, seed=1)
    assert [one.metric for one in found] == [REST]
    assert left_out == {
        "sync": "the candidate does not have it",
        "nothing": "it took no time",
        "never": "neither stack has it",
    }


def test_nothing_measured_is_nothing_decided():
    assert speed.rows([REST], [], seed=1)[0] == []
    assert speed.paces([REST], []) == []


def test_the_order_of_blocks_is_a_fair_coin_that_the_seed_repeats():
    drawn = [speed.turns(7, pair) for pair in range(1000)]
    assert drawn == [speed.turns(7, pair) for pair in range(1000)]
    assert 430 < sum(first == "baseline" for first, _ in drawn) < 570
