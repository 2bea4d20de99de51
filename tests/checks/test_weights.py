"""Parameters after a sync: the version that each server holds, by digest."""

from __future__ import annotations

import pytest

from harness.checks.weights import (
    EVERY_PARAMETER,
    NOT_READ,
    NOTHING_BETWEEN,
    SAME_VERSION_SAME_PARAMETERS,
    UNIFORM_SERVERS,
)
from harness.contract.errors import Blame
from harness.contract.topology import Topology
from harness.records.recording import CallError
from harness.records.reference import ExpectedDigests, ExpectedDigestsRequest, ExpertShard
from tests.checks.scene import SERVERS, Scene

NAMES = ("embed", "layers.0.qkv_proj", "norm")


def version(number: int) -> dict[str, str]:
    return {name: f"{number:08x}-{name}:2x2:float32" for name in NAMES}


def held(*digests: dict[str, str]) -> dict[str, dict[str, str]]:
    return dict(zip(SERVERS, digests, strict=True))


@pytest.fixture
def scene() -> Scene:
    """Versions 0, 1, 2 and 1 again, read after each sync. The test adds the last reading."""
    scene = Scene()
    for number in range(3):
        answer = ExpectedDigests(digests=version(number))
        scene.reference.set(ExpectedDigestsRequest(version=number), answer)
    scene.digests(held(version(0), version(0)))
    for number in (1, 2):
        scene.sync(number)
        scene.digests(held(version(number), version(number)))
    scene.sync(1)
    return scene


@pytest.mark.parametrize("check", [EVERY_PARAMETER, UNIFORM_SERVERS, SAME_VERSION_SAME_PARAMETERS])
def test_every_server_holds_every_parameter(scene, check):
    scene.digests(held(version(1), version(1)))
    assert scene.judge(check).status == "pass"
    scene.calls = [c for c in scene.calls if c.method != "digests"]
    assert scene.judge(check).status == "untestable"
    if check is not SAME_VERSION_SAME_PARAMETERS:
        assert scene.judge(check).reason == NOT_READ


@pytest.mark.parametrize("check", [EVERY_PARAMETER, UNIFORM_SERVERS])
def test_digests_that_cannot_be_read_are_a_failure(scene, check):
    """Of the stack, not of the scenario that asked for them."""
    scene.calls = [c for c in scene.calls if c.method != "digests"]
    dead = CallError(kind="HTTPStatusError", message="500", blame=Blame.STACK)
    scene.change(scene.call("digests"), result=None, error=dead)
    assert scene.judge(check).status == "fail"
    assert scene.judge(check).reason.startswith("digests() failed with HTTPStatusError")


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (version(2), "a server missed a weight sync"),
        ({**version(1), "norm": version(2)["norm"]}, "a parameter was not updated by a weight sync"),
        ({**version(1), "norm": "deadbeef:2x2:float32"}, "a parameter holds values of no policy version"),
        ({k: v for k, v in version(1).items() if k != "norm"}, "a parameter of the model is missing in a worker"),
        ({**version(1), "bias": "0:2:float32"}, "a worker holds a parameter that the model does not have"),
    ],
    ids=["missed", "not updated", "corrupted", "missing", "unknown"],
)
def test_what_one_server_lacks_is_named(scene, second, reason):
    scene.digests(held(version(1), second))
    found = scene.judge(EVERY_PARAMETER)
    assert (found.status, found.reason) == ("fail", reason)
    assert found.evidence[0]["server"] == "server-1"
    assert scene.judge(UNIFORM_SERVERS).status == "fail"
    assert scene.judge(SAME_VERSION_SAME_PARAMETERS).status == "fail"


def test_a_fault_that_both_servers_share_is_no_drift_but_a_fault(scene):
    stale = {**version(1), "embed": version(2)["embed"]}
    scene.digests(held(stale, stale))
    assert scene.judge(UNIFORM_SERVERS).status == "pass"
    assert scene.judge(EVERY_PARAMETER).status == "fail"
    assert scene.judge(SAME_VERSION_SAME_PARAMETERS).status == "fail"


def test_a_server_that_shows_nothing(scene):
    scene.digests({"server-0": version(1)})
    assert scene.judge(EVERY_PARAMETER).reason == "a server shows no parameters"
    assert scene.judge(UNIFORM_SERVERS).reason == "a server shows no parameters"


def test_each_kind_of_wrong_parameter_is_named(scene):
    second = {**version(1), "embed": version(2)["embed"], "norm": "deadbeef:2x2:float32", "bias": "0:2:float32"}
    del second["layers.0.qkv_proj"]
    last = scene.digests(held(version(1), second))
    found = scene.judge(EVERY_PARAMETER)
    assert found.reasons == [
        "a parameter holds values of no policy version",
        "a parameter of the model is missing in a worker",
        "a parameter was not updated by a weight sync",
        "a worker holds a parameter that the model does not have",
    ]
    assert found.concerns == [(last.id, None)]


def test_every_reading_is_judged(scene):
    last = scene.digests({"server-0": version(1)})
    again = scene.digests(held(version(1), version(2)))
    found = scene.judge(UNIFORM_SERVERS)
    assert found.reasons == ["a server shows no parameters", "servers hold different parameters"]
    assert {call for call, _ in found.concerns} == {last.id, again.id}


