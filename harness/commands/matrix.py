"""What `parity matrix` does: drive cells, put runs together as columns, write the page."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from harness.contract.errors import UsageError
from harness.judging import ledger
from harness.machine.progress import Progress
from harness.records.run_folder import stem
from harness.records.verdict import Judgement
from harness.running.earlier import refuse_what_differs
from harness.running.matrix import MatrixFolder, Outcome, not_driven, not_offered
from harness.running.merge import merging
from harness.running.run import judge_run
from harness.suite.plan import load_plan
from reports import matrix
from reports.matrix import Matrix, Release
from reports.render import write_all

_OF_THIS_MACHINE = frozenset({"--run-dir", "--out", "--shard"})
"""Options that the page's command leaves out."""
Read = Callable[[Path], Judgement]
"""Reads a run's report."""


def releases(
    sources: Sequence[Path], out: Path, read: Read, progress: Progress, order: Sequence[str] = ()
) -> list[Release]:
    """The columns of these runs and matrices, in `order`, or else in the order in which the sources name the targets.

    The cells of a target, of all matrices, are merged into one run in ``<out>/columns`` and judged again. Other runs give the
    verdicts that their report has. Raises UsageError for a target of `order` without a run, and what merging raises.
    """
    folders = [MatrixFolder(path) for path in sources if MatrixFolder.is_one(path)]
    runs = [read(path) for path in sources if not MatrixFolder.is_one(path)]
    found: dict[str, Release] = {}
    for one in (*_of_cells(folders, out, progress), *(column for run in runs for column in _of_run(run))):
        found[one.target] = _together(found[one.target], one) if one.target in found else one
    if lost := [target for target in order if target not in found]:
        raise UsageError(
            f"no run drove {', '.join(lost)}",
            next_step=f"these runs drove {', '.join(found)}: name these, or leave --stack out",
        )
    return [found[target] for target in order or found]


def _together(one: Release, other: Release) -> Release:
    """Both as one column. Raises UsageError if they are of different packages or checkouts."""
    refuse_what_differs(
        (
            ((f"{fact} of {one.target}", header.get(fact)), f"run {run.run_id}")
            for run in (*one.runs, *other.runs)
            for header in run.headers
            for fact in ("packages", "checkout")
        ),
        next_step="leave one of the runs out",
    )
    lists = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("runs", "verdicts", "problems", "failed", "undriven")
    }
    return msgspec.structs.replace(one, **lists)


def _of_run(judgement: Judgement) -> Iterator[Release]:
    """A column for each stack of a run. Problems with the ledger belong to the run, not to a stack: they stand in its report."""
    run = judgement.run
    own = [verdict for verdict in judgement.verdicts if verdict.baseline is None]
    asked = [*filter(None, (run.baseline, run.candidate)), *run.declared]
    for target in dict.fromkeys([*asked, *(verdict.target for verdict in own)]):
        about = [header for header in run.headers if header.get("target") == target]
        mine = [verdict for verdict in own if verdict.target == target]
        yield Release(
            target=target,
            runs=[msgspec.structs.replace(run, headers=about)],
            verdicts=[(run.run_id, verdict) for verdict in (*mine, *not_offered(run, target, mine))],
            failed=[] if run.outcome == "completed" else [f"run {run.run_id} did not complete: {run.outcome}"],
        )


def _of_cells(folders: Sequence[MatrixFolder], out: Path, progress: Progress) -> Iterator[Release]:
    planned = {order.cell: order for folder in folders for order in folder.planned()}
    driven: dict[str, list[tuple[Path, Outcome]]] = {cell.target: [] for cell in planned}
    for folder in folders:
        for outcome in folder.outcomes():
            driven[outcome.order.cell.target].append((folder.run_of(outcome.order.cell), outcome))
    for target, cells in driven.items():
        whole = [path for path, outcome in cells if not outcome.failed]
        finished = {outcome.order.cell for _, outcome in cells if not outcome.failed}
        failed = {one.order.cell: one for _, one in cells if one.failed and one.order.cell not in finished}
        merged = [] if not whole else [_merged(whole, out / "columns" / stem(target, "all"), progress, target)]
        columns = [column for judgement in merged for column in _of_run(judgement)]
        verdicts = [(cell.name, verdict) for cell, one in failed.items() for verdict in not_driven(one)]
        yield Release(
            target=target,
            runs=[run for column in columns for run in column.runs],
            verdicts=[verdict for column in columns for verdict in column.verdicts] + verdicts,
            problems=[problem for judgement in merged for problem in judgement.ledger_problems],
            failed=[f"{cell}: {one.failed}" for cell, one in failed.items()],
            undriven=[
                str(cell) for cell in planned if cell.target == target and cell not in finished and cell not in failed
            ],
        )


def _merged(cells: Sequence[Path], whole: Path, progress: Progress, target: str) -> Judgement:
    """One run of all finished cells of a target, judged as one. Replaces the one of an earlier time."""
    with progress(f"{target}: judging {len(cells)} cells as one run"):
        whole.parent.mkdir(parents=True, exist_ok=True)
        if whole.exists():
            shutil.rmtree(whole)
        with merging(cells, whole) as folder:
            judgement = judge_run(folder)
            write_all(judgement, folder)
    return judgement


def command_of(words: Sequence[str]) -> str:
    """The command line of a matrix for its page: without what belongs to one machine (where it wrote, its shard, folders)."""
    told: list[str] = []
    rest = iter(words)
    for word in rest:
        option, _, value = word.partition("=")
        if option not in _OF_THIS_MACHINE:
            before, equals, path = word.rpartition("=")
            told.append(before + equals + (Path(path).name if path.startswith("/") else path))
        elif not value:
            next(rest, None)
    return shlex.join(["parity", *told])


def write(found: Iterable[Release], out: Path, command: str) -> tuple[Matrix, Path]:
    """Write page, data and badges into `out`. Returns the matrix and the page's path."""
    made = matrix.build(list(found), load_plan(), ledger.load(), command)
    return made, matrix.write_all(made, out)["matrix.html"]


def summary(made: Matrix) -> Iterator[str]:
    """The matrix in lines for a terminal: one per release, what is wrong with it, and one per step."""
    width = max((len(column.target) for column in made.columns), default=0)
    for column in made.columns:
        yield f"{column.target:<{width}}  {matrix.badge(column, made.promises)['message']}"
        yield from (f"{'':<{width}}  {problem}" for problem in column.problems)
    for step in made.steps:
        broke = ", ".join(move.promise for move in step.broke)
        yield f"{step.before} → {step.after}: {len(step.fixed)} fixed, {len(step.broke)} broken{broke and f' ({broke})'}"
