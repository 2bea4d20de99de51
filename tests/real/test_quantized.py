"""Quantized weights have the same bytes on a CPU as on a GPU. Runs in the oracle's environment."""

from __future__ import annotations

import json

import pytest

from harness import PROJECT

pytestmark = pytest.mark.real

ON_A_GPU = PROJECT / "reports" / "evidence" / "h200-bfloat16" / "eight-bit"
EXPECTED = """
import asyncio, json, sys
from backends.oracle.reference import Reference
from harness.contract.messages import StartRequest
from harness.contract.topology import Topology
from harness.records.reference import ExpectedDigestsRequest

async def found(path, kind):
    oracle = Reference()
    await oracle.start(
        StartRequest(target="reference", topology=Topology(), model_path=path, dtype="bfloat16", scratch="", logs="")
    )
    return [
        (await oracle.expected_digests(ExpectedDigestsRequest(version=version, quantization=kind))).digests
        for version in range(4)
    ]

print(json.dumps(asyncio.run(found(*sys.argv[1:]))))
"""


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_reference_expects_the_bytes_that_engines_held_on_a_gpu(run, model, kind):
    lines = (ON_A_GPU / kind / "recordings" / f"local_http@{kind}.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines if '"method":"digests"' in line]
    held = {
        json.dumps(workers, sort_keys=True)
        for c in calls
        if c["result"]
        for (workers,) in c["result"]["servers"].values()
    }
    assert {json.dumps(digests, sort_keys=True) for digests in run(EXPECTED, model, kind)} == held
