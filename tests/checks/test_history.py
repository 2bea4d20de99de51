"""Tokens that an order of the syncs explains, and tokens that none does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness.checks.history import (
    ALIKE,
    BY,
    EXPLAINED,
    NO_CHANGE,
    NO_GREEDY,
    NO_VERSION,
    NONE_FROZEN,
    NONE_WAITED,
    NOT_FROZEN,
    OLD_KEYS,
    READ_ANEW,
    SILENT,
    cached,
    explained,
    frozen,
    waited,
)
from harness.checks.register import REPLACED, WENT_BACK
from harness.checks.staleness import NOT_HIT, NOT_TOLD
from tests import traces
from tests.checks.scene import SERVERS, STEP, WEIGHTS, Scene, without_observations

SHORT = [[10, 11], [20, 21]]
LONG = [[3 + n % 50 for n in range(130)], [4 + n % 50 for n in range(130)]]
"""Longer than a cache block; each prompt always meets the same server."""
HELD_BY_ONE = {"weight": "00000001:2x2:float32"}
"""Version 1 as the reference knows it."""
NONSENSE = [1, 2, 3, 4, 5, 6]
CACHED, FROZEN, WAITED = explained(cached), explained(frozen), explained(waited)


def synced(prompts=SHORT, times=1) -> Scene:
    """Answers of version 0, then a sync to version 1. The test adds the next answer."""
    scene = Scene()
    for _ in range(times):
        scene.generate(prompts)
    scene.sync(1)
    return scene


# --- one version at a time


def test_tokens_follow_the_version_that_was_synced():
    scene = synced()
    scene.generate(SHORT)
    found = scene.judge(EXPLAINED)
    assert (found.status, found.facts) == ("pass", 4 * 6)


def test_one_stale_server_is_enough():
    scene = synced()
    fresh = scene.reference.greedy(SHORT[0], 6, version=1)
    stale = scene.reference.greedy(SHORT[1], 6, version=0)
    scene.generate(SHORT, tokens=[fresh, stale])
    found = scene.judge(EXPLAINED)
    assert (found.reason, found.evidence[0]["row"], found.evidence[0]["follows"]) == (BY[REPLACED], 1, [0])


def test_all_tokens_that_are_wrong_are_reported():
    scene = synced()
    scene.generate(SHORT[:1], version=0)
    scene.generate(SHORT[1:], tokens=[NONSENSE])
    found = scene.judge(EXPLAINED)
    assert found.reasons == sorted([NO_VERSION, BY[REPLACED]])
    assert {call for call, _ in found.concerns} == {call.id for call in scene.calls[-2:]}


def test_tokens_of_any_call_are_judged():
    """A chat whose tokens never came back, by old weights."""
    scene = synced()
    scene.generate(SHORT)
    stale = scene.reference.greedy([30, 31], 6, version=0)
    scene.seen += traces.executed([30, 31], stale, params={"temperature": 0}, from_ns=scene.pass_time(), step_ns=STEP)
    assert scene.judge(EXPLAINED).reason == BY[REPLACED]


@pytest.mark.parametrize("params", [{"allowed_token_ids": NONSENSE}, {"presence_penalty": 1.0}, {"temperature": 1.0}])
def test_tokens_that_are_not_the_models_own_choice_say_nothing(params):
    scene = Scene()
    scene.generate(SHORT, tokens=[NONSENSE] * 2, params=params)
    assert scene.judge(EXPLAINED).reason == NO_GREEDY


def test_requests_that_all_fail_are_the_stacks_doing_and_no_gap_of_the_check():
    scene = Scene()
    scene.calls.append(traces.generate([[5, 6]], None, error=traces.error("EngineDead"), ended_ns=scene.pass_time(7)))
    assert scene.judge(EXPLAINED).reason.startswith("generate() failed with EngineDead")


def test_a_sync_that_was_to_fail_is_no_reason_for_nothing_to_judge():
    scene = Scene()
    scene.change(
        scene.call("sync_weights", {"version": 2, "fail_after_chunks": 1}), error=traces.error("TrainerFailed")
    )
    assert scene.judge(EXPLAINED).reason == NO_GREEDY
    scene.change(scene.call("sync_weights", {"version": 2}), error=traces.error("Refused"))
    assert scene.judge(EXPLAINED).reason.startswith("sync_weights() failed with Refused")


def test_a_server_that_answers_nothing_after_a_sync_shows_nothing():
    scene = synced()
    assert scene.judge(EXPLAINED).reason == NO_CHANGE
    scene.generate(SHORT, route=lambda *_: SERVERS[0])
    assert scene.judge(EXPLAINED).reason == SILENT
    scene.generate(SHORT)
    numbers = scene.judge(EXPLAINED).numbers
    assert (numbers["answers_after_a_change"], numbers["servers"]) == (4, 2)
    assert without_observations(scene).judge(EXPLAINED).status == "untestable"


# --- a sync whose outcome or moment is unknown


def in_a_sync(*versions: int, failed: bool = False, session: str | None = None) -> Scene:
    """One answer of each of `versions`, all while a sync to version 1 runs, or after one that failed; and one after the next sync."""
    scene = Scene()
    sync = scene.sync(1)
    error = traces.error("TrainerFailed", "given up") if failed else None
    for number, version in enumerate(versions):
        here = SERVERS[number % 2 if session else 0]
        sessions = [session] if session else None
        scene.generate([[30 + number]], version=version, sessions=sessions, route=lambda *_, here=here: here)
    scene.change(sync, error=error, result=None if failed else {}, ended_ns=sync.ended_ns if failed else scene.now)
    scene.sync(1)
    scene.generate(SHORT)
    return scene


@pytest.mark.parametrize("failed", [False, True])
def test_before_the_end_of_a_sync_either_version_may_answer_and_the_first_new_one_decides(failed):
    for versions in ((0, 0), (1, 1), (0, 1)):
        assert in_a_sync(*versions, failed=failed).judge(EXPLAINED).status == "pass"
    assert in_a_sync(1, 0, failed=failed).judge(EXPLAINED).reason == BY[WENT_BACK]


def test_a_session_does_not_go_back_to_older_weights_on_another_server():
    assert in_a_sync(0, 1, session="one").judge(EXPLAINED).status == "pass"
    assert in_a_sync(1, 0, session="one").judge(EXPLAINED).reason == BY[WENT_BACK]


def test_what_a_failed_sync_leaves_is_open_until_the_next():
    found = in_a_sync(7, failed=True).judge(EXPLAINED)
    assert (found.status, found.numbers["open"]) == ("pass", 1)


def test_digests_show_what_a_server_held():
    """Weights of a failed sync were there, and the next answer lacks them."""
    scene = Scene()
    sync = scene.sync(1)
    scene.change(sync, error=traces.error(), result=None)
    scene.digests(dict.fromkeys(SERVERS, HELD_BY_ONE))
    scene.generate(SHORT, version=0)
    assert scene.judge(EXPLAINED).reason == BY[WENT_BACK]
    scene.digests(dict.fromkeys(SERVERS, WEIGHTS))
    assert scene.judge(EXPLAINED).reason == BY[WENT_BACK], "digests that fit no sync are judged by every_parameter"


# --- the prefix cache


def test_a_stale_prefix_cache():
    scene = synced(LONG, times=2)
    scene.control("reset_prefix_cache", reset_running_requests=False)
    scene.generate(LONG)
    found = scene.judge(CACHED)
    assert (found.status, found.numbers["cache_hits"]) == ("pass", 2)
    assert without_observations(scene).judge(CACHED).status == "untestable"


@pytest.mark.parametrize(("reset", "status"), [(True, "fail"), (False, "pass")])
def test_keys_and_values_may_be_as_old_as_the_last_reset(reset, status):
    scene = synced(LONG, times=2)
    if reset:
        scene.control("reset_prefix_cache", reset_running_requests=False)
    old = on_cache(1, (128, 0))
    made = [scene.reference.greedy(prompt, 6, version=old) for prompt in LONG]
    for number, (prompt, tokens) in enumerate(zip(LONG, made, strict=True)):
        begun = scene.pass_time()
        about = {"server": SERVERS[number], "params": {"temperature": 0.0}, "cached_tokens": 128}
        scene.seen += traces.executed(prompt, tokens, from_ns=begun, step_ns=STEP, **about)
        scene.pass_time(10)
    found = scene.judge(explained())
    assert (found.status, found.reason) == (status, OLD_KEYS if reset else "")


@pytest.mark.parametrize(("reset", "status"), [(False, "pass"), (True, "fail")])
def test_a_turn_finds_keys_and_values_of_each_turn_before_it(reset, status):
    """Three turns of a conversation with a sync between each two: the cache is of two versions when the third begins."""
    scene, prompt, caches = Scene(), LONG[0], [(), ((128, 0),), ((128, 0), (128, 1))]
    for version, cache in enumerate(caches):
        if version:
            scene.sync(version)
        if reset and version == 2:
            scene.control("reset_prefix_cache", reset_running_requests=False)
        answer = scene.reference.greedy(prompt, 6, version=on_cache(version, *cache))
        about = {"server": SERVERS[0], "params": {"temperature": 0.0}, "cached_tokens": sum(n for n, _ in cache)}
        scene.seen += traces.executed(prompt, answer, from_ns=scene.pass_time(), step_ns=STEP, **about)
        scene.pass_time(10)
        prompt = [*prompt, *answer, *LONG[1]]
    assert scene.judge(explained()).status == status


def test_prompts_that_no_cache_holds_say_nothing_of_it():
    scene = synced()
    scene.generate(SHORT)
    assert scene.judge(CACHED).status == "untestable"
    scene = synced(LONG)
    scene.generate(LONG)
    assert scene.judge(CACHED).reason == NOT_HIT, "no engine had answered them from its cache"
    scene = Scene()
    for _ in range(2):
        scene.generate(LONG, route=lambda *_: SERVERS[0])
    scene.sync(1)
    scene.generate(LONG, route=lambda *_: SERVERS[1])
    assert scene.judge(CACHED).reason == NOT_HIT, "another server's cache held them"


def test_engines_that_do_not_tell_of_their_cache():
    scene = synced(LONG)
    scene.generate(LONG)
    for number, seen in enumerate(scene.seen):
        if seen.kind == "finish":
            data = {name: value for name, value in seen.data.items() if name != "cached_tokens"}
            scene.seen[number] = traces.observation("finish", seen.server, seen.at_ns, **data)
    assert scene.judge(CACHED).reason == NOT_TOLD


# --- requests that waited for a sync


def held(answer=None, *, paused=True) -> Scene:
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
    seen = traces.executed(
        SHORT[0], made, server=SERVERS[0], params={"temperature": 0.0}, from_ns=scene.pass_time(), step_ns=STEP
    )
    seen[0] = traces.observation("request", SERVERS[0], arrived, **seen[0].data)
    scene.seen += seen
    scene.now += 10 * STEP
    params = {"temperature": 0.0, "max_tokens": 6}
    scene.calls.append(traces.generate(SHORT[:1], [made], params=params, started_ns=asked, ended_ns=scene.now))
    return scene


def test_a_request_that_waited_for_a_sync_meets_the_whole_version():
    assert held().judge(WAITED).status == "pass"
    assert held(lambda scene: scene.reference.greedy(SHORT[0], 6, version=0)).judge(WAITED).reason == BY[REPLACED]
    half = held(lambda scene: [*scene.reference.greedy(SHORT[0], 3, version=1), 1, 2, 3])
    assert half.judge(WAITED).reason == NO_VERSION


def test_what_an_engine_may_have_begun_before_the_sync_is_of_either_version_or_left_open():
    assert held(paused=False).judge(WAITED).status == "pass"
    assert (
        held(lambda scene: scene.reference.greedy(SHORT[0], 6, version=0), paused=False).judge(WAITED).status == "fail"
    )
    assert held(lambda _: NONSENSE, paused=False).judge(WAITED).reason == NONE_WAITED


# --- frozen requests


PROMPT = [10, 11]
PIECE = 3
"""Tokens between two freezes."""
READ = len(PROMPT) + PIECE - 1
"""Tokens read before the first freeze: all but the newest."""


def thawed(
    *makers: int, versions: Sequence[int] = (1,), clear: bool = False, reset: bool = False, in_sync: bool = False
) -> Scene:
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
            if reset:
                scene.control("reset_prefix_cache", reset_running_requests=True)
            scene.control("resume")
            if in_sync:
                times[-1] = sync.started_ns + 1
        made += scene.reference.greedy([*PROMPT, *made], PIECE, version=maker)
        times += [scene.pass_time() for _ in range(PIECE)]
        scene.pass_time()
    params = {"temperature": 0.0, "max_tokens": len(made)}
    seen = traces.executed(PROMPT, made, server=SERVERS[0], params=params, from_ns=at, step_ns=STEP)
    steps = iter(times)
    for o in seen:
        when = at if o.kind == "request" else next(steps, scene.now)
        scene.seen.append(traces.observation(o.kind, o.server, when, **o.data))
    scene.calls.append(traces.generate([PROMPT], [made], params=params, started_ns=asked, ended_ns=scene.pass_time()))
    return scene


def on_cache(version: int, *read: tuple[int, int]) -> int:
    return traces.on_cache(version, read)


def test_the_new_weights_on_the_old_cache():
    found = thawed(0, on_cache(1, (READ, 0))).judge(FROZEN)
    assert (found.status, found.facts) == ("pass", 2 * PIECE)


def test_each_sync_leaves_what_had_been_read():
    first, second = on_cache(1, (READ, 0)), on_cache(2, (READ, 0), (PIECE, 1))
    assert thawed(0, first, second, versions=(1, 2)).judge(FROZEN).facts == 3 * PIECE
    assert thawed(0, first, on_cache(2, (READ, 0)), versions=(1, 2)).judge(FROZEN).reason == NO_VERSION


@pytest.mark.parametrize(("maker", "reason"), [(0, BY[REPLACED]), (1, READ_ANEW), (7, NO_VERSION)])
def test_anything_else_is_named(maker, reason):
    assert thawed(0, maker).judge(FROZEN).reason == reason


@pytest.mark.parametrize("how", [{"clear": True}, {"reset": True}])
def test_a_frozen_request_whose_cache_was_dropped_goes_on_as_the_new_version_alone(how):
    assert thawed(0, 1, **how).judge(WAITED).status == "pass"
    assert thawed(0, 1, **how).judge(FROZEN).reason == NONE_FROZEN
    assert thawed(0, 0, **how).judge(WAITED).reason == BY[REPLACED]
    assert thawed(1, 1, **how).judge(WAITED).status == "fail"
    assert thawed(0, on_cache(1, (READ, 0)), **how).judge(WAITED).reason == OLD_KEYS


def test_a_request_that_goes_on_through_a_sync_was_not_frozen():
    found = thawed(0, on_cache(1, (READ, 0)), in_sync=True).judge(FROZEN)
    assert NOT_FROZEN in (found.reasons or [found.reason])


def test_where_all_weights_agree_nothing_is_shown():
    """A sync of the current version."""
    scene = thawed(0, 0, versions=(0,))
    assert scene.judge(EXPLAINED).status == "untestable"
    assert scene.judge(FROZEN).reason == ALIKE
