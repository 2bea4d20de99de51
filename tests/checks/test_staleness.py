"""Answers and the policy version that made them."""

from __future__ import annotations

import pytest

from harness.checks.staleness import (
    CURRENT_POLICY,
    FORCED_EFFECT,
    FRESH_CACHE,
    NO_CHANGE,
    NO_GREEDY,
    NOT_HIT,
    NOT_TOLD,
    NOTHING_BETWEEN,
    SAME_VERSION_SAME_OUTPUT,
    SILENT,
    WHOLE_VERSION,
)
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene, without_observations

SHORT = [[10, 11], [20, 21]]
LONG = [[3 + n % 50 for n in range(130)], [4 + n % 50 for n in range(130)]]
"""Longer than a cache block; each prompt always meets the same server."""
STALE = "an answer was made by a policy version that had been replaced"
MIXED = "an answer after a sync mixes policy versions: its prefix cache is stale"


def synced(prompts=SHORT) -> Scene:
    """An answer of version 0, then a sync to version 1. The test adds the next answer."""
    scene = Scene()
    scene.generate(prompts)
    scene.sync(1)
    return scene


def test_answers_follow_the_version_that_was_synced():
    scene = synced()
    scene.generate(SHORT)
    assert scene.judge(CURRENT_POLICY).status == "pass"
    assert scene.judge(FORCED_EFFECT).status == "pass"


def test_an_answer_by_stale_weights():
    scene = synced()
    scene.generate(SHORT, version=0)
    assert scene.judge(CURRENT_POLICY).reason == STALE
    assert scene.judge(FORCED_EFFECT).reason == "syncing another version does not change the answers"


def test_one_stale_server_is_enough():
    scene = synced()
    fresh = scene.reference.greedy(SHORT[0], 6, version=1)
    stale = scene.reference.greedy(SHORT[1], 6, version=0)
    scene.generate(SHORT, tokens=[fresh, stale])
    found = scene.judge(CURRENT_POLICY)
    assert (found.reason, found.evidence[0]["row"], found.evidence[0]["follows"]) == (STALE, 1, [{"version": 0}])


def test_an_answer_of_no_version():
    scene = synced()
    scene.generate(SHORT, tokens=[[1, 2, 3, 4, 5, 6]] * 2)
    assert scene.judge(CURRENT_POLICY).reason == "an answer follows no policy version"


def test_an_answer_that_a_sync_overlaps_is_not_judged():
    scene = Scene()
    call = scene.generate(SHORT, version=1)
    sync = scene.sync(1)
    scene.change(sync, started_ns=call.started_ns + 1)
    assert scene.judge(CURRENT_POLICY).reason == NO_GREEDY


def test_a_stale_prefix_cache():
    scene = Scene()
    for _ in range(2):
        scene.generate(LONG)
    scene.sync(1)
    scene.generate(LONG)
    found = scene.judge(FRESH_CACHE)
    assert (found.status, found.numbers["cache_hits"]) == ("pass", 2)
    assert without_observations(scene).judge(FRESH_CACHE).reason == NOT_TOLD
    scene = synced(LONG)
    mixed = [[*scene.reference.greedy(prompt, 3, version=1), 1, 2, 3] for prompt in LONG]
    scene.generate(LONG, tokens=mixed)
    assert scene.judge(FRESH_CACHE).reason == MIXED
    scene = synced(LONG)
    scene.generate(LONG, version=0)
    assert scene.judge(FRESH_CACHE).reason == STALE


def test_prompts_that_no_cache_holds_say_nothing_of_it():
    scene = synced()
    scene.generate(SHORT)
    assert scene.judge(FRESH_CACHE).status == "untestable"
    scene = synced(LONG)
    scene.generate(LONG)
    assert scene.judge(FRESH_CACHE).reason == NOT_HIT, "no engine had answered them from its cache"
    scene = Scene()
    for _ in range(2):
        scene.generate(LONG, route=lambda *_: SERVERS[0])
    scene.sync(1)
    scene.generate(LONG, route=lambda *_: SERVERS[1])
    assert scene.judge(FRESH_CACHE).reason == NOT_HIT, "another server's cache held them"


