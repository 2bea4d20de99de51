"""Frozen requests that continue with the new weights on their old cache, or with something else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness.checks.kept_cache import ALIKE, KEPT_CACHE, NEITHER, NONE_FROZEN, NOT_FROZEN, OLD_WEIGHTS, READ_ANEW
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene

PROMPT = [10, 11]
PIECE = 3
"""Tokens between two freezes."""


def frozen(*makers: int, versions: Sequence[int] = (1,), clear: bool = False, in_sync: bool = False) -> Scene:
    """A request that is frozen after every three tokens for a sync to the next of `versions`. `makers` are the versions by which
    the oracle generates each piece."""
    scene = Scene()
    asked, at = scene.pass_time(), scene.pass_time()
    made: list[int] = []
    times: list[int] = []
    for maker, version in zip(makers, [0, *versions], strict=True):
        if made:
            scene.control("pause", mode="keep", clear_cache=clear)
            sync = scene.sync(version)
            scene.control("resume")
            if in_sync:
                times[-1] = sync.started_ns + 1
        made += scene.reference.greedy([*PROMPT, *made], PIECE, version=maker)
        times += [scene.pass_time() for _ in range(PIECE)]
        scene.pass_time()
    seen = traces.executed(PROMPT, made, server=SERVERS[0], from_ns=at, step_ns=STEP)
    steps = iter(times)
    for o in seen:
        when = at if o.kind == "request" else next(steps, scene.now)
        scene.seen.append(traces.observation(o.kind, o.server, when, **o.data))
    params = {"temperature": 0.0, "max_tokens": len(made)}
    scene.calls.append(traces.generate([PROMPT], [made], params=params, started_ns=asked, ended_ns=scene.pass_time()))
    return scene


def on_cache(version: int, *cached: tuple[int, int]) -> int:
    return traces.on_cache(version, cached)


READ = len(PROMPT) + PIECE - 1
"""Tokens read before the first freeze: all but the newest."""


def test_the_new_weights_on_the_old_cache():
    found = frozen(0, on_cache(1, (READ, 0))).judge(KEPT_CACHE)
    assert (found.status, found.facts) == ("pass", PIECE)


def test_each_sync_leaves_what_had_been_read():
    first, second = on_cache(1, (READ, 0)), on_cache(2, (READ, 0), (PIECE, 1))
    assert frozen(0, first, second, versions=(1, 2)).judge(KEPT_CACHE).facts == 2 * PIECE
    assert frozen(0, first, on_cache(2, (READ, 0)), versions=(1, 2)).judge(KEPT_CACHE).status == "fail"


@pytest.mark.parametrize(("maker", "reason"), [(0, OLD_WEIGHTS), (1, READ_ANEW), (7, NEITHER)])
def test_anything_else_is_named(maker, reason):
    assert frozen(0, maker).judge(KEPT_CACHE).reason == reason


def test_a_cleared_cache_is_for_another_check():
    assert frozen(0, 1, clear=True).judge(KEPT_CACHE).reason == NONE_FROZEN


def test_a_request_that_goes_on_through_a_sync_was_not_frozen():
    found = frozen(0, on_cache(1, (READ, 0)), in_sync=True).judge(KEPT_CACHE)
    assert (found.reason, found.evidence[0]["tokens during a sync"]) == (NOT_FROZEN, 1)


def test_where_all_weights_agree_nothing_is_shown():
    """A sync of the current version."""
    found = frozen(0, on_cache(0, (READ, 0)), versions=(0,)).judge(KEPT_CACHE)
    assert found.status == "pass"
    scene = frozen(0, 0, versions=(0,))
    scene.reference.score = lambda request: traces.FakeReference.score(scene.reference, traces.uncached(request))
    scene.reference.asked = lambda _: scene.reference
    assert scene.judge(KEPT_CACHE).reason == ALIKE
