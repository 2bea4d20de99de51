"""Greedy tokens, seeds and log-probabilities: green on a correct recording, red on each fault."""

from __future__ import annotations

import math

import pytest

from harness.checks import logprobs, tokens
from harness.records.reference import NextRequest, Score, ScoreRequest
from tests import traces
from tests.traces import FakeReference, error, generate, judge, sample

REFERENCE = FakeReference()
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
ANSWERS = [REFERENCE.greedy(p, 6) for p in PROMPTS]
LOGPROBS = [REFERENCE.logprobs(p, a) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
FIRST = "greedy output parts from the reference's at its first token"
LATER = "greedy output parts from the reference's after a common start"


def greedy(answers=ANSWERS, numbers=LOGPROBS, **about):
    return generate(PROMPTS, answers, logprobs=numbers, params=GREEDY | about.pop("params", {}), **about)


def damaged(answers, row, new):
    return [new if i == row else a for i, a in enumerate(answers)]


def found(check, *calls, reference=REFERENCE):
    finding = judge(check, *calls, reference=reference)
    return finding.status, finding.reason


def test_a_correct_recording_passes_every_check():
    checks = (tokens.greedy(), logprobs.are_numbers(), logprobs.of_reference())
    findings = [judge(c, greedy(), reference=REFERENCE) for c in checks]
    assert [(f.status, f.facts) for f in findings] == [("pass", 18)] * 3
    assert findings[2].numbers == {"max_abs_error": 0.0, "bound": traces.NOISE.near}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([ANSWERS[1], ANSWERS[0], ANSWERS[2]], FIRST),
        (damaged(ANSWERS, 1, ANSWERS[1][:-1]), "greedy output has another length than max_tokens with ignore_eos"),
        (damaged(ANSWERS, 1, [ANSWERS[1][0], *ANSWERS[1][:-1]]), LATER),
        (damaged(ANSWERS, 1, [*ANSWERS[1][:-1], 63]), LATER),
        (damaged(ANSWERS, 1, []), "generate() returned a result without tokens"),
        (ANSWERS[:2], "generate() returned fewer results than were asked for"),
        ([*ANSWERS, ANSWERS[0]], "generate() returned more results than were asked for"),
        ([REFERENCE.greedy(p, 6, version=1) for p in PROMPTS], FIRST),
    ],
    ids=["swapped", "truncated", "doubled", "other", "empty", "dropped", "extra", "version"],
)
def test_greedy_is_red(answers, reason):
    assert found(tokens.greedy(), greedy(answers, None)) == ("fail", reason)


def test_greedy_lets_a_near_tie_go_either_way_and_counts_it():
    prompt, answer = PROMPTS[0], [20, 21]
    reference = FakeReference()
    call = generate([prompt], [answer], params={"temperature": 0, "max_tokens": 2, "ignore_eos": True})
    question = ScoreRequest(version=0, prompt=prompt, tokens=answer)
    reference.set(question, Score(logprobs=[-1, -1], ranks=[1, 0], margins=[5e-5, 2]))
    assert judge(tokens.greedy(), call, reference=reference).numbers == {"near_ties": 1}
    reference.set(question, Score(logprobs=[-1, -1], ranks=[1, 0], margins=[5e-3, 2]))
    assert judge(tokens.greedy(), call, reference=reference).status == "fail"
    reference.set(question, Score(logprobs=[-1, -1], ranks=[2, 0], margins=[5e-5, 2]))
    assert judge(tokens.greedy(), call, reference=reference).status == "fail"


def test_a_failed_call_is_named_and_not_a_crash():
    call = generate(PROMPTS, None, params=GREEDY, error=error("RayTaskError", "boom 17"))
    for check in (tokens.greedy(), logprobs.are_numbers(), logprobs.of_reference()):
        assert found(check, call) == ("fail", "generate() failed with RayTaskError: boom …")


def test_nothing_observed_is_untestable():
    sampled = generate(PROMPTS, ANSWERS, params={"temperature": 1, "max_tokens": 6})
    checks = (tokens.greedy(), logprobs.are_numbers(), logprobs.of_reference(), tokens.same_output("a", "b"))
    assert {judge(check).status for check in checks} == {"untestable"}
    assert found(tokens.greedy(), sampled)[0] == "untestable"
    assert found(logprobs.of_reference(), sampled)[0] == "untestable"
    assert found(tokens.greedy("after"), greedy()) == ("untestable", "no call labelled after was recorded")


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (None, "log-probabilities were asked for and none came"),
        ([LOGPROBS[0], None, LOGPROBS[2]], "log-probabilities were asked for and none came"),
        (damaged(LOGPROBS, 1, LOGPROBS[1][:-1]), "there is not one log-probability per token"),
        (damaged(LOGPROBS, 1, [math.nan, *LOGPROBS[1][1:]]), "a log-probability is not a finite number"),
        (damaged(LOGPROBS, 1, [None, *LOGPROBS[1][1:]]), "a log-probability is not a finite number"),
        (damaged(LOGPROBS, 1, [-math.inf, *LOGPROBS[1][1:]]), "a log-probability is not a finite number"),
        (damaged(LOGPROBS, 1, [0.5, *LOGPROBS[1][1:]]), "a log-probability is above zero"),
        (LOGPROBS[:2], "generate() returned another number of response_logprobs than of results"),
    ],
    ids=["none", "a row without", "short", "nan", "null", "inf", "positive", "a row lost"],
)
def test_logprobs_that_are_no_numbers_are_red_in_both_checks(numbers, reason):
    assert found(logprobs.are_numbers(), greedy(numbers=numbers)) == ("fail", reason)
    assert found(logprobs.of_reference(), greedy(numbers=numbers)) == ("fail", reason)


