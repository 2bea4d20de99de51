"""LoRA adapters: a load sends nothing else, and each answer uses the requested adapter, its latest version and no other adapter's
cache.

The checks judge greedy answers of generate(); `one_policy` judges those of every call. `tokens.greedy` and
`logprobs.reference` compare the same answers with the reference; the checks here name the fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import msgspec

from harness.checks import ties
from harness.checks.answers import Answer, answered, nothing_to_judge, select, whole
from harness.checks.base import Check, Evidence, Finding, Tap, concluded, untestable
from harness.checks.client_lives import CONFIGURED
from harness.checks.echo import reached
from harness.checks.matching import queries
from harness.checks.staleness import (
    NOT_ASKED,
    Again,
    Answered,
    after_hits,
    asked_again,
    follow,
    greedy_answers,
    overlap,
    questions,
)
from harness.checks.tokens import is_greedy
from harness.checks.transfer import FINISH, RPC, START, UPDATE, within
from harness.contract.faults import Fact
from harness.contract.messages import CHOICES, LISTS
from harness.records.recording import Call, Observation
from harness.records.reference import Query, ScoreRequest, UnansweredQuery

ENOUGH = 4
"""Prompts that must all be unmoved before that is a fault: a right adapter may leave the first tokens of a few unchanged."""

SOURCE = "SkyRL #1014, task 11; vLLM documentation, LoRA Adapters"


def other_adapters(evidence: Evidence, answer: Answered) -> list[Answered]:
    """The same answer under each other adapter version that the scenario loaded or wrote, and under the base model."""
    known = [*evidence.succeeded("load_lora_adapter"), *evidence.succeeded("write_lora_adapter")]
    versions = {call.request["version"] for call in known} - {answer.adapter}
    base = [] if answer.adapter is None else [msgspec.structs.replace(answer, adapter=None)]
    return base + [msgspec.structs.replace(answer, adapter=version) for version in sorted(versions)]


def _judge_effect(evidence: Evidence) -> Finding:
    """Compares each pair of adapter versions (None: the base model) on the prompts that both answered under one policy version.

    One prompt with different answers shows the effect; only `ENOUGH` equal ones show its absence.
    """
    by_prompt: dict[Any, dict[int | None, tuple[int, ...] | None]] = defaultdict(dict)
    for answer in greedy_answers(evidence):
        by_prompt[answer.row.prompt, answer.version][answer.adapter] = answer.row.tokens
    pairs: dict[tuple[int | None, int | None], list[bool]] = {}
    for answers in by_prompt.values():
        for one, other in combinations(sorted(answers, key=lambda a: -1 if a is None else a), 2):
            pairs.setdefault((one, other), []).append(answers[one] != answers[other])
    if not any(None in pair for pair in pairs):
        return untestable("no prompt was answered both by the base model and under an adapter")
    pairs = {pair: moved for pair, moved in pairs.items() if any(moved) or len(moved) >= ENOUGH}
    if not any(None in pair for pair in pairs):
        return untestable("too few prompts were answered both by the base model and under an adapter")
    wrong = [
        (
            "an adapter does not change the answers" if one is None else "another version does not change the answers",
            {"adapter versions": [one, other], "prompts": len(moved)},
        )
        for (one, other), moved in pairs.items()
        if not any(moved)
    ]
    return concluded(len(pairs), wrong, pairs=len(pairs), prompts=max(map(len, pairs.values())))


ADAPTER_EFFECT = Check(
    name="adapter_effect",
    fault="an adapter is accepted and ignored, or loading another version under its name has no effect",
    next_step="compare the adapter's name in the request with the one that the engine ran, then the version that it was loaded from",
    reads=Fact.ANSWERS | Fact.ADAPTERS,
    falsifies=Fact.ADAPTERS,
    source=f"{SOURCE}; architecture, forced effect",
    judge=_judge_effect,
)


def _base_answers(evidence: Evidence) -> list[Answered]:
    return [answer for answer in greedy_answers(evidence) if answer.row.call.request.get("lora_adapter") is None]


def _judge_isolated(evidence: Evidence) -> Finding:
    """Judges answers without an adapter. At least one of them must end after an adapter was loaded."""
    loads = evidence.succeeded("load_lora_adapter")
    base = _base_answers(evidence)
    if not any(load.ended_ns <= answer.row.call.ended_ns for load in loads for answer in base):
        return untestable("nothing was answered without an adapter once one was loaded")
    under = [call for call in evidence.calls("generate") if call.request.get("lora_adapter") is not None]
    beside = sum(any(overlap(answer.row.call, call) for call in under) for answer in base)
    after = sum(any(load.ended_ns <= answer.row.call.ended_ns for load in loads) for answer in base)
    return follow(
        evidence,
        base,
        other_adapters,
        replaced="an answer without an adapter was made under one",
        neither="an answer without an adapter is not the base model's",
        after_a_load=after,
        beside_an_adapter=beside,
    )


ADAPTER_ISOLATED = Check(
    name="adapter_isolated",
    fault="an adapter leaks into answers of the base model, in the same batch or afterwards",
    next_step="look at the requests beside the one in the evidence: which adapter ran in the same batch or filled "
    "the same prefix-cache block",
    reads=Fact.ANSWERS | Fact.ADAPTERS,
    falsifies=Fact.ADAPTERS,
    source=f"{SOURCE}: requests without an adapter are served by the base model",
    judge=_judge_isolated,
    queries=lambda evidence: questions(evidence, _base_answers(evidence), other_adapters),
)


def _beside(evidence: Evidence) -> dict[str, list[Answered]]:
    """Change → answers under other adapters, or under none, that were under way meanwhile. For an adapter that was only written: the
    answers under its name until it is loaded."""
    answers = greedy_answers(evidence)
    found: dict[str, list[Answered]] = {}
    for method in ("load_lora_adapter", "unload_lora_adapter"):
        changes = evidence.succeeded(method)
        found[method] = [a for a in answers if any(overlap(change, a.row.call) for change in changes)]
    found["write_lora_adapter"] = [
        a
        for a in answers
        if any(_before_its_load(evidence, w, a.row.call) for w in evidence.succeeded("write_lora_adapter"))
    ]
    return found


def _before_its_load(evidence: Evidence, write: Call, answer: Call) -> bool:
    """True if the answer ended after its adapter was written anew, and began before that was loaded."""
    name = write.request["name"]
    loads = [
        load
        for load in evidence.succeeded("load_lora_adapter")
        if load.request["name"] == name and load.started_ns >= write.ended_ns
    ]
    return (
        answer.request.get("lora_adapter") == name
        and answer.ended_ns > write.started_ns
        and not any(load.started_ns < answer.started_ns for load in loads)
    )


def _judge_undisturbed(evidence: Evidence) -> Finding:
    """Judges answers that a load or an unload of another adapter overlaps, or a write of their own came before."""
    beside = _beside(evidence)
    if not any(beside.values()):
        after_a_write = ("generate",) if evidence.succeeded("write_lora_adapter") else ()
        return nothing_to_judge(evidence, "no adapter was loaded, unloaded or written beside an answer", after_a_write)
    return follow(
        evidence,
        [answer for answers in beside.values() for answer in answers],
        other_adapters,
        replaced="an answer was made under an adapter that came or went beside it",
        neither="an answer was disturbed by an adapter that came or went beside it",
        beside_a_load=len(beside["load_lora_adapter"]),
        beside_an_unload=len(beside["unload_lora_adapter"]),
        after_a_write=len(beside["write_lora_adapter"]),
    )


ADAPTER_UNDISTURBED = Check(
    name="adapter_undisturbed",
    fault="loading, replacing or unloading an adapter, or writing its next version to disk, changes answers of an adapter that was "
    "loaded before, or of the base model",
    next_step="look at what the engine does to its running batch when it loads or removes an adapter, and when it reads an adapter's "
    "folder",
    reads=Fact.ANSWERS | Fact.ADAPTERS,
    falsifies=Fact.ADAPTERS,
    source=f"{SOURCE}, Dynamically serving LoRA Adapters; SkyRL 0.3.0, save_weights_for_sampler: no pause around a load",
    judge=_judge_undisturbed,
    queries=lambda evidence: questions(
        evidence, [answer for answers in _beside(evidence).values() for answer in answers], other_adapters
    ),
)


def _again(evidence: Evidence) -> list[Again]:
    """Answers to prompts longer than a cache block that another adapter, or the base model, answered before."""
    return asked_again(evidence, greedy_answers(evidence), lambda a: (a.row.prompt, a.version), lambda a: a.adapter)


def _judge_cache(evidence: Evidence) -> Finding:
    again = _again(evidence)
    if not again:
        return untestable("no prompt longer than a prefix-cache block was answered under two adapters")
    return after_hits(
        evidence,
        again,
        other_adapters,
        replaced="an answer was made under another adapter than it asked for",
        neither="an answer mixes adapters: its prefix cache is another one's",
    )


def _ask_cache(evidence: Evidence) -> Iterator[ScoreRequest]:
    return questions(evidence, [one.answer for one in _again(evidence)], other_adapters)


FRESH_ADAPTER_CACHE = Check(
    name="fresh_adapter_cache",
    fault="keys and values computed under one adapter are read under another, or under its next version",
    next_step="look at the key of the prefix cache: it has to hold the adapter and its version",
    reads=Fact.ANSWERS | Fact.ADAPTERS,
    falsifies=Fact.ADAPTERS,
    source="vLLM documentation, Automatic Prefix Caching: the LoRA adapter is part of a block's hash",
    judge=_judge_cache,
    queries=_ask_cache,
)


def _judge_base_kept(evidence: Evidence) -> Finding:
    """Judges the level at which each engine slept."""
    calls = evidence.succeeded("sleep")
    slept = [(call, seen) for call in calls for seen in reached(evidence, call)]
    if not slept:
        return untestable("no engine slept")
    wrong = [
        (
            "engines whose adapters alone are synced slept at a level that discards the model",
            {"call": call.id, "server": seen.server, "asked": call.request["level"], "slept at": level},
        )
        for call, seen in slept
        if (level := seen.data["arguments"].get("level", 1)) != 1
    ]
    return concluded(len(slept), wrong)


BASE_MODEL_KEPT = Check(
    name="base_model_kept",
    fault="engines discard the base model when they sleep, and no sync brings it back, since only adapters are synced",
    next_step="look at who chooses the level of sleep: with adapters it has to be 1, whatever the caller asks for",
    source='SkyRL #1014, task 11: "Only LoRA weights synced"; vLLM documentation, Sleep Mode: level 2 discards the weights',
    reads=Fact.ADAPTERS,
    tap=Tap.READ,
    judge=_judge_base_kept,
)


POLICIES = (*LISTS, *CHOICES)
"""Calls that a policy answers."""


def _configured(evidence: Evidence) -> list[Call]:
    """The calls of the client that the configuration makes that were answered."""
    return answered(select(evidence, (CONFIGURED,), POLICIES))


def _policies(evidence: Evidence) -> list[int | None]:
    """The base model (None), and each version of an adapter that was loaded."""
    return [None, *sorted({call.request["version"] for call in evidence.succeeded("load_lora_adapter")})]


def _under(answer: Answer, policy: int | None) -> ScoreRequest:
    return msgspec.structs.replace(answer, adapter=policy).score


def _judge_one_policy(evidence: Evidence) -> Finding:
    """Compares the policies that the greedy answers of each method follow. A call that was refused says nothing."""
    policies = _policies(evidence)
    followed: dict[str, set[int | None]] = {}
    rows = [answer for answer in whole(evidence, _configured(evidence)) if is_greedy(answer)]
    try:
        for answer in rows:
            scores = {policy: evidence.reference.score(_under(answer, policy)) for policy in policies}
            by = {policy for policy, score in scores.items() if ties.parts_at(evidence, score) is None}
            followed[answer.call.method] = followed.get(answer.call.method, set(policies)) & by
    except UnansweredQuery:
        return untestable(NOT_ASKED)
    if len(policies) < 2 or len(followed) < 2:
        return untestable("no adapter was loaded, or the configuration's client answered by one method only")
    names = {policy: "the base model" if policy is None else "the adapter" for policy in policies}
    shown = {method: [names[policy] for policy in policies if policy in by] for method, by in followed.items()}
    wrong = []
    if mixed := sorted(method for method, by in followed.items() if not by):
        wrong.append((f"answers of {', '.join(mixed)} follow no one policy", shown))
    elif not set.intersection(*followed.values()):
        said = {name: sorted(m for m, by in shown.items() if by == [name]) for name in dict.fromkeys(names.values())}
        told = [f"{', '.join(methods)} by {name}" for name, methods in said.items() if methods]
        wrong.append((f"calls of one client are answered by several policies: {'; '.join(told)}", shown))
    elif any(len(by) > 1 for by in followed.values()):
        return untestable("the answers of a method do not tell the base model from an adapter")
    return concluded(sum(len(answer.tokens) for answer in rows), wrong, methods=len(followed))


def _ask_one_policy(evidence: Evidence) -> Iterator[Query]:
    yield from queries(evidence)
    for answer in whole(evidence, _configured(evidence)):
        if is_greedy(answer):
            yield from (_under(answer, policy) for policy in _policies(evidence))


ONE_POLICY = Check(
    name="one_policy",
    fault="of the calls of one client some are answered under the adapter that is loaded, others by the base model",
    next_step="compare the model's name that each call of the client sends, or the adapter that it is run with",
    reads=Fact.ANSWERS | Fact.POLICY | Fact.ADAPTERS,
    falsifies=Fact.ADAPTERS,
    source="SkyRL documentation, LoRA Support: the policy is the model with its adapter; SkyRL 0.3.0, RemoteInferenceClient: "
    '"falling back to the base model would silently bypass LoRA"',
    judge=_judge_one_policy,
    queries=_ask_one_policy,
)


LOAD = "add_lora"
"""The engine's operation that loads an adapter (vLLM, AsyncLLM). Its argument holds the name and the tensors (tensor → bytes)."""
FACTORS = ("lora_a", "lora_b")
"""Each tensor name of an adapter contains one of these, in any case (PEFT documentation, checkpoint format)."""
CARRIES_WEIGHTS = frozenset({RPC, "init_weight_transfer_engine", START, UPDATE, FINISH})
"""Control calls of an engine that may carry tensors of the model (vLLM, AsyncLLM; the legacy stack uses collective_rpc)."""


