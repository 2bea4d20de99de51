"""Random workloads leave correct miniatures green and find seeded faults within a budget. Their findings can be run again."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from fixtures.prompts import Prompts
from harness.commands import cli
from harness.contract.errors import UsageError
from harness.contract.faults import DRIVEN, Fault
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

FOUND = [
    ("miniature", "dead_server_waited_for"),
    ("miniature", "hang/under_load"),
    ("miniature", "parameter_ignored/top_k"),
    ("miniature", "quantization_ignored"),
    ("miniature", "session_moves/falsy_id"),
    ("miniature", "stale_prefix_cache/one_server"),
    ("miniature", "tokens_doubled_on_continuation/keep"),
    ("miniature", "turns_retokenized"),
    ("miniature:retry", "abort_leaks/second_time"),
    ("miniature:retry", "attempts_unbounded"),
]
"""With those below, one fault per kind of operation. `parity prove` drives every fault."""


@pytest.fixture(scope="module")
def explorers() -> Iterator[dict[str, Explorer]]:
    """One explorer per miniature for the whole file. It rebuilds its miniature for each sequence."""
    with Explorer("miniature") as plain, Explorer("miniature:retry") as retry:
        yield {"miniature": plain, "miniature:retry": retry}


@pytest.fixture(scope="module")
def explorer(explorers) -> Explorer:
    return explorers["miniature"]


def searched(explorer: Explorer, fault: str | None, count: int = BUDGET) -> Search:
    seeded = None if fault is None else explorer.target.seeded()[fault]
    return search(explorer, sequences(explorer.capabilities, count, SEED), seeded)


def shown(outcome: Outcome) -> list[tuple[str, str, str]]:
    return [(v.check, v.reason, str(v.evidence)[:1000]) for v in outcome.findings]


# --- the power, and no false alarm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", MINIATURES)
def test_the_correct_miniature_stays_green(explorers, target):
    search = searched(explorers[target], None, max(GREEN, BUDGET))
    assert search.found is None, (
        f"sequence {search.found.number} of seed {SEED}",
        shown(search.found.outcome),
        w.as_scenario(search.found.workload, known(target).capabilities),
    )
    assert search.judged > 10 * search.sequences, "the checks have something to judge"


@pytest.mark.parametrize(("target", "fault"), FOUND, ids=map("-".join, FOUND))
def test_a_fault_is_found_within_the_budget(explorers, target, fault):
    search = searched(explorers[target], fault)
    assert search.found is not None, f"not found in {search.sequences} sequences"


# --- what is found can be run ---------------------------------------------------------------------------------------


def test_what_is_found_shrinks_to_a_scenario_that_is_red_for_the_fault_alone(explorer):
    request = Request(fault="adapter_cache_reused/base", examples=BUDGET, seed=SEED)
    fault = known("miniature").seeded()[request.fault]
    found = explore.explore(explorer, request, lambda _: None).found
    assert found is not None
    assert len(found.workload.operations) <= 3, found.workload
    assert any(isinstance(one, w.Ask) for one in found.workload.operations)

    text = as_scenario(found, explorer.capabilities, request)
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 120
    scenario, function = load(text)
    assert scenario.name == "explored.test_found"
    assert "fresh_adapter_cache" in {one.name for one in scenario.checks}
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


def test_workloads_are_values():
    workload = w.Workload(EVERY_OPERATION)
    assert workload == msgspec.structs.replace(workload)
    assert hash(workload) == hash(w.Workload(EVERY_OPERATION))


def test_a_fault_of_another_stack_is_refused():
    with pytest.raises(UsageError, match="no seeded fault"):
        explore.seeded(known("miniature"), "abort_leaks/retry")
    assert isinstance(explore.seeded(known("miniature:retry"), "abort_leaks/retry"), Fault)
