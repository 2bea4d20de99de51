"""Answers with and without adapters: each is generated under the requested adapter."""

from __future__ import annotations

import pytest

from harness.checks.adapters import (
    ADAPTER_EFFECT,
    ADAPTER_ISOLATED,
    ADAPTER_UNDISTURBED,
    BASE_MODEL_KEPT,
    FRESH_ADAPTER_CACHE,
    ONE_POLICY,
    ONLY_ADAPTER_TRAVELS,
)
from harness.checks.base import Evidence
from harness.checks.client_lives import CONFIGURED
from harness.checks.history import EXPLAINED, cached, explained
from harness.checks.staleness import FORCED_EFFECT, NOT_HIT, NOT_TOLD, SAME_VERSION_SAME_OUTPUT
from tests import traces
from tests.checks.scene import Scene, without_observations

SHORT = [[10, 11], [20, 21]]
FOUR = [*SHORT, [30, 31], [40, 41]]
LONG = [[3 + n % 50 for n in range(130)], [4 + n % 50 for n in range(130)]]
"""Longer than a cache block; each prompt always meets the same server."""


def served(prompts=SHORT) -> Scene:
    """The base model, version 1 under a name, then version 2 under the same name. The test adds the next call."""
    scene = Scene()
    for _ in range(2):
        scene.generate(prompts)
    scene.load("policy", 1)
    scene.generate(prompts, adapter="policy")
    scene.load("policy", 2)
    return scene


def under(scene: Scene, adapter: int | None, prompts=SHORT) -> list[list[int]]:
    """The model's answers under a version of the adapter."""
    return [scene.reference.greedy(p, 6, adapter=adapter) for p in prompts]


def test_right_answers_pass():
    scene = served(LONG)
    scene.generate(LONG, adapter="policy")
    scene.generate(LONG)
    for check in (ADAPTER_EFFECT, ADAPTER_ISOLATED, FRESH_ADAPTER_CACHE, ONLY_ADAPTER_TRAVELS):
        assert scene.judge(check).status == "pass"


def test_an_adapter_that_is_ignored():
    scene = Scene()
    scene.load("policy", 1)
    scene.generate(FOUR)
    scene.generate(FOUR, adapter="policy", tokens=under(scene, None, FOUR))
    assert scene.judge(ADAPTER_EFFECT).reason == "an adapter does not change the answers"
    assert scene.judge(ADAPTER_ISOLATED).status == "pass"


def test_a_version_that_was_not_loaded():
    scene = served(FOUR)
    scene.generate(FOUR, adapter="policy", tokens=under(scene, 1, FOUR))
    assert scene.judge(ADAPTER_EFFECT).reason == "another version does not change the answers"


def test_a_few_prompts_may_be_answered_alike():
    scene = Scene()
    scene.load("policy", 1)
    scene.generate(FOUR[:3])
    scene.generate(FOUR[:3], adapter="policy", tokens=under(scene, None, FOUR[:3]))
    assert scene.judge(ADAPTER_EFFECT).status == "untestable"
    scene = served()
    scene.generate(SHORT, adapter="policy", tokens=under(scene, 1))
    assert scene.judge(ADAPTER_EFFECT).status == "pass", (
        "the first version moved them; of the second too few say anything"
    )


def test_one_prompt_that_moves_shows_the_effect():
    scene = served()
    scene.generate(SHORT, adapter="policy", tokens=[under(scene, 1)[0], under(scene, 2)[1]])
    assert scene.judge(ADAPTER_EFFECT).status == "pass"


def test_an_adapter_that_leaks_into_the_base():
    scene = served()
    scene.generate(SHORT, tokens=[under(scene, None)[0], under(scene, 2)[1]])
    found = scene.judge(ADAPTER_ISOLATED)
    assert found.reason == "an answer without an adapter was made under one"
    assert (found.evidence[0]["row"], found.evidence[0]["follows"]) == (1, [{"version": 0, "adapter": 2}])
    scene = served()
    scene.generate(SHORT, tokens=[[1, 2, 3, 4, 5, 6]] * 2)
    assert scene.judge(ADAPTER_ISOLATED).reason == "an answer without an adapter is not the base model's"