def _tensors(seen: Observation) -> dict[str, int] | None:
    """Tensor → bytes of what an engine loaded; None if the tap could not see it."""
    shown = seen.data["arguments"].get("lora_request")
    found = shown.get("tensors") if isinstance(shown, dict) else None
    return found or None


def _judge_travels(evidence: Evidence) -> Finding:
    """Judges what reached each engine during a load. Skips loads that overlap a sync, which sends weights too."""
    syncs = evidence.calls("sync_weights")
    loads = [load for load in evidence.succeeded("load_lora_adapter") if not any(overlap(sync, load) for sync in syncs)]
    if not loads:
        return untestable("no adapter was loaded")
    facts, largest, wrong, unseen = 0, 0, [], False
    for load in loads:
        seen = within(evidence, load)
        loaded = {s.server: s for s in seen if s.data["op"] == LOAD and s.data["error"] is None}
        shown: dict[str, Any] = {"call": load.id, "name": load.request["name"], "version": load.request["version"]}
        facts += len(evidence.header.servers)
        if absent := sorted(set(evidence.header.servers) - set(loaded)):
            wrong.append(("an adapter was not loaded by every server", {**shown, "servers": absent}))
        others = [s for s in seen if s.data["op"] in CARRIES_WEIGHTS]
        if others:
            ops = sorted({f"{s.server}: {s.data['op']}" for s in others})
            wrong.append(("weights of the model travelled with an adapter", {**shown, "seen": ops[:4]}))
        for server, one in loaded.items():
            tensors = _tensors(one)
            if tensors is None:
                unseen = True
                continue
            facts += len(tensors)
            largest = max(largest, sum(tensors.values()))
            if strange := sorted(name for name in tensors if not any(part in name.lower() for part in FACTORS)):
                found = {**shown, "server": server, "tensors": strange[:3]}
                wrong.append(("an adapter came with tensors that are no low-rank factors", found))
    if unseen and not wrong:
        return untestable("the tap could not see what was loaded")
    return concluded(facts, wrong, loads=len(loads), bytes=largest, servers=len(evidence.header.servers))


ONLY_ADAPTER_TRAVELS = Check(
    name="only_adapter_travels",
    fault="loading an adapter also sends weights of the model, or does not reach every server",
    next_step="look at what the weight sync of the adapter sends: the evidence names tensors or calls beyond the adapter's own",
    reads=Fact.ADAPTERS,
    falsifies=Fact.ADAPTERS,
    source='SkyRL #1014, task 11: "Only LoRA weights synced"',
    tap=Tap.READ,
    judge=_judge_travels,
)
