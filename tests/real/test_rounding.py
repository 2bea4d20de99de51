"""Rounding is measured on a bare engine, and a wrong engine does not count as noise. Runs in a stack's environment, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.real

MEASURE = """
import asyncio, json, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from backends.oracle import rounding
from backends.oracle.reference import Reference
from harness.contract.messages import StartRequest
from harness.records.reference import NoiseRequest
from harness.contract.topology import Topology
model, scratch = map(Path, sys.argv[1:])
wrong, answers = scratch / "wrong", []

async def measured(model):
    reference = Reference()
    given = {"target": "reference", "topology": Topology(), "engine": "cpu", "dtype": "float32"}
    await reference.start(StartRequest(**given, model_path=str(model), scratch=str(scratch), logs=str(scratch)))
    return await reference.noise(NoiseRequest())

bare_engine = rounding.bare_engine
rounding.bare_engine = lambda asked: answers.append(bare_engine(asked)) or answers[0]
right = asyncio.run(measured(model))
wrong.mkdir()
for file in model.iterdir():
    (wrong / file.name).write_bytes(file.read_bytes())
tensors = load_file(wrong / "model.safetensors")
tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.001
save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
rounding.bare_engine = lambda asked: answers[0]
try:
    said = str(asyncio.run(measured(wrong)))
except ValueError as e:
    said = str(e)
print(json.dumps([{name: moved.largest for name, moved in right.measured.items()}, right.near, said]))
"""


IN_DOUBT = """
import asyncio, json, sys
from backends.oracle.reference import Reference
from harness.contract.messages import StartRequest
from harness.contract.topology import Topology
from harness.records.reference import NextRequest, Noise, NoiseRequest, ScoreRequest, key

PROMPT, CACHED = list(range(20, 52)), ((31, 0),)

async def scored(model, scratch):
    reference = Reference()
    given = {"target": "reference", "topology": Topology(), "engine": "cpu", "dtype": "bfloat16"}
    await reference.start(StartRequest(**given, model_path=model, scratch=scratch, logs=scratch))
    reference._noises[key(NoiseRequest())] = Noise(largest=0.2)
    best, shown = [], []
    for _ in range(8):
        row = await reference.next(NextRequest(version=1, prompt=PROMPT + best))
        best.append(max(range(len(row.logprobs)), key=row.logprobs.__getitem__))
    for tokens, cached in ((best, ()), (best[::-1], ()), (best, ()), (best[::-1], CACHED), (best[::-1], ())):
        score = await reference.score(ScoreRequest(version=1, prompt=PROMPT, tokens=tokens, cached=cached))
        shown.append([score.logprobs, score.rounding])
    row = PROMPT + best
    noises = [await reference.noise(NoiseRequest(version=version, rows=[row] * 2)) for version in (0, 1)]
    return shown, [[noise.numbers, noise.largest, noise.weights, list(noise.measured)] for noise in noises]

print(json.dumps(asyncio.run(scored(*sys.argv[1:]))))
"""


def test_an_answer_in_doubt_is_computed_in_16_bits_too_and_the_weights_stay_what_they_are(run, model, tmp_path: Path):
    scores, noises = run(IN_DOUBT, model, tmp_path)
    (greedy, none), (other, moved), again, (cached, moved_cached), other_again = scores
    assert (greedy, none) == (again[0], again[1])
    assert none == []
    assert len(moved) == 8
    assert 0 < max(moved) < 3
    assert cached != other
    assert len(moved_cached) == 8
    assert [other, moved] == other_again
    for numbers, largest, weights, measured in noises:
        assert (numbers, measured) == (2 * 40 * 5, ["reference"])
        assert 0 < largest < 3
        assert 0 < weights < 3


BEGINNINGS = """
import asyncio, json, sys
from backends.oracle.reference import Reference
from harness.contract.messages import StartRequest
from harness.contract.topology import Topology
from harness.records.reference import NextRequest

async def asked(model, scratch):
    reference = Reference()
    given = {"target": "reference", "topology": Topology(), "engine": "cpu", "dtype": "float32"}
    await reference.start(StartRequest(**given, model_path=model, scratch=scratch, logs=scratch))
    read, passes = reference._logprobs, []
    reference._logprobs = lambda weights, tokens: passes.append(len(tokens)) or read(weights, tokens)
    whole, found = list(range(20, 60)), []
    for version, length in ((1, 30), (1, 40), (1, 30), (0, 30)):
        found.append((await reference.next(NextRequest(version=version, prompt=whole[:length]))).logprobs)
    far = [max(abs(a - b) for a, b in zip(found[0], other)) for other in found[1:]]
    return passes, far, sum(map(pow, [2.718281828459045] * len(found[2]), found[2]))

print(json.dumps(asyncio.run(asked(*sys.argv[1:]))))
"""


def test_what_was_read_for_a_prompt_tells_its_beginnings_under_the_same_weights(run, model, tmp_path: Path):
    passes, (longer, again, other), total = run(BEGINNINGS, model, tmp_path)
    assert passes == [30, 40, 30], "the third was told by the second, the fourth has other weights"
    assert again < 1e-4 < min(longer, other)
    assert abs(total - 1) < 1e-3


def test_a_bare_engine_is_as_far_off_as_rounding_makes_it_and_one_with_other_weights_is_refused(
    run, model, tmp_path: Path
):
    measured, near, said = run(MEASURE, model, tmp_path)
    assert set(measured) == {"reference", "alone", "by 4", "all, in chunks", "all again", "all, cached"}
    assert all(0 < largest < 1e-4 for largest in measured.values()), measured
    assert near == 2 * max(measured.values())
    assert "this is no noise" in said
