"""mutants.json and mutants.md, and the summary in a terminal: the output of `parity prove --mutants`.

Published schema: ``reports/mutants.schema.json``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal, final

import msgspec

from harness.contract.errors import UsageError
from harness.contract.faults import DRIVEN
from harness.proving.mutants import STARTED, Fate, Judged, MutantProof, MutantRun
from reports import published
from reports.text import many, seconds, shortened

CODE = 110
"""Most characters of a statement in a table."""


FORMAT: Literal[1] = 1
"""Version of mutants.json."""


@final
class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of one stack."""

    fates: dict[Fate, int]
    """How many mutants met each fate. They add up to the sample."""
    killed_by_a_check: int
    killed_by_a_failed_call: int
    score: float | None
    """Killed share of the judged mutants; None if none was judged."""
    public: int
    """Functions of the public path."""
    public_reached: int
    """Functions of the public path that a scenario calls."""
    public_before: int
    """Further ones, which run while a stack starts or in a clean room."""
    public_excluded: int
    """Further ones that no scenario can run; `excluded` of the stack has the reasons."""
    seconds_per_mutant: float | None
    """Mean over the judged mutants."""


@final
class MutantReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the suite sees of machine-made changes of the stacks' own code."""

    format: Literal[1] = FORMAT
    exit_status: int
    """0 if every stack was driven to the end and the instrument worked, whatever the score."""
    figures: dict[str, Figures]
    """Stack → its totals."""
    problems: dict[str, list[str]]
    """Stack → why its figures do not count."""
    run: MutantRun


SCHEMA = published.Schema(
    MutantReport,
    "mutants.schema.json",
    "rollout-parity mutants",
    "mutants.json of one run of `parity prove --mutants`: each mutant and what became of it.",
)


def read(folder: Path) -> list[MutantProof]:
    """What the run in `folder` knows. Raises UsageError if it has no mutants.json that this version reads."""
    try:
        return msgspec.json.decode((folder / "mutants.json").read_bytes(), type=MutantReport).run.proofs
    except (OSError, msgspec.MsgspecError) as e:
        raise UsageError(f"{folder}: {e}", next_step="name the folder of a run of `parity prove --mutants`") from e


def write_all(run: MutantRun, folder: Path) -> Path:
    """Write both files. Returns the path of the Markdown."""
    report = MutantReport(
        exit_status=run.exit_status,
        figures={proof.target: figures_of(proof) for proof in run.proofs},
        problems={proof.target: proof.problems for proof in run.proofs},
        run=run,
    )
    return published.write(folder, {"mutants.json": published.encode(report), "mutants.md": markdown(run).encode()})[
        "mutants.md"
    ]


def figures_of(proof: MutantProof) -> Figures:
    """The totals of one stack."""
    counts = Counter(one.fate for one in proof.judged)
    by_call = sum(one.fate == Fate.KILLED and one.by in ([DRIVEN], [STARTED]) for one in proof.judged)
    driven = [one.seconds for one in proof.reached]
    return Figures(
        fates={fate: counts[fate] for fate in Fate},
        killed_by_a_check=counts[Fate.KILLED] - by_call,
        killed_by_a_failed_call=by_call,
        score=None if proof.score is None else round(proof.score, 4),
        public=len(proof.public),
        public_reached=len(proof.public) - len(proof.unreached),
        public_before=len(set(proof.unreached).intersection(proof.prepared)),
        public_excluded=len(set(proof.unreached).intersection(proof.excluded).difference(proof.prepared)),
        seconds_per_mutant=round(sum(driven) / len(driven), 1) if driven else None,
    )


