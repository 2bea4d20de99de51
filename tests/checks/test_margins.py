"""Figures of numeric checks are honest: a fault that they claim to see is red, and a fault that they miss is reported."""

from __future__ import annotations

import math

import msgspec
import pytest

from harness.checks import ties, tokens
from harness.checks.base import Check, Evidence, passed
from harness.checks.logprobs import CONSTANT, TEMPERATURE, extremes, of_reference
from harness.checks.sampling import tempered
from harness.contract.errors import Blame
from harness.judging.judge import run
from harness.judging.noise import floors
from harness.judging.takes import widest
from harness.records.reference import NextRequest, NoiseRequest, Score, ScoreRequest, UnansweredQuery
from harness.records.verdict import Margin, Verdict
from tests import recordings, traces
from tests.traces import FakeReference, generate, judge

REFERENCE = FakeReference()
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
PARAMS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
ANSWERS = [REFERENCE.greedy(p, 6) for p in PROMPTS]
RIGHT = [REFERENCE.logprobs(p, a) for p, a in zip(PROMPTS, ANSWERS, strict=True)]


def call(numbers):
    return generate(PROMPTS, ANSWERS, logprobs=numbers, params=PARAMS)


def at_temperature(prompt, answer):
    nexts = [REFERENCE.next(NextRequest(version=0, prompt=prompt + answer[:n])) for n in range(len(answer))]
    return [math.log(tempered(one.logprobs, TEMPERATURE)[token]) for one, token in zip(nexts, answer, strict=True)]


DAMAGED = {
    f"each off by {CONSTANT:g}": [[x - CONSTANT for x in row] for row in RIGHT],
    f"of temperature {TEMPERATURE:g}": [at_temperature(p, a) for p, a in zip(PROMPTS, ANSWERS, strict=True)],
    "shifted by one position": [[*row[1:], row[-1]] for row in RIGHT],
    "of another policy version": [REFERENCE.logprobs(p, a, version=1) for p, a in zip(PROMPTS, ANSWERS, strict=True)],
}
SYNC = traces.call("sync_weights", {"version": 1})
BACK = traces.call("sync_weights", {"version": 0})


def test_each_fault_that_is_named_as_caught_is_red_when_it_is_there():
    green = judge(of_reference(), SYNC, BACK, call(RIGHT), reference=REFERENCE)
    assert (green.status, green.margin.measured, green.margin.unit) == ("pass", 0.0, "nats")
    assert set(green.margin.faults) == set(DAMAGED)
    for name, numbers in DAMAGED.items():
        assert green.margin.faults[name] > green.margin.bound
        red = judge(of_reference(), SYNC, BACK, call(numbers), reference=REFERENCE)
        assert (name, red.status) == (name, "fail")
        assert red.numbers["max_abs_error"] >= green.margin.faults[name] * (1 - 1e-9), "the figures do not boast"
        assert red.margin is None, "what failed is no noise of a correct stack"


def test_a_bound_that_hides_a_fault_is_untestable_and_says_which():
    noisy = FakeReference()
    noisy.set(NoiseRequest(), msgspec.structs.replace(traces.NOISE, largest=CONSTANT))
    found = run(of_reference(), Evidence(traces.trace(call(RIGHT)), noisy))
    assert (found.status, found.blame) == ("untestable", Blame.HARNESS)
    assert found.reason == f"the bound hides a seeded fault: each off by {CONSTANT:g}"


def test_a_fault_that_the_reference_was_not_asked_for_is_left_out_not_made_up():
    class OfBefore(FakeReference):
        def next(self, request):
            raise UnansweredQuery(str(request))

    green = of_reference().judge(Evidence(traces.trace(call(RIGHT)), OfBefore()))
    assert green.status == "pass"
    assert f"of temperature {TEMPERATURE:g}" not in green.margin.faults