def test_a_server_that_answers_nothing_after_a_sync_shows_nothing():
    scene = synced()
    assert scene.judge(CURRENT_POLICY).reason == NO_CHANGE
    scene.generate(SHORT, route=lambda *_: SERVERS[0])
    assert scene.judge(CURRENT_POLICY).reason == SILENT
    scene.generate(SHORT)
    assert scene.judge(CURRENT_POLICY).numbers == {"answers_after_a_change": 4, "servers": 2}
    assert without_observations(scene).judge(CURRENT_POLICY).status == "untestable"


def test_all_answers_that_are_wrong_are_reported():
    scene = synced()
    scene.generate(SHORT[:1], version=0)
    scene.generate(SHORT[1:], tokens=[[1, 2, 3, 4, 5, 6]])
    found = scene.judge(CURRENT_POLICY)
    assert found.reasons == ["an answer follows no policy version", STALE]
    assert {call for call, _ in found.concerns} == {call.id for call in scene.calls[-2:]}


@pytest.mark.parametrize("syncs", [(0,), (1, 0)], ids=["same version", "there and back"])
def test_the_same_version_answers_the_same(syncs):
    scene = Scene()
    scene.generate(SHORT)
    for version in syncs:
        scene.sync(version)
    scene.generate(SHORT)
    assert scene.judge(SAME_VERSION_SAME_OUTPUT).status == "pass"
    before = scene.calls[-1].result["response_ids"]
    scene.change(scene.calls[-1], result={**scene.calls[-1].result, "response_ids": [before[0], before[1][::-1]]})
    found = scene.judge(SAME_VERSION_SAME_OUTPUT)
    assert found.reason == "a policy version answers otherwise the second time"
    scene.generate(SHORT, tokens=[[1, 2, 3, 4, 5, 6]] * 2)
    assert [row for _, row in scene.judge(SAME_VERSION_SAME_OUTPUT).concerns] == [0, 1, 1]


def test_two_answers_with_nothing_between_them_show_nothing():
    scene = Scene()
    scene.generate(SHORT)
    scene.generate(SHORT)
    assert scene.judge(SAME_VERSION_SAME_OUTPUT).reason == NOTHING_BETWEEN


def test_nothing_to_compare_is_untestable():
    scene = Scene()
    for check in (CURRENT_POLICY, SAME_VERSION_SAME_OUTPUT, FORCED_EFFECT, FRESH_CACHE):
        assert scene.judge(check).status == "untestable"
    scene.generate(SHORT)
    for check in (SAME_VERSION_SAME_OUTPUT, FORCED_EFFECT):
        assert scene.judge(check).status == "untestable"


def waited(answer=None, *, paused=True) -> Scene:
    """A request that arrives during a pause, while a sync runs. It runs after resume(), if it was `paused`."""
    scene = Scene()
    if paused:
        scene.control("pause", mode="keep", clear_cache=False)
    asked = scene.pass_time()
    arrived = scene.pass_time()
    scene.sync(1)
    if paused:
        scene.control("resume")
    made = answer(scene) if answer else scene.reference.greedy(SHORT[0], 6, version=1)
    seen = traces.executed(SHORT[0], made, server=SERVERS[0], from_ns=scene.pass_time(), step_ns=STEP)
    seen[0] = traces.observation("request", SERVERS[0], arrived, **seen[0].data)
    scene.seen += seen
    scene.now += 10 * STEP
    params = {"temperature": 0.0, "max_tokens": 6}
    scene.calls.append(traces.generate(SHORT[:1], [made], params=params, started_ns=asked, ended_ns=scene.now))
    return scene


def test_a_request_that_waited_for_a_sync_meets_the_whole_version():
    assert waited().judge(WHOLE_VERSION).status == "pass"
    assert waited().judge(CURRENT_POLICY).reason == NO_GREEDY, "by its call alone it cannot be told"