def test_answers_beside_an_adapter_are_counted():
    scene = served()
    base = scene.generate(SHORT)
    beside = scene.generate(SHORT, adapter="policy")
    scene.change(beside, started_ns=base.started_ns + 1)
    assert scene.judge(ADAPTER_ISOLATED).numbers["beside_an_adapter"] == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda scene: under(scene, 1, LONG), "an answer was made under another adapter than it asked for"),
        (lambda scene: under(scene, None, LONG), "an answer was made under another adapter than it asked for"),
        (
            lambda scene: [[*answer[:3], 1, 2, 3] for answer in under(scene, 2, LONG)],
            "an answer mixes adapters: its prefix cache is another one's",
        ),
    ],
    ids=["replaced", "base", "mixed"],
)
def test_a_cache_of_another_adapter(answer, reason):
    scene = served(LONG)
    scene.generate(LONG, adapter="policy", tokens=answer(scene))
    assert scene.judge(FRESH_ADAPTER_CACHE).reason == reason


def test_what_no_cache_held_shows_nothing_of_it():
    scene = Scene()
    scene.load("policy", 1)
    scene.generate(LONG)
    scene.generate(LONG, adapter="policy")
    assert scene.judge(FRESH_ADAPTER_CACHE).reason == NOT_HIT
    scene = served(LONG)
    scene.generate(LONG, adapter="policy")
    assert scene.judge(FRESH_ADAPTER_CACHE).numbers["cache_hits"] == 4
    assert without_observations(scene).judge(FRESH_ADAPTER_CACHE).reason == NOT_TOLD


def beside_a_change(change: str, adapter: str | None, tokens=None) -> Scene:
    """An answer under an adapter, or the base model's, while another adapter is loaded or unloaded."""
    scene = served()
    answer = scene.generate(SHORT, adapter=adapter, tokens=tokens and tokens(scene))
    call = scene.load("other", 3) if change == "load" else scene.call("unload_lora_adapter", {"name": "other"})
    scene.change(call, started_ns=answer.started_ns + 1)
    return scene


@pytest.mark.parametrize("adapter", ["policy", None])
@pytest.mark.parametrize("change", ["load", "unload"])
def test_an_answer_beside_another_adapters_change(change, adapter):
    found = beside_a_change(change, adapter).judge(ADAPTER_UNDISTURBED)
    assert (found.status, found.numbers[f"beside_a_{change}".replace("a_un", "an_un")]) == ("pass", 2)


@pytest.mark.parametrize(
    ("adapter", "tokens", "reason"),
    [
        ("policy", lambda scene: under(scene, 1), "an answer was made under an adapter that came or went beside it"),
        (None, lambda scene: under(scene, 2), "an answer was made under an adapter that came or went beside it"),
        (
            "policy",
            lambda _: [[1, 2, 3, 4, 5, 6]] * 2,
            "an answer was disturbed by an adapter that came or went beside it",
        ),
    ],
    ids=["another", "base", "neither"],
)
def test_an_answer_that_anothers_change_disturbs(adapter, tokens, reason):
    assert beside_a_change("load", adapter, tokens).judge(ADAPTER_UNDISTURBED).reason == reason


@pytest.mark.parametrize(("version", "status"), [(1, "pass"), (2, "fail")], ids=["loaded", "written"])
def test_a_version_that_is_only_written(version, status):
    scene = Scene()
    scene.generate(SHORT)
    scene.load("policy", 1)
    scene.call("write_lora_adapter", {"name": "policy", "version": 2})
    scene.generate(SHORT, adapter="policy", tokens=under(scene, version))
    scene.load("policy", 2)
    scene.generate(SHORT, adapter="policy")
    found = scene.judge(ADAPTER_UNDISTURBED)
    assert found.status == status
    if status == "pass":
        assert found.numbers["after_a_write"] == 2, "the answers before its load, and none after"


