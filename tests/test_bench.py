"""`parity bench` end to end on the miniature: slow stacks are caught, a stack against itself is not, and nothing measured is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from benchmarks import bench as benchmark
from harness.commands import cli
from harness.contract.errors import StackError, UsageError
from harness.contract.topology import topology
from harness.machine.processes import usage_below
from harness.machine.progress import silent
from harness.machine.targets import known
from harness.records.bench import Bench, Pace
from harness.running import bench as running
from harness.running.bench import Order
from harness.running.session import Options
from reports import bench as report


def order(folder: Path, **more: Any) -> Order:
    options = Options(baseline="miniature", candidate="miniature", engine="cpu", run_dir=folder / "run", record=False)
    chosen = {"topology": topology("disaggregated"), "in_flight": (1, 8), "tokens": 4, "seed": 1} | more
    return Order(options=options, **chosen)


def slower(made: Bench) -> set[str]:
    return {row.metric.name for row in made.slower}


@pytest.mark.parametrize("name", known("miniature").slower())
def test_a_seeded_slowdown_is_caught_on_a_busy_machine(name):
    made = benchmark.turns_on_the_miniature(1, slowdown=name, most_pairs=14)
    assert known("miniature").slower()[name] <= slower(made)
    assert made.exit_status == 1


def test_a_stack_against_itself_is_not_slower_on_a_busy_machine():
    made = benchmark.turns_on_the_miniature(2, most_pairs=12, precision=1e-6)
    assert len(made.rows) == 13
    assert {row.verdict for row in made.rows} == {Pace.INCONCLUSIVE}
    assert made.exit_status == 3


def test_a_quiet_machine_decides_every_row(tmp_path):
    lines: list[str] = []
    made, folder = running.bench(order(tmp_path, precision=0.3), silent, lines.append)
    assert (made.outcome, made.exit_status) == ("completed", 0)
    assert lines[0].startswith("seed 1; up to 10 min")
    assert len(lines) == 1 + len(made.order) == 1 + len(made.blocks) / 2
    assert [f"{a.side} {b.side}" for a, b in zip(made.blocks[::2], made.blocks[1::2], strict=True)] == made.order
    assert folder == tmp_path / "run"


def test_both_stacks_of_a_pair_are_asked_for_the_same(monkeypatch, tmp_path):
    asked: dict[str, list[Any]] = {}
    shipped = running.Stack.generate

    async def generate(self, prompts, **params):
        asked.setdefault(str(id(self)), []).append((prompts, params))
        return await shipped(self, prompts, **params)

    monkeypatch.setattr(running.Stack, "generate", generate)
    running.bench(order(tmp_path, most_pairs=2), silent, lambda _: None)
    one, other = asked.values()
    assert one == other


def test_an_interruption_keeps_the_pairs_that_were_measured(tmp_path):
    def say(line: str) -> None:
        if line.startswith("pair 3"):
            raise KeyboardInterrupt

    made, folder = running.bench(order(tmp_path), silent, say)
    assert (made.outcome, made.exit_status, made.rows[0].pairs) == ("interrupted", 2, 3)
    assert json.loads((folder / "run.json").read_text())["outcome"] == "interrupted"


def test_an_interruption_before_the_first_pair_keeps_nothing(tmp_path):
    def say(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.bench(order(tmp_path), silent, say)


def test_a_stack_that_fails_is_named_and_the_pairs_before_are_kept(monkeypatch, tmp_path):
    calls = []
    shipped = running.measure

    async def measure(stack, *rest):
        calls.append(stack)
        if len(calls) == 2 + 7:
            raise StackError("the router is gone")
        return await shipped(stack, *rest)

    monkeypatch.setattr(running, "measure", measure)
    made, _ = running.bench(order(tmp_path), silent, lambda _: None)
    assert (made.outcome, made.exit_status, made.rows[0].pairs) == ("failed", 2, 3)
    assert "(miniature): the router is gone" in made.failure


def test_answers_that_are_too_short_are_no_speed(tmp_path):
    made, _ = running.bench(order(tmp_path, usual="result_lost/empty_row"), silent, lambda _: None)
    assert made.outcome == "failed"
    assert "tokens were asked for" in made.failure


def test_the_time_being_up_leaves_rows_inconclusive(tmp_path):
    made, _ = running.bench(order(tmp_path, minutes=0.001), silent, lambda _: None)
    assert (made.outcome, made.exit_status, made.rows[0].pairs) == ("out of time", 3, 1)
    assert "about" in report.said(made.rows[-1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"precision": 0.0}, "above 0"),
        ({"tokens": 1}, "two tokens"),
        ({"in_flight": (0,)}, "must be positive"),
        ({"slowdown": "slow/nothing"}, "it has slow/share"),
    ],
)
def test_what_cannot_work_is_named_before_anything_starts(wrong, said, tmp_path):
    with pytest.raises(UsageError) as refused:
        running.bench(order(tmp_path, **wrong), silent, lambda _: None)
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_two_stacks_need_memory_for_both(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "available_and_total", lambda: (2**30, 2**33))
    options = Options(
        baseline="skyrl-0.2.0:legacy", candidate="skyrl-0.2.0:http", engine="cpu", run_dir=tmp_path / "run"
    )
    with pytest.raises(UsageError, match=r"both stacks are up at once and need [\d.]+ GiB"):
        running.bench(Order(options=options, topology=topology("disaggregated")), silent, lambda _: None)


def test_the_command_writes_its_files_and_ends_with_the_answers_status(monkeypatch, tmp_path, capsys):
    line = "bench --baseline miniature --candidate miniature --in-flight 1 --tokens 4 --slowdown slow/share --seed 1 --run-dir"
    monkeypatch.setattr(sys, "argv", ["parity", *line.split(), str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    written = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert written["bench"]["command"].startswith("parity bench --baseline miniature")
    assert (tmp_path / "run" / "bench.html").is_file()
    assert "pair 2 (" in capsys.readouterr().err


def test_memory_and_processor_time_are_those_of_all_processes_below():
    before = usage_below(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", "print(sum(range(3 * 10**6)), flush=True); input()"], stdin=-1, stdout=-1
    ) as child:
        child.stdout.readline()
        used = usage_below(os.getpid())
        child.communicate(b"\n")
    assert used.pss_bytes - before.pss_bytes > 2**20
    assert used.cpu_s > before.cpu_s


def test_the_way_of_a_request_is_split_at_the_engines_taps():
    spans = {(1, 2): (0, 100_000_000)}
    seen = [
        {
            "kind": "request",
            "server": "a",
            "at_ns": 20_000_000,
            "data": {"request_id": "r", "prompt_token_ids": [1, 2]},
        },
        {"kind": "finish", "server": "a", "at_ns": 90_000_000, "data": {"request_id": "r"}},
    ]
    assert running.hops(spans, seen) == pytest.approx({"there": 0.02, "engine": 0.07, "back": 0.01})
    assert running.hops(spans, seen[:1]) == {}


# --- what it writes


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    return running.bench(order(folder, slowdown="slow/share"), silent, lambda _: None)[0]


def test_bench_json_fits_its_schema(made):
    written = json.loads(report.encode(made))
    jsonschema.validate(written, report.SCHEMA.made())
    assert written["exit_status"] == 1
    assert written["answer"].startswith("slower in ")


def test_the_page_shows_every_row_and_needs_no_network(made):
    page = report.render(msgspec.structs.replace(made, baseline="<old>"))
    assert all(row.metric.what in page and report.said(row) in page for row in made.rows)
    assert "Where the time of one request at rest goes" in page
    assert "&lt;old&gt;" in page
    assert not any(word in page for word in ("<old>", "<script", "http://", "https://"))


def test_the_terminal_ends_with_the_answer(made, capsys):
    report.show(made, page=Path("bench.html"))
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"miniature against miniature: {report.answer(made)}"
    assert "slower by" in shown