def test_what_nothing_could_move_was_not_put_to_the_test():
    scene = Scene()
    for _ in range(2):
        scene.digests(held(version(0), version(0)))
    assert scene.judge(SAME_VERSION_SAME_PARAMETERS).reason == NOTHING_BETWEEN
    scene.sync(0)
    scene.digests(held(version(0), version(0)))
    found = scene.judge(SAME_VERSION_SAME_PARAMETERS)
    assert (found.status, found.numbers) == ("pass", {"readings_after_a_change": 1})


def test_corruption_from_the_second_sync_on_says_after_how_many():
    scene = Scene()
    for number in range(3):
        scene.reference.set(ExpectedDigestsRequest(version=number), ExpectedDigests(digests=version(number)))
    for number in (1, 2):
        scene.sync(number)
        wrong = {**version(2), "norm": "deadbeef:2x2:float32"}
        scene.digests(held(*[version(1) if number == 1 else wrong] * 2))
    found = scene.judge(EVERY_PARAMETER)
    assert (found.status, found.evidence[0]["syncs"]) == ("fail", 2)


@pytest.fixture
def sharded() -> Scene:
    """Version 0, then 1, on two servers with two workers each. The test adds the last reading."""
    scene = Scene()
    for number in range(2):
        for rank in range(2):
            asked = ExpectedDigestsRequest(version=number, tensor_parallel=2, rank=rank)
            scene.reference.set(asked, ExpectedDigests(digests=shard(number, rank)))
    scene.digests(workers(*[shard(0, 0), shard(0, 1)] * 2))
    scene.sync(1)
    return scene


TP2 = Topology(tensor_parallel=2)


def shard(number: int, rank: int) -> dict[str, str]:
    return {name: f"{rank}{digest}" for name, digest in version(number).items()}


def workers(*digests: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    first, second = SERVERS
    return {first: list(digests[:2]), second: list(digests[2:])}


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([shard(1, 0), shard(1, 1)], None),
        ([shard(1, 0), shard(0, 1)], "a server missed a weight sync"),
        ([shard(1, 1), shard(1, 0)], "a parameter holds values of no policy version"),
        ([shard(1, 0)], "a worker shows no parameters"),
        ([shard(1, 0), shard(1, 1), shard(1, 1)], "a server has more workers than the topology"),
    ],
    ids=["right", "one rank missed it", "swapped", "one rank silent", "one rank too many"],
)
def test_every_worker_holds_its_shards(sharded, last, reason):
    sharded.digests(workers(shard(1, 0), shard(1, 1), *last))
    found = sharded.judge(EVERY_PARAMETER, topology=TP2)
    assert (found.status, found.reason or None) == ("fail" if reason else "pass", reason)


def test_stages_of_a_pipeline_are_not_known(scene):
    scene.digests(held(version(1), version(1)))
    assert scene.judge(EVERY_PARAMETER, topology=Topology(pipeline_parallel=2)).status == "untestable"
    assert scene.judge(UNIFORM_SERVERS, topology=Topology(pipeline_parallel=2)).status == "pass"


EXPERT_PARALLEL = Topology(engines=1, data_parallel=2, expert_parallel=True)


def share(rank: int, number: int = 1) -> dict[str, str]:
    """Digests of a data-parallel worker: it holds everything except the other workers' experts."""
    return {**version(number), "layers.0.experts.w2": f"{number}{rank}:4x2:float32"}


@pytest.fixture
def spread() -> Scene:
    """Versions 0 and 1 on two data-parallel workers. The test adds the reading after the sync."""
    scene = Scene()
    for number in range(2):
        for rank in range(2):
            of = ExpertShard(rank=rank, workers=2, whole=True)
            asked = ExpectedDigestsRequest(version=number, experts=of)
            scene.reference.set(asked, ExpectedDigests(digests=share(rank, number)))
    scene.digests(held(share(0, 0), share(1, 0)))
    scene.sync(1)
    return scene


def test_data_parallel_workers_hold_their_own_experts_and_all_else_alike(spread):
    spread.digests(held(share(0), share(1)))
    for check in (EVERY_PARAMETER, UNIFORM_SERVERS):
        found = spread.judge(check, topology=EXPERT_PARALLEL)
        assert (found.status, found.facts) == ("pass", 2 * 2 * 4 if check is EVERY_PARAMETER else 2 * 3)


def test_one_server_is_uniform_with_none():
    alone = Scene()
    alone.digests({SERVERS[0]: [version(0)]})
    assert alone.judge(UNIFORM_SERVERS, servers=[SERVERS[0]]).status == "untestable"


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (share(0), "a worker holds the experts of another one"),
        (share(1, 0), "a server missed a weight sync"),
        (
            {**share(1), "layers.0.experts.w2": share(1, 0)["layers.0.experts.w2"]},
            "a parameter was not updated by a weight sync",
        ),
    ],
    ids=["another's", "missed", "not updated"],
)
def test_wrong_experts_of_one_worker_are_named(spread, second, reason):
    spread.digests(held(share(0), second))
    found = spread.judge(EVERY_PARAMETER, topology=EXPERT_PARALLEL)
    assert (found.status, found.reason, found.evidence[0]["server"]) == ("fail", reason, "server-1")


def test_what_data_parallel_workers_must_hold_alike_differs(spread):
    spread.digests(held(share(0), {**share(1), "norm": version(0)["norm"]}))
    assert spread.judge(UNIFORM_SERVERS, topology=EXPERT_PARALLEL).status == "fail"