def test_a_write_that_ends_every_later_answer_is_the_stacks_doing():
    scene = Scene()
    scene.generate(SHORT)
    scene.load("policy", 1)
    assert scene.judge(ADAPTER_UNDISTURBED).status == "untestable"
    scene.call("write_lora_adapter", {"name": "policy", "version": 2})
    scene.generate(SHORT, adapter="policy", error=traces.error("EngineDead"))
    assert scene.judge(ADAPTER_UNDISTURBED).reason.startswith("generate() failed with EngineDead")


@pytest.mark.parametrize(("level", "status"), [(1, "pass"), (2, "fail")])
def test_the_base_model_of_engines_that_sleep(level, status):
    scene = Scene()
    assert scene.judge(BASE_MODEL_KEPT).status == "untestable"
    scene.control("sleep", arguments={"level": level}, level=2)
    assert scene.judge(BASE_MODEL_KEPT).status == status


def test_a_change_beside_no_answer_disturbs_nothing():
    scene = served()
    scene.generate(SHORT, adapter="policy")
    assert scene.judge(ADAPTER_UNDISTURBED).status == "untestable"


def test_an_answer_under_a_name_that_is_not_loaded_is_no_answer_of_an_adapter():
    scene = served(FOUR)
    scene.call("unload_lora_adapter", {"name": "policy"})
    asked = scene.generate(FOUR, adapter="policy", tokens=under(scene, None, FOUR))
    assert Evidence(traces.trace(*scene.calls), scene.reference).adapter_at(asked) is None
    assert scene.judge(ADAPTER_EFFECT).status == "pass", "else the base model's answers would count as the adapter's"


def test_nothing_to_judge_is_untestable():
    scene = Scene()
    assert scene.judge(ADAPTER_EFFECT).status == "untestable"
    scene.generate(SHORT)
    for check in (ADAPTER_EFFECT, ADAPTER_ISOLATED, FRESH_ADAPTER_CACHE, ONLY_ADAPTER_TRAVELS):
        assert scene.judge(check).status == "untestable"
    scene = served()  # short prompts: no cache block
    scene.generate(SHORT, adapter="policy")
    assert scene.judge(FRESH_ADAPTER_CACHE).status == "untestable"
    assert scene.judge(ADAPTER_ISOLATED).status == "untestable", "no base answer since the adapter came"


def test_an_answer_while_its_adapter_is_replaced_is_not_judged():
    scene = Scene()
    scene.load("policy", 1)
    scene.generate(SHORT)
    answer = scene.generate(SHORT, adapter="policy", tokens=[[1, 2, 3, 4, 5, 6]] * 2)
    load = scene.load("policy", 2)
    scene.change(load, started_ns=answer.started_ns + 1)
    assert scene.judge(ADAPTER_EFFECT).status == "untestable"


def test_checks_of_policy_versions_keep_adapters_apart():
    scene = served(LONG)
    scene.generate(LONG, adapter="policy")
    scene.generate(LONG)
    assert scene.judge(EXPLAINED).status == "pass"
    assert scene.judge(SAME_VERSION_SAME_OUTPUT).status == "pass"
    assert scene.judge(FORCED_EFFECT).status == "untestable", "one policy version, whatever the adapter"
    assert scene.judge(explained(cached)).status == "untestable"
    scene.generate(LONG)
    scene.sync(1)
    for _ in range(2):
        scene.generate(LONG, adapter="policy")
        scene.generate(LONG)
    for check in (EXPLAINED, SAME_VERSION_SAME_OUTPUT, FORCED_EFFECT, explained(cached)):
        assert scene.judge(check).status == "pass"


def test_an_adapter_that_one_server_does_not_load():
    scene = served()
    scene.load("policy", 3, servers=["server-0"])
    found = scene.judge(ONLY_ADAPTER_TRAVELS)
    assert (found.status, found.reason) == ("fail", "an adapter was not loaded by every server")
    assert found.evidence[0]["servers"] == ["server-1"]


