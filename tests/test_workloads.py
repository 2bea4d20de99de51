"""Random workloads leave correct miniatures green and find every seeded fault within a budget. Their findings can be run again."""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from fixtures.prompts import Prompts
from harness.checks.always import ALWAYS
from harness.commands import cli
from harness.contract.errors import UsageError
from harness.contract.faults import DRIVEN, NOTHING, Fault, family
from harness.contract.vocabulary import TINY
from harness.exploring import explore
from harness.exploring import workloads as w
from harness.exploring.explore import (
    Explorer,
    Outcome,
    Request,
    Search,
    as_scenario,
    findings,
    search,
    sequences,
    shrink,
    told,
)
from harness.exploring.scripts import load
from harness.machine.targets import known
from harness.proving.prove import MINIATURES
from harness.records.verdict import Cause
from tests.kill_matrices import verdict

SEED = 0
BUDGET = 60
"""Number of sequences within which each fault is found."""
GREEN = int(os.environ.get("PARITY_SEQUENCES", BUDGET))
"""Number of sequences that leave the correct miniatures green: at least the budget, so that a finding is due to the fault."""

OUT_OF_REACH = {
    "ipc_not_used/one_server": "how weights travel is no check of a workload's",
    "logprobs_off_by_constant/a_hair": "a mean needs thousands of tokens under one policy version",
    "slow/every_server": "pace is a comparison with another stack",
    "slow/one_server": "pace is a comparison with another stack",
    "worker_extension_carries_weights/one_server": "how weights travel is no check of a workload's",
    "worker_extension_loaded/one_server": "what a worker's class is made of is no check of a workload's",
}
"""Fault that no workload can show → why. It is not driven: a test reads off that no check of a workload may turn red for it."""
RARE = {
    "cache_outlives_weights/running_requests": "a reset while requests run, and their prompts again after it",
    "experts_empty/after_a_pause": "a row that is frozen and lives on (sequence 83)",
    "one_server_gets_all/sessions": "so many sessions that both servers are due",
    "parameter_ignored/stop_string_kept": "a stop string that is included and met (sequence 108)",
}
"""Fault that needs more sequences than the budget → the circumstances that it needs."""

UNASKED = {
    "device memory": (
        "sleep_keeps_memory/every_server", "sleep_keeps_memory/one_server", "sleep_keeps_memory/cache", "sleep_leaks/a_little",
        "wake_up_ignores_tags", "wake_up_takes_nothing",
    ),
    "the OpenAI address": (
        "endpoint_hides_errors/empty_success", "endpoint_hides_errors/status", "endpoint_hides_errors/server_error",
        "endpoint_drops_session/header", "endpoint_drops_session/body", "endpoint_fails_after_an_error",
        "endpoint_logprobs_wrong/shifted", "stream_loses_a_chunk/first", "stream_loses_a_chunk/last", "stream_is_whole",
    ),
    "the gym generator": (
        "trajectories_swapped", "rewards_shifted", "turn_reward_late", "loss_mask_wrong/observations",
        "loss_mask_wrong/one_short", "last_turn_dropped", "stop_reason_wrong/trajectory", "turn_logprobs_late",
        "trajectory_not_sticky", "metrics_wrong/turns", "observation_retokenized", "error_becomes_empty/trajectory",
        "environment_reads_special_tokens",
    ),
    "the trainer": (
        "training_ascends_the_loss", "training_has_no_effect", "trainer_logprobs_wrong/temperature",
        "trainer_logprobs_wrong/stale", "training_blocks_generation", "trained_version_never_arrives",
        "trained_version_late", "shards_swapped", "sync_returns_early",
    ),
    "the staleness manager": (
        "staleness_exceeded/one_slot_too_many", "staleness_exceeded/accepted_forgotten", "staleness_exceeded/workers",
    ),
    "a pause at a moment that is aimed at": (
        "budget_not_reduced/keep_last_token", "budget_not_reduced/last_token", "abort_leaks/keep_queued",
        "abort_leaks/before_the_first_token", "pause_returns_early/wait_queued",
        "tokens_lost_on_continuation/before_the_first_token", "seed_ignored/begun_anew_on_resume",
        "stop_string_missed/across_a_freeze", "stop_string_missed/across_an_interruption",
        "budget_not_reduced/min_tokens", "session_moves/after_an_interruption",
    ),
    "a chat across a pause": ("abort_leaks/chat", "messages_lost/first_answer"),
    "a sync that fails in the middle": (
        "failed_sync_poisons_the_next/leftovers", "failed_sync_poisons_the_next/one_server",
        "failed_sync_poisons_the_next/refused", "failed_sync_poisons_the_next/half_visible",
        "failed_sync_reported_as_done", "failed_sync_leaves_paused/one_server", "failed_sync_ends_the_pause/one_server",
    ),
    "engines of several workers": (
        "world_size_wrong/servers", "parameters_differ_between_ranks", "sync_missed/one_rank", "shards_swapped/ranks",
        "experts_misplaced/anothers", "experts_misplaced/stale",
    ),
    "a trainer of several ranks": (
        "megatron_layout_wrong/groups", "megatron_layout_wrong/ranks", "megatron_layout_wrong/stages",
    ),
    "a sync while requests are frozen, with their cache kept or cleared": (
        "cache_outlives_weights/cleared_freeze", "freeze_loses_cache/one_server",
    ),
    "a chat under an adapter": ("chat_ignores_adapter",),
    "an adapter's name that is loaded again, and a reset": ("adapter_cache_reused/after_a_reset",),
}  # fmt: skip
"""Feature that no workload uses → faults that only affect that feature. Scenarios find them; here they never take effect."""
NEVER_ASKED = {fault for faults in UNASKED.values() for fault in faults}
SHOWN_UNASKED = 5
"""Number of sequences that show that such a fault does not take effect."""

