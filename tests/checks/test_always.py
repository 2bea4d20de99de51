"""The checks of every scenario together: silent without anything to judge, red on damage."""

from __future__ import annotations

import math

import pytest

from harness.checks import numbers
from harness.checks.always import ALWAYS
from harness.checks.numbers import NUMBERS
from tests import traces
from tests.checks.scene import Scene

PROMPTS = [[10, 11], [20, 21]]


def with_logprobs(change=lambda values: values, asked: int | None = 0) -> Scene:
    scene = Scene()
    call = scene.generate(PROMPTS, params=None if asked is None else {"logprobs": asked})
    values = [
        scene.reference.logprobs(prompt, ids) for prompt, ids in zip(PROMPTS, call.result["response_ids"], strict=True)
    ]
    scene.change(call, result={**call.result, "response_logprobs": change(values)})
    return scene


def test_all_pass_on_a_right_recording():
    scene = with_logprobs()
    told = scene.call("http", {"method": "POST", "path": "/x", "headers": {}, "body": ""}, {"status": 404})
    about = {"method": "POST", "path": "/x", "status": 404}
    scene.seen.append(traces.observation("refusal", at_ns=told.started_ns, **about))
    assert [(check.name, scene.judge(check).status) for check in ALWAYS] == [(c.name, "pass") for c in ALWAYS]


def test_a_scenario_of_control_calls_only_is_judged_for_what_it_did():
    scene = Scene()
    scene.call("world_size", {}, {"world_size": 2})
    assert [check.name for check in ALWAYS if scene.judge(check) is not None] == ["clean_room", "instruments"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v: None, numbers.ABSENT),
        (lambda v: [v[0], None], numbers.ABSENT),
        (lambda v: [v[0], v[1][:-1]], numbers.UNEVEN),
        (lambda v: [v[0], [*v[1][:-1], math.nan]], numbers.NOT_FINITE),
        (lambda v: [v[0], [*v[1][:-1], None]], numbers.NOT_FINITE),
        (lambda v: [v[0], [*v[1][:-1], -9999.0]], numbers.STOOD_IN),
        (lambda v: [v[0], [*v[1][:-1], 0.1]], numbers.POSITIVE),
    ],
)
def test_numbers_that_are_none(change, reason):
    assert with_logprobs(change).judge(NUMBERS).reason == reason
    assert with_logprobs(change, asked=None).judge(NUMBERS) is None
