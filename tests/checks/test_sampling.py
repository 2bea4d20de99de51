"""Sampling: green on draws from the reference, red on every other sampler, untestable if chance could explain a pass."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.sampling import SUMMED, allowed, goodness_of_fit, independent, tempered, within_filters
from harness.records.reference import Next, NextRequest, Noise, NoiseRequest
from tests.traces import FakeReference, error, executed, generate, judge, sample

REFERENCE = FakeReference(vocab_size=64)
PROMPT = [3, 4, 5]
MODEL = REFERENCE.next(NextRequest(version=0, prompt=PROMPT)).logprobs


def drawn(probabilities, count, seed=1):
    return [[t] for t in random.Random(seed).choices(range(64), probabilities, k=count)]


def draws(answers, **params):
    return generate([PROMPT] * len(answers), answers, params={"temperature": 1.0, "max_tokens": 1} | params)


def found(check, *calls, reference=REFERENCE):
    finding = judge(check, *calls, reference=reference)
    return finding.status, finding.reason


@pytest.mark.parametrize("seed", range(20))
def test_draws_from_the_reference_pass(seed):
    finding = judge(goodness_of_fit(), draws(drawn(tempered(MODEL, 1.0), 512, seed)), reference=REFERENCE)
    assert finding.status == "pass"
    assert finding.facts == 512
    assert finding.margin.power >= 0.9
    assert finding.margin.measured < finding.margin.bound < min(finding.margin.faults.values())


def test_draws_at_another_temperature_pass_only_where_it_was_asked_for():
    cold = drawn(tempered(MODEL, 0.7), 512)
    assert found(goodness_of_fit(), draws(cold, temperature=0.7))[0] == "pass"
    wrong = ("fail", "sampled tokens do not come from the reference's distribution")
    assert found(goodness_of_fit(), draws(cold)) == wrong
    assert found(goodness_of_fit(), draws(drawn(tempered(MODEL, 1.0), 512), temperature=0.7)) == wrong


@pytest.mark.parametrize(
    "answers",
    [
        [[max(range(64), key=MODEL.__getitem__)]] * 512,
        [[t % 64] for t in range(512)],
        drawn(tempered(REFERENCE.next(NextRequest(version=1, prompt=PROMPT)).logprobs, 1.0), 512),
    ],
    ids=["greedy", "uniform", "other weights"],
)
def test_another_distribution_is_red(answers):
    assert found(goodness_of_fit(), draws(answers))[0] == "fail"


def test_draws_that_prove_nothing_are_untestable():
    assert found(goodness_of_fit(), draws(drawn(tempered(MODEL, 1.0), 12)))[0] == "untestable"
    assert found(goodness_of_fit(), draws(drawn(tempered(MODEL, 1.0), 512), seed=1))[0] == "untestable"
    other = generate([[3], [4]], [[1], [2]], params={"temperature": 1.0})
    assert found(goodness_of_fit(), other)[0] == "untestable"
    assert found(goodness_of_fit())[0] == "untestable"
    assert found(goodness_of_fit(), generate([PROMPT], None, error=error())) == (
        "fail",
        "generate() failed with ValueError: not like this",
    )


SURE = [-1e-4, *[math.log(1e-4 / 63)] * 63]
"""Log-probabilities after a prompt that leaves almost no choice."""


def several(temperature: float, asked: float, reference: FakeReference, *, prompts: int = 4, each: int = 192):
    """Draws at `temperature` for requests of several prompts that ask for `asked`."""
    rng, rows = random.Random(5), []
    for prompt in PROMPTS[:prompts]:
        model = reference.next(NextRequest(version=0, prompt=prompt)).logprobs
        rows += [(prompt, [t]) for t in rng.choices(range(64), tempered(model, temperature), k=each)]
    asking, answers = zip(*rows, strict=True)
    return generate(list(asking), list(answers), params={"temperature": asked, "max_tokens": 1})


def after_sure_prompts(number: int) -> FakeReference:
    """A reference that is sure of the token after the first `number` prompts."""
    reference = FakeReference(vocab_size=64)
    for prompt in PROMPTS[:number]:
        reference.set(NextRequest(version=0, prompt=prompt), Next(logprobs=SURE))
    return reference


@pytest.mark.parametrize(("drawn_at", "status"), [(0.7, "pass"), (1.0, "fail")])
@pytest.mark.parametrize("sure", [0, 1])
def test_the_draws_of_several_prompts_are_judged_together(sure, drawn_at, status):
    reference = after_sure_prompts(sure)
    assert found(goodness_of_fit(), several(drawn_at, 0.7, reference), reference=reference)[0] == status


def test_a_single_prompt_that_leaves_no_choice_is_untestable():
    reference = after_sure_prompts(1)
    alone = several(0.7, 0.7, reference, prompts=1, each=512)
    assert found(goodness_of_fit(), alone, reference=reference)[0] == "untestable"


PROMPTS = [[3, n] for n in range(4, 20)]


def left(probabilities, params, tolerance=0.0):
    return set(np.flatnonzero(allowed(np.asarray(probabilities), params, tolerance)).tolist())


def filtered(pick, length=4, **params):
    """Sixteen prompts of `length` tokens each, every token drawn by `pick(probabilities, rng)`."""
    rng = random.Random(3)
    answers = []
    for prompt in PROMPTS:
        tokens = []
        for _ in range(length):
            tokens.append(
                pick(tempered(REFERENCE.next(NextRequest(version=0, prompt=prompt + tokens)).logprobs, 1.0), rng)
            )
        answers.append(tokens)
    return generate(PROMPTS, answers, params={"temperature": 1.0, "max_tokens": length} | params)


def freely(probabilities, rng):
    return rng.choices(range(64), probabilities)[0]


def under(**params):
    def pick(probabilities, rng):
        kept = sorted(left(probabilities, params))
        return rng.choices(kept, [probabilities[t] for t in kept])[0]

    return pick


def greedily(probabilities, rng):
    return max(range(64), key=probabilities.__getitem__)


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.6}])
def test_filters(params):
    finding = judge(within_filters(), filtered(under(**params), **params), reference=REFERENCE)
    assert (finding.status, finding.facts) == ("pass", 64)
    names = " and ".join(params)
    assert found(within_filters(), filtered(freely, **params)) == ("fail", f"a sampled token is outside {names}")
    always = ("fail", "sampling under a filter always took the most probable token")
    assert found(within_filters(), filtered(greedily, **params)) == always


IN_16_BITS = Noise(numbers=1000, largest=0.6, rms=0.08)


def nearly_greedily(probabilities, rng):
    """The most probable token, or one that noise of 0.08 nats may make so."""
    close = [t for t in range(64) if probabilities[t] > max(probabilities) * math.exp(-0.2)]
    return rng.choice(close)


@pytest.mark.parametrize("params", [{"top_k": 5}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.6}])
def test_filters_in_16_bits(params):
    reference = FakeReference(vocab_size=64)
    reference.set(NoiseRequest(), IN_16_BITS)
    right = judge(within_filters(), filtered(under(**params), length=12, **params), reference=reference)
    assert right.status == "pass", "tokens that could be near ties are sampled all the same"
    for greedy in (greedily, nearly_greedily):
        wrong = found(within_filters(), filtered(greedy, length=12, **params), reference=reference)
        assert wrong == ("fail", "sampling under a filter always took the most probable token")


def test_noise_that_widens_a_filter_makes_no_greedy_engine_of_it():
    """With noise of two nats nobody knows what a small top_p leaves, and a right engine takes the most probable token alone."""
    reference = FakeReference(vocab_size=64)
    reference.set(NoiseRequest(), Noise(numbers=1000, largest=1.0, rms=0.08))
    sure = filtered(greedily, length=12, top_p=1e-6)
    assert found(within_filters(), sure, reference=reference)[0] == "untestable"


def test_a_few_tokens_under_a_filter_do_not_tell_sampling_from_greedy_choices():
    reference = FakeReference(vocab_size=64)
    reference.set(NoiseRequest(), IN_16_BITS)
    few = filtered(greedily, top_k=2)
    one = generate(
        few.request["prompt_token_ids"][:1], few.result["response_ids"][:1], params=few.request["sampling_params"]
    )
    assert found(within_filters(), one, reference=reference)[0] == "untestable"


def test_each_row_outside_a_filter_is_reported_once():
    wide = judge(within_filters(), filtered(freely, top_k=5), reference=REFERENCE)
    assert (wide.facts, len(wide.concerns)) == (64, len({row for _, row in wide.concerns}))
    assert len(wide.concerns) > 1
    call = filtered(under(top_k=5), top_k=5)
    both = judge(within_filters(), call, filtered(freely, min_p=0.2), reference=REFERENCE)
    assert both.reason == "a sampled token is outside min_p"
    plain = judge(within_filters(), filtered(freely, top_k=5), filtered(freely), reference=REFERENCE)
    assert plain.status == "fail", "another call without a filter excuses nothing"


def test_a_filter_that_is_one_too_wide_is_red():
    assert found(within_filters(), filtered(under(top_k=6), top_k=5))[0] == "fail"
    assert found(within_filters(), filtered(under(top_p=0.6), top_p=0.5))[0] == "fail"


def test_a_filter_that_another_one_implies_proves_nothing():
    asked = {"top_k": 60, "top_p": 0.3}
    margin = judge(within_filters(), filtered(under(**asked), **asked), reference=REFERENCE).margin
    assert margin.weakest == "top_k dropped"
    assert margin.faults[margin.weakest] < margin.bound


def test_filters_that_leave_everything_prove_nothing():
    margin = judge(within_filters(), filtered(freely, top_k=64), reference=REFERENCE).margin
    assert margin.faults[margin.weakest] < margin.bound
    assert found(within_filters(), filtered(freely))[0] == "untestable"
    assert found(within_filters())[0] == "untestable"


def test_allowed_cuts_where_documented():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert left(probabilities, {"top_k": 2}) == {0, 1}
    assert left(probabilities, {"top_p": 0.7}) == {0, 1}
    assert left(probabilities, {"top_p": 0.85}) == {0, 1, 2}
    assert left(probabilities, {"min_p": 0.2}) == {0, 1, 2}
    assert left([0.25, 0.25, 0.25, 0.25], {"top_k": 1}) == {0, 1, 2, 3}
    assert left(probabilities, {"top_k": -1, "top_p": 1.0, "min_p": 0.0}) == {0, 1, 2, 3}


def by_definition(probabilities, params, tolerance):
    """vLLM documentation, SamplingParams: min_p, top_k, top_p, one token after the other. A token stays if some order of those within
    the tolerance keeps it."""
    slack, kept = math.exp(-tolerance), sorted(range(len(probabilities)), key=lambda t: -probabilities[t])
    if params["min_p"]:
        kept = [t for t in kept if probabilities[t] >= params["min_p"] * probabilities[kept[0]] * slack]
    if 0 < params["top_k"] < len(kept):
        kept = [t for t in kept if probabilities[t] >= probabilities[kept[params["top_k"] - 1]] * slack]
    if params["top_p"] < 1.0:
        total = math.fsum(probabilities[t] for t in kept)
        above = {
            t: math.fsum(probabilities[u] for u in kept if probabilities[u] > probabilities[t] / slack) / total
            for t in kept
        }
        kept = [t for t in kept if above[t] * slack / (above[t] * slack + 1 - above[t]) < params["top_p"] + SUMMED]
    return set(kept)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    st.sampled_from([-1, 0, 1, 3, 12]),
    st.sampled_from([0.103, 0.507, 0.911, 1.0]),
    st.sampled_from([0.0, 0.1, 0.7]),
)
def test_allowed_is_the_definition(weights, min_p, top_k, top_p, tolerance):
    probabilities = [weight / sum(weights) for weight in weights]
    params = {"min_p": min_p, "top_k": top_k, "top_p": top_p}
    assert left(probabilities, params, tolerance) == by_definition(probabilities, params, tolerance)


SAMPLES = [REFERENCE.drawn(PROMPT, 12, seed=s) for s in range(4)]
FREE = {"temperature": 1.0, "max_tokens": 12}


def test_independent_samples():
    assert judge(independent(), sample(PROMPT, SAMPLES, params=FREE), reference=REFERENCE).facts == 6
    seeded = [sample(PROMPT, SAMPLES, params=FREE | {"seed": 3}) for _ in range(2)]
    assert found(independent(), *seeded)[0] == "pass"


def test_independence_of_servers_needs_each_of_them():
    call = sample(PROMPT, SAMPLES, params=FREE)

    def drawn_by(*servers):
        ran = zip(SAMPLES, servers, strict=True)
        start = call.started_ns
        seen = [
            o for tokens, server in ran for o in executed(PROMPT, tokens, server=server, params=FREE, from_ns=start)
        ]
        return judge(independent(on_every_server=True), call, reference=REFERENCE, observations=seen)

    assert drawn_by(*["server-0", "server-1"] * 2).numbers["servers"] == 2
    assert drawn_by(*["server-0"] * 4).reason == "a server drew none of a prompt's samples"


def test_samples_that_are_copies_are_red():
    copies = sample(PROMPT, [SAMPLES[0]] * 4, params=FREE | {"seed": 3})
    assert found(independent(), copies) == ("fail", "all samples of a prompt are the same")
    some = sample(PROMPT, [SAMPLES[0], SAMPLES[1], SAMPLES[0]], params=FREE)
    assert found(independent(), some) == ("fail", "some samples of a prompt are the same")
    twice = [copies, sample(PROMPT, [SAMPLES[1], SAMPLES[1], SAMPLES[2]], params=FREE | {"seed": 4})]
    found_of = judge(independent(), *twice, reference=REFERENCE)
    assert found_of.reasons == ["all samples of a prompt are the same", "some samples of a prompt are the same"]
    assert len(found_of.concerns) == 6
    across = [sample(PROMPT, [SAMPLES[0]], params=FREE) for _ in range(2)]
    assert found(independent(), *across) == ("fail", "all samples of a prompt are the same")
    assert found(independent(), sample(PROMPT, SAMPLES[:3], num_samples=4, params=FREE)) == (
        "fail",
        "sample() returned fewer results than were asked for",
    )


def test_samples_that_had_no_choice_prove_nothing():
    sure = FakeReference()
    sure.set(NextRequest(version=0, prompt=PROMPT), Next(logprobs=MODEL))
    short = [[max(range(64), key=MODEL.__getitem__)]] * 3
    assert found(independent(), sample(PROMPT, short, params={"temperature": 1.0}), reference=sure)[0] == "untestable"
    assert found(independent(), sample(PROMPT, SAMPLES[:1], params=FREE))[0] == "untestable"
    assert found(independent(), sample(PROMPT, SAMPLES, params=FREE | {"top_k": 3}))[0] == "untestable"
