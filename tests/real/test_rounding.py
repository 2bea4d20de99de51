"""Rounding is measured on a bare engine, and a wrong engine does not count as noise. Runs in a stack's environment, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from harness import PROJECT
from harness.driving.models import tiny_model
from harness.machine import environments
from harness.machine.progress import console_progress
from harness.machine.targets import known

pytestmark = pytest.mark.real

MEASURE = """
import asyncio, json, sys
from pathlib import Path
import msgspec
from safetensors.torch import load_file, save_file
from backends.oracle import rounding
from backends.oracle.reference import Reference
from harness.contract.messages import StartRequest
from harness.records.reference import NoiseRequest
from harness.contract.topology import Topology
model, scratch = map(Path, sys.argv[1:])

async def measured():
    reference = Reference()
    given = {"target": "reference", "topology": Topology(), "engine": "cpu", "dtype": "float32"}
    await reference.start(StartRequest(**given, model_path=str(model), scratch=str(scratch), logs=str(scratch)))
    return await reference.noise(NoiseRequest())

right = asyncio.run(measured())
wrong = scratch / "wrong"
wrong.mkdir()
for file in model.iterdir():
    (wrong / file.name).write_bytes(file.read_bytes())
tensors = load_file(wrong / "model.safetensors")
tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.001
save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
bare_engine = rounding.bare_engine
rounding.bare_engine = lambda asked: bare_engine(msgspec.structs.replace(asked, model_path=str(wrong)))
try:
    said = str(asyncio.run(measured()))
except ValueError as e:
    said = str(e)
print(json.dumps([{name: moved.largest for name, moved in right.measured.items()}, right.near, said]))
"""


def test_a_bare_engine_is_as_far_off_as_rounding_makes_it_and_one_with_other_weights_is_refused(tmp_path: Path):
    python = environments.ensure(str(known("reference").environment), "cpu", root=PROJECT)
    model = tiny_model(python, console_progress())
    command = [str(python), "-c", MEASURE, str(model), str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=variables)
    assert done.returncode == 0, done.stderr[-2000:]
    measured, near, said = json.loads(done.stdout.splitlines()[-1])
    assert set(measured) == {"reference", "alone", "by 4", "all, in chunks", "all again", "all, cached"}
    assert all(0 < largest < 1e-4 for largest in measured.values()), measured
    assert near == 2 * max(measured.values())
    assert "this is no noise" in said
