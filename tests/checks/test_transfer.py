"""The transport of weights, and the effects of an abandoned sync."""

from __future__ import annotations

import pytest

from harness.checks.failed_sync import DONE, ENDLESS, FAILED_SYNC, OTHERWISE
from harness.checks.transfer import BY_IPC, NATIVE_TRANSFER, NO_EXTENSION, NOT_ASKED
from tests import traces
from tests.checks.scene import SERVERS, Scene, without_observations

BY_RPC = "a sync calls methods that a worker class was given beside the engine's own"
BEGUN = "a sync in chunks was begun and finished another number of times"
NOT_REACHED = "a sync did not reach a server through the engine's own weight transfer"


def carried(*ops: str, there: tuple[str, ...] = ("update_weights",)) -> Scene:
    """A sync that the first server got by `ops`, the other by `there`. "collective_rpc:f" calls method f of the workers."""
    scene = Scene()
    scene.generate([[5, 6], [7, 8]])
    sync = scene.sync(1)
    for server, by in zip(SERVERS, (ops, there), strict=True):
        for op in by:
            at = sync.started_ns + 1
            kind, _, method = op.partition(":")
            about = {"op": kind, "arguments": {"method": method} if method else {}}
            scene.seen.append(traces.observation("control", server, at, **about, ended_ns=at, error=None))
    return scene


@pytest.mark.parametrize(
    "ops",
    [
        ("update_weights",),
        ("update_weights", "collective_rpc:update_weights"),
        ("start_weight_update", "update_weights", "update_weights", "finish_weight_update"),
    ],
)
def test_the_engines_own_transfer(ops):
    found = carried(*ops).judge(NATIVE_TRANSFER)
    assert (found.status, found.facts) == ("pass", 2)


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        (("collective_rpc",), BY_RPC),
        (("update_weights", "collective_rpc:update_weights_chunk"), BY_RPC),
        (("pause_generation",), NOT_REACHED),
        (("start_weight_update", "update_weights"), BEGUN),
    ],
)
def test_another_way(ops, reason):
    assert carried(*ops).judge(NATIVE_TRANSFER).reason == reason


def test_a_tap_that_saw_nothing_shows_nothing():
    assert without_observations(carried("update_weights")).judge(NATIVE_TRANSFER).status == "untestable"


def workers(**second: object) -> Scene:
    scene = Scene()
    plain = {"rank": 0, "extensions": [], "transport": "ipc"}
    scene.call("workers", {}, {"servers": {SERVERS[0]: [plain], SERVERS[1]: [{**plain, **second}]}})
    return scene


def test_workers_without_an_extension_that_take_weights_through_ipc():
    for check in (NO_EXTENSION, BY_IPC):
        assert workers().judge(check).facts == 2
        assert Scene().judge(check).reason == NOT_ASKED
    extended = workers(extensions=["stack.Worker"]).judge(NO_EXTENSION)
    assert extended.reason == "a worker class is extended by a class of the stack's own"
    other = workers(transport="broadcast").judge(BY_IPC)
    assert other.reason == "a colocated worker takes weights by another way than CUDA IPC"


@pytest.mark.parametrize("check", [NO_EXTENSION, BY_IPC])
def test_a_server_without_workers_shows_nothing(check):
    worker = {"rank": 0, "extensions": [], "transport": "ipc"}
    for servers in ({SERVERS[0]: [worker], SERVERS[1]: []}, {SERVERS[0]: [worker]}):
        scene = Scene()
        scene.call("workers", {}, {"servers": servers})
        assert scene.judge(check).reason == "a server shows no worker"


def given_up(error: object = "TrainerFailed", after: object = None) -> Scene:
    """An abandoned sync and a next one, which succeeds unless `after` is its error."""
    scene = Scene()
    first = scene.call("sync_weights", {"version": 2, "chunks": 3, "fail_after_chunks": 1})
    if error:
        scene.change(first, result=None, error=traces.error(str(error)))
    second = scene.sync(1)
    if after:
        scene.change(second, result=None, error=traces.error(str(after)))
    return scene


def test_a_sync_that_was_given_up_fails_and_the_next_one_does_not():
    found = given_up().judge(FAILED_SYNC)
    assert (found.facts, found.numbers) == (2, {"interrupted": 1})


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"error": None}, DONE),
        ({"error": "CallTimedOut"}, ENDLESS),
        ({"error": "TimeoutError"}, ENDLESS),
        ({"error": "NotJoined"}, OTHERWISE),
        ({"after": "RuntimeError"}, "after a sync that failed, sync_weights() fails as well"),
    ],
)
def test_what_a_sync_that_was_given_up_may_do_wrong(how, reason):
    assert given_up(**how).judge(FAILED_SYNC).reason == reason


def test_nothing_after_it_shows_nothing():
    scene = Scene()
    scene.call("sync_weights", {"version": 2, "chunks": 3, "fail_after_chunks": 1})
    assert scene.judge(FAILED_SYNC).status == "untestable"
    assert Scene().judge(FAILED_SYNC).status == "untestable"
