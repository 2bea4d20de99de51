"""Answers of quantized engines beside those of full precision."""

from __future__ import annotations

import pytest

from harness.checks.logprobs import of_reference
from harness.checks.quantization import quantization_effect
from harness.checks.weights import EVERY_PARAMETER
from harness.reference import ExpectedDigests, ExpectedDigestsRequest
from harness.topology import Topology
from tests.checks.scene import SERVERS, Scene

PROMPTS = [[10, 11], [20, 21]]
INT8 = Topology(quantization="int8")
CHECK = quantization_effect()


def answered(*held) -> Scene:
    """One greedy row for each of `held`, which says in what the engine held its weights."""
    scene = Scene()
    prompts = PROMPTS[: len(held)]
    ids = [scene.reference.greedy(p, 6, quantization="int8") for p in prompts]
    numbers = [
        scene.reference.logprobs(p, tokens, quantization=kind)
        for p, tokens, kind in zip(prompts, ids, held, strict=True)
    ]
    scene.generate(prompts, tokens=ids, params={"logprobs": 0}, logprobs=numbers)
    return scene


def test_quantized_answers_pass():
    scene = answered("int8", "int8")
    for check in (CHECK, of_reference()):
        assert scene.judge(check, topology=INT8).status == "pass"


@pytest.mark.parametrize("held", [(None, None), ("int8", None)], ids=["every row", "one row"])
def test_answers_in_full_precision_are_not_what_was_asked_for(held):
    found = answered(*held).judge(CHECK, topology=INT8)
    assert found.reason == "log-probabilities are those of full precision: the quantization is not in effect"


def test_what_cannot_tell_is_untestable():
    assert answered("int8").judge(CHECK).reason == "the stack was not asked to quantize"
    scene = Scene()
    scene.generate(PROMPTS)
    assert scene.judge(CHECK, topology=INT8).reason == "no answer can tell whether its weights were quantized"


def test_digests_are_those_of_quantized_weights():
    scene = Scene()
    quantized = {"weight": "0a:2x2:int8", "weight.scale": "0b:1:float32"}
    scene.reference.set(ExpectedDigestsRequest(version=0, quantization="int8"), ExpectedDigests(digests=quantized))
    scene.digests(dict.fromkeys(SERVERS, quantized))
    assert scene.judge(EVERY_PARAMETER, topology=INT8).status == "pass"
    assert scene.judge(EVERY_PARAMETER).status == "fail"
    scene.digests({SERVERS[0]: quantized, SERVERS[1]: quantized | {"weight.scale": "0c:1:float32"}})
    assert scene.judge(EVERY_PARAMETER, topology=INT8).reason == "a parameter holds values of no policy version"
