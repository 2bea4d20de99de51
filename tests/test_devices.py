"""GPUs of each worker and of the trainer, for any number of GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract import devices
from harness.contract.topology import Placement, names, topology


@pytest.mark.parametrize(
    ("name", "gpus", "workers", "trainer", "share"),
    [
        ("colocated", 1, (0, 0), 0, 0.5),
        ("colocated", 2, (0, 1), 0, 1.0),
        ("colocated", 8, (0, 1), 0, 1.0),
        ("disaggregated", 3, (0, 1), 2, 1.0),
        ("tp2x2", 4, (0, 1, 2, 3), 0, 1.0),
    ],
)
def test_devices_of_a_topology(name, gpus, workers, trainer, share):
    found = devices.assign(topology(name), gpus)
    assert (found.workers, found.trainer, found.share) == (workers, trainer, share)


@given(st.sampled_from(names()), st.integers(1, 4), st.integers(1, 16))
def test_no_worker_is_left_out_and_only_single_workers_share(name, engines, gpus):
    one = topology(name, engines)
    if gpus < devices.needed(one):
        with pytest.raises(ValueError, match=f"needs {devices.needed(one)} GPUs, there are {gpus}"):
            devices.assign(one, gpus)
        return
    found = devices.assign(one, gpus)
    assert len(found.workers) == one.world_size
    assert {*found.workers, found.trainer} <= set(range(gpus))
    per_gpu = max(found.workers.count(gpu) for gpu in found.workers)
    assert per_gpu == found.workers_per_gpu
    assert per_gpu == 1 or (one.placement is Placement.COLOCATED and one.world_size == one.engines)
    assert one.placement is Placement.COLOCATED or found.trainer not in found.workers


def test_an_engine_sees_its_own_gpus_alone():
    found = devices.assign(topology("tp2x2"), 4)
    assert [found.visible(index, 2) for index in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