@pytest.mark.parametrize(
    ("margin", "status"),
    [
        (None, "pass"),
        (Margin(unit="u", measured=0, bound=1, faults={"a": 2, "b": 3}), "pass"),
        (Margin(unit="u", measured=0, bound=1, faults={"a": 1, "b": 3}), "untestable"),
        (Margin(unit="u", measured=0, bound=0, faults={"a": 0}), "untestable"),
        (Margin(unit="u", measured=0, bound=1), "untestable"),
    ],
)
def test_a_pass_counts_only_where_the_weakest_fault_would_have_been_red(margin: Margin | None, status: str):
    check = Check(name="n", fault="f", source="s", judge=lambda _: passed(1, margin=margin))
    found = run(check, Evidence(traces.trace(), REFERENCE))
    assert (found.status, found.margin) == (status, margin)


def scores(*pairs: tuple[int, float]) -> list[Score]:
    ranks, margins = zip(*pairs, strict=True)
    return [Score(logprobs=[-1.0] * len(pairs), ranks=list(ranks), margins=list(margins))]


def test_a_near_tie_shows_what_was_let_pass_and_the_closest_decision():
    evidence = Evidence(traces.trace(), REFERENCE)
    found = ties.margin(evidence, scores((0, 2.0), (1, 5e-5), (0, 3e-5), (0, 0.02)))
    assert (found.measured, found.bound, list(found.faults.values())) == (5e-5, 1e-4, [0.02])
    assert ties.margin(evidence, scores((0, 2e-5))).weakest is None


def test_greedy_is_untestable_where_every_token_was_a_near_tie_and_red_at_the_closest_decision():
    prompt, answer = PROMPTS[0], [20, 21]
    reference = FakeReference()
    one = generate([prompt], [answer], params={"temperature": 0, "max_tokens": 2, "ignore_eos": True})
    question = ScoreRequest(version=0, prompt=prompt, tokens=answer)
    reference.set(question, Score(logprobs=[-1, -1], ranks=[0, 1], margins=[5e-5, 2e-5]))
    found = run(tokens.greedy(), Evidence(traces.trace(one), reference))
    assert (found.status, found.margin.measured) == ("untestable", 2e-5)
    reference.set(question, Score(logprobs=[-1, -1], ranks=[0, 0], margins=[5e-3, 2e-4]))
    (closest,) = judge(tokens.greedy(), one, reference=reference).margin.faults.values()
    assert closest == 2e-4
    reference.set(question, Score(logprobs=[-1, -1], ranks=[0, 1], margins=[5e-3, closest]))
    assert judge(tokens.greedy(), one, reference=reference).status == "fail"


def verdict(margin: Margin | None, check: str = "logprobs.reference", **fields) -> Verdict:
    return recordings.verdict(check=check, facts=5, margin=margin, **fields)


def test_a_run_shows_the_most_that_passed_and_each_fault_where_it_is_hardest_to_see():
    first = Margin(unit="nats", measured=1e-5, bound=1e-3, faults={"a": 0.5, "b": 0.02})
    other = Margin(unit="nats", measured=4e-5, bound=1e-3, faults={"a": 0.3}, false_alarm_rate=1e-6, power=0.95)
    found = floors([verdict(first), verdict(other, "logprobs.reference:sampled"), verdict(None, "text")])
    (floor,) = found
    assert (floor.check, floor.floor, floor.bound, floor.facts) == ("logprobs.reference", 4e-5, 1e-3, 10)
    assert (floor.weakest_fault, floor.faults) == (0.02, {"a": 0.3, "b": 0.02})
    assert (floor.false_alarm_rate, floor.power) == (1e-6, 0.95)
    assert widest([first]) == first
    assert floors([]) == []
    assert msgspec.json.decode(msgspec.json.encode(floor), type=type(floor)) == floor


def test_very_small_log_probabilities_that_are_cut_at_a_floor():
    small = [[-1e4 * (1 + 0.01 * place) for place in range(len(answer))] for answer in ANSWERS]
    own = [[value - 7 * row for value in values] for row, values in enumerate(small)]
    cut = [[max(value, -9999.0) for value in row] for row in own]

    def extreme(numbers):
        return judge(extremes("far"), msgspec.structs.replace(call(numbers), label="far"), reference=REFERENCE)

    assert extreme(own).status == "pass"
    assert extreme(cut).reason == "the log-probabilities of very unlikely tokens are alike: -9999"
    assert extreme(RIGHT).status == "untestable"
    assert extreme([[*row[:-1], None] for row in own]).status == "pass"  # a missing number is judged by another check
