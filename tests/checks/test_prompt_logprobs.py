"""Log-probabilities of prompts: green as the reference has them, red for each way to pair or cut them wrongly."""

from __future__ import annotations

import pytest

from harness.checks.prompt_logprobs import ABSENT, FAR, NOT_TOP, OF_PROMPTS, UNASKED, UNEVEN
from harness.contract.messages import Generation, SampleRequest
from harness.records.reference import NextRequest
from tests import traces

REFERENCE = traces.FakeReference()
PROMPT = [3, 4, 5, 6]
NUMBERS = REFERENCE.logprobs(PROMPT[:1], PROMPT[1:])
ROWS = [REFERENCE.next(NextRequest(version=0, prompt=PROMPT[:at])).logprobs for at in range(1, len(PROMPT))]
TOP = [sorted(enumerate(row), key=lambda pair: -pair[1])[:2] for row in ROWS]


def judged(numbers, top, *, asked=True):
    request = SampleRequest(
        prompt_token_ids=PROMPT, num_samples=1, prompt_logprobs=asked, topk_prompt_logprobs=2 if asked else 0
    )
    result = Generation(
        response_ids=[[7]], responses=None, stop_reasons=["length"], prompt_logprobs=numbers, topk_prompt_logprobs=top
    )
    right = SampleRequest(prompt_token_ids=PROMPT, num_samples=1, prompt_logprobs=True)
    good = Generation(response_ids=[[7]], responses=None, stop_reasons=["length"], prompt_logprobs=[None, *NUMBERS])
    calls = [traces.call("sample", right, good), traces.call("sample", request, result)]
    return traces.judge(OF_PROMPTS, *calls, reference=REFERENCE)


def test_the_references_numbers_pass():
    found = judged([None, *NUMBERS], [None, *TOP])
    assert (found.status, found.facts) == ("pass", 12)


@pytest.mark.parametrize(
    ("numbers", "top", "reason"),
    [
        (None, None, ABSENT),
        (NUMBERS, [None, *TOP], UNEVEN),
        ([None, *NUMBERS[:-1]], [None, *TOP], UNEVEN),
        ([None, *NUMBERS[1:], NUMBERS[0]], [None, *TOP], FAR),
        ([None, *NUMBERS], None, NOT_TOP),
        ([None, *NUMBERS], [None, *(row[:1] for row in TOP)], NOT_TOP),
        ([None, *NUMBERS], [None, *(row[::-1] for row in TOP)], NOT_TOP),
        ([None, *NUMBERS], [None, *([row[0], row[0]] for row in TOP)], NOT_TOP),
    ],
    ids=["absent", "one for the first token", "cut", "shifted", "no top", "top cut", "unsorted", "doubled"],
)
def test_each_fault_is_red(numbers, top, reason):
    found = judged(numbers, top)
    assert (found.status, found.reason) == ("fail", reason)


def test_numbers_that_nobody_asked_for_are_red():
    assert judged([None, *NUMBERS], None, asked=False).reason == UNASKED
