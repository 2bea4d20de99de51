"""Recordings from a GPU show the same results when today's checks judge them again."""

from __future__ import annotations

import tarfile
from pathlib import Path

import msgspec
import pytest

from harness.records.verdict import Judgement
from harness.running.run import compare_recordings, judge_run

H100 = Path(__file__).resolve().parents[1] / "reports" / "evidence" / "h100-bfloat16"
CUT_OFF = (
    "could not be driven: Interrupted: the run was interrupted",
    "the reference was not asked for the scores of an answer",
)
"""Both runs ended with Ctrl-C, so the scenario that was running is untestable."""

H200 = H100.parents[0] / "h200-bfloat16" / "mixtures"
EIGHT_BIT = H200.parent / "eight-bit"
WAVES = H100.parent / "h100-bfloat16-waves" / "waves-2-3-6.tar.xz"

UNSPREAD = "a server answered nothing after the weights had changed"
"""These runs sent four prompts per version, and one server got all of them in a scenario. Today's scenarios send more."""


@pytest.fixture(scope="module", params=["legacy", "http"])
def judged(request) -> Judgement:
    return judge_run(H100 / request.param)


def test_the_recordings_say_that_a_gpu_computed_in_bfloat16(judged: Judgement):
    (header,) = judged.run.headers
    assert judged.run.computed == "cuda, bfloat16, eager"
    assert header["hardware"]["gpus"] == "1 × NVIDIA H100 80GB HBM3"


def test_stacks_that_computed_otherwise_are_each_named(judged: Judgement):
    (header,) = judged.run.headers
    graphs = header | {"target": "local:other", "cuda_graphs": True, "batch_invariant": True}
    both = msgspec.structs.replace(judged.run, headers=[header, header, graphs])
    assert both.computed == (
        f"cuda, bfloat16, CUDA graphs, batch-invariant (local:other); cuda, bfloat16, eager ({header['target']})"
    )


def test_a_right_stack_is_green_in_bfloat16_up_to_where_its_run_was_cut_off(judged: Judgement):
    red = [v for v in judged.verdicts if v.red and v.reason != UNSPREAD]
    assert {v.reason for v in red} <= set(CUT_OFF)
    assert len({v.scenario for v in red}) == 1
    assert len(judged.verdicts) - len(red) >= 55


@pytest.mark.parametrize(
    ("scenario", "checks"),
    [
        ("cuda_ipc.test_colocated_engines_take_weights_through_ipc", {"by_ipc", "every_parameter", "weight_history"}),
        ("sleep.test_sleep_gives_memory_back", {"memory.released", "memory.by_tags", "memory.awake_again"}),
        ("sleep.test_the_colocated_training_step", {"weight_history"}),
    ],
)
def test_what_only_a_gpu_shows(judged: Judgement, scenario: str, checks: set[str]):
    passed = {v.check.partition(":")[0] for v in judged.verdicts if v.scenario == scenario and v.status == "pass"}
    assert checks <= passed


def test_the_bound_lies_between_the_noise_and_the_weakest_fault(judged: Judgement):
    (floor,) = [floor for floor in judged.noise if floor.check == "weight_history"]
    assert 0.1 < floor.floor < floor.bound < floor.weakest_fault


def test_the_two_stacks_compare():
    compared = compare_recordings(H100 / "legacy", H100 / "http")
    both = [v for v in compared.verdicts if v.baseline is not None and v.scenario.startswith(("cuda_ipc", "sleep"))]
    assert both
    assert {v.reason for v in both if v.red} <= {f"candidate: {UNSPREAD}"}


def test_mixtures_of_experts_of_both_stacks_are_right_in_bfloat16_on_a_gpu():
    judged = compare_recordings(H200 / "legacy", H200 / "http")
    assert {header["hardware"]["gpus"] for header in judged.run.headers} == {"1 × NVIDIA H200"}
    red = [(v.scenario, v.check, v.reason) for v in judged.verdicts if v.red]
    assert red == []
    known = {(v.scenario, v.check) for v in judged.verdicts if v.known is not None}
    assert known == {("experts.test_experts_of_samples", "routed_experts")}
    passed = [v for v in judged.verdicts if v.status == "pass" and v.check == "routed_experts"]
    assert {(v.target, v.topology) for v in passed} >= {
        (target, topology) for target in ("local:legacy", "local:http") for topology in ("moe", "moe-olmoe")
    }


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_syncs_into_quantized_engines_are_right_on_a_gpu(kind):
    judged = judge_run(EIGHT_BIT / kind)
    red = {(v.scenario, v.check) for v in judged.verdicts if v.red}
    assert red == ({("quantization.test_the_client_of_the_configuration", "client_lives")} if kind == "int8" else set())
    passed = {(v.scenario.partition(".")[2], v.check.partition(":")[0]) for v in judged.verdicts if v.status == "pass"}
    assert passed >= {
        ("test_quantized_engines_answer", "quantization_effect"),
        ("test_syncs_into_quantized_engines", "every_parameter"),
        ("test_quantized_syncs_are_idempotent", "every_parameter"),
    }


def test_both_stacks_compared_in_bfloat16_on_a_gpu(tmp_path):
    with tarfile.open(WAVES) as archive:
        archive.extractall(tmp_path, filter="data")
    judged = compare_recordings(tmp_path / "legacy-waves-2-3-6", tmp_path / "http-waves-2-3-6")
    assert {v.scenario for v in judged.verdicts if v.red} == {
        "moments.test_keep_before_the_first_token",  # the GPU had read all prompts before a pause
        "openai_endpoint.test_the_configured_address",  # driven although SkyRL 0.3.0 has none
    }
    assert sum(v.status == "parity" for v in judged.verdicts) > 700
    passed = {v.check for v in judged.verdicts if v.status == "pass"}
    assert {"weight_history", "gym.logprobs", "schedule.versions", "by_ipc", "frozen_while_paused"} <= passed
