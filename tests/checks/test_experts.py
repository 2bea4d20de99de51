"""Routed experts of prompt and response: green as the reference routes them, otherwise red."""

from __future__ import annotations

import pytest

from harness.checks.base import Evidence
from harness.checks.experts import routed_experts
from harness.checks.history import EXPLAINED
from harness.checks.tokens import greedy
from harness.records.reference import Experts, ExpertsRequest, Noise, NoiseRequest, Score, ScoreRequest
from tests import traces
from tests.checks.scene import Scene
from tests.traces import NOISE

PROMPTS = [[10, 11, 12], [20, 21]]
CHECK = routed_experts()


def answered(damage=None) -> Scene:
    """A greedy batch with its experts; `damage` changes the second row's."""
    scene = Scene()
    call = scene.generate(PROMPTS)
    fed = [(p + r)[:-1] for p, r in zip(PROMPTS, call.result["response_ids"], strict=True)]
    experts = [scene.reference.routed(tokens) for tokens in fed]
    if damage is not None:
        experts[1] = damage(experts[1])
    scene.change(call, result={**call.result, "routed_experts": experts})
    return scene


def test_the_references_experts_pass_and_are_counted():
    found = answered().judge(CHECK)
    assert (found.status, found.facts) == ("pass", 2 * (8 + 7))


def swapped(experts):
    return [[pair[::-1] for pair in layers] for layers in experts]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _: None, "routed experts are missing"),
        (lambda _: [], "routed experts are empty"),
        (lambda e: e[:-1], "there are not routed experts for each token that was fed to the model"),
        (lambda e: [*e, e[-1]], "there are not routed experts for each token that was fed to the model"),
        (
            lambda e: [layers[:1] for layers in e],
            "routed experts do not have the model's number of layers or of experts a token",
        ),
        (
            lambda e: [[pair[:1] for pair in layers] for layers in e],
            "routed experts do not have the model's number of layers or of experts a token",
        ),
        (lambda e: [*e[:-1], [[8, 0], [1, 2]]], "a routed expert does not exist"),
        (lambda e: [*e[:-1], [[-1, 0], [1, 2]]], "a routed expert does not exist"),
        (lambda e: [*e[:-1], [[3, 3], [1, 2]]], "an expert is listed twice for one token"),
        (lambda e: [e[0], *e[:-1]], "routed experts are shifted against the tokens"),
        (lambda e: [*e[1:], e[-1]], "routed experts are shifted against the tokens"),
        (swapped, "routed experts are not in the order of their probability"),
        (lambda e: [layers[::-1] for layers in e], "routed experts are not those that the model routes to"),
        (
            lambda e: [[[(i + 1) % 8 for i in pair] for pair in layers] for layers in e],
            "routed experts are not those that the model routes to",
        ),
    ],
)
def test_what_is_wrong_is_told(damage, reason):
    found = answered(damage).judge(CHECK)
    assert (found.status, found.reason) == ("fail", reason)


def test_none_for_any_row_is_red():
    scene = Scene()
    scene.generate(PROMPTS)
    assert scene.judge(CHECK).reason == "routed experts are missing"


def test_a_near_tie_may_go_either_way_and_many_say_nothing():
    scene = answered(swapped)
    call = scene.calls[-1]
    fed = (PROMPTS[1] + call.result["response_ids"][1])[:-1]
    near = [[NOISE.router] * 2 for _ in fed]
    right = Experts(indices=scene.reference.routed(fed), margins=near, count=8)
    scene.reference.set(ExpertsRequest(version=0, tokens=fed), right)
    assert scene.judge(CHECK).numbers["near_ties"] == 2 * len(fed)
    assert scene.judge(CHECK).status == "pass", "the other row shows that experts are not shifted"
    one = (PROMPTS[0] + call.result["response_ids"][0])[:-1]
    also = Experts(indices=scene.reference.routed(one), margins=[[0.0] * 2 for _ in one], count=8)
    scene.reference.set(ExpertsRequest(version=0, tokens=one), also)
    assert scene.judge(CHECK).status == "untestable"


