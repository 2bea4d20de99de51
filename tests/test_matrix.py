"""The matrix: cells are ordinary runs, finished ones stay, a failed one is red with its reason, and shards add up to the whole."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import msgspec
import psutil
import pytest

from harness import PROJECT
from harness.commands import cli, matrix
from harness.contract.capability import Capability
from harness.contract.errors import UsageError
from harness.machine.progress import silent
from harness.machine.targets import known
from harness.records.run_folder import RunFolder
from harness.running import matrix as cells
from harness.running.catalogue import declared
from harness.running.matrix import Cell, MatrixFolder, Order, Outcome, drive, plan, shard_of
from harness.suite.coverage import State
from harness.suite.plan import load_plan
from reports import matrix as page
from reports import matrix_html
from reports.json_report import read_report
from reports.matrix import Release
from tests import matrices, recordings, synthetic
from tests.leftovers import IN_BACKGROUND
from tests.matrices import HTTP, LEGACY, NEXT
from tests.repositories import Repository
from tests.test_reports import Page

LAUNCH = [sys.executable, "-m", "harness.commands.cli", "run"]
SELECTED = "empty_batch or world_size or test_health_is_true"


def orders(*targets: str, **options) -> list[Order]:
    return plan(
        targets or ("miniature",), ["disaggregated", "remote"], [1], SELECTED, arguments=["-k", SELECTED], **options
    )


def launch(script: str) -> list[str]:
    """Stands in for `parity run`: `where` is the run's folder, and `done` writes a whole run of a cell's scenarios."""
    head = (
        "import sys\nfrom pathlib import Path\nfrom harness.records.run_folder import RunFolder\nfrom tests import recordings\n"
        "said = dict(zip(sys.argv[1::2], sys.argv[2::2]))\nwhere = Path(said['--run-dir'])\n"
        "def done(*names, **info):\n    with RunFolder.create(where) as folder:\n"
        "        folder.write_info(recordings.info(selected={said['--topology']: list(names)}, **info))\n"
    )
    return [sys.executable, "-c", head + script]


@pytest.fixture
def folder(tmp_path: Path) -> MatrixFolder:
    made = MatrixFolder(tmp_path / "matrix")
    with made.held():
        yield made


def driven(folder: MatrixFolder, order: Order, launch: list[str]) -> Outcome:
    """What one cell came to."""
    outcomes: list[Outcome] = []
    drive(folder, [order], launch, silent, outcomes.append)
    return outcomes[0]


# --- which cells there are


def test_cells_are_targets_by_topologies_by_waves_with_a_scenario():
    found = plan(["miniature", "miniature:retry"], (), (), "")
    assert len({order.cell for order in found}) == len(found)
    assert [order.cell.target for order in found] == sorted(order.cell.target for order in found), "target by target"
    first = found[0]
    assert first.cell == Cell(target="miniature", topology=first.cell.topology, wave=1)
    assert all(order.scenarios for order in found)
    assert {order.cell.topology for order in orders()} == {"disaggregated", "remote"}


def test_only_cells_of_a_local_target_get_its_interpreter():
    found = plan(
        ["miniature", "local:http"], ["lora"], (), arguments=["--start", "fork"], pythons={"": Path("/a/python")}
    )
    assert {order.cell.target: order.arguments for order in found} == {
        "miniature": ["--start", "fork"],
        "local:http": ["--python", "/a/python", "--start", "fork"],
    }


@pytest.fixture
def tree(tmp_path: Path) -> Repository:
    """A checkout with the layout of local targets."""
    made = Repository(tmp_path / "tree")
    layout = known("local:http").runs_on.source
    texts = {part.version: 'version = "0.3.0"\n' for part in layout.parts}
    made.commit("begin", {f"{part.module}/__init__.py": "" for part in layout.parts} | texts)
    made.file("skyrl/__init__.py", '__version__ = "0.3.0"\n')
    made.commit("a version")
    return made


def test_a_checkout_is_a_column_and_its_state_is_part_of_each_cells_order(tree: Repository):
    def cells_of(tree: Repository) -> list[Order]:
        return plan(["miniature", "local:http"], ["lora"], (), trees={"": tree.tree})

    before = {order.cell.target: order for order in cells_of(tree)}
    assert (before["miniature"].arguments, before["miniature"].tree) == ([], None)
    assert before["local:http"].arguments == ["--checkout", str(tree.tree)]
    assert before["local:http"].tree is not None
    tree.file("skyrl/__init__.py", '__version__ = "0.3.0"  # changed\n')
    [said] = {order.cell.target: order for order in cells_of(tree)}["local:http"].differs_from(before["local:http"])
    assert said.startswith("the checkout (skyrl 0.3.0, commit ")
    assert "uncommitted changes" in said


def test_a_checkout_that_changes_stops_the_matrix_before_the_next_cell(folder: MatrixFolder, tree: Repository):
    order = plan(["local:http"], ["lora"], (), trees={"": tree.tree})[0]
    tree.commit("go on", {"n": "2"})
    with pytest.raises(UsageError, match=r"tree changed since the matrix began: skyrl 0\.3\.0, commit"):
        driven(folder, order, launch("done()"))


def test_a_cell_that_is_to_be_driven_again_is_not_finished_until_it_is(folder: MatrixFolder):
    one, other = orders()
    whole = launch(f"done({', '.join(map(repr, one.scenarios))})")
    folder.extend([one, other])
    for order in (one, other):
        driven(folder, order, whole)
    again = [msgspec.structs.replace(order, arguments=["--start", "fork"]) for order in (one, other)]
    folder.extend(again)
    driven(folder, again[0], whole)  # and then Ctrl-C
    assert [outcome.order for outcome in folder.outcomes()] == [again[0]]
    assert folder.to_drive(again, again=True) == [again[1]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((["miniature"], ["moon"]), "unknown topology 'moon'"),
        ((["miniature"], ["lora"], [1]), "no cell of the matrix"),
        ((["miniature"], (), (), "nothing_like_it"), "selects no scenario"),
    ],
)
def test_a_matrix_without_a_cell_is_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        plan(*arguments)


def test_shards_are_disjoint_and_together_the_whole():
    whole = plan(["miniature", "miniature:retry"])
    parts = [shard_of(whole, f"{part}/3") for part in (1, 2, 3)]
    assert sorted(o.cell.name for part in parts for o in part) == sorted(o.cell.name for o in whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for wrong in ("0/3", "4/3", "2", "a/b", "1/0"):
        with pytest.raises(UsageError, match="is no part of a whole"):
            shard_of(whole, wrong)


# --- driving


def test_a_cell_that_fails_is_told_with_its_reason_and_the_others_are_driven(folder):
    wanted = orders()
    names = ", ".join(map(repr, wanted[0].scenarios))
    script = (
        "if said['--topology'] == 'remote':\n    print('parity: no pears here')\n    sys.exit(2)\n"
        f"done({names})\nsys.exit(1)"
    )
    told: list[Outcome] = []
    folder.extend(wanted)
    drive(folder, wanted, launch(script), silent, told.append)
    assert [outcome.failed for outcome in told] == ["", "exit status 2: parity: no pears here"]
    assert [outcome.exit_status for outcome in told] == [1, 2]
    assert folder.outcomes() == told
    verdicts = cells.not_driven(told[1])
    assert {v.scenario for v in verdicts} == set(wanted[1].scenarios)
    assert all(v.red and v.reason.endswith("exit status 2: parity: no pears here") for v in verdicts)


@pytest.mark.parametrize(
    ("target", "says"), [("miniature", "nothing to drive, the stack offers none of it"), ("miniature:retry", "green")]
)
def test_a_cell_of_which_a_stack_offers_nothing_is_told_so_and_is_not_red(folder, target, says):
    [one] = plan([target], ["disaggregated"], [2], "pausing_twice", arguments=["-k", "pausing_twice"])
    assert says in driven(folder, one, LAUNCH).told


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import os\nos.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("print('nothing')", "it wrote no run: nothing"),
        ("done(outcome='interrupted')", "the run is not whole: interrupted"),
        ("done('a.test_b')", "it selected 1 scenarios where the matrix selects"),
    ],
)
def test_a_run_that_is_not_whole_is_no_finished_cell(folder, script, says):
    [one, _] = orders()
    assert says in driven(folder, one, launch(script)).failed


def test_a_finished_cell_is_not_driven_again_and_a_failed_one_is_with_its_first_attempt_kept(folder):
    one, other = orders()
    names = ", ".join(map(repr, one.scenarios))
    folder.extend([one, other])
    driven(folder, one, launch(f"done({names})"))
    driven(folder, other, launch("print('the first attempt'); sys.exit(2)"))
    assert folder.to_drive([one, other]) == [other]
    driven(folder, other, launch(f"done({', '.join(map(repr, other.scenarios))})"))
    assert folder.to_drive([one, other]) == []
    [log] = folder.cells.glob(f"earlier/{other.cell.name}.1/*.log")
    assert log.read_text() == "the first attempt\n"
    shutil.rmtree(folder.run_of(one.cell))
    assert folder.to_drive([one, other]) == [one], "a run that is gone is driven again"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"commit": "beef"}, "the harness (0.1.0 beef, was 0.1.0"),
        ({"version": "9.9.9"}, "the harness (9.9.9"),
        ({"arguments": ["--start", "fork"]}, "the options (--start fork, was -k"),
        ({"scenarios": ["a.test_b"]}, "the selection (1 scenarios more, 3 fewer)"),
    ],
)
def test_a_finished_cell_of_another_harness_or_selection_is_named_and_driven_again_only_if_asked(folder, change, says):
    one = orders()[0]
    folder.extend([one])
    driven(folder, one, launch(f"done({', '.join(map(repr, one.scenarios))})"))
    changed = msgspec.structs.replace(one, **change)
    with pytest.raises(UsageError) as caught:
        folder.to_drive([changed])
    assert says in str(caught.value)
    assert "--again" in caught.value.next_step
    assert folder.to_drive([changed], again=True) == [changed]


def test_a_harness_that_changes_stops_the_matrix_before_the_next_cell(folder, monkeypatch):
    one, other = orders()
    whole = launch(f"done({', '.join(map(repr, one.scenarios))})")
    commits = [one.commit, "beef", "beef"]
    monkeypatch.setattr(cells, "commit", lambda: commits.pop(0))
    assert "the harness changed while it was driven" in driven(folder, one, whole).failed
    with pytest.raises(UsageError, match="the harness changed since the matrix began") as caught:
        driven(folder, other, whole)
    assert "finished cells are kept" in caught.value.next_step


def test_two_commands_do_not_work_in_one_folder(folder):
    with pytest.raises(UsageError, match="another `parity matrix` works in"), MatrixFolder(folder.path).held():
        pass


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_cell_and_keeps_what_is_finished(tmp_path, how):
    """The command gets the signal alone, as from `kill`: no terminal tells its children. A script's background ignores SIGINT."""
    out = tmp_path / "matrix"
    where = ["--stack", "miniature", "--wave", "1", "--topology", "disaggregated", "--run-dir", str(out)]
    command = [sys.executable, "-m", "harness.commands.cli", "matrix", *where]
    process = subprocess.Popen([*IN_BACKGROUND, *command], cwd=PROJECT, stderr=subprocess.PIPE, text=True)
    try:
        log = out / "cells" / "miniature@disaggregated-wave1.log"
        deadline = time.monotonic() + 60
        while not (log.is_file() and b"collected" in log.read_bytes()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(how)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "interrupted: 0 of 1 cells are finished; the same command goes on" in said
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert MatrixFolder(out).outcomes() == []


# --- shards, and columns


def shown(out: Path, *sources: Path, order=()) -> list[Release]:
    return matrix.releases(sources, out, lambda run: read_report(run / "report.json"), silent, order)


def facts(release: Release) -> set[tuple]:
    return {(v.id, v.status, v.reason, v.facts) for _, v in release.verdicts}


def cell_counts(made: page.Matrix) -> list[tuple]:
    return [
        (p.id, c.target, c.state, c.counts, c.unexercised, c.command)
        for t in made.tasks
        for p in t.promises
        for c in p.cells
    ]


def test_a_merge_of_shards_is_the_matrix_in_one_which_is_the_run_in_one_but_for_times(tmp_path):
    wanted = orders()
    for name, part in (("a", "1/2"), ("b", "2/2")):
        there = MatrixFolder(tmp_path / name)
        with there.held():
            there.extend(wanted)
            drive(there, shard_of(wanted, part), LAUNCH, silent, lambda outcome: None)
        shutil.copytree(there.path, tmp_path / "whole", dirs_exist_ok=True)
    one = RunFolder(tmp_path / "run")
    places = ["--topology", "disaggregated", "--topology", "remote"]
    given = ["--stack", "miniature", "--wave", "1", *places, "-k", SELECTED, "--run-dir", str(one.path)]
    subprocess.run([*LAUNCH, *given], cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
    [whole], [merged], [run] = (
        shown(tmp_path / "1", tmp_path / "whole"),
        shown(tmp_path / "2", tmp_path / "b", tmp_path / "a"),
        shown(tmp_path / "3", one.path),
    )
    assert facts(merged) == facts(whole) == facts(run)
    assert merged.undriven == merged.failed == []
    pages = [cell_counts(page.build([column], load_plan(), synthetic.ledger())) for column in (merged, whole, run)]
    assert pages[0] == pages[1] == pages[2]
    [half] = shown(tmp_path / "4", tmp_path / "a")
    assert half.undriven == ["miniature @ remote, wave 1"], "a shard alone says what it lacks"
    assert page.build([half], load_plan(), synthetic.ledger()).exit_status == 1
    with pytest.raises(UsageError, match="was driven on miniature@disaggregated in"):
        shown(tmp_path / "5", tmp_path / "whole", tmp_path / "a")


def test_what_a_target_does_not_offer_is_missing_and_no_gap():
    name = next(s.name for s in declared().values() if Capability.RETRY_ABORTED in s.needs)
    able = sorted(known("miniature").capabilities)
    header = {"target": "miniature", "topology": {"name": "disaggregated"}, "capabilities": able}
    run = recordings.info(selected={"disaggregated": [name], "lora": [name]}, declared={"miniature": able})
    for one in (run, msgspec.structs.replace(run, headers=[header])):
        found = cells.not_offered(one, "miniature", [])
        assert {(v.scenario, v.topology, v.status) for v in found} == {
            (name, "disaggregated", "missing"),
            (name, "lora", "missing"),
        }
        assert "retry_aborted" in found[0].reason
        assert cells.not_offered(one, "miniature", found) == []
    assert cells.not_offered(run, "miniature:retry", []) != [], "a target that declared nothing offers nothing"


def test_runs_of_pairs_and_single_stacks_become_columns_in_the_order_asked_for(tmp_path):
    run = tmp_path / "pair"
    run.mkdir()
    judgement = synthetic.judgement()
    read = {run: judgement}.__getitem__
    found = matrix.releases([run], tmp_path / "out", read, silent)
    assert [column.target for column in found] == [LEGACY, HTTP]
    assert all(v.baseline is None for column in found for _, v in column.verdicts)
    assert [c.target for c in matrix.releases([run], tmp_path, read, silent, [HTTP, LEGACY])] == [HTTP, LEGACY]
    with pytest.raises(UsageError, match=f"no run drove {NEXT}"):
        matrix.releases([run], tmp_path, read, silent, [NEXT])
    cut = msgspec.structs.replace(judgement, run=msgspec.structs.replace(judgement.run, outcome="interrupted"))
    assert matrix.releases([run], tmp_path, lambda _: cut, silent)[0].failed


# --- what the page says


def promise(made: page.Matrix, name: str) -> page.Promise:
    return next(p for task in made.tasks for p in task.promises if p.id == name)


def test_a_known_divergence_has_its_cause_and_the_column_since_which_it_is_there():
    made = matrices.build()
    by_target = {cell.target: cell for cell in promise(made, "stop-conditions").cells}
    assert [cell.state for cell in by_target.values()] == [State.PASS, State.KNOWN, State.KNOWN, State.PASS]
    [known] = by_target[NEXT].known
    assert (known.entry, known.verdicts, known.since) == ("http-stop-string", 1, HTTP)
    assert by_target[NEXT].since == HTTP
    assert {one.id for one in made.divergences} == {"http-stop-string", "legacy-spread"}
    finding = by_target[NEXT].evidence[0].findings[0]
    assert (finding.check, finding.since, finding.known) == ("tokens.stop", HTTP, ["http-stop-string"])
    assert "--stack skyrl-0.3.0:http -k 'test_stop_string or " in by_target[NEXT].command


def test_a_step_lists_what_was_fixed_and_what_broke_by_check():
    first, second, third = matrices.build().steps
    assert {move.promise for move in first.fixed} == {"sessions-stick"}
    assert {move.promise for move in first.broke} == {"stop-conditions", "chat-completions", "external-control-fan-out"}
    assert ([m.promise for m in second.fixed], second.broke) == (["chat-completions"], [])
    assert [m.promise for m in third.fixed] == ["stop-conditions"]
    [broke] = third.broke
    assert (broke.checks, broke.reason) == (6, "a chunk of the sync was lost")


def test_what_one_side_could_not_judge_is_neither_fixed_nor_broken():
    judged, *_ = matrices.releases()
    unknown = [
        (run, msgspec.structs.replace(v, target=HTTP, status="untestable", known=None)) for run, v in judged.verdicts
    ]
    step = matrices.build([judged, msgspec.structs.replace(judged, target=HTTP, verdicts=unknown)]).steps[0]
    assert (step.fixed, step.broke) == ([], [])


def test_the_worst_of_several_runs_counts_in_any_order():
    [_, http, *_] = matrices.releases()
    bad = next((run, v) for run, v in http.verdicts if v.red)
    good = ("later", msgspec.structs.replace(bad[1], status="pass", reason="", evidence=[]))
    for verdicts in ([bad, good], [good, bad]):
        made = matrices.build([msgspec.structs.replace(http, verdicts=verdicts)])
        assert (made.columns[0].verdicts, made.columns[0].red) == (1, 1)


def test_a_pass_that_only_cuda_can_show_is_incomplete_on_a_cpu():
    [legacy, *_] = matrices.releases()
    cuda = msgspec.structs.replace(legacy, runs=[msgspec.structs.replace(legacy.runs[0], engine="cuda")])
    [on_cpu], [on_cuda] = (promise(matrices.build([r]), "sync-across-gpu-sets").cells for r in (legacy, cuda))
    assert (on_cpu.state, on_cpu.note) == (State.INCOMPLETE, page.ONLY_CUDA)
    assert (on_cuda.state, on_cuda.note) == (State.PASS, "")


@pytest.mark.parametrize("change", [{"failed": ["cell x: no pears"]}, {"undriven": ["cell y"]}, {"verdicts": []}])
def test_a_column_with_a_gap_ends_red(change):
    green = [(run, v) for run, v in matrices.releases()[0].verdicts if not v.red]
    whole = msgspec.structs.replace(matrices.releases()[0], verdicts=green)
    assert matrices.build([whole]).exit_status == 0
    assert matrices.build([msgspec.structs.replace(whole, **change)]).exit_status == 1
    assert matrices.build([]).exit_status == 1


def test_a_badge_counts_every_promise_and_is_red_where_something_is_red():
    made = matrices.build()
    for column in made.columns:
        found = page.badge(column, made.promises)
        assert (found["schemaVersion"], found["label"]) == (1, column.target)
        assert sum(column.counts.values()) == made.promises == len(load_plan().bullets)
    every = made.promises
    red = page.badge(made.columns[1], every)
    assert red["message"] == f"13 of {every} promises kept, 2 red, 1 missing, 1 known, {every - 17} not shown"
    assert red["color"] == "red"
    kept = msgspec.structs.replace(made.columns[0], counts={State.PASS: every})
    assert page.badge(kept, every) == {
        "schemaVersion": 1, "label": LEGACY, "message": f"{every} of {every} promises kept", "color": "brightgreen"
    }  # fmt: skip
    known = msgspec.structs.replace(made.columns[0], counts={State.PASS: every - 1, State.KNOWN: 1})
    assert page.badge(known, every)["color"] == "yellow"


def test_the_files_validate_and_the_page_is_one_file_without_foreign_content(tmp_path):
    paths = page.write_all(matrices.build(matrices.hostile()), tmp_path)
    found = json.loads(paths["matrix.json"].read_text())
    jsonschema.Draft202012Validator(page.SCHEMA.made()).validate(found)
    text = paths["matrix.html"].read_text()
    shown = Page(text)
    assert len(shown.ids) == len(set(shown.ids))
    assert shown.tags.isdisjoint({"img", "iframe", "object", "link", "form"})
    assert (text.count("<script>"), shown.handlers) == (1, [])
    assert {link[1:] for link in shown.links} <= set(shown.ids)
    assert not set(text) & set("\u202e\u2066\u200b\x00\x1b\x07")
    assert f"<script>{matrix_html.SCRIPT.read_text()}</script>" in text, "the page's policy knows it by its hash"
    assert {name for name in paths if name.startswith("badge")} == {
        f"badge-skyrl-{name}.json" for name in ("0.2.0_legacy", "0.2.0_http", "0.3.0_http", "0.4.0_http")
    }


def test_checks_that_say_the_same_are_one_finding_of_the_page():
    def found(check: str, reason: str, **fields) -> page.Finding:
        return page.Finding(check=check, state=State.MISSING, reason=reason, since=LEGACY, **fields)

    one, two, other = found("a", "it lacks x"), found("b", "it lacks x"), found("c", "it lacks y")
    shown = found("d", "it lacks y", evidence=[{"row": 1}])
    assert matrix_html.alike([one, two, other, shown]) == [[one, two], [other], [shown]]


def test_a_page_has_no_path_of_the_machine_that_made_it(tmp_path):
    said = "lost /opt/a/.parity/models/tiny-1, see (/home/me/b.log); POST /pause, http://127.0.0.1:80/tmp/x, skyrl/tmp/y.py:3"
    told = "lost …/tiny-1, see (…/b.log); POST /pause, http://127.0.0.1:80/tmp/x, skyrl/tmp/y.py:3"
    *earlier, latest = matrices.releases()
    evidence = [{"request": {"model": "/opt/a/.parity/models/tiny-1"}}]
    verdicts = [
        (run, msgspec.structs.replace(v, status="fail", reason=said, evidence=evidence)) for run, v in latest.verdicts
    ]
    found = matrices.build([*earlier, msgspec.structs.replace(latest, verdicts=verdicts, failed=[f"a cell: {said}"])])
    paths = page.write_all(found, tmp_path)
    for name in ("matrix.json", "matrix.html"):
        text = paths[name].read_text()
        assert told in text, name
        assert "/opt/" not in text, name
        assert "…/tiny-1" in text, name


# --- the command


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("matrix --stack a --run-dir /tmp/x --out=/opt/docs --shard 1/9 -k 'not bulk'", "parity matrix --stack a -k 'not bulk'"),
        ("matrix --from /mnt/runs/monday b --stack a", "parity matrix --from monday b --stack a"),
        ("matrix --python local:http=/opt/python --checkout=/me/SkyRL", "parity matrix --python local:http=python --checkout=SkyRL"),
        ("matrix --checkout=local:http=/me/SkyRL -- --dtype fp8", "parity matrix --checkout=local:http=SkyRL -- --dtype fp8"),
    ],
)  # fmt: skip
def test_the_pages_command_has_no_path_of_the_machine(typed, told):
    assert matrix.command_of(shlex.split(typed)) == told


def test_the_command_puts_runs_together_and_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    from reports import json_report

    run = tmp_path / "run"
    run.mkdir()
    (run / "report.json").write_bytes(json_report.encode(json_report.settle(synthetic.judgement())))
    monkeypatch.setattr(sys, "argv", ["parity", "matrix", "--from", str(run), "--out", str(tmp_path / "out")])
    monkeypatch.setattr(cli, "PROJECT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert f"page: {tmp_path / 'out' / 'matrix.html'}" in said
    assert f"{LEGACY} → {HTTP}: " in said
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