SHRUNK = {
    "stale_prefix_cache/one_server": ("fresh_prefix_cache", w.Sync),
    "tokens_doubled_on_continuation/keep": ("pause_changes_nothing", w.Paused),
    "adapter_cache_reused/base": ("fresh_adapter_cache", w.Ask),
}
"""Fault whose sequence is shrunk → a check that the smallest sequence turns red, and an operation that this needs."""

Job = tuple[str, str | None]
"""A target, and its fault, if any."""
FAULTS = [(target, fault) for target in MINIATURES for fault in known(target).seeded() if fault not in OUT_OF_REACH]


def shrinking(fault: str) -> Request:
    return Request(fault=fault, examples=BUDGET, seed=SEED)


def job(target: str, fault: str | None = None, *, explorers: dict[str, Explorer] = {}) -> tuple[Job, Search]:  # noqa: B006 - kept
    """A whole search in a worker process, which keeps its explorers for its lifetime."""
    explorer = explorers[target] = explorers.get(target) or Explorer(target)
    if fault in SHRUNK:
        return (target, fault), explore.explore(explorer, shrinking(fault), lambda _: None)
    seeded = None if fault is None else known(target).seeded()[fault]
    count = max(GREEN, BUDGET) if fault is None else SHOWN_UNASKED if fault in NEVER_ASKED else BUDGET
    return (target, fault), search(explorer, sequences(explorer.capabilities, count, SEED), seeded)


@pytest.fixture(scope="module")
def searches() -> dict[Job, Search]:
    """Results of a search on each correct miniature and under each fault, driven in one process per core."""
    jobs: list[Job] = [*((target, None) for target in MINIATURES), *FAULTS]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        found = dict(pool.starmap(job, jobs, chunksize=1))
        pool.close()
        pool.join()
    return found


@pytest.fixture(scope="module")
def explorer() -> Iterator[Explorer]:
    """One explorer for the whole file. It rebuilds its miniature for each sequence."""
    with Explorer("miniature") as made:
        yield made


def shown(outcome: Outcome) -> list[tuple[str, str, str]]:
    return [(v.check, v.reason, str(v.evidence)[:1000]) for v in outcome.findings]


# --- the power, and no false alarm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", MINIATURES)
def test_the_correct_miniature_stays_green(searches, target):
    search = searches[target, None]
    assert search.found is None, (
        f"sequence {search.found.number} of seed {SEED}",
        shown(search.found.outcome),
        w.as_scenario(search.found.workload, known(target).capabilities),
    )
    assert search.judged > 10 * search.sequences, "the checks have something to judge"


@pytest.mark.parametrize(("target", "fault"), FAULTS, ids=map("-".join, FAULTS))
def test_each_fault_is_found_within_the_budget(searches, target, fault):
    search = searches[target, fault]
    if fault in NEVER_ASKED:
        assert not search.fired, "workloads ask for it by now: take it off the list"
    elif fault in RARE:
        assert search.found is None, f"found: take it off the list: {shown(search.found.outcome)}"
    else:
        assert search.found is not None, f"not found in {search.sequences} sequences"


