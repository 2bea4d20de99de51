"""Order of results: green on a correct recording, red on each fault, untestable without a test of the order."""

from __future__ import annotations

from harness.checks.ordering import in_order
from tests.traces import error, executed, generate, judge

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10]]
ANSWERS = [[20, 21, 22, 23], [30, 31], [40, 41, 42]]
TAPPED = [
    seen
    for at, (p, a) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
    for seen in executed(p, a, server=f"server-{at % 2}", from_ns=100)
]


def found(check, *calls, observations=TAPPED):
    finding = judge(check, *calls, observations=observations)
    return finding.status, finding.reason


def test_order_is_green_and_counts_rows():
    assert judge(in_order(ragged=True), generate(PROMPTS, ANSWERS), observations=TAPPED).facts == 3


def test_swapped_rows_are_red():
    wrong = generate(PROMPTS, [ANSWERS[1], ANSWERS[0], ANSWERS[2]])
    assert found(in_order(), wrong) == ("fail", "results are not in the order of their prompts")


def test_a_dropped_row_is_red():
    assert found(in_order(), generate(PROMPTS, ANSWERS[1:]))[0] == "fail"


def test_tokens_that_no_engine_made_are_red():
    wrong = generate(PROMPTS, [ANSWERS[0], [*ANSWERS[1], 9], ANSWERS[2]])
    assert found(in_order(), wrong) == ("fail", "a result is not what the engine made of its prompt")


def test_results_of_another_caller_are_red():
    calls = [generate([p], [a]) for p, a in zip(PROMPTS, [ANSWERS[1], ANSWERS[0], ANSWERS[2]], strict=True)]
    assert found(in_order(), *calls) == ("fail", "a result belongs to another caller")


def test_callers_must_have_overlapped():
    apart = [generate([p], [a]) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert found(in_order(concurrent=True), *apart)[0] == "untestable"
    rows = enumerate(zip(PROMPTS, ANSWERS, strict=True))
    together = [generate([p], [a], started_ns=at, ended_ns=100 + at) for at, (p, a) in rows]
    assert found(in_order(concurrent=True), *together)[0] == "pass"


def test_what_finished_in_order_was_not_put_to_the_test():
    rows = enumerate(zip(PROMPTS, ANSWERS, strict=True))
    even = [seen for at, (p, a) in rows for seen in executed(p, a, from_ns=100 * at)]
    assert found(in_order(ragged=True), generate(PROMPTS, ANSWERS), observations=even)[0] == "untestable"


def test_a_blind_tap_or_like_outputs_are_untestable():
    call = generate(PROMPTS, ANSWERS)
    assert found(in_order(), call, observations=[])[0] == "untestable"
    assert found(in_order(), call, observations=executed(PROMPTS[0], ANSWERS[0]))[0] == "untestable"
    alike = [[5, 5]] * 3
    taps = [seen for p in PROMPTS for seen in executed(p, [5, 5])]
    assert found(in_order(), generate(PROMPTS, alike), observations=taps)[0] == "untestable"


def test_a_failed_call_is_named():
    assert found(in_order(), generate(PROMPTS, None, error=error("ValueError"))) == (
        "fail",
        "generate() failed with ValueError: not like this",
    )