@pytest.mark.parametrize(
    "change",
    [lambda x, _: x - 2e-3, lambda x, at: x - (0.01 if at == 5 else 0), lambda x, _: x / 0.7],
    ids=["constant", "one token", "temperature"],
)
def test_logprobs_of_another_model_are_red(change):
    numbers = [[change(x, at) for at, x in enumerate(row)] for row in LOGPROBS]
    finding = judge(logprobs.of_reference(), greedy(numbers=numbers), reference=REFERENCE)
    assert finding.reason == "log-probabilities are further from the reference's than the bound"
    assert finding.numbers["max_abs_error"] > finding.numbers["bound"]


def test_logprobs_within_rounding_are_green():
    numbers = [[x - 1e-5 for x in row] for row in LOGPROBS]
    assert found(logprobs.of_reference(), greedy(numbers=numbers))[0] == "pass"


def test_logprobs_nobody_asked_for_are_red():
    plain = {"temperature": 0, "max_tokens": 6}
    assert found(logprobs.are_numbers(), generate(PROMPTS, ANSWERS, params=plain))[0] == "pass"
    assert found(logprobs.are_numbers(), generate(PROMPTS, ANSWERS, logprobs=LOGPROBS, params=plain)) == (
        "fail",
        "log-probabilities came that were not asked for",
    )
    sampled = sample(PROMPTS[0], [ANSWERS[0]], logprobs=[LOGPROBS[0]], params=plain)
    assert found(logprobs.are_numbers(), greedy(), sampled)[0] == "fail"


def seeded(label, answers, prompts=PROMPTS, **about):
    return generate(prompts, answers, params={"temperature": 1, "seed": 7, "max_tokens": 6}, label=label, **about)


def test_same_seed_same_output_wherever_the_row_stands():
    check = tokens.same_output("alone", "crowd")
    drawn = [REFERENCE.drawn(p, 6, seed=7) for p in PROMPTS]
    turned = seeded("crowd", [[9], *drawn[::-1]], [[30], *PROMPTS[::-1]])
    assert judge(check, seeded("alone", drawn), turned).facts == 9
    wrong = seeded("crowd", [[9], *damaged(drawn[::-1], 0, [1, 2])], [[30], *PROMPTS[::-1]])
    assert found(check, seeded("alone", drawn), wrong) == ("fail", "tokens differ between alone and crowd")
    other_end = seeded("crowd", drawn, stop_reasons=["stop"] * 3)
    assert found(check, seeded("alone", drawn), other_end) == ("fail", "finish_reason differ between alone and crowd")
    other_text = seeded("crowd", drawn, responses=["x"] * 3)
    assert found(check, seeded("alone", drawn), other_text) == ("fail", "text differ between alone and crowd")
    missing = seeded("crowd", drawn[:1], PROMPTS[:1])
    assert found(check, seeded("alone", drawn), missing)[0] == "untestable"


def test_different_seeds_must_matter():
    check = tokens.different_output("one", "two")
    drawn = [[REFERENCE.drawn(p, 6, seed=s) for p in PROMPTS] for s in (1, 2)]
    assert found(check, seeded("one", drawn[0]), seeded("two", drawn[1]))[0] == "pass"
    assert found(check, seeded("one", drawn[0]), seeded("two", drawn[0])) == (
        "fail",
        "outputs of one and two are the same",
    )
    failed = generate(PROMPTS, None, params={}, label="two", error=error("KeyError"))
    assert found(check, seeded("one", drawn[0]), failed) == ("fail", "generate() failed with KeyError: not like this")


def filtered(token_of, number_of, **params):
    """One token of one prompt. `number_of`: (its log-probability at temperature 1, probability mass that the filter leaves) → what the
    stack gives."""
    model = REFERENCE.next(NextRequest(version=0, prompt=PROMPTS[0])).logprobs
    order = sorted(range(len(model)), key=model.__getitem__, reverse=True)
    token, left = order[token_of], sum(math.exp(model[t]) for t in order[:2])
    asked = {"temperature": 1.0, "max_tokens": 1, "logprobs": 0, "top_k": 2, **params}
    number = number_of(model[token], math.log(left))
    return generate(PROMPTS[:1], [[token]], logprobs=[[number]], params=asked)


@pytest.mark.parametrize("token", [0, 1])
def test_log_probabilities_after_filters(token):
    after = logprobs.after_filters()
    assert found(after, filtered(token, lambda own, left: own - left))[0] == "pass"
    wrong = ("fail", "a log-probability is not the one after temperature and filters")
    assert found(after, filtered(token, lambda own, left: own)) == wrong


def test_greedy_log_probabilities_have_no_filter():
    assert found(logprobs.after_filters(), filtered(0, lambda own, left: own, temperature=0.0))[0] == "pass"


def test_a_token_outside_its_filter_has_no_log_probability_after_it():
    assert found(logprobs.after_filters(), filtered(5, lambda own, left: own))[0] == "untestable"
