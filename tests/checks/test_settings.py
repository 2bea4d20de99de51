"""Engines run with the configured settings."""

from __future__ import annotations

from harness.checks.settings import NOT_TOLD, SETTINGS
from tests.checks.scene import SERVERS, Scene

ASKED = {"max_num_seqs": "64", "dtype": "float32"}


def running(*settings: dict[str, str], configured: dict[str, str] = ASKED) -> Scene:
    scene = Scene()
    workers = zip(SERVERS, settings, strict=True)
    servers = {server: [{"rank": 0, "settings": each}] for server, each in workers}
    scene.call("workers", {}, {"servers": servers, "configured": configured})
    return scene


def test_every_worker_has_every_setting():
    found = running(ASKED, {**ASKED, "seed": "1"}).judge(SETTINGS)
    assert (found.status, found.facts) == ("pass", 4)


def test_a_setting_that_one_server_lost_or_does_not_tell():
    other = running(ASKED, {**ASKED, "max_num_seqs": "256"}).judge(SETTINGS)
    assert (other.status, other.reason) == ("fail", "an engine does not run with the configured max_num_seqs")
    assert other.evidence == [{"server": SERVERS[1], "rank": 0, "configured": "64", "runs with": "256"}]
    assert running(ASKED, {"dtype": "float32"}).judge(SETTINGS).status == "fail"


def test_a_stack_that_does_not_say_what_it_was_told():
    assert running(ASKED, ASKED, configured={}).judge(SETTINGS).reason == NOT_TOLD
    assert Scene().judge(SETTINGS).reason == NOT_TOLD