def test_what_is_out_of_reach_may_turn_no_check_of_a_workload_red():
    """`parity prove` allows a fault to turn red what is in `caught_by` and what reads a fact that it corrupts, nothing else."""
    able = known("miniature").capabilities
    drawn = (w.explored(workload, able)[0].checks for workload in sequences(able, BUDGET, SEED))
    asked = {family(check.name) for checks in (*drawn, ALWAYS) for check in checks}
    for fault in map(known("miniature").seeded().__getitem__, OUT_OF_REACH):
        assert fault.caught_by.isdisjoint(asked), fault.id
        assert fault.corrupts == NOTHING, fault.id


def test_only_faults_that_there_are_are_out_of_reach():
    seeded = {fault for target in MINIATURES for fault in known(target).seeded()}
    assert seeded >= (OUT_OF_REACH | RARE).keys() | NEVER_ASKED


# --- what is found can be run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault_id", SHRUNK)
def test_what_is_found_shrinks_to_a_scenario_that_is_red_for_the_fault_alone(searches, explorer, fault_id):
    fault, request = known("miniature").seeded()[fault_id], shrinking(fault_id)
    check, operation = SHRUNK[fault_id]
    found = searches["miniature", fault_id].found
    assert found is not None
    assert len(found.workload.operations) <= 3, found.workload
    assert any(isinstance(one, operation) for one in found.workload.operations)

    text = as_scenario(found, explorer.capabilities, request)
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 120
    scenario, function = load(text)
    assert scenario.name == "explored.test_found"
    assert check in {one.name for one in scenario.checks}
    assert {one.name for one in scenario.checks} <= {v.check for v in found.outcome.findings}
    assert request.command in " ".join(scenario.source.split())

    red = explorer.drive_scenario(scenario, function, fault)
    assert {v.check for v in red.findings} == {v.check for v in found.outcome.findings}
    assert explorer.drive_scenario(scenario, function).findings == ()


def test_the_same_seed_finds_the_same(explorer):
    fault = known("miniature").seeded()["results_swapped/in_a_batch"]
    found = []
    for _ in range(2):
        explore._drawn.cache_clear()
        one = search(explorer, sequences(explorer.capabilities, BUDGET, SEED), fault).found
        found.append(shrink(explorer, one, seed=SEED, fault=fault))
    assert found[0].workload == found[1].workload
    assert [v.check for v in found[0].outcome.findings] == [v.check for v in found[1].outcome.findings]


def test_other_seeds_draw_other_workloads():
    able = known("miniature").capabilities
    assert tuple(sequences(able, 5, 1)) != tuple(sequences(able, 5, 2))
    assert tuple(sequences(able, 5, 1)) == tuple(sequences(able, 9, 1))[:5], "how many are drawn decides none of them"


# --- workloads ------------------------------------------------------------------------------------------------------

EVERY_OPERATION = (
    w.Generate(w.Rows(3, "ragged"), w.answer(4), ("a", 0, "Gespräch")),
    w.Messages(2, w.answer(4)),
    w.Ask("long", (w.Under(), w.Under("one", 2), w.Under("one"))),
    w.Repeated(2, 3, company=2),
    w.Filtered((("temperature", "1.0"), ("top_k", "5")), 1),
    w.Draws(),
    w.Copies(4),
    w.Sample(3, seed=2, session="a"),
    w.Completion(3, text=True),
    w.Chat(2, session=7),
    w.Conversation(3),
    w.Concurrent(2, 2),
    w.Crowd(sessions=True),
    w.Texts(2, hard=True),
    w.ReadBack(2),
    w.Look(("health", "world_size", "probe_security", "digests", "pickle_client")),
    w.Paused("keep", 3, ("late", "late_long", "is_paused", "pause_again", "reset", "digests", "health")),
    w.IdlePause("wait", ("late", "sync"), 2, 4),
    w.States(again=True),
    w.Reset(running=True),
    w.InFlight(3, ("short", "sessions", "reset_running", "load", "completion", "pickle_client")),
    w.Sync(2, 3, "short"),
    w.Load("other", 2),
    w.Unload("other"),
    w.Refused(tuple(w.MISTAKES)),
    w.Nothing(),
    w.Deaths(4),
)


def test_one_workload_of_every_operation_is_green(explorer):
    assert {type(one) for one in EVERY_OPERATION} | {w.Sleep} == set(w.Operation.__subclasses__())
    outcome = explorer.drive(w.Workload(EVERY_OPERATION))
    assert shown(outcome) == []
    assert outcome.judged > 60


