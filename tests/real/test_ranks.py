"""A trainer's ranks gather whole tensors, from FSDP2's and Megatron-core's shards. Runs in a stack's environment, on the CPU."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real

COMPARE = """
import json, sys
import torch
from backends.policies import versions as policy, ranks
module, model = sys.argv[1:]
whole = policy.version(model, 1)
gathered = ranks.gather(module, model, 1, "")
print(json.dumps([sorted(whole), sorted(gathered), sorted(n for n in whole if not torch.equal(whole[n], gathered[n]))]))
"""
FAIL = """
import json, sys
import psutil
from backends.policies import ranks
model, version, ranks.GATHER_DEADLINE_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
try:
    said = sorted(ranks.gather("tests.real.bad_ranks", model, version, ""))
except RuntimeError as e:
    said = str(e)
print(json.dumps([said, len(psutil.Process().children(recursive=True))]))
"""


@pytest.mark.parametrize("module", ["backends.policies.fsdp2", "backends.policies.megatron_core"])
def test_what_ranks_hold_is_gathered_whole(run, model, module):
    names, found, wrong = run(COMPARE, module, model)
    assert (found, wrong) == (names, [])


def test_a_layout_that_is_not_megatrons_is_not_gathered_whole(run, model):
    names, found, wrong = run(COMPARE, "tests.real.wrong_megatron", model)
    assert found == names
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert wrong == [name for name in names if name.split(".")[-2] in fused]


@pytest.mark.parametrize(
    ("version", "deadline_s", "says"),
    [
        ("1", "120", ["rank 1 of 2 ended with 1", "this shard is lost"]),
        ("2", "10", ["tests.real.bad_ranks ended with nothing within 10 s"]),
    ],
    ids=["fails", "hangs"],
)
def test_a_rank_that_fails_is_named_and_none_is_left(run, model, version, deadline_s, says):
    said, left = run(FAIL, model, version, deadline_s)
    assert [words for words in says if words not in said] == [], said
    assert left == 0
