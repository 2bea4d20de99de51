"""GPUs of each worker and of the trainer, for any number of GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract import devices
from harness.contract.topology import Placement, names, topology
from harness.machine import environments


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


@pytest.mark.parametrize(
    ("within", "seen"),
    [(None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"]), ("GPU-a,GPU-b,GPU-c,3", ["GPU-a,GPU-b", "GPU-c,3"])],
)
def test_an_engine_sees_its_own_gpus_alone_of_those_that_the_job_was_given(within, seen):
    found = devices.assign(topology("tp2x2"), 4)
    assert [found.visible(index, 2, within) for index in range(2)] == [{"CUDA_VISIBLE_DEVICES": own} for own in seen]


LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa-1)
  MIG 3g.40gb     Device  0: (UUID: MIG-cccc)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb-2)
"""


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (None, ["GPU 0", "GPU 1"]),
        ("1", ["GPU 1"]),
        ("1,0", ["GPU 1", "GPU 0"]),
        ("GPU-bbbb", ["GPU 1"]),
        ("MIG-cccc", ["MIG 3g.40gb"]),
        ("0,7,1", ["GPU 0"]),
        ("", []),
        ("-1", []),
    ],
)
def test_a_job_has_the_gpus_that_it_was_given(chosen, found, tmp_path, monkeypatch):
    """As CUDA reads the variable: the first name of no device ends the list."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [one.partition(":")[0].partition("  ")[0] for one in environments.list_gpus()] == found