@pytest.mark.parametrize(
    "answer",
    [
        lambda scene: scene.reference.greedy(SHORT[0], 6, version=0),
        lambda scene: [*scene.reference.greedy(SHORT[0], 3, version=1), 1, 2, 3],
    ],
    ids=["stale", "mixed"],
)
def test_a_request_that_meets_half_a_sync(answer):
    found = waited(answer).judge(WHOLE_VERSION)
    assert found.reason == "what an engine made after a sync does not follow the version that was synced"


def test_what_an_engine_may_have_begun_before_the_sync_is_left_open():
    assert waited(paused=False).judge(WHOLE_VERSION).status == "untestable"


def test_reshaped_sampling_is_no_evidence_of_a_version():
    """A greedy choice among few tokens, or with a bias, is not the model's own choice."""
    scene = synced()
    scene.generate(SHORT, tokens=[[1, 2, 3, 4, 5, 6]] * 2, params={"allowed_token_ids": [1, 2, 3, 4, 5, 6]})
    assert scene.judge(CURRENT_POLICY).reason == NO_CHANGE
    scene.generate(SHORT, tokens=[[1, 2, 3, 4, 5, 6]] * 2)
    assert scene.judge(CURRENT_POLICY).reason == "an answer follows no policy version"


def test_how_far_an_aborted_answer_had_come_is_chance():
    scene = Scene()
    scene.generate(SHORT)
    scene.sync(0)
    scene.generate(SHORT)
    half = [row[:3] for row in scene.calls[-1].result["response_ids"]]
    cut = {**scene.calls[-1].result, "response_ids": half, "stop_reasons": ["abort"] * 2}
    scene.change(scene.calls[-1], result=cut)
    assert scene.judge(SAME_VERSION_SAME_OUTPUT).status == "untestable"


def frozen_through_a_sync(*, reset: bool = True, clear: bool = False, before: int = 0, after: int = 1) -> Scene:
    """Three tokens by version `before`, a freeze, a sync, and three tokens by version `after`."""
    scene = Scene()
    asked, begun = scene.pass_time(), scene.pass_time()
    first = scene.reference.greedy(SHORT[0], 3, version=before)
    made = [*first, *scene.reference.greedy([*SHORT[0], *first], 3, version=after)]
    seen = traces.executed(SHORT[0], made, server=SERVERS[0], from_ns=begun, step_ns=STEP)
    scene.now = begun + 4 * STEP
    scene.control("pause", mode="keep", clear_cache=clear)
    scene.sync(1)
    if reset:
        scene.control("reset_prefix_cache", reset_running_requests=True)
    scene.control("resume")
    steps = [o for o in seen if o.kind == "step"]
    for o in seen:
        late = o not in steps[:3] and o.kind != "request"
        scene.seen.append(traces.observation(o.kind, o.server, o.at_ns + (scene.now - begun if late else 0), **o.data))
    scene.now += 20 * STEP
    params = {"temperature": 0.0, "max_tokens": 6}
    scene.calls.append(traces.generate(SHORT[:1], [made], params=params, started_ns=asked, ended_ns=scene.now))
    return scene


def test_a_frozen_request_whose_cache_is_reset_goes_on_as_the_new_version():
    assert frozen_through_a_sync().judge(WHOLE_VERSION).status == "pass"
    for wrong in ({"before": 1}, {"after": 0}):
        found = frozen_through_a_sync(**wrong).judge(WHOLE_VERSION)
        assert found.reason == "what an engine made after a sync does not follow the version that was synced"


def test_a_frozen_request_whose_cache_was_cleared_goes_on_as_the_new_version():
    assert frozen_through_a_sync(reset=False, clear=True).judge(WHOLE_VERSION).status == "pass"
    found = frozen_through_a_sync(reset=False, clear=True, after=0).judge(WHOLE_VERSION)
    assert found.reason == "what an engine made after a sync does not follow the version that was synced"


def test_what_reads_old_keys_and_values_is_left_to_another_check():
    found = frozen_through_a_sync(reset=False, after=0).judge(WHOLE_VERSION)
    assert (found.status, found.reason) == (
        "untestable",
        "no request that a sync overlaps was worked on by a new version alone",
    )