def test_after_a_sync_the_experts_are_the_new_versions():
    scene = Scene()
    scene.sync(1)
    call = scene.generate(PROMPTS)
    fed = [(p + r)[:-1] for p, r in zip(PROMPTS, call.result["response_ids"], strict=True)]
    for version, status in ((1, "pass"), (0, "fail")):
        experts = [scene.reference.routed(tokens, version=version) for tokens in fed]
        call = scene.change(call, result={**call.result, "routed_experts": experts})
        assert scene.judge(CHECK).status == status


def test_an_answer_that_a_sync_overlaps_is_not_judged():
    scene = answered()
    sync = scene.sync(1)
    scene.change(sync, started_ns=scene.calls[-2].started_ns + 1)
    assert scene.judge(CHECK).status == "untestable"


BFLOAT16 = {"name": "tiny", "sha256": "0" * 64, "dtype": "bfloat16"}
TIE = 0.2


def in_sixteen_bits() -> tuple[Scene, list[int], list[list[list[int]]]]:
    """One greedy answer in bfloat16, the tokens that were fed, and their experts with the last pair swapped."""
    scene = Scene()
    scene.reference.set(NoiseRequest(), Noise(numbers=1, largest=0.1, rms=0.01, router=TIE / 2))
    scene.sync(0)
    call = scene.generate(PROMPTS[:1])
    fed = (PROMPTS[0] + call.result["response_ids"][0])[:-1]
    right = scene.reference.routed(fed)
    other = [*right[:-1], [right[-1][0][::-1], right[-1][1]]]
    scene.change(call, result={**call.result, "routed_experts": [other]})
    return scene, fed, other


@pytest.mark.parametrize(
    ("behind", "status"), [(0.9 * TIE, "pass"), (1.1 * TIE, "fail")], ids=["near tie", "other expert"]
)
def test_in_sixteen_bits_the_distance_of_the_engines_choice_decides(behind, status):
    scene, fed, other = in_sixteen_bits()
    expected = Experts(
        indices=scene.reference.routed(fed),
        margins=[[1.0, 1.0]] * len(fed),
        count=8,
        behind=[*[[0.0, 0.0]] * (len(fed) - 1), [behind, 0.0]],
    )
    scene.reference.set(ExpertsRequest(version=0, tokens=fed, routed=other), expected)
    assert scene.judge(CHECK, model=BFLOAT16).status == status


@pytest.mark.parametrize("check", [greedy(), EXPLAINED], ids=["greedy", "history"])
@pytest.mark.parametrize(("behind", "status"), [(0.1, "pass"), (0.3, "fail")], ids=["near tie", "other token"])
def test_in_sixteen_bits_an_answer_is_scored_on_the_experts_that_it_names(check, behind, status):
    scene, fed, other = in_sixteen_bits()
    tokens = scene.calls[-1].result["response_ids"][0]
    score = Score(logprobs=[-1.0] * 6, ranks=[1] + [0] * 5, margins=[3.0] * 6, behind=(behind, *[0.0] * 5))
    scene.reference.set(ScoreRequest(version=0, prompt=PROMPTS[0], tokens=tokens, routed=other), score)
    assert len(fed) == len(other)
    assert scene.judge(check, model=BFLOAT16, servers=["server-0"]).status == status


@pytest.mark.parametrize(("about", "taken"), [({}, False), ({"model": BFLOAT16}, True)], ids=["float32", "bfloat16"])
def test_the_reference_is_given_the_answers_experts_in_sixteen_bits_alone(about, taken):
    scene, _, other = in_sixteen_bits()
    evidence = Evidence(traces.trace(*scene.calls, observations=scene.seen, **about), scene.reference)
    asked = [query for check in (CHECK, greedy()) for query in check.queries(evidence) if hasattr(query, "routed")]
    assert other in [query.routed for query in asked] if taken else not any(query.routed for query in asked)
