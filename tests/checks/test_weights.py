"""Parameters after a sync: which server holds which version, by digest."""

from __future__ import annotations

import pytest

from harness.checks.weights import EVERY_PARAMETER, NOT_READ, SAME_VERSION_SAME_PARAMETERS, UNIFORM_SERVERS
from harness.reference import ExpectedDigests, ExpectedDigestsRequest
from harness.topology import Topology
from tests.checks.scene import SERVERS, Scene

NAMES = ("embed", "layers.0.qkv_proj", "norm")


def version(number: int) -> dict[str, str]:
    return {name: f"{number:08x}-{name}:2x2:float32" for name in NAMES}


def held(*digests: dict[str, str]) -> dict[str, dict[str, str]]:
    return dict(zip(SERVERS, digests, strict=True))


@pytest.fixture
def scene() -> Scene:
    """Versions 0, 1, 2 and 1 again, read after each sync; the last reading is left to the test."""
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


def test_shards_are_not_compared_with_whole_parameters(scene):
    scene.digests(held(version(1), version(1)))
    assert scene.judge(EVERY_PARAMETER, topology=Topology(tensor_parallel=2)).status == "untestable"
    assert scene.judge(UNIFORM_SERVERS, topology=Topology(tensor_parallel=2)).status == "pass"
