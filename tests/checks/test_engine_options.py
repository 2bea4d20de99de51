"""Options for the engines take effect, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.engine_options import ENGINE_OPTIONS, NOT_TOLD, SERVING_OPTIONS, SYNC_BACKEND
from harness.records.recording import CallError
from tests.checks.scene import Scene
from tests.traces import error

PLAIN = {"arguments": {"seed": 0, "max_num_seqs": 64, "dtype": "half"}, "configured": ["max_num_seqs"]}


def asked(options: dict[str, Any], got: dict[str, Any] | None, failed: CallError | None = None) -> Scene:
    scene = Scene()
    scene.call("engine_arguments", {}, PLAIN)
    scene.call("engine_arguments", {"options": options}, None if got is None else {"arguments": got})
    if failed is not None:
        scene.change(scene.calls[-1], result=None, error=failed)
    return scene


@pytest.mark.parametrize(
    ("options", "got", "failed"),
    [
        ({"seed": 7}, {"seed": 7}, None),
        ({"seed": 7}, None, error("TypeError", "got multiple values for keyword argument 'seed'")),
        ({"seedd": 7}, None, error("TypeError", "unexpected keyword argument 'seedd'. Did you mean 'seed'?")),
        ({"max_num_seqs": 65}, None, error("TypeError", "got multiple values for keyword argument 'max_num_seqs'")),
    ],
)
def test_an_option_that_takes_effect_or_is_refused_by_name(options, got, failed):
    found = asked(options, got, failed).judge(ENGINE_OPTIONS)
    assert (found.status, found.facts) == ("pass", 1)


@pytest.mark.parametrize(
    ("options", "got", "failed", "says"),
    [
        ({"seed": 7}, {"seed": 0}, None, "an option for the engines does not reach them"),
        ({"seed": 7}, {}, None, "an option for the engines does not reach them"),
        ({"seedd": 7}, {}, None, "an option that engines do not have is ignored"),
        (
            {"max_num_seqs": 65},
            {"max_num_seqs": 65},
            None,
            "an option for the engines replaces what the configuration has a key for",
        ),
        (
            {"seed": 7},
            None,
            error("TypeError", "unexpected keyword argument 'seedd'"),
            "an option for the engines is refused by an error that does not name it",
        ),
    ],
)
def test_an_option_that_is_ignored_or_replaces_a_key(options, got, failed, says):
    found = asked(options, got, failed).judge(ENGINE_OPTIONS)
    assert (found.status, found.reason) == ("fail", f"{says}: all of them")
    assert found.evidence == [{"options": 1, "first": [*options]}]


def test_those_that_are_ignored_are_named_unless_all_are():
    scene = asked({"seedd": 7}, {})
    scene.call("engine_arguments", {"options": {"speed": 7}}, None)
    scene.change(scene.calls[-1], result=None, error=error("TypeError", "unexpected keyword argument 'speed'"))
    assert scene.judge(ENGINE_OPTIONS).reason == "an option that engines do not have is ignored: seedd"


def test_a_stack_that_does_not_say_what_it_starts_its_engines_with():
    assert Scene().judge(ENGINE_OPTIONS).reason == NOT_TOLD


@pytest.mark.parametrize(
    ("named", "got", "failed", "said"),
    [
        ("gloo", "gloo", None, None),
        ("nccl", "skyrl_nccl", None, None),
        ("gloo", "nccl", None, "weights travel by another backend than the configuration names: gloo"),
        ("nccll", None, "no backend nccll", None),
        ("nccll", None, "broken", "a backend is refused by an error that does not name it: nccll"),
    ],
)
def test_the_backend_of_weight_syncs(named, got, failed, said):
    scene = Scene()
    call = scene.call("engine_arguments", {"options": {}, "sync_backend": named}, got and {"sync_backend": got})
    scene.change(call, result=got and {"sync_backend": got}, error=failed and error("ValueError", failed))
    found = scene.judge(SYNC_BACKEND)
    assert (found.status, found.reason) == (("pass", "") if said is None else ("fail", said))


@pytest.mark.parametrize(("got", "passes"), [(["secret"], True), ("secret", False), (["other"], False), (None, False)])
def test_a_text_for_an_option_that_holds_several(got, passes):
    scene = Scene()
    scene.call("serving_arguments", {"options": {"api_key": "secret"}}, {"arguments": {"api_key": got}})
    assert scene.judge(SERVING_OPTIONS).status == ("pass" if passes else "fail")


@pytest.mark.parametrize(
    ("got", "failed", "said"),
    [
        ({"tool_parser": "hermes"}, None, None),
        ({}, None, "an option for the OpenAI address does not reach it: tool_parser"),
        ({"tool_parser": "other"}, None, "an option for the OpenAI address does not reach it: tool_parser"),
        (None, "unknown option tool_parser", None),
        (None, "broken", "an option for the OpenAI address is refused by an error that does not name it: tool_parser"),
    ],
)
def test_options_for_the_openai_address(got, failed, said):
    scene = Scene()
    call = scene.call("serving_arguments", {"options": {"tool_parser": "hermes"}}, got and {"arguments": got})
    result = None if got is None else {"arguments": got}
    scene.change(call, result=result, error=failed and error("TypeError", failed))
    found = scene.judge(SERVING_OPTIONS)
    assert (found.status, found.reason) == (("pass", "") if said is None else ("fail", said))
