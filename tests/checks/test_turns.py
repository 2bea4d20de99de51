"""Two conversations of three turns: green if turns keep their tokens, red on each change."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.conservation import CONSERVATION
from harness.checks.turns import NO_TEXT_TURNS, NO_TURNS, OTHER_TEXT, SURVIVES, TEXT_TURNS, TURNS_KEEP_TOKENS
from harness.records.reference import DecodeRequest, EncodeRequest, RenderRequest, Text, Tokens
from tests import traces
from tests.checks.scene import SERVERS, STEP, Scene, without_observations

FIRST = {"a": [10, 11, 12], "b": [20, 21, 22]}
NEW = [30, 31]


def conversations(*, turns=3, survives=False) -> Scene:
    """Two interleaved conversations. A prompt's text is encoded again as other ids unless it `survives`."""
    scene = Scene()
    contexts = dict(FIRST)
    for _ in range(turns):
        sessions = list(contexts)
        if not survives:
            for context in contexts.values():
                scene.reference.set(DecodeRequest(tokens=context, skip_special_tokens=False), Text(text="?"))
        scene.reference.set(EncodeRequest(text="?", add_special_tokens=False), Tokens(tokens=[9]))
        answer = scene.generate(list(contexts.values()), sessions=sessions)
        rows = zip(contexts.items(), answer.result["response_ids"], strict=True)
        contexts = {session: context + response + NEW for (session, context), response in rows}
    return scene


def reread(scene: Scene, prompt: list[int]) -> Scene:
    """Replace the prompt that the engine got in the second conversation's last turn."""
    last = scene.calls[-1].request["prompt_token_ids"][1]
    scene.seen = [
        msgspec.structs.replace(o, data={**o.data, "prompt_token_ids": prompt})
        if o.data.get("prompt_token_ids") == last
        else o
        for o in scene.seen
    ]
    return scene


def test_tokens_that_stay_pass():
    found = conversations().judge(TURNS_KEEP_TOKENS)
    assert (found.status, found.numbers["conversations"]) == ("pass", 2)


@pytest.mark.parametrize(
    "damage",
    [lambda p: [*p[:4], 40, *p[6:]], lambda p: [*p[:4], p[5], p[4], *p[6:]], lambda p: p[:-1], lambda p: [0, *p]],
    ids=["merged", "swapped", "cut off", "one more"],
)
def test_tokens_that_become_text_and_tokens_again(damage):
    scene = conversations()
    scene = reread(scene, damage(scene.calls[-1].request["prompt_token_ids"][1]))
    found = scene.judge(TURNS_KEEP_TOKENS)
    assert found.reason == "an engine read other tokens than the turn was given"
    assert (found.evidence[0]["session"], found.evidence[0]["turn"]) == ("b", 2)
    assert scene.judge(CONSERVATION).status == "fail"


def test_a_response_that_is_not_what_the_engine_made():
    scene = conversations(turns=1)
    made = scene.calls[-1].result["response_ids"]
    returned = [made[0], [*made[1][:-1], 63]]
    scene.change(scene.calls[-1], result={**scene.calls[-1].result, "response_ids": returned})
    scene.generate([FIRST["b"] + returned[1] + NEW], sessions=["b"])
    found = scene.judge(TURNS_KEEP_TOKENS)
    assert found.reason == "a turn does not begin with what the engines read and made in the turn before"


def test_a_turn_that_is_lost():
    scene = conversations()
    result = scene.calls[-1].result
    scene.change(scene.calls[-1], result={**result, "response_ids": result["response_ids"][:1]})
    assert scene.judge(TURNS_KEEP_TOKENS).reason == "a turn was not answered"


def test_what_puts_nothing_to_the_test_is_untestable():
    assert conversations(survives=True).judge(TURNS_KEEP_TOKENS).reason == SURVIVES
    assert conversations(turns=1).judge(TURNS_KEEP_TOKENS).reason == NO_TURNS
    assert without_observations(conversations()).judge(TURNS_KEEP_TOKENS).status == "untestable"
    scene = Scene()
    for prompts in ([[10, 11]], [[40, 41]]):
        scene.generate(prompts, sessions=["a"])
    assert scene.judge(TURNS_KEEP_TOKENS).reason == NO_TURNS, "a session is no conversation by itself"


def chat(*, render=lambda messages: None) -> Scene:
    """One conversation of two turns by messages. `render` returns the prompt that the engine reads; None for the template's."""
    scene = Scene()
    messages = [{"role": "user", "content": "a"}]
    for prompt, made in (([30, 31], [40, 41, 42]), ([30, 31, 40, 50, 32], [43, 44, 45])):
        scene.reference.set(RenderRequest(messages=messages), Tokens(tokens=prompt))
        begun = scene.pass_time()
        read = render(messages) or prompt
        scene.seen += traces.executed(read, made, server=SERVERS[0], from_ns=begun, step_ns=STEP)
        choice = {"index": 0, "finish_reason": "length", "token_ids": made, "message": {"content": "b"}}
        body = {"messages": list(messages), "session_id": "s"}
        result = {"body": {"choices": [choice], "usage": {}}}
        ended = scene.pass_time(8)
        scene.calls.append(traces.call("chat_completion", {"body": body}, result, started_ns=begun - 1, ended_ns=ended))
        messages = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    return scene


def test_turns_by_text_show_how_far_they_drift():
    found = chat().judge(TEXT_TURNS)
    assert (found.status, found.numbers) == ("pass", {"tokens_made": 3, "tokens_drifted": 2})
    assert Scene().judge(TEXT_TURNS).reason == NO_TEXT_TURNS


def test_a_turn_that_another_template_rendered():
    scene = chat(render=lambda messages: [30, 32] if len(messages) > 1 else None)
    assert scene.judge(TEXT_TURNS).reason == OTHER_TEXT