@pytest.mark.parametrize("op", ["update_weights", "collective_rpc"])
def test_weights_that_travel_with_an_adapter(op):
    scene = served()
    load = scene.load("policy", 3)
    sent = traces.observation(
        "control", "server-1", load.ended_ns, op=op, arguments={}, ended_ns=load.ended_ns, error=None
    )
    scene.seen.append(sent)
    assert scene.judge(ONLY_ADAPTER_TRAVELS).reason == "weights of the model travelled with an adapter"


def test_an_adapter_that_brings_a_whole_tensor():
    scene = served()
    scene.load("policy", 3, tensors=["q_proj.lora_A", "q_proj.lora_B", "embed_tokens.weight"])
    found = scene.judge(ONLY_ADAPTER_TRAVELS)
    assert found.reason == "an adapter came with tensors that are no low-rank factors"
    assert found.evidence[0]["tensors"] == ["embed_tokens.weight"]


def test_an_adapter_that_the_tap_could_not_see():
    scene = served()
    scene.load("policy", 3, tensors=[])
    assert scene.judge(ONLY_ADAPTER_TRAVELS).status == "untestable"
    assert without_observations(served()).judge(ONLY_ADAPTER_TRAVELS).status == "untestable"
    assert Scene().judge(ONLY_ADAPTER_TRAVELS).reason == "no adapter was loaded"


def test_a_load_beside_a_sync_says_nothing():
    scene = Scene()
    load = scene.load("policy", 1)
    scene.change(scene.sync(1), started_ns=load.started_ns, ended_ns=load.ended_ns)
    assert scene.judge(ONLY_ADAPTER_TRAVELS).reason == "no adapter was loaded"


def test_a_body_asks_for_an_adapter_by_its_model():
    scene = served()
    for name, version in (("policy", 2), ("the model", None)):
        asked = traces.call("chat_completion", {"body": {"model": name}}, started_ns=scene.now, ended_ns=scene.now + 1)
        evidence = Evidence(traces.trace(*scene.calls, asked), scene.reference)
        assert evidence.adapter_at(asked) == version


def configured(tokens: int | None, completion: int | None, *, refused: bool = False) -> Scene:
    """The configuration's client answers generate() and a completion under these versions of the adapter, or refuses the latter."""
    scene = Scene()
    scene.load("any", 1)
    scene.generate(FOUR, tokens=under(scene, tokens, FOUR), label=CONFIGURED)
    body = {"model": "tiny", "prompt": FOUR, "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    choices = [
        {"index": index, "text": traces.decode(ids), "finish_reason": "length", "token_ids": ids}
        for index, ids in enumerate(under(scene, completion, FOUR))
    ]
    said = {"error": {"message": "no model", "type": "NotFound", "code": 404}} if refused else {"choices": choices}
    for prompt, ids in zip(FOUR, under(scene, completion, FOUR), strict=True):
        scene.seen += traces.executed(prompt, ids, from_ns=scene.pass_time(), step_ns=1)
    times = {"started_ns": scene.pass_time(), "ended_ns": scene.pass_time()}
    scene.calls.append(traces.openai("completion", body, said, label=CONFIGURED, **times))
    return scene


@pytest.mark.parametrize("by", [None, 1])
def test_every_call_by_one_policy_passes(by):
    assert configured(by, by).judge(ONE_POLICY).status == "pass"


def test_calls_by_several_policies():
    found = configured(1, None).judge(ONE_POLICY)
    several = (
        "calls of one client are answered by several policies: completion by the base model; generate by the adapter"
    )
    assert found.reason == several


def test_answers_of_a_call_by_no_policy():
    assert configured(1, 7).judge(ONE_POLICY).reason == "answers of completion follow no one policy"


def test_a_policy_is_not_judged_by_one_method():
    assert configured(1, 1, refused=True).judge(ONE_POLICY).status == "untestable"
    scene = Scene()
    scene.generate(FOUR, label=CONFIGURED)
    assert scene.judge(ONE_POLICY).status == "untestable"
