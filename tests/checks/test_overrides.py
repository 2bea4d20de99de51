"""Values that override keys of the configuration arrive as they are, or are refused by a key's name."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.overrides import CONFIGURED_SAMPLING, CONTRADICTION, CONTRADICTIONS, OVERRIDES, VALID
from harness.records.recording import CallError
from tests.checks.scene import Scene
from tests.traces import error

KEY = "generator.sampling_params.stop"


def overridden(given: Any, got: Any = None, failed: CallError | None = None) -> Scene:
    scene = Scene()
    scene.call("override_configuration", {}, {"values": {KEY: None}})
    scene.call("override_configuration", {"overrides": {KEY: given}}, {"values": {KEY: got}})
    if failed is not None:
        scene.change(scene.calls[-1], result=None, error=failed)
    return scene


@pytest.mark.parametrize("value", [None, True, 3, 1e-05, "12"])
def test_a_value_that_arrives(value):
    assert overridden(value, value).judge(OVERRIDES).status == "pass"


@pytest.mark.parametrize(
    ("given", "got", "reason"),
    [
        (None, "None", "None in an override is another value in the configuration"),
        ("12", 12, "a text in an override is another value in the configuration"),
        (True, 1, "a switch in an override is another value in the configuration"),
        (2, 3, "a number in an override is another value in the configuration"),
    ],
)
def test_a_value_that_becomes_another(given, got, reason):
    found = overridden(given, got).judge(OVERRIDES)
    assert (found.status, found.reason) == ("fail", reason)


def test_a_value_that_is_refused():
    assert overridden(7, failed=error("ValueError", f"{KEY} is a text")).judge(OVERRIDES).status == "pass"
    found = overridden(7, failed=error("ValueError", "not a text")).judge(OVERRIDES)
    assert found.reason == "an override is refused by an error that names no key"


def test_nothing_overridden():
    scene = Scene()
    scene.call("override_configuration", {}, {"values": {KEY: None}})
    assert scene.judge(OVERRIDES).status == "untestable"


@pytest.mark.parametrize(
    ("name", "sampling", "lost"),
    [
        ("top_k", {"top_k": 7}, False),
        ("max_generate_length", {"max_tokens": 7}, False),
        ("top_k", {"top_k": 8}, True),
        ("top_k", {}, True),
    ],
)
def test_a_configured_sampling_parameter_reaches_requests(name, sampling, lost):
    scene = Scene()
    key = f"generator.sampling_params.{name}"
    scene.call("override_configuration", {"overrides": {key: 7}}, {"values": {key: 7}, "sampling": sampling})
    found = scene.judge(CONFIGURED_SAMPLING)
    reason = f"a sampling parameter of the configuration does not reach requests: {name}" if lost else ""
    assert (found.status, found.reason) == ("fail" if lost else "pass", reason)


def test_no_configured_sampling_parameter():
    assert overridden(None).judge(CONFIGURED_SAMPLING).status == "untestable"


ENGINES = "generator.inference_engine."
OWN = {"trainer.placement.colocate_all": True, f"{ENGINES}num_engines": 1}
BESIDE = {f"{ENGINES}external_proxy_url": "http://127.0.0.1:9"}


def contradicting(failed: CallError | None, valid: CallError | None = None) -> Scene:
    scene = Scene()
    for settings, label, refused in ((OWN, VALID, valid), ({**OWN, **BESIDE}, CONTRADICTION, failed)):
        result = None if refused else {"values": {}}
        call = scene.call("override_configuration", {"overrides": settings, "validated": True}, result)
        scene.change(call, label=label, error=refused)
    return scene


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        (error("ValueError", "Cannot use external_proxy_url with colocate_all=true"), None),
        (error("AssertionError", "external proxy url: not with colocated engines"), None),
        (None, "settings that exclude each other are accepted without a word"),
        (
            error("AssertionError", "num_engines is wrong"),
            "settings that exclude each other are refused by an error that names none",
        ),
    ],
    ids=["named", "in words", "accepted", "another key"],
)
def test_settings_that_exclude_each_other_are_refused_by_name(failed, reason):
    found = contradicting(failed).judge(CONTRADICTIONS)
    assert (found.status, found.reason or None) == ("fail" if reason else "pass", reason)


def test_a_refusal_says_nothing_if_the_rest_is_refused_too():
    assert contradicting(error(), valid=error()).judge(CONTRADICTIONS).status == "untestable"
