"""What a trainer's ranks hold is gathered whole: FSDP2's shards, and Megatron-core's. In a stack's environment, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from harness import environments
from harness.progress import console_progress
from harness.session import tiny_model
from harness.stack import PROJECT
from harness.targets import resolve

pytestmark = pytest.mark.real

COMPARE = """
import json, sys
import torch
from fixtures import policy, ranks
module, model = sys.argv[1:]
whole = policy.version(model, 1)
gathered = ranks.gather(module, model, 1, "")
print(json.dumps([sorted(whole), sorted(gathered), sorted(n for n in whole if not torch.equal(whole[n], gathered[n]))]))
"""


def gathered(module: str) -> tuple[list[str], list[str], list[str]]:
    """Names of policy version 1, names of what these ranks gather of it, and the names whose values are not the same."""
    target, progress = resolve("skyrl-0.2.0:http"), console_progress()
    python = environments.ensure(str(target.environment), "cpu", root=PROJECT, progress=progress)
    model = tiny_model(python, progress)
    command = [str(python), "-c", COMPARE, module, str(model)]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names, found, wrong = json.loads(done.stdout.splitlines()[-1])
    return names, found, wrong


@pytest.mark.parametrize("module", ["fixtures.fsdp2", "fixtures.megatron_core"])
def test_what_ranks_hold_is_gathered_whole(module):
    names, found, wrong = gathered(module)
    assert (found, wrong) == (names, [])


def test_a_layout_that_is_not_megatrons_is_not_gathered_whole():
    names, found, wrong = gathered("tests.real.wrong_megatron")
    assert found == names
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert wrong == [name for name in names if name.split(".")[-2] in fused]