@pytest.mark.parametrize("operation", [*EVERY_OPERATION, w.Sleep(2, 1, tags=True)], ids=lambda one: type(one).__name__)
def test_each_operation_prints_as_code_that_declares_what_it_needs(operation):
    able = known("miniature").capabilities
    text = w.as_scenario(w.Workload((operation,)), able)
    scenario, _ = load(text)
    assert scenario.needs <= able
    if scenario.needs:
        with pytest.raises(ValueError, match="which the stack does not offer"):
            w.script(w.Workload((operation,)), able - scenario.needs)


@pytest.mark.asyncio
async def test_run_drives_a_workload_on_a_stack():
    asked = []

    async def generate(prompts, **params):
        asked.append((prompts, params))

    stack = SimpleNamespace(capabilities=known("miniature").capabilities, vocabulary=TINY, generate=generate)
    await w.run(stack, w.Workload((w.Generate(w.Rows(2), w.answer(4)),)))
    prompts = Prompts("explored.test_found").unique(2)
    assert asked == [(prompts, {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True})]


def test_a_stack_that_can_do_little_is_asked_for_nothing_else():
    for workload in sequences(frozenset(), 20, SEED):
        scenario, _ = w.explored(workload, frozenset())
        assert scenario.needs == frozenset()


# --- what counts as a finding ---------------------------------------------------------------------------------------


def test_a_sequence_without_anything_judged_is_a_finding():
    verdicts = [verdict("found", "tokens", "untestable", "no greedy call was recorded")]
    assert [v.check for v in findings(verdicts)] == [explore.JUDGED]
    assert findings([*verdicts, verdict("found", "text")]) == []


def test_a_failed_a_broken_and_a_blind_check_are_findings():
    broken = verdict("found", "tokens", "untestable", "check tokens raised KeyError", cause=Cause.RAISED)
    blind = verdict("found", "instruments", "untestable", "the tap saw nothing")
    failed = verdict("found", "text", "fail", "text is wrong")
    idle = verdict("found", "routing", "untestable", "no session")
    assert findings([broken, blind, failed, idle]) == [broken, blind, failed]


def test_a_sequence_that_did_not_reach_its_end_is_one_finding():
    verdicts = [verdict("found", check, "fail", "timed out", cause=Cause.NOT_DRIVEN) for check in ("tokens", "text")]
    assert [v.check for v in findings(verdicts)] == [DRIVEN]


# --- the command ----------------------------------------------------------------------------------------------------


def run(*words: str):
    return CliRunner().invoke(cli.app, ["explore", *words], obj={})


def test_nothing_found_ends_with_0_and_says_how_much_was_driven():
    done = run("--examples", "2", "--seed", "0")
    assert done.exit_code == 0, done.output
    assert "nothing found in 2 sequences" in done.stderr
    assert done.stdout == ""


def test_what_is_found_ends_with_1_and_is_printed_and_written(tmp_path):
    out = tmp_path / "test_explored.py"
    done = run("--fault", "usage_wrong/counted_twice", "--examples", str(BUDGET), "--out", str(out))
    assert done.exit_code == 1, done.output
    assert "completion() miscounts completion_tokens" in done.stderr
    assert "--fault usage_wrong/counted_twice --examples 60 --seed 0" in done.stderr
    assert done.stdout.strip() == out.read_text().strip()
    assert load(out.read_text())[0].checks


def test_a_fault_that_was_not_found_is_told_apart_from_one_that_never_took_effect():
    request = Request(fault="slow/one_server")
    assert told(request, Search(sequences=3, judged=20, fired=5)).endswith("nothing found in 3 sequences, 20 verdicts")
    assert told(request, Search(sequences=3, judged=20)).endswith("; the fault never took effect")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fault", "session_move"], "did you mean session_moves"),
        (["--stack", "skyrl-0.2.0:http"], "cannot be explored"),
        (["--stack", "miniature:reference"], "cannot be explored"),
        (["--stack", "minature"], "unknown target"),
    ],
)
def test_what_cannot_be_explored_is_a_named_error(words, says):
    done = run("--examples", "1", *words)
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)


def test_without_hypothesis_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    explore._drawn.cache_clear()
    with pytest.raises(UsageError, match=r"rollout-parity\[explore\]"):
        next(sequences(frozenset(), 1, SEED))


def test_workloads_are_values():
    workload = w.Workload(EVERY_OPERATION)
    assert workload == msgspec.structs.replace(workload)
    assert hash(workload) == hash(w.Workload(EVERY_OPERATION))


def test_a_fault_of_another_stack_is_refused():
    with pytest.raises(UsageError, match="no seeded fault"):
        explore.seeded(known("miniature"), "abort_leaks/retry")
    assert isinstance(explore.seeded(known("miniature:retry"), "abort_leaks/retry"), Fault)
