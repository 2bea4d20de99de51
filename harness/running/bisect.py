"""Finds the commit that turned a check red: `git bisect` in a worktree of the checkout, with a run of the suite as its test.

The user's working tree, index and branches stay as they are: the bisection's own refs belong to the worktree. A commit that cannot
be judged is skipped, as in `git bisect`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from harness.contract.errors import UsageError
from harness.contract.faults import family
from harness.machine.git import commit_of, git, run_git, worktree
from harness.records.verdict import Conformance, Judgement, Parity

Verdict = Literal["good", "bad", "skip"]
UNJUDGED = (Conformance.UNTESTABLE, Conformance.MISSING, Parity.UNTESTABLE, Parity.MISSING)
FIRST_BAD, ONLY_SKIPPED, POSSIBLE = (
    "# first bad commit: ",
    "# only skipped commits left to test",
    "# possible first bad commit: ",
)
"""Lines of `git bisect log` at the end of a bisection."""
SKIPPED_ONLY = 2
"""Exit status of `git bisect` when only skipped commits are left."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One commit, as it was judged."""

    commit: str
    subject: str
    verdict: Verdict
    why: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a bisection."""

    steps: list[Step]
    first_bad: str | None
    """None if commits that could not be judged hide it."""
    possible: list[str] = []
    """The commits that it can be, if it is hidden."""
    description: str = ""
    """The first bad commit with its message and diffstat."""


Judge = Callable[[Path, str], tuple[Verdict, str]]
"""Worktree and commit → verdict and its reason."""


def of_check(judgement: Judgement, check: str) -> tuple[Verdict, str]:
    """What a run says about a check. Entries of the ledger count, as in the run itself: what they explain is good."""
    about = [v for v in judgement.verdicts if check in (v.check, family(v.check))]
    if red := [v for v in about if v.red and v.status not in UNJUDGED]:
        return "bad", f"{red[0].scenario}: {red[0].told}"
    if judgement.run.outcome != "completed":
        return "skip", f"the run did not complete: {judgement.run.outcome}"
    if bare := [v for v in about if v.status in UNJUDGED and v.known is None]:
        return "skip", f"{bare[0].status}: {bare[0].told}"
    if not about:
        others = sorted({family(v.check) for v in judgement.verdicts})
        started = "; ".join(
            f"{seat}: {error.kind}: {error.message}" for seat, error in judgement.run.not_started.items()
        )
        return "skip", started or f"this run has no verdict about {check}; it judged {', '.join(others) or 'nothing'}"
    return "good", f"{len(about)} verdicts of {check} are green"


def bisect(tree: Path, good: str, bad: str, judge: Judge, say: Callable[[str], None]) -> Found:
    """The commit after `good`, up to `bad`, that turned the judge's check red. `say` gets a line per step.

    Judges both ends first. Raises UsageError for an end that is not as it was said to be, or that cannot be judged, and for
    revisions between which git cannot bisect.
    """
    ends = {"good": commit_of(tree, good), "bad": commit_of(tree, bad)}
    known: dict[str, Step] = {}
    with worktree(tree, ends["good"]) as work:

        def judged(commit: str) -> Step:
            if commit not in known:
                subject = git(work, "log", "-1", "--format=%s", commit)
                verdict, why = judge(work, commit)
                known[commit] = Step(commit=commit, subject=subject, verdict=verdict, why=why)
                say(f"{verdict:<4}  {commit[:9]}  {subject}\n      {why}")
            return known[commit]

        for role, commit in ends.items():
            git(work, "checkout", "--quiet", "--detach", "--force", commit)
            if (step := judged(commit)).verdict != role:
                raise UsageError(
                    f"the {role} revision {commit[:9]} is {'not judged' if step.verdict == 'skip' else step.verdict}: {step.why}",
                    next_step=f"name another --{role}, or other scenarios and checks: `parity contract` lists them",
                )
        _bisecting(work, "start", ends["bad"], ends["good"])
        while (end := _end(work, list(known.values()))) is None:
            verdict = judged(git(work, "rev-parse", "HEAD")).verdict
            _bisecting(work, verdict)
    return end


def _bisecting(work: Path, *arguments: str) -> None:
    """One step of git's. Raises UsageError with git's words if it cannot go on."""
    said = run_git(work, "bisect", *arguments)
    if said.returncode not in (0, SKIPPED_ONLY):
        words = (said.stdout + said.stderr).decode(errors="replace").strip()
        raise UsageError(
            f"git bisect {arguments[0]} failed: {words[-600:]}", next_step="name a --good that is an ancestor of --bad"
        )


def _end(work: Path, steps: Sequence[Step]) -> Found | None:
    log = git(work, "bisect", "log").splitlines()
    if first := [line for line in log if line.startswith(FIRST_BAD)]:
        commit = _in_brackets(first[0])
        shown = git(work, "show", "--stat", "--format=commit %H%nAuthor: %an%nDate:   %ad%n%n    %s", commit)
        return Found(steps=list(steps), first_bad=commit, description=shown)
    if ONLY_SKIPPED in log:
        possible = [_in_brackets(line) for line in log if line.startswith(POSSIBLE)]
        return Found(steps=list(steps), first_bad=None, possible=possible)
    return None


def _in_brackets(line: str) -> str:
    return line.partition("[")[2].partition("]")[0]