def summary(proof: MutantProof) -> list[str]:
    """A few lines about one stack."""
    figures = figures_of(proof)
    score = (
        "no mutant was judged"
        if proof.score is None
        else f"{proof.score:.0%} of {len(proof.reached)} judged mutants killed"
    )
    others = (f"{fate} {figures.fates[fate]}" for fate in Fate if fate is not Fate.KILLED)
    return [
        f"{proof.target}: {score} (seed {proof.seed}, {many(len(proof.judged), 'mutant')} of {proof.population})",
        f"  killed {figures.fates[Fate.KILLED]} (by a check {figures.killed_by_a_check}, by a call that failed "
        f"{figures.killed_by_a_failed_call}), {', '.join(others)}",
        f"  {figures.seconds_per_mutant} s per judged mutant, {seconds(proof.seconds)} in all",
        f"  public functions reached: {figures.public_reached} of {figures.public} by scenarios, {figures.public_before} more by "
        f"starts and clean rooms; {figures.public_excluded} of the others are excluded with a reason",
        *(f"  problem: {one}" for one in proof.problems),
    ]


def markdown(run: MutantRun) -> str:
    """The report as Markdown."""
    parts = [
        "# Mutants of the stacks' own code",
        f"Run {run.run_id}, {run.created_at}: `{run.command}`. Outcome: {run.outcome}.",
    ]
    for proof in run.proofs:
        parts += [f"## {proof.target}", "\n".join(f"- {line.strip()}" for line in summary(proof))]
        parts += [_fates(proof)]
        parts += _list("Survivors", proof.of(Fate.SURVIVED), "No scenario that runs the statement saw the change.")
        parts += _list("Killed by accident", proof.of(Fate.ACCIDENT), "Red, but the verdicts do not name the matter.")
        parts += _list("Skipped", proof.of(Fate.SKIPPED), "Not judged.")
        parts += _functions("Public functions that no scenario calls", proof)
        parts += _list("Not reached", proof.of(Fate.UNREACHED), "")
        parts += _list("Killed", proof.of(Fate.KILLED), "")
    return "\n\n".join(parts) + "\n"


def _fates(proof: MutantProof) -> str:
    """The table of outcomes."""
    counts = figures_of(proof).fates
    return "\n".join(["| outcome | mutants |", "| --- | --- |", *(f"| {fate} | {n} |" for fate, n in counts.items())])


def _list(title: str, judged: list[Judged], about: str) -> list[str]:
    if not judged:
        return []
    by_function: dict[str, list[Judged]] = {}
    for one in judged:
        by_function.setdefault(one.function, []).append(one)
    rows = [f"- `{function}`\n" + "\n".join(map(_row, ones)) for function, ones in sorted(by_function.items())]
    return [f"### {title} ({len(judged)})", *([about] if about else []), "\n".join(rows)]


def _row(one: Judged) -> str:
    by = f" {one.seen}: {shortened(one.reason, CODE)}" if one.by else f" {one.reason}"
    quiet = " (never ran)" * (one.fate in (Fate.KILLED, Fate.SURVIVED) and not one.fired)
    _, _, operator = one.id.rpartition(f"{one.function}:")
    return f"  - `{operator}` line {one.line}: {_change(one)}{quiet};{by} ({one.driven} of {one.callers} scenarios)"


def _change(one: Judged) -> str:
    """The statement around the first difference, before and after."""
    start = next((n for n, (a, b) in enumerate(zip(one.before, one.after, strict=False)) if a != b), 0)
    start = 0 if len(one.before) <= CODE else max(0, start - CODE // 3)
    return f"`{_cut(one.before, start)}` → `{_cut(one.after, start)}`"


def _cut(code: str, start: int) -> str:
    return ("…" if start else "") + code[start : start + CODE] + ("…" if len(code) > start + CODE else "")


def _functions(title: str, proof: MutantProof) -> list[str]:
    if not proof.unreached:
        return []
    rows = [f"- `{name}`{_why(name, proof)}" for name in proof.unreached]
    return [f"### {title} ({len(rows)})", "\n".join(rows)]


def _why(name: str, proof: MutantProof) -> str:
    if name in proof.prepared:
        return " (starts or clean rooms call it)"
    return f": {proof.excluded[name]}" if name in proof.excluded else ""
