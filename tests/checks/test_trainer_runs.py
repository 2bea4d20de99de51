"""Runs of the trainer: a right one passes, and each way in which it goes wrong has its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.checks import trainer_runs
from harness.checks.trainer_runs import FAILS, TRAINER_RUN
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene

PROMPTS = [[{"role": "user", "content": word}] for word in ("three", "blind", "mice", "run")]
ASKED = {
    "prompts": PROMPTS,
    "env_extras": [{}] * 4,
    "mini_batch_size": 2,
    "workers": 4,
    "max_staleness_steps": 1,
    "max_tokens": 8,
}


def wants(scene: Scene, what: str, label: str | None = None, **told: Any) -> None:
    call = scene.call("trainer_wants", {"within_s": 1.0}, {"what": what, **told})
    scene.change(call, label=label)


def training(scene: Scene, *uids: str) -> None:
    wants(scene, "training", groups=[{"uid": uid, "begun_at": 1, "responses": [[1]]} for uid in uids])


def weights(scene: Scene, *, pauses: bool = True, meets: bool = True, cuts: bool = False) -> None:
    """New weights, which a rollout meets: frozen, given back, or, without a pause, under way."""
    if meets:
        pace = {"from_ns": scene.pass_time(), "step_ns": STEP if cuts else 3 * STEP}
        scene.seen += traces.executed([5, 6], [7] * 3, server=SERVERS[0], params={}, **pace)
    if cuts:
        scene.seen.pop()
        scene.pass_time(4)
    elif pauses:
        scene.control("pause", mode="keep")
    wants(scene, "weights")
    scene.sync(scene.version + 1)
    scene.control("resume")
    scene.pass_time(9)


def run(
    steps: tuple[tuple[str, ...], ...] = (("0", "1"), ("2", "3")),
    *,
    first: bool = True,
    end: dict[str, Any] | None = None,
    **sync: bool,
) -> Scene:
    scene = Scene()
    scene.call("start_trainer_run", ASKED)
    if first:
        wants(scene, "weights")
    for uids in steps:
        training(scene, *uids)
        weights(scene, **sync)
    wants(scene, **{"what": "nothing", **(end or {})})
    return scene


def failing(what: str, **told: Any) -> Scene:
    scene = Scene()
    scene.call("start_trainer_run", ASKED)
    wants(scene, "weights", FAILS)
    wants(scene, what, FAILS, **told)
    return scene


def test_a_right_run():
    found = run().judge(TRAINER_RUN)
    assert (found.status, found.numbers["syncs_that_met_rollouts"]) == ("pass", 2)


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        (lambda: run(end={"what": "unknown"}), trainer_runs.WAITS),
        (lambda: run(end={"ended": "ValueError: no"}), trainer_runs.ENDED.format("ValueError: no")),
        (lambda: run((("0", "1"), ("1", "2"))), trainer_runs.TWICE),
        (lambda: run((("0", "1"),)), trainer_runs.SIZE),
        (lambda: run((("0", "1"), ("2",))), trainer_runs.SIZE),
        (lambda: run(first=False), trainer_runs.ORDER),
        (lambda: run(pauses=False), trainer_runs.RUNNING),
        (lambda: failing("unknown"), trainer_runs.WAITS),
        (lambda: failing("nothing"), trainer_runs.UNTOLD),
    ],
)
def test_a_wrong_run(scene: Callable[[], Scene], reason: str):
    found = scene().judge(TRAINER_RUN)
    assert (found.status, found.reason) == ("fail", reason)


def test_a_run_whose_pauses_cut_rollouts_short():
    assert run(cuts=True).judge(TRAINER_RUN).numbers["syncs_that_met_rollouts"] == 2


def test_a_failed_rollout_that_ends_the_run():
    assert failing("nothing", ended="the process exits with status 1").judge(TRAINER_RUN).status == "pass"


def test_a_run_that_no_rollout_met_shows_nothing_of_its_pauses():
    assert run(meets=False).judge(TRAINER_RUN).reason == trainer_runs.IDLE
    assert Scene().judge(TRAINER_RUN).status == "untestable"
