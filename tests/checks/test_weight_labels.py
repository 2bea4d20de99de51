"""What a stack says of its own weights: counts of syncs, labels, and the parameters that they name."""

from __future__ import annotations

import pytest

from harness.checks.weight_labels import (
    ANOTHER,
    MISCOUNTED,
    OLD_SALT,
    OUTLIVED,
    SALTS_OF_WEIGHTS,
    SILENT,
    SYNCS_COUNTED,
    UNCOUNTED,
    WEIGHT_LABELS,
)
from harness.contract.errors import Blame
from harness.records.recording import CallError
from harness.records.reference import ExpectedDigests, ExpectedDigestsRequest
from tests import traces
from tests.checks.scene import SERVERS, Scene

FAILED = CallError(kind="TrainerFailed", message="the trainer failed after 1 chunks", blame=Blame.STACK)


def counting(*counts: int, failed: tuple[int, ...] = ()) -> Scene:
    """The count is read before and after each sync. `failed`: numbers of the syncs that fail, from 1 on."""
    scene = Scene()
    for number, count in enumerate(counts):
        if number:
            sync = scene.sync(1)
            if number in failed:
                scene.change(sync, error=FAILED, result=None)
        scene.call("sync_count", {}, {"count": count})
    return scene


@pytest.mark.parametrize("scene", [counting(0, 1, 2), counting(7, 8), counting(3, 3, 4, failed=(1,))])
def test_a_count_of_completed_syncs(scene):
    assert scene.judge(SYNCS_COUNTED).status == "pass"


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        (counting(0, 1, 1), UNCOUNTED),
        (counting(2, 3, 0), UNCOUNTED),
        (counting(0, 2), MISCOUNTED),
        (counting(0, 1, failed=(1,)), MISCOUNTED),
    ],
    ids=["repeated", "lost", "twice", "failed"],
)
def test_a_wrong_count(scene, reason):
    assert scene.judge(SYNCS_COUNTED).reason == reason


def test_a_count_that_moves_without_a_sync():
    scene = counting(0, 1)
    scene.call("sync_count", {}, {"count": 2})
    assert scene.judge(SYNCS_COUNTED).reason == MISCOUNTED


def test_a_count_without_a_sync_says_nothing():
    scene = Scene()
    scene.call("sync_count", {}, {"count": 0})
    scene.call("sync_count", {}, {"count": 0})
    assert scene.judge(SYNCS_COUNTED).status == "untestable"


def held(version: int) -> dict[str, str]:
    return {name: f"{version:08x}-{name}:2x2:float32" for name in ("embed", "norm")}


@pytest.fixture
def scene() -> Scene:
    """Nothing is synced yet. The reference knows versions 0 to 2."""
    scene = Scene()
    for version in range(3):
        scene.reference.set(ExpectedDigestsRequest(version=version), ExpectedDigests(digests=held(version)))
    return scene


def label(scene: Scene, version: int, given: str | None, *, fails: bool = False) -> None:
    """A sync of this version under a label."""
    before = scene.version
    sync = scene.sync(version)
    request = {**sync.request, "weight_label": given}
    scene.change(sync, request=request, **({"error": FAILED, "result": None} if fails else {}))
    scene.version = before if fails else version


def told(scene: Scene, *labels: str | None) -> None:
    """What the servers say."""
    servers = {server: one for server, one in zip(SERVERS, labels, strict=True) if one is not None}
    scene.call("weight_labels", {}, {"servers": servers})


def holding(scene: Scene, version: int) -> None:
    """Both servers hold this version."""
    scene.digests(dict.fromkeys(SERVERS, held(version)))


def test_labels_of_the_weights_that_servers_hold(scene):
    for version, given in ((1, "first"), (2, "second"), (2, "again"), (1, "back")):
        label(scene, version, given)
        told(scene, given, given)
        holding(scene, version)
    found = scene.judge(WEIGHT_LABELS)
    assert (found.status, found.numbers["readings"]) == ("pass", 4)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [(("second", "first"), ANOTHER), (("first", "first"), ANOTHER), (("second", None), SILENT)],
    ids=["one server", "both", "silent"],
)
def test_a_label_that_a_server_does_not_have(scene, labels, reason):
    label(scene, 1, "first")
    label(scene, 2, "second")
    told(scene, *labels)
    assert scene.judge(WEIGHT_LABELS).reason == reason


def test_a_label_of_other_parameters(scene):
    label(scene, 1, "first")
    label(scene, 2, "second")
    told(scene, "second", "second")
    holding(scene, 1)
    assert scene.judge(WEIGHT_LABELS).reason == "a server missed a weight sync"


@pytest.mark.parametrize(("said", "reason"), [("labelled", OUTLIVED), ("sync 2", "")])
def test_a_label_after_a_sync_without_one(scene, said, reason):
    label(scene, 1, "labelled")
    label(scene, 2, None)
    told(scene, said, said)
    assert scene.judge(WEIGHT_LABELS).reason == reason


@pytest.mark.parametrize(("said", "reason"), [("broken", ANOTHER), ("whole", "")])
def test_a_failed_sync_moves_no_label(scene, said, reason):
    label(scene, 1, "whole")
    label(scene, 2, "broken", fails=True)
    told(scene, said, said)
    holding(scene, 2)  # what a server holds after a failed sync is open
    assert scene.judge(WEIGHT_LABELS).reason == reason


def test_labels_without_a_labelled_sync_say_nothing(scene):
    scene.sync(1)
    told(scene, "default", "default")
    assert scene.judge(WEIGHT_LABELS).status == "untestable"


def salted(*salts: str | None, sync: bool = True, earlier: tuple[bool, bool] = (True, True)) -> Scene:
    """Trajectories before and after a sync, under these salts."""
    scene = Scene()
    for number, (salt, by_earlier) in enumerate(zip(salts, earlier, strict=True)):
        if number and sync:
            scene.sync(1)
        started = scene.pass_time()
        scene.seen += traces.executed([1, 2], [3], from_ns=scene.pass_time(), step_ns=1)
        scene.seen[-3:] = [
            s
            if s.kind != "request"
            else traces.observation("request", s.server, s.at_ns, **(s.data | {"cache_salt": salt}))
            for s in scene.seen[-3:]
        ]
        request = {"prompts": [], "env_extras": [], "earlier_client": by_earlier}
        scene.calls.append(traces.call("gym_generate", request, {}, started_ns=started, ended_ns=scene.pass_time(3)))
    return scene


def test_trajectories_after_a_sync_have_another_salt():
    assert salted("policy@0", "policy@1").judge(SALTS_OF_WEIGHTS).status == "pass"
    assert salted("policy@0", "policy@0").judge(SALTS_OF_WEIGHTS).reason == OLD_SALT


@pytest.mark.parametrize(
    "scene",
    [salted("a", "a", sync=False), salted("a", "a", earlier=(True, False)), salted(None, None)],
    ids=["no sync", "two clients", "no salt"],
)
def test_salts_that_say_nothing(scene):
    assert scene.judge(SALTS_OF_WEIGHTS).status == "untestable"
