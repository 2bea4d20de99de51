"""Whether the legacy stack may be removed, with every reason against it, worst first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from harness.judging.ledger import Ledger
from harness.records.verdict import UNEXPLAINED, Conformance, Gate, Judgement, Parity, Verdict
from harness.suite.coverage import Column, State, cell
from harness.suite.plan import Bullet, Plan, Task

_WORST_FIRST = (Parity.REGRESSION, Parity.BOTH_WRONG, Conformance.FAIL, Parity.MISSING, Conformance.UNTESTABLE)


def decide(judgement: Judgement, plan: Plan, ledger: Ledger) -> Gate:
    """The answer, from verdicts to which the ledger has been applied.

    Yes requires a completed run of both stacks as shipped (start "ray"), evidence for every bullet of every task,
    nothing red, missing or untestable, a sound ledger, and no known divergence that blocks removal.
    """
    reasons = list(
        dict.fromkeys(
            [
                *_run(judgement),
                *_red(judgement.verdicts),
                *(f"ledger entry {p.entry}: {p.problem}" for p in judgement.ledger_problems),
                *_unexplained(judgement),
                *_known(judgement.verdicts, ledger),
                *_start(judgement),
                *_given_way(judgement),
                *_unproven(judgement, plan),
            ]
        )
    )
    return Gate(may_remove_legacy=not reasons, reasons=reasons, left_out=[*_left_out(judgement, plan)])


def _run(judgement: Judgement) -> Iterable[str]:
    run = judgement.run
    if run.outcome != "completed":
        yield f"the run did not complete: {run.outcome}"
    for where, error in run.not_started.items():
        yield f"{where} did not start: {error.kind}: {error.message}"
    if not judgement.verdicts:
        yield "nothing was judged"
    if not (run.baseline and run.candidate):
        yield "no comparison: a baseline and a candidate have to be run"


def _start(judgement: Judgement) -> Iterable[str]:
    if judgement.run.start != "ray":
        yield f"started by {judgement.run.start}: only a run with --start ray drives the stacks as SkyRL ships them"


def _unexplained(judgement: Judgement) -> Iterable[str]:
    for one in judgement.open_causes:
        if not one.source:
            count = f"{one.verdicts} verdict{'s' * (one.verdicts != 1)}"
            known = "no cause explains an open difference" if one.cause == UNEXPLAINED else f"no entry for {one.cause}"
            yield f"{known}: {count} of {one.pair}, first in {one.scenarios[0]}"


def _given_way(judgement: Judgement) -> Iterable[str]:
    hiding = [one for one in judgement.concessions if one.hides]
    if hiding:
        can = f"{len(hiding)} of {len(judgement.concessions)} concessions to these stacks can hide a difference"
        yield f"{can}: `parity concessions` lists them"


def _red(verdicts: Sequence[Verdict]) -> Iterable[str]:
    """One reason per status, check and cause; consequences last. A comparison stands for the stack's own verdict that made it
    red."""
    own = {(*_place(v), v.target): v for v in verdicts if v.baseline is None}
    spoken_for = {_place(v) for v in verdicts if v.red and v.baseline is not None}
    causes: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in (v for v in verdicts if v.red):
        reason, check = verdict.reason, verdict.check
        if verdict.baseline is not None:
            sides = [own.get((*_place(verdict), target)) for target in (verdict.target, verdict.baseline)]
            reason = next((side.reason for side in sides if side is not None and side.status != "pass"), reason)
        elif _place(verdict) in spoken_for:
            continue
        else:
            check += f" on {verdict.target}"
        causes.setdefault((verdict.status, check, reason), []).append(verdict)
    order = [str(status) for status in _WORST_FIRST]
    for (status, check, reason), group in sorted(
        causes.items(),
        key=lambda item: (all(v.because for v in item[1]), order.index(item[0][0]), -len(item[1]), item[0]),
    ):
        yield f"{status}: {check}{_where(group)}" + (f": {reason}" if reason else "")


def _place(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.scenario, verdict.topology, verdict.check


def _where(group: Sequence[Verdict]) -> str:
    scenarios = sorted({v.scenario for v in group})
    return f" in {scenarios[0]}" if len(scenarios) == 1 else f" in {len(scenarios)} scenarios ({scenarios[0]}, …)"


def _known(verdicts: Sequence[Verdict], ledger: Ledger) -> Iterable[str]:
    """Known divergences in which the candidate is worse than legacy. Each blocks removal unless its entry says otherwise."""
    both_wrong = {_place(v) for v in verdicts if v.status == Parity.BOTH_WRONG}
    baselines = {v.baseline for v in verdicts if v.baseline}
    causes: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        entry = ledger.get(verdict.known)
        if verdict.known is None or (entry is not None and not entry.blocks_removal):
            continue
        own_fault = (
            verdict.status == Conformance.FAIL
            and verdict.baseline is None
            and verdict.target not in baselines
            and _place(verdict) not in both_wrong
        )
        if own_fault or verdict.status in (Parity.REGRESSION, Parity.MISSING, Conformance.UNTESTABLE):
            causes.setdefault(verdict.known, []).append(verdict)
    for name, group in causes.items():
        many = "1 verdict" if len(group) == 1 else f"{len(group)} verdicts"
        yield f"known divergence {name} still stands ({many}): {group[0].check}: {group[0].reason}"


def _unproven(judgement: Judgement, plan: Plan) -> Iterable[str]:
    """Bullets without evidence, task by task. Tasks without evidence for any bullet are listed together, with their waves."""
    engine, nobodys = judgement.run.engine, _nobodys(judgement)
    untouched: list[Task] = []
    for task in plan.task:
        bare = [bullet.id for bullet in task.bullet if not _evident(bullet, judgement, nobodys)]
        if len(bare) == len(task.bullet):
            untouched.append(task)
        elif bare:
            yield f"task {task.number}: no evidence for {', '.join(bare)}"
        weak = [b.id for b in task.bullet if b.id not in bare and b.engine not in ("any", engine)]
        if weak:
            yield f"task {task.number}: {', '.join(weak)} can only be shown on CUDA; this run used {engine}"
    if untouched:
        waves = sorted({task.wave for task in untouched})
        yield (
            f"task {_ranges([task.number for task in untouched])}: no bullet has all of its evidence (wave {_ranges(waves)})"
        )


def _evident(bullet: Bullet, judgement: Judgement, nobodys: AbstractSet[str]) -> bool:
    """True if every scenario of the bullet was judged on the candidate and compared with the baseline.

    Scenarios that neither stack offers are left out: removing the baseline loses nothing there."""
    run = judgement.run
    if not (run.candidate and run.baseline):
        return False
    left = tuple(name for name in bullet.scenarios if name.partition("@")[0] not in nobodys)
    if not left:
        return False
    bullet = msgspec.structs.replace(bullet, scenarios=left)
    judged = [v for v in judgement.verdicts if v.status not in (Conformance.MISSING, Conformance.UNTESTABLE)]
    stack, pair = Column(target=run.candidate), Column(target=run.candidate, baseline=run.baseline)
    return all(
        found.state is not State.NOT_EXERCISED and not found.unexercised
        for found in (cell(bullet, stack, judged), cell(bullet, pair, judged))
    )


def _left_out(judgement: Judgement, plan: Plan) -> Iterable[str]:
    nobodys = _nobodys(judgement)
    for bullet in (bullet for task in plan.task for bullet in task.bullet):
        if lacking := [name for name in bullet.scenarios if name.partition("@")[0] in nobodys]:
            yield f"{bullet.id} without {', '.join(lacking)}"


def _nobodys(judgement: Judgement) -> set[str]:
    """The scenarios that neither stack of the comparison offers."""
    run = judgement.run
    if not (run.candidate and run.baseline):
        return set()
    asked = [v for v in judgement.verdicts if v.target in (run.candidate, run.baseline)]
    return {v.scenario for v in asked} - {v.scenario for v in asked if v.status != Conformance.MISSING}


def _ranges(numbers: Sequence[int]) -> str:
    """[4, 5, 6, 9] → "4–6, 9"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
