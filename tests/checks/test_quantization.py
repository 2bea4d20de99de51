"""Answers of quantized engines, compared with those of full precision."""

from __future__ import annotations

import random

import msgspec
import pytest

from harness.checks.history import EXPLAINED
from harness.checks.logprobs import of_reference
from harness.checks.quantization import quantization_effect
from harness.checks.tokens import greedy
from harness.checks.weights import EVERY_PARAMETER
from harness.contract.topology import Topology
from harness.records.reference import ExpectedDigests, ExpectedDigestsRequest, Noise, NoiseRequest, Score, ScoreRequest
from tests.checks.scene import SERVERS, Scene
from tests.traces import NOISE

PROMPTS = [[10, 11], [20, 21]]
INT8 = Topology(quantization="int8")
CHECK = quantization_effect()


def answered(*held) -> Scene:
    """One greedy row for each of `held`, the precision in which the engine held its weights."""
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


BFLOAT16 = {"name": "tiny", "sha256": "0" * 64, "dtype": "bfloat16"}


def noisy(held, *, rms: float = 0.05, rows: int = 16) -> Scene:
    """Rows of an engine that holds its weights in `held`, with 16-bit noise in each log-probability."""
    scene, rng = Scene(), random.Random(4)
    scene.reference.set(NoiseRequest(quantization="int8"), Noise(numbers=1, largest=4 * rms, rms=rms))
    prompts = [[30 + row] for row in range(rows)]
    ids = [scene.reference.greedy(p, 6, quantization="int8") for p in prompts]
    numbers = [
        [x + rng.gauss(0.0, rms) for x in scene.reference.logprobs(p, tokens, quantization=held)]
        for p, tokens in zip(prompts, ids, strict=True)
    ]
    scene.generate(prompts, tokens=ids, params={"logprobs": 0}, logprobs=numbers)
    return scene


@pytest.mark.parametrize(("held", "status"), [("int8", "pass"), (None, "fail")], ids=["quantized", "full precision"])
def test_in_sixteen_bits_all_tokens_together_tell_whether_weights_are_quantized(held, status):
    found = noisy(held).judge(CHECK, topology=INT8, model=BFLOAT16)
    assert found.status == status
    assert found.numbers["share of the quantization error"] == pytest.approx(1.0 if held else 0.0, abs=0.3)


def test_noise_that_hides_the_quantization_is_untestable():
    assert noisy("int8", rms=1.0).judge(CHECK, topology=INT8, model=BFLOAT16).status == "untestable"
    assert noisy("int8", rows=1).judge(CHECK, topology=INT8, model=BFLOAT16).status == "untestable"


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


# --- roundings that part ----------------------------------------------------------------------------------------------

ROUNDING = 0.02
"""Nats by which random rounding moves each log-probability in the made-up reference."""


def parted(*moves: float) -> Scene:
    """Sixteen rows of one token. The first log-probabilities are off by `moves`, the others exact; the bound is 2 × `ROUNDING`."""
    scene = Scene()
    prompts = [[30 + row] for row in range(16)]
    ids = [scene.reference.greedy(p, 1, quantization="int8") for p in prompts]
    numbers = []
    for row, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
        asked = ScoreRequest(version=0, quantization="int8", prompt=prompt, tokens=tokens)
        score = msgspec.structs.replace(scene.reference.score(asked), rounding=(ROUNDING,))
        scene.reference.set(asked, score)
        numbers.append([score.logprobs[0] - (moves[row] if row < len(moves) else 0.0)])
    scene.generate(prompts, tokens=ids, params={"logprobs": 0}, logprobs=numbers)
    return scene


def test_a_few_roundings_that_part_are_no_fault():
    found = parted(0.03, 0.01).judge(of_reference(), topology=INT8)
    assert (found.status, found.margin.measured) == ("pass", 0.0)
    assert found.numbers["max_abs_error"] == pytest.approx(0.03)
    assert found.numbers["bound_where_roundings_part"] == pytest.approx(NOISE.near + 2 * ROUNDING)


@pytest.mark.parametrize("moves", [(0.05,), (0.01,) * 16], ids=["further than any rounding", "all a little"])
def test_what_rounding_does_not_explain_is_red(moves):
    found = parted(*moves).judge(of_reference(), topology=INT8)
    assert found.reason == "log-probabilities are further from the reference's than the bound"


@pytest.mark.parametrize(("apart", "status"), [(0.03, "pass"), (0.05, "fail")])
def test_a_token_that_rounding_can_turn_is_a_near_tie(apart, status):
    scene = Scene()
    scene.sync(0)
    scene.generate([[10]], tokens=[[7]])
    asked = ScoreRequest(version=0, quantization="int8", prompt=[10], tokens=[7])
    scene.reference.set(asked, Score(logprobs=[-1.0], ranks=[1], margins=[apart], rounding=(ROUNDING,)))
    for check in (greedy(), EXPLAINED):
        assert scene.judge(check, topology=INT8, servers=["server-0"]).status == status


def test_the_cost_of_quantization_is_reported():
    scene = answered("int8", "int8")
    found = scene.judge(CHECK, topology=INT8)
    full = [abs(a - b) for row in range(2) for a, b in zip(*both(scene, row), strict=True)]
    assert found.numbers["mean_quantization_error"] == pytest.approx(sum(full) / len(full))
    assert found.numbers["max_quantization_error"] == pytest.approx(max(full))
    assert found.numbers["mean_error_of_reference"] == found.numbers["mean_quantization_error"], (
        "an engine without noise"
    )


def both(scene: Scene, row: int) -> list[list[float]]:
    tokens = scene.reference.greedy(PROMPTS[row], 6, quantization="int8")
    return [scene.reference.logprobs(PROMPTS[row], tokens, quantization=kind) for kind in ("int8", None)]
